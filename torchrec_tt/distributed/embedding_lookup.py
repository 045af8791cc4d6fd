"""The grouped lookups that know the Tensor-Train kernels beside TorchRec's own."""

from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tt.distributed.embedding_kernel import (
    TTBatchedDenseEmbeddingBag,
    TTBatchedFusedEmbeddingBag,
)


class TTGroupedPooledEmbeddingsLookup(GroupedPooledEmbeddingsLookup):
    """GroupedPooledEmbeddingsLookup whose customized kernel is the Tensor-Train one.

    Args:
        replica_pg: the ranks that hold the same cores; None where each table has one owner.
        kwargs: those of GroupedPooledEmbeddingsLookup.
    """

    def __init__(self, *, replica_pg: dist.ProcessGroup | None = None, **kwargs: Any) -> None:
        self._replica_pg = replica_pg  # the kernels are made in the next line
        super().__init__(**kwargs)

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        sharding_type: ShardingType | None,
        env: ShardingEnv | None,
    ) -> BaseEmbedding:
        if config.compute_kernel != EmbeddingComputeKernel.CUSTOMIZED_KERNEL:
            return super()._create_embedding_kernel(config, device, pg, sharding_type, env)
        return _tt_kernel(
            config,
            pg=pg,
            device=device,
            sharding_type=sharding_type,
            replica_pg=self._replica_pg,
        )

    def prefetch(
        self,
        sparse_features: KeyedJaggedTensor,
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Prefetches as TorchRec's, and looks up the tags of row caches."""
        super().prefetch(sparse_features, forward_stream)
        groups = sparse_features.split(self._feature_splits)
        for kernel, features in zip(self._emb_modules, groups, strict=True):
            if isinstance(kernel, TTBatchedDenseEmbeddingBag):
                kernel.emb_module.prefetch(
                    features.values(), features.offsets(), forward_stream=forward_stream
                )


class TTGroupedEmbeddingsLookup(GroupedEmbeddingsLookup):
    """GroupedEmbeddingsLookup whose customized kernel is the Tensor-Train one.

    Args:
        sharding_type: ROW_WISE where the kernels answer for blocks of rows; the stock lookup does
            not ask.
        replica_pg: the ranks that hold the same cores; None where each table has one owner.
        kwargs: those of GroupedEmbeddingsLookup.
    """

    def __init__(
        self,
        *,
        sharding_type: ShardingType | None,
        replica_pg: dist.ProcessGroup | None,
        **kwargs: Any,
    ) -> None:
        self._sharding_type = sharding_type  # the kernels are made by the last line
        self._replica_pg = replica_pg
        super().__init__(**kwargs)

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        env: ShardingEnv | None = None,
    ) -> BaseEmbedding:
        if config.compute_kernel != EmbeddingComputeKernel.CUSTOMIZED_KERNEL:
            return super()._create_embedding_kernel(config, pg, device, env)
        return _tt_kernel(
            config,
            pg=pg,
            device=device,
            sharding_type=self._sharding_type,
            replica_pg=self._replica_pg,
        )


def _tt_kernel(
    config: GroupedEmbeddingConfig,
    *,
    pg: dist.ProcessGroup | None,
    device: torch.device | None,
    sharding_type: ShardingType | None,
    replica_pg: dist.ProcessGroup | None,
) -> BaseEmbedding:
    if config.embedding_tables[0].global_metadata is None:  # data-parallel
        return TTBatchedDenseEmbeddingBag(config, pg=pg, device=device)
    return TTBatchedFusedEmbeddingBag(
        config, pg=pg, device=device, sharding_type=sharding_type, replica_pg=replica_pg
    )
