"""tt_planner: TorchRec's planner, knowing what Tensor-Train tables cost and can do."""

import copy
import dataclasses
import functools
import pickle
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    GreedyProposer,
    GridSearchProposer,
)
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    Proposer,
    ShardingOption,
    Topology,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_tt.distributed.fused_params import check_fused_params
from torchrec_tt.distributed.planner.enumerators import TTEmbeddingEnumerator, check_table_names
from torchrec_tt.distributed.planner.failures import explain_failure, surely_lacks_storage
from torchrec_tt.distributed.planner.hardware import Hardware
from torchrec_tt.distributed.planner.lookups import tt_shape_of
from torchrec_tt.distributed.planner.perf_models import TTPerfModel
from torchrec_tt.distributed.planner.proposers import TTUniformProposer
from torchrec_tt.distributed.planner.shard_estimators import (
    TTPerfEstimator,
    TTStorage,
    TTStorageEstimator,
)
from torchrec_tt.distributed.planner.stats import PlanReport, TTEmbeddingStats, placements
from torchrec_tt.distributed.sharding_plan import check_plan, tt_collection
from torchrec_tt.modules.embedding_modules import TTCollection
from torchrec_tt.tt.traffic import Traffic

_NOTHING_FITS = (PlannerErrorType.INSUFFICIENT_STORAGE, PlannerErrorType.STRICT_CONSTRAINTS)


class TTEmbeddingShardingPlanner(EmbeddingShardingPlanner):
    """EmbeddingShardingPlanner that refuses bad plans and raises on every rank.

    Use `tt_planner` to make one with the estimators of Tensor-Train tables.

    Args:
        storage_estimator: that of the enumerator, for reports.
        perf_model: for reports, and for plans unless there is a `performance_model`.
        traffic: by table, as the estimators have it.
        kwargs: arguments of EmbeddingShardingPlanner.
    """

    def __init__(
        self,
        *,
        storage_estimator: TTStorageEstimator,
        perf_model: TTPerfModel,
        traffic: dict[str, Traffic] | None = None,
        **kwargs: Any,
    ) -> None:
        _check_arguments(**kwargs)
        super().__init__(**{"performance_model": perf_model, **kwargs})
        self._storage_estimator = storage_estimator
        self._report_model = perf_model
        self._traffic = traffic or {}

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Returns the best plan.

        Raises:
            ValueError: if no sharder shards a TT collection, or a constraint or the
                sharder's `fused_params` ask for what a TT table cannot have, or name no table.
            PlannerError: if nothing fits, from TorchRec's error; the message is one line that names
                the table that does not, its bytes, the cap, and the row cache or TT rank that would
                fit. If `timeout_seconds` end planning before a proposal fits, it says so.
        """
        _check_sharders(module, sharders)
        # Or a report after a failure has the plan before.
        self._best_plan: list[ShardingOption] | None = None
        if self._traffic:
            options = self._enumerator.enumerate(module, sharders)
            check_table_names("traffic", self._traffic, options)
        try:
            plan = super().plan(module, sharders)
        except PlannerError as error:
            if error.error_type not in _NOTHING_FITS:
                raise
            raise self._explained(error.error_type, module, sharders) from error
        for path, _, collection in _collections(module):
            check_plan(
                collection,
                plan.plan[path],
                world_size=self._topology.world_size,
                local_world_size=self._topology.local_world_size,
            )
        return plan

    def _explained(
        self,
        error_type: PlannerErrorType,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
    ) -> PlannerError:
        """TorchRec's error that nothing fits, in one line: TorchRec takes a time-out for that."""
        options = self._enumerator.enumerate(module, sharders)
        available = self._available(module, sharders)
        ran_out = self._timeout_seconds and any(one.propose() for one in self._proposers)
        if ran_out and not surely_lacks_storage(options, available):
            return PlannerError(
                f"timeout_seconds must leave time for a proposal that fits, got "
                f"{self._timeout_seconds:g} and {self._num_proposals} proposals of which none did"
            )
        explained = explain_failure(
            options,
            available,
            table_bytes=functools.partial(self._table_storage, sharders=sharders),
        )
        return PlannerError(explained, error_type)

    def report(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        plan: ShardingPlan | None = None,
    ) -> PlanReport:
        """Returns what a plan costs and why tables are where they are.

        Args:
            module: the model that was planned.
            sharders: those that it was planned with.
            plan: any plan for the model; by default the last one that this planner made.

        Raises:
            ValueError: without a plan, or if the plan has what this planner would not offer.
        """
        options = self._enumerator.enumerate(module, sharders)
        if plan is not None:
            options += self._asked_for(plan, options, module, sharders)
        chosen = self._best_plan if plan is None else _options_of(plan, options)
        if chosen is None:
            raise ValueError("plan must be given where this planner made none yet, got None")
        if {option.fqn for option in chosen} - {option.fqn for option in options}:
            raise ValueError(
                "plan must be given for another module than the last one planned, got None"
            )
        return placements(
            chosen,
            options,
            storages={
                option.fqn: self._table_storage(option, sharders=sharders)
                for option in chosen
                if tt_shape_of(option) is not None
            },
            constrained={n for n, c in (self._constraints or {}).items() if c.sharding_types},
            topology=self._available(module, sharders),
            perf_model=self._report_model,
        )

    def _table_storage(
        self, option: ShardingOption, *, sharders: list[ModuleSharder[nn.Module]]
    ) -> TTStorage:
        fused_params = {s.module_type: getattr(s, "fused_params", None) for s in sharders}
        return self._storage_estimator.table_storage(
            option, option.shards[0], fused_params=fused_params.get(type(option.module[1]))
        )

    def _asked_for(
        self,
        plan: ShardingPlan,
        options: list[ShardingOption],
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
    ) -> list[ShardingOption]:
        """What a plan has and the planner offers only where a constraint asks for it."""
        offered = {(option.path, option.name, option.sharding_type) for option in options}
        constraints = self._constraints or {}
        asked = {
            name: dataclasses.replace(
                constraints.get(name, ParameterConstraints()),
                sharding_types=[sharding.sharding_type],
            )
            for path, tables in plan.plan.items()
            for name, sharding in tables.items()
            if (path, name, sharding.sharding_type) not in offered
        }
        if not asked:
            return []
        enumerator = copy.copy(self._enumerator)
        enumerator._constraints = {**constraints, **asked}
        enumerator._last_stored_module = None  # or it answers what it last answered
        return [o for o in enumerator.enumerate(module, sharders) if o.name in asked]

    def _available(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> Topology:
        """The devices, less what is reserved."""
        return self._storage_reservation.reserve(
            topology=self._topology,
            batch_size=self._batch_size,
            module=module,
            sharders=sharders,
            constraints=self._constraints,
        )

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Returns rank 0's plan on every rank, or raises rank 0's error on every rank.

        TorchRec's own leaves the other ranks waiting for a plan that never comes.

        Raises:
            ValueError: if the topology's ranks do not divide those of the group (they are fewer
                where groups of ranks hold copies of the model); as `plan`.
            PlannerError: as `plan`.
        """
        group = dist.group.WORLD if pg is None else pg
        if dist.get_world_size(group) % self._topology.world_size:
            raise ValueError(
                f"topology must have a world_size that divides the {dist.get_world_size(group)} "
                f"ranks of the process group, got {self._topology.world_size}"
            )
        result: list[Any] = [None]
        if dist.get_rank(group) == 0:
            try:
                result = [self.plan(module, sharders or get_default_sharders())]
            except Exception as error:
                _broadcast([_picklable(error)], group)
                raise
        _broadcast(result, group)
        if isinstance(result[0], Exception):
            raise result[0]
        return result[0]


def tt_planner(
    topology: Topology,
    *,
    batch_size: int,
    constraints: dict[str, ParameterConstraints] | None = None,
    hardware: Hardware | str | None = None,
    traffic: dict[str, Traffic] | None = None,
    **kwargs: Any,
) -> TTEmbeddingShardingPlanner:
    """Returns a planner that counts the bytes and flops of Tensor-Train tables.

    Regular tables are planned by TorchRec's formulas, at the hardware's speeds where the topology
    has TorchRec's default ones.

    Args:
        topology: the devices to plan for.
        batch_size: samples per rank and step.
        constraints: per-table constraints, as for EmbeddingShardingPlanner.
        hardware: a Hardware, the name of a known one ("cpu", "a100", "h100", "h200", "b200"), or
            the YAML file that `torchrec-tt calibrate` wrote. None: "cpu" for CPUs, else "h100".
        traffic: by table, how its ids are drawn; by default Zipf's law of exponent 1.05.
        kwargs: further arguments of EmbeddingShardingPlanner (`debug` is off by default).

    Raises:
        ValueError: if `batch_size` is not a positive integer, the hardware is unknown or of
            another device, or constraints or traffic have what no table can.

    Example:
        >>> planner = tt_planner(Topology(world_size=2, compute_device="cpu"), batch_size=128)
        >>> plan = planner.collective_plan(model, [TTEmbeddingBagCollectionSharder()])
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be a positive integer, got {batch_size!r}")
    perf = TTPerfEstimator(topology, constraints, hardware=hardware, traffic=traffic)
    storage = TTStorageEstimator(topology, constraints, traffic=traffic)
    enumerator = TTEmbeddingEnumerator(
        topology=topology,
        batch_size=batch_size,
        constraints=constraints,
        estimator=[perf, storage],
    )
    defaults = {
        "debug": False,
        "enumerator": enumerator,
        "proposer": [TTUniformProposer(), GridSearchProposer(), GreedyProposer()],
        "stats": TTEmbeddingStats(),
    }
    return TTEmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        constraints=constraints,
        storage_estimator=storage,
        perf_model=TTPerfModel(topology, perf.hardware),
        traffic=traffic,
        **{**defaults, **kwargs},
    )


def _check_arguments(
    topology: Topology | None = None,
    enumerator: Any = None,
    proposer: Proposer | list[Proposer] | None = None,
    timeout_seconds: float | None = None,
    **kwargs: Any,
) -> None:
    if enumerator is not None and not isinstance(enumerator, TTEmbeddingEnumerator):
        raise ValueError(
            f"enumerator must be a TTEmbeddingEnumerator, got {type(enumerator).__name__}: it "
            "would give Tensor-Train tables the kernels of regular ones"
        )
    is_number = isinstance(timeout_seconds, int | float) and not isinstance(timeout_seconds, bool)
    if timeout_seconds is not None and not (is_number and timeout_seconds > 0):
        raise ValueError(f"timeout_seconds must be positive or None, got {timeout_seconds!r}")
    for one in proposer if isinstance(proposer, list) else [proposer]:
        if one is not None and not isinstance(one, Proposer):
            raise ValueError(f"proposer must be a Proposer or a list of them, got {one!r}")
        if (
            isinstance(one, DynamicProgrammingProposer)
            and topology is not None
            and not any(device.storage.hbm for device in topology.devices)
        ):
            raise ValueError(
                "proposer must not be a DynamicProgrammingProposer where devices have no HBM, "
                f"which it shares out, got one for {topology.compute_device!r}"
            )


def _options_of(plan: ShardingPlan, options: list[ShardingOption]) -> list[ShardingOption]:
    """The options that a plan chose, with its ranks.

    Raises:
        ValueError: if a table's sharding is none of its options.
    """
    chosen = []
    for path, tables in plan.plan.items():
        for name, sharding in tables.items():
            sizes = (
                [s.shard_sizes for s in sharding.sharding_spec.shards]
                if (sharding.sharding_spec)
                else None
            )
            option = next(
                (
                    copy.deepcopy(o)
                    for o in options
                    if (o.path, o.name, o.sharding_type) == (path, name, sharding.sharding_type)
                    and sizes in (None, [s.size for s in o.shards])
                ),
                None,
            )
            if option is None:
                raise ValueError(
                    f"plan must have for table {name!r} one of its options, got "
                    f"{sharding.sharding_type} with shards {sizes}"
                )
            ranks = sharding.ranks or range(len(option.shards))
            for shard, rank in zip(option.shards, ranks, strict=True):
                shard.rank = rank
            chosen.append(option)
    return chosen


def _collections(module: nn.Module) -> list[tuple[str, nn.Module, TTCollection]]:
    """Path and module of what is sharded as one, and the collection that it is or has."""
    found: dict[TTCollection, tuple[str, nn.Module]] = {}
    for path, child in module.named_modules():
        collection = tt_collection(child)
        if collection is not None:
            found.setdefault(collection, (path, child))  # the outermost first
    return [(path, child, collection) for collection, (path, child) in found.items()]


def _check_sharders(module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> None:
    if not isinstance(sharders, list | tuple) or not all(
        isinstance(sharder, ModuleSharder) for sharder in sharders
    ):
        raise ValueError(f"sharders must be a list of ModuleSharders, got {sharders!r}")
    known = {sharder.module_type: sharder for sharder in sharders}
    for path, child, collection in _collections(module):
        name = type(collection).__name__
        sharder = known.get(type(child))
        inner = getattr(sharder, "_ebc_sharder", sharder)  # that of a feature processors' sharder
        if inner is None or inner.module_type is not type(collection):
            wanted = f"{name}Sharder"
            if child is not collection:
                wanted = f"{type(child).__name__}Sharder(ebc_sharder={wanted}())"
            raise ValueError(
                f"sharders must have one for {name} ({wanted}) as module {path!r} has Tensor-Train "
                f"tables, got {[type(sharder).__name__ for sharder in sharders]}"
            )
        if collection.tt_shapes:
            check_fused_params(getattr(sharder, "fused_params", None))


def _picklable(error: Exception) -> Exception:
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # an exception class that cannot be rebuilt from its arguments
        return RuntimeError(f"{type(error).__name__}: {error}")


def _broadcast(objects: list[Any], pg: dist.ProcessGroup) -> None:
    if dist.get_world_size(pg) > 1:
        dist.broadcast_object_list(objects, src=dist.get_global_rank(pg, 0), group=pg)
