"""tt_planner: TorchRec's planner, knowing what Tensor-Train tables cost and can do."""

import pickle
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_tt.distributed.fused_params import check_fused_params
from torchrec_tt.distributed.planner.enumerators import TTEmbeddingEnumerator
from torchrec_tt.distributed.planner.shard_estimators import TTPerfEstimator, TTStorageEstimator
from torchrec_tt.distributed.sharding_plan import check_plan, tt_collection
from torchrec_tt.modules.embedding_modules import TTCollection


class TTEmbeddingShardingPlanner(EmbeddingShardingPlanner):
    """EmbeddingShardingPlanner that refuses bad plans and raises on every rank.

    Use `tt_planner` to make one with the estimators of Tensor-Train tables.
    """

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Returns the best plan.

        Raises:
            ValueError: if no sharder shards a TT collection, or a constraint or the
                sharder's `fused_params` ask for what a TT table cannot have.
            PlannerError: if nothing fits, as TorchRec's planner.
        """
        _check_sharders(module, sharders)
        plan = super().plan(module, sharders)
        for path, _, collection in _collections(module):
            check_plan(
                collection,
                plan.plan[path],
                world_size=self._topology.world_size,
                local_world_size=self._topology.local_world_size,
            )
        return plan

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Returns rank 0's plan on every rank, or raises rank 0's error on every rank.

        TorchRec's own leaves the other ranks waiting for a plan that never comes.
        """
        group = dist.group.WORLD if pg is None else pg
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
    **kwargs: Any,
) -> TTEmbeddingShardingPlanner:
    """Returns a planner that counts the bytes and flops of Tensor-Train tables.

    Regular tables are planned as by EmbeddingShardingPlanner.

    Args:
        topology: the devices to plan for.
        batch_size: samples per rank and step.
        constraints: per-table constraints, as for EmbeddingShardingPlanner.
        kwargs: further arguments of EmbeddingShardingPlanner (`debug` is off by default).

    Raises:
        ValueError: if `batch_size` is not a positive integer.

    Example:
        >>> planner = tt_planner(Topology(world_size=2, compute_device="cpu"), batch_size=128)
        >>> plan = planner.collective_plan(model, [TTEmbeddingBagCollectionSharder()])
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be a positive integer, got {batch_size!r}")
    enumerator = TTEmbeddingEnumerator(
        topology=topology,
        batch_size=batch_size,
        constraints=constraints,
        estimator=[
            TTPerfEstimator(topology, constraints),
            TTStorageEstimator(topology, constraints),
        ],
    )
    return TTEmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        enumerator=enumerator,
        constraints=constraints,
        **{"debug": False, **kwargs},
    )


def _collections(module: nn.Module) -> list[tuple[str, nn.Module, TTCollection]]:
    """Path and module of what is sharded as one, and the collection that it is or has."""
    found: dict[TTCollection, tuple[str, nn.Module]] = {}
    for path, child in module.named_modules():
        collection = tt_collection(child)
        if collection is not None:
            found.setdefault(collection, (path, child))  # the outermost first
    return [(path, child, collection) for collection, (path, child) in found.items()]


def _check_sharders(module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> None:
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
