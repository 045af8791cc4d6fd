"""What a Tensor-Train table costs a rank, in bytes and in time: TorchRec's estimators, corrected.

Both wrap a stock estimator. It knows no TT kernel, so it is shown a copy of each TT option on a
kernel that it knows; what it says of inputs, outputs and communication holds for TT tables too,
what it says of the table itself is replaced by the formulas of `torchrec_tt.tt.cost`.
"""

import copy
import math
from typing import Any

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.planner.types import (
    CollectiveType,
    ParameterConstraints,
    Perf,
    Shard,
    ShardEstimator,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ShardingType
from torchrec.distributed.utils import merge_fused_params, optimizer_type_to_emb_opt_type

from torchrec_tt.distributed.fused_optimizer import core_optimizer_config
from torchrec_tt.distributed.sharding_plan import tt_collection
from torchrec_tt.tt.cost import (
    core_bytes,
    expected_unique,
    lookup_flops,
    optimizer_state_bytes,
)
from torchrec_tt.tt.shape import TTShape

# Float32 rate of the lookup's small products. CPU: 2e7 to 4e7 were measured on one AVX2 thread
# (10M rows, dims 16 and 64, ranks 16 and 32, 4096 and 16384 ids). Others: not measured, a guess.
FLOPS_PER_MS = {"cpu": 3e7, "cuda": 1e10, "mtia": 1e10}


def tt_shape_of(option: ShardingOption) -> TTShape | None:
    """Returns the shape of the option's table, None for a regular one."""
    collection = tt_collection(option.module[1])
    return collection.tt_shapes.get(option.name) if collection is not None else None


class _TTEstimator(ShardEstimator):
    """Runs a stock estimator over all options, then corrects the shards of TT tables."""

    def __init__(self, topology: Topology, *, stock: ShardEstimator) -> None:
        self._topology = topology
        self._stock = stock

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        """Sets the estimate of every shard. The rest is the stock estimator's sharder map."""
        sharder_map = args[0] if args else next(iter(kwargs.values()), {})
        shown = [_as_dense(o) if tt_shape_of(o) else o for o in sharding_options]
        self._stock.estimate(shown, *args, **kwargs)
        for option, dense in zip(sharding_options, shown, strict=True):
            shape = tt_shape_of(option)
            if shape is None:
                continue
            sharder = sharder_map.get(option.module_type_key)
            for shard, dense_shard in zip(option.shards, dense.shards, strict=True):
                self._correct(
                    shard,
                    dense=dense_shard,
                    option=option,
                    shape=shape,
                    fused_params=getattr(sharder, "fused_params", None),
                )

    def _correct(
        self,
        shard: Shard,
        *,
        dense: Shard,
        option: ShardingOption,
        shape: TTShape,
        fused_params: dict[str, Any] | None,
    ) -> None:
        raise NotImplementedError


class TTStorageEstimator(_TTEstimator):
    """Bytes of a shard: cores, their optimizer state and dense gradients, inputs and outputs.

    The cores are whole on every rank of the table. Dense gradients exist where the cores are
    replicated, and for Adam and weight decay. The user's optimizer of data-parallel tables is
    unknown here and counts 0, as in TorchRec.

    Args:
        topology: the devices.
        constraints: the planner's constraints, for pooling factors and batch sizes.
        stock: the estimator for all that TT does not change; None is EmbeddingStorageEstimator.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        *,
        stock: ShardEstimator | None = None,
    ) -> None:
        super().__init__(topology, stock=stock or EmbeddingStorageEstimator(topology, constraints))

    def _correct(
        self,
        shard: Shard,
        *,
        dense: Shard,
        option: ShardingOption,
        shape: TTShape,
        fused_params: dict[str, Any] | None,
    ) -> None:
        rows = dense.size[0] * dense.size[1] * 4  # shown as float32
        table = core_bytes(shape, element_size=option.tensor.element_size())
        has_dense_gradients = num_replicas(option, self._topology) > 1
        if option.sharding_type == ShardingType.DATA_PARALLEL.value:
            rows = math.prod(option.tensor.shape) * 4
            has_dense_gradients = True
        else:
            config = core_optimizer_config(_with_applied_optimizer(fused_params, option))
            table += optimizer_state_bytes(shape, optimizer=config.optimizer)
            # These steps move slices without a gradient too.
            has_dense_gradients |= config.weight_decay != 0 or config.optimizer == "adam"
        if has_dense_gradients:
            table += core_bytes(shape)  # in float32
        storage = copy.copy(dense.storage)
        memory = "ddr" if self._topology.compute_device == "cpu" else "hbm"
        setattr(storage, memory, getattr(storage, memory) - rows + table)
        shard.storage = storage


class TTPerfEstimator(_TTEstimator):
    """Milliseconds of a shard: what dense rows cost, and the flops that make them.

    Pooling reads each row once, as a dense table does, so the stock estimate of compute and of
    input and output distribution stays; added are the flops of the deduplicated lookup and, where
    the cores are replicated, the all-reduce of their gradients.

    Args:
        topology: the devices.
        constraints: the planner's constraints, for pooling factors and batch sizes.
        stock: the estimator for all that TT does not change; None is EmbeddingPerfEstimator.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        *,
        stock: ShardEstimator | None = None,
    ) -> None:
        super().__init__(topology, stock=stock or EmbeddingPerfEstimator(topology, constraints))

    def _correct(
        self,
        shard: Shard,
        *,
        dense: Shard,
        option: ShardingOption,
        shape: TTShape,
        fused_params: dict[str, Any] | None,
    ) -> None:
        topology = self._topology
        flops = lookup_flops(shape, **_expected_lookups(option, shard, shape, topology))
        rate = FLOPS_PER_MS[topology.compute_device]
        is_data_parallel = option.sharding_type == ShardingType.DATA_PARALLEL.value
        bwd_comms = 0.0 if is_data_parallel else dense.perf.bwd_comms
        # The user's optimizer gets gradients in the cores' dtype, the one in backward float32 ones.
        element_size = option.tensor.element_size() if is_data_parallel else 4
        bwd_comms += _all_reduce_ms(
            core_bytes(shape, element_size=element_size),
            topology,
            ranks=num_replicas(option, topology),
        )
        shard.perf = Perf(
            fwd_compute=dense.perf.fwd_compute + flops.forward / rate,
            fwd_comms=dense.perf.fwd_comms,
            bwd_compute=dense.perf.bwd_compute + flops.backward / rate,
            bwd_comms=bwd_comms,
            prefetch_compute=0.0,
            input_dist_comms=dense.perf.input_dist_comms,
        )


def num_replicas(option: ShardingOption, topology: Topology) -> int:
    """Returns how many ranks have the table's cores; if several do, they sum dense gradients."""
    if option.sharding_type == ShardingType.TABLE_WISE.value:
        return 1
    if option.sharding_type == ShardingType.TABLE_ROW_WISE.value:
        return topology.local_world_size
    return topology.world_size


def _as_dense(option: ShardingOption) -> ShardingOption:
    """A copy of a TT option on a kernel that stock estimators know, without optimizer hints."""
    is_data_parallel = option.sharding_type == ShardingType.DATA_PARALLEL.value
    kernel = EmbeddingComputeKernel.DENSE if is_data_parallel else EmbeddingComputeKernel.FUSED
    shown = copy.deepcopy(option)
    # Outputs are float32 whatever the cores are, and the estimator tells them by the tensor.
    shown._tensor = torch.empty_like(option.tensor, dtype=torch.float32, device="meta")
    shown.compute_kernel = kernel.value
    return shown


def _with_applied_optimizer(
    fused_params: dict[str, Any] | None, option: ShardingOption
) -> dict[str, Any]:
    """`fused_params` with the choice of `apply_optimizer_in_backward`, which precedes them."""
    if not hasattr(option.tensor, "_optimizer_classes"):
        return dict(fused_params or {})
    (optimizer,), (kwargs,) = option.tensor._optimizer_classes, option.tensor._optimizer_kwargs
    applied = {"optimizer": optimizer_type_to_emb_opt_type(optimizer), **kwargs}
    return merge_fused_params(fused_params, applied)


def _expected_lookups(
    option: ShardingOption, shard: Shard, shape: TTShape, topology: Topology
) -> dict[str, float]:
    """Expected distinct rows and prefixes that a shard computes per batch, ids being uniform."""
    # The ranks with the cores share the batches of all ranks.
    batches = topology.world_size / num_replicas(option, topology)
    lookups = sum(option.input_lengths) * option.batch_size * batches
    num_rows = expected_unique(lookups, max(1, shard.size[0]))
    num_prefixes = expected_unique(num_rows, math.prod(shape.row_factors[:-1]))
    return {"num_rows": num_rows, "num_prefixes": num_prefixes}


def _all_reduce_ms(num_bytes: int, topology: Topology, *, ranks: int) -> float:
    """Ring all-reduce over `ranks`: every byte travels 2 (ranks - 1) / ranks times."""
    bandwidth = topology.comms_bandwidths.get_bw(
        local_world_size=topology.local_world_size,
        world_size=ranks,
        collective_type=CollectiveType.ALL_REDUCE,
    )
    return 2 * (ranks - 1) / ranks * num_bytes / bandwidth
