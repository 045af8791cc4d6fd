"""What a Tensor-Train table costs a rank, in bytes and in time: TorchRec's estimators, corrected.

Both wrap a stock estimator. It knows no TT kernel, so it is shown a copy of each TT option on a
kernel that it knows; what it says of inputs, outputs and communication holds for TT tables too,
what it says of the table itself is replaced by the formulas of `torchrec_tt.tt.cost`.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
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
from torchrec_tt.distributed.planner.constraints import (
    check_constraints,
    check_topology,
    check_traffic,
)
from torchrec_tt.distributed.planner.hardware import (
    Hardware,
    find_hardware,
    stock_perf_estimator,
    with_speeds,
)
from torchrec_tt.distributed.planner.lookups import (
    Lookups,
    expected_lookups,
    num_replicas,
    tt_shape_of,
)
from torchrec_tt.distributed.planner.row_cache import row_cache_ms, row_cache_of, row_cache_storage
from torchrec_tt.tt.cost import core_bytes, optimizer_state_bytes, step_work
from torchrec_tt.tt.shape import TTShape
from torchrec_tt.tt.traffic import Traffic
from torchrec_tt.tt.workspace import workspace_bytes


class _TTEstimator(ShardEstimator):
    """Runs a stock estimator over all options, then corrects the shards of TT tables."""

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None,
        *,
        stock: ShardEstimator,
        traffic: dict[str, Traffic] | None,
    ) -> None:
        self._topology = topology
        self._constraints = constraints or {}
        self._stock = stock
        self._traffic = traffic or {}

    def lookups(self, option: ShardingOption, shard: Shard, shape: TTShape) -> Lookups:
        """Returns what a step asks of the shard."""
        return expected_lookups(
            option,
            shard,
            shape,
            topology=self._topology,
            constraints=self._constraints.get(option.name),
            traffic=self._traffic.get(option.name, Traffic()),
            cache=row_cache_of(option),
        )

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


@dataclass(frozen=True, kw_only=True, slots=True)
class TTStorage:
    """The bytes of a TT table on one of its ranks, without inputs and outputs.

    Attributes:
        cores: of the table, whole on each of its ranks.
        optimizer: the state of the optimizer that steps the cores in backward.
        gradients: float32, of all cores, where there are dense ones.
        cache: rows, their optimizer state, tags, counter: all of the row cache.
        workspace: what a step allocates beside them, at its peak.
    """

    cores: int
    optimizer: int
    gradients: int
    cache: int
    workspace: int

    @property
    def total(self) -> int:
        return self.cores + self.optimizer + self.gradients + self.cache + self.workspace


class TTStorageEstimator(_TTEstimator):
    """Bytes of a shard: a TTStorage, inputs and outputs.

    The cores are whole on every rank of the table. Dense gradients exist where the cores are
    replicated, and for Adam and weight decay. The user's optimizer of data-parallel tables is
    unknown here and counts 0, as in TorchRec.

    Args:
        topology: the devices.
        constraints: the planner's constraints, for pooling factors and batch sizes.
        stock: the estimator for all that TT does not change; None is EmbeddingStorageEstimator.
        traffic: by table, which ids are asked for, for the workspace.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        *,
        stock: ShardEstimator | None = None,
        traffic: dict[str, Traffic] | None = None,
    ) -> None:
        _check_told(topology, constraints, traffic)
        stock = stock or EmbeddingStorageEstimator(topology, constraints)
        super().__init__(topology, constraints, stock=stock, traffic=traffic)

    def table_storage(
        self, option: ShardingOption, shard: Shard, *, fused_params: dict[str, Any] | None = None
    ) -> TTStorage:
        """Returns the bytes of a TT option's shard; `fused_params` are the sharder's."""
        shape = tt_shape_of(option)
        assert shape is not None
        optimizer_bytes, is_dense = 0, num_replicas(option, self._topology) > 1
        counts, cache_bytes = self.lookups(option, shard, shape), 0
        if option.sharding_type == ShardingType.DATA_PARALLEL.value:
            is_dense = True
        else:
            config = core_optimizer_config(_with_applied_optimizer(fused_params, option))
            optimizer_bytes = optimizer_state_bytes(shape, optimizer=config.optimizer)
            # These steps move slices without a gradient too.
            is_dense |= config.weight_decay != 0 or config.optimizer == "adam"
            cache_bytes = row_cache_storage(option, counts, config)
        return TTStorage(
            cores=core_bytes(shape, element_size=option.tensor.element_size()),
            optimizer=optimizer_bytes,
            gradients=core_bytes(shape) if is_dense else 0,
            cache=cache_bytes,
            workspace=_workspace(shape, counts, option.tensor.element_size()),
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
        rows = dense.size[0] * dense.size[1] * 4  # shown as float32
        if option.sharding_type == ShardingType.DATA_PARALLEL.value:
            rows = math.prod(option.tensor.shape) * 4
        table = self.table_storage(option, shard, fused_params=fused_params)
        storage = copy.copy(dense.storage)
        memory = "ddr" if self._topology.compute_device == "cpu" else "hbm"
        setattr(storage, memory, getattr(storage, memory) - rows + table.total)
        shard.storage = storage


class TTPerfEstimator(_TTEstimator):
    """Milliseconds of a shard: TT products, what moves beside them, and communication.

    With the coefficients of a Hardware, the counts of `step_work` and of `Lookups` (N indices, G
    bags, U distinct rows) and D columns:

    - forward: products and their bytes, `N (4 D + 48) + 4 G D` bytes to sort and pool, and a third
      of `table_ms`;
    - backward: products and their bytes, `4 N D + 8 U D` bytes to sum gradients, the update (once
      more for each element of optimizer state per element), and the rest of `table_ms`;
    - a row cache: see `row_cache_ms`;
    - communication: TorchRec's for dense rows, which are as long, and the all-reduce of the core
      gradients where the cores are replicated.

    Args:
        topology: the devices.
        constraints: the planner's constraints, for pooling factors and batch sizes.
        stock: the estimator for all that TT does not change; None is TorchRec's
            EmbeddingPerfEstimator at the hardware's speeds.
        hardware: coefficients, their name or a YAML file; None is the default of the device.
        traffic: by table, which ids are asked for; by default Zipf's law of exponent 1.05.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        *,
        stock: ShardEstimator | None = None,
        hardware: Hardware | str | None = None,
        traffic: dict[str, Traffic] | None = None,
    ) -> None:
        _check_told(topology, constraints, traffic)
        self.hardware = find_hardware(hardware, device=topology.compute_device)
        stock = stock or stock_perf_estimator(topology, constraints, self.hardware)
        super().__init__(topology, constraints, stock=stock, traffic=traffic)
        self._speeds = with_speeds(topology, self.hardware)

    def _correct(
        self,
        shard: Shard,
        *,
        dense: Shard,
        option: ShardingOption,
        shape: TTShape,
        fused_params: dict[str, Any] | None,
    ) -> None:
        counts, speed = self.lookups(option, shard, shape), self.hardware
        replicas = num_replicas(option, self._topology)
        is_data_parallel = option.sharding_type == ShardingType.DATA_PARALLEL.value
        is_dense = is_data_parallel or replicas > 1
        work = step_work(
            shape, num_rows=counts.num_rows, num_prefixes=counts.num_prefixes, is_dense=is_dense
        )
        update, cache_ms = work.update_bytes, (0.0, 0.0)
        if not is_data_parallel:
            config = core_optimizer_config(_with_applied_optimizer(fused_params, option))
            state = optimizer_state_bytes(shape, optimizer=config.optimizer)
            update *= 1 + state / core_bytes(shape)
            cache_ms = row_cache_ms(option, counts, config, shape=shape, speed=speed)
        row = 4 * shape.embedding_dim
        pooled = counts.num_indices * (row + 48) + counts.num_bags * row
        summed = counts.num_indices * row + 2 * counts.num_rows * row
        bwd_comms = 0.0 if is_data_parallel else dense.perf.bwd_comms
        # The user's optimizer gets gradients in the cores' dtype, the one in backward float32 ones.
        element_size = option.tensor.element_size() if is_data_parallel else 4
        bwd_comms += _all_reduce_ms(
            core_bytes(shape, element_size=element_size), self._speeds, ranks=replicas
        )
        shard.perf = Perf(
            fwd_compute=work.forward_flops / speed.flops_per_ms
            + work.forward_bytes / speed.core_bytes_per_ms
            + pooled / speed.pool_bytes_per_ms
            + speed.table_ms / 3
            + cache_ms[0],
            fwd_comms=dense.perf.fwd_comms,
            bwd_compute=work.backward_flops / speed.flops_per_ms
            + work.backward_bytes / speed.core_bytes_per_ms
            + summed / speed.pool_bytes_per_ms
            + update / (speed.sweep_bytes_per_ms if is_dense else speed.core_bytes_per_ms)
            + speed.table_ms * 2 / 3
            + cache_ms[1],
            bwd_comms=bwd_comms,
            prefetch_compute=0.0,
            input_dist_comms=dense.perf.input_dist_comms,
        )


def _check_told(topology: Topology, constraints: object, traffic: object) -> None:
    check_topology(topology)
    check_constraints(constraints, device=topology.compute_device)
    check_traffic(traffic)


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


def _workspace(shape: TTShape, counts: Lookups, element_size: int) -> int:
    """Peak bytes of a step: the plan's, and the most of what its operators take in turn."""
    peak = workspace_bytes(
        shape,
        num_indices=math.ceil(counts.num_indices),
        num_rows=math.ceil(counts.num_rows),
        num_prefixes=math.ceil(counts.num_prefixes),
        num_heads=math.ceil(min(counts.num_prefixes, math.prod(shape.row_factors[:2]))),
        num_bags=math.ceil(counts.num_bags),
        core_element_size=element_size,
    )
    return peak.kept + max(peak.plan, peak.forward, peak.backward)


def _all_reduce_ms(num_bytes: int, topology: Topology, *, ranks: int) -> float:
    """Ring all-reduce over `ranks`: every byte travels 2 (ranks - 1) / ranks times.

    Within a node at its bandwidth, over nodes at that between them.
    """
    bandwidth = topology.comms_bandwidths.get_bw(
        local_world_size=topology.local_world_size,
        world_size=ranks,
        collective_type=CollectiveType.ALL_REDUCE,
    )
    return 2 * (ranks - 1) / ranks * num_bytes / bandwidth
