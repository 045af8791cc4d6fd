"""The compute kernels that put Tensor-Train tables into TorchRec's grouped lookups."""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import data_type_to_dtype, pooling_type_to_pooling_mode
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tt.distributed.fused_optimizer import TTFusedOptimizer, core_optimizer_config
from torchrec_tt.distributed.fused_params import PRECISION, check_mode_of
from torchrec_tt.modules.row_cache import RowCache
from torchrec_tt.modules.table_batched import ReduceGradients, TTTable, TTTableBatchedEmbeddingBags
from torchrec_tt.ops.lookup import Pooling
from torchrec_tt.optim import TTOptimizerConfig

_POOLINGS: dict[PoolingMode, Pooling] = {  # of row-wise tables TorchRec makes MEAN a SUM
    PoolingMode.SUM: "sum",
    PoolingMode.MEAN: "mean",
    PoolingMode.NONE: "none",
}
TT_SHAPE = "_tt_shape"  # a table's TTShape in ShardedEmbeddingTable.fused_params
ROW_CACHE = "_row_cache"  # its RowCacheConfig or None there


class TTBatchedDenseEmbeddingBag(BaseEmbedding):
    """Data-parallel TT tables: ordinary parameters, reduced by the lookup's DDP.

    Args:
        config: the tables of the kernel; each one's `fused_params` hold its TTShape.
        pg: the ranks that share the tables.
        device: where the cores live.
        sharding_type: ROW_WISE or TABLE_ROW_WISE where the kernel answers for a block of rows,
            else None.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        *,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        sharding_type: ShardingType | None = None,
        optimizer: TTOptimizerConfig | None = None,
        reduce_gradients: ReduceGradients | None = None,
    ) -> None:
        super().__init__()
        self._config = config
        self._pg = pg
        self.reduce_gradients = reduce_gradients  # None where nothing sums them, or DDP does
        self._emb_module = TTTableBatchedEmbeddingBags(
            [_tt_table(table) for table in config.embedding_tables],
            pooling=_POOLINGS[pooling_type_to_pooling_mode(config.pooling, sharding_type)],
            check_mode=check_mode_of(config.fused_params or {}),
            precision=(config.fused_params or {}).get(PRECISION),
            optimizer=optimizer,
            reduce_gradients=reduce_gradients,
            caches={
                table.name: cache
                for table in config.embedding_tables
                if (cache := table.fused_params[ROW_CACHE]) is not None
            },
            device=device,
            dtype=data_type_to_dtype(config.data_type),
        )

    @property
    def config(self) -> GroupedEmbeddingConfig:
        return self._config

    @property
    def emb_module(self) -> TTTableBatchedEmbeddingBags:
        return self._emb_module

    def replicas_without_reduction(self) -> dist.ProcessGroup | None:
        """Returns the ranks that have the same cores, where it is DDP that sums gradients."""
        is_data_parallel = self._config.embedding_tables[0].global_metadata is None
        return self._pg if is_data_parallel else None

    def cores(self, table: str) -> nn.ParameterList:
        """Returns the cores of one of the kernel's tables, `d` of `[m_k, r_k * n_k * r_{k+1}]`."""
        return self._emb_module.cores[table]

    def row_cache(self, table: str) -> RowCache | None:
        """Returns the cache of one of the kernel's tables, if it has one."""
        return cast(RowCache | None, self._emb_module.row_caches._modules.get(table))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:  # [B, sum of D]; unpooled [N, D]
        weights = features.weights_or_none() if self._config.is_weighted else None
        if weights is None and self._config.is_weighted:
            tables = [table.name for table in self._config.embedding_tables]
            raise ValueError(
                f"features must have weights for the weighted tables {tables}, got none"
            )
        return self._emb_module(
            features.values(),
            features.offsets(),
            per_sample_weights=None if weights is None else weights.float(),
        )

    # ShardedTTCollection keeps cores and row caches in its own state dict.

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        return {} if destination is None else destination

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from ()  # what is yielded would be registered as `<table>.weight`

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        yield from ()  # DDP would broadcast them from rank 0 at every step

    def flush(self) -> None:
        """Does nothing: cached rows are in the state dict themselves."""

    def purge(self) -> None:
        """Does nothing: what is loaded has the cached rows that belong to its cores."""


class TTBatchedFusedEmbeddingBag(TTBatchedDenseEmbeddingBag, FusedOptimizerModule):
    """Model-parallel TT tables: the cores are updated in backward, as TBE updates its rows.

    A table-wise table has one owner. A row-wise table's cores are replicated on the ranks of its
    blocks; backward sums their gradients over these ranks, one all-reduce for all tables of the
    kernel, and every replica takes the same step.

    Args:
        replica_pg: the ranks that hold the same cores; None where each table has one owner.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        *,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        sharding_type: ShardingType | None,
        replica_pg: dist.ProcessGroup | None = None,
    ) -> None:
        reduces = replica_pg is not None and dist.get_world_size(replica_pg) > 1
        super().__init__(
            config,
            pg=pg,
            device=device,
            sharding_type=sharding_type,
            optimizer=core_optimizer_config(config.fused_params),
            reduce_gradients=sum_over(replica_pg) if reduces else None,
        )
        params = {
            f"{table.name}.tt_cores.{k}": core
            for table in config.embedding_tables
            for k, core in enumerate(self.cores(table.name))
        }
        is_everywhere = sharding_type == ShardingType.ROW_WISE
        owned = {} if is_everywhere else _placements(config, params)
        assert self._emb_module.optimizer is not None
        self._optim = TTFusedOptimizer(
            self._emb_module.optimizer,
            params=params,
            owned=owned,
            pg=pg,
            mesh=_mesh_of(config),
            row_caches=cast(list[RowCache], list(self._emb_module.row_caches.values())),
        )

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        return self._optim


def _tt_table(table: ShardedEmbeddingTable) -> TTTable:
    block: dict[str, int] = {}
    shard = table.local_metadata
    if shard is not None:
        block = {"row_offset": shard.shard_offsets[0], "num_rows": shard.shard_sizes[0]}
    return TTTable(
        name=table.name,
        shape=table.fused_params[TT_SHAPE],
        num_features=table.num_features(),
        **block,
    )


def _placements(config: GroupedEmbeddingConfig, params: dict[str, nn.Parameter]) -> dict[str, Any]:
    """Placement of every core, by name, on this rank, be it one of several with the core."""
    placement = {table.name: table.local_metadata.placement for table in config.embedding_tables}
    return {name: placement[name.rpartition(".tt_cores.")[0]] for name in params}


def _mesh_of(config: GroupedEmbeddingConfig) -> DeviceMesh | None:
    """The mesh of the tables' DTensors, None where state dicts hold ShardedTensors."""
    metadata = config.embedding_tables[0].dtensor_metadata
    return None if metadata is None else metadata.mesh


def sum_over(pg: dist.ProcessGroup | None) -> ReduceGradients:
    """Returns a function that returns the sums of gradients over `pg`, from one all-reduce.

    Waiting for it at the end of backward instead was not faster where two ranks share two cores
    (9.4 MB of cores, 64 and 1024 samples a rank).
    """

    def reduce_gradients(gradients: list[Tensor]) -> list[Tensor]:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=pg)
        parts = flat.split([gradient.numel() for gradient in gradients])
        return [part.view_as(g) for part, g in zip(parts, gradients, strict=True)]

    return reduce_gradients
