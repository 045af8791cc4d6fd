"""What a plan says of itself: TorchRec's statistics with TT bytes, and why tables are where."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import ShardingOption, Topology

from torchrec_tt.distributed.planner.lookups import tt_shape_of
from torchrec_tt.distributed.planner.perf_models import TTPerfModel
from torchrec_tt.distributed.planner.shard_estimators import TTStorage
from torchrec_tt.tt.cost import core_bytes, dense_bytes


class TTEmbeddingStats(EmbeddingStats):
    """EmbeddingStats in which the weights of TT tables are their cores, not rows."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Logs the statistics of a plan."""
        if "best_plan" in kwargs:
            kwargs["best_plan"] = [_with_core_bytes(option) for option in kwargs["best_plan"]]
        super().log(*args, **kwargs)


class _CoresAsRows:
    """Stands for a TT table's tensor: the rows and columns of the table, the bytes of its cores."""

    def __init__(self, tensor: torch.Tensor, num_bytes: int) -> None:
        self.shape = tensor.shape
        self._bytes = num_bytes
        if hasattr(tensor, "_optimizer_classes"):
            self._optimizer_classes = tensor._optimizer_classes

    def element_size(self) -> float:
        return self._bytes / (self.shape[0] * self.shape[1])


def _with_core_bytes(option: ShardingOption) -> ShardingOption:
    shape = tt_shape_of(option)
    if shape is None:
        return option
    shown = ShardingOption.__new__(ShardingOption)
    shown.__dict__.update(option.__dict__)
    num_bytes = core_bytes(shape, element_size=option.tensor.element_size())
    shown._tensor = _CoresAsRows(option.tensor, num_bytes)
    return shown


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePlacement:
    """Where a table is, what it costs there, and why.

    Attributes:
        table: its name.
        path: of its module.
        is_tt: whether it is a TT table.
        sharding_type: of the plan.
        ranks: that hold it.
        rank_bytes: the most that one of them needs, inputs and outputs included.
        storage: of a TT table on one rank.
        compression: uncompressed bytes over those of the cores; 1 for a regular table.
        ms: of the slowest of its shards.
        terms: the parts of `ms`, in milliseconds.
        alternatives: by other sharding type, milliseconds of the slowest shard.
        why: in words.
    """

    table: str
    path: str
    is_tt: bool
    sharding_type: str
    ranks: list[int]
    rank_bytes: int
    storage: TTStorage | None
    compression: float
    ms: float
    terms: dict[str, float]
    alternatives: dict[str, float]
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """A plan, explained.

    Attributes:
        tables: one entry each.
        step_ms: predicted for a step's embeddings.
        fixed_ms: the part of it that is the same wherever the tables are: see `TTPerfModel`.
        rank_ms: of each rank's shards.
        rank_bytes: of each rank's shards.
        cap_bytes: of a rank, less what is reserved.
    """

    tables: list[TablePlacement]
    step_ms: float
    fixed_ms: float
    rank_ms: list[float]
    rank_bytes: list[int]
    cap_bytes: int

    def table(self) -> Table:
        """Returns the report for a terminal."""
        result = Table(
            title=f"{self.step_ms:.2f} ms a step: {max(self.rank_ms):.2f} on the busiest rank and "
            f"{self.fixed_ms:.2f} fixed, for the step and the collectives of its sharding types",
            caption="shards go where they even out the ranks: "
            + "; ".join(
                f"rank {rank}: {ms:.2f} ms, {_size(num_bytes)} of {_size(self.cap_bytes)}"
                for rank, (ms, num_bytes) in enumerate(
                    zip(self.rank_ms[:8], self.rank_bytes[:8], strict=True)
                )
            )
            + (f"; and {len(self.rank_ms) - 8} more ranks" if len(self.rank_ms) > 8 else ""),
        )
        for name in ("table", "sharding", "ranks", "bytes", "of which TT", "smaller"):
            result.add_column(name, overflow="fold")
        result.add_column("ms", justify="right")
        result.add_column("of which", overflow="fold")
        result.add_column("why", overflow="fold", ratio=1)
        for entry in self.tables:
            result.add_row(
                entry.table,
                entry.sharding_type,
                _ranks(entry.ranks),
                _size(entry.rank_bytes),
                _parts(entry.storage),
                f"{entry.compression:.0f}x" if entry.is_tt else "",
                f"{entry.ms:.2f}",
                ", ".join(f"{name} {ms:.2f}" for name, ms in entry.terms.items() if ms >= 0.005),
                entry.why,
            )
        return result


def placements(
    plan: Sequence[ShardingOption],
    options: Sequence[ShardingOption],
    *,
    storages: dict[str, TTStorage],
    constrained: set[str],
    topology: Topology,
    perf_model: TTPerfModel,
) -> PlanReport:
    """Returns the report of a plan.

    Args:
        plan: an option for each table, with ranks.
        options: all options that the planner had.
        storages: of the TT tables, by fully qualified name.
        constrained: names of the tables whose sharding types a constraint limits.
        topology: the devices, less what is reserved.
        perf_model: of the planner.
    """
    memory = "ddr" if topology.compute_device == "cpu" else "hbm"
    rank_bytes = [0] * topology.world_size
    for option in plan:
        for shard in option.shards:
            rank_bytes[shard.rank] += getattr(shard.storage, memory)
    used = {(option.path, option.sharding_type) for option in plan}
    tables = []
    for option in plan:
        others: dict[str, float] = {}
        for other in options:
            if other.fqn == option.fqn and other.sharding_type != option.sharding_type:
                ms = _slowest(other)[0]
                others[other.sharding_type] = min(ms, others.get(other.sharding_type, ms))
        shape = tt_shape_of(option)
        ms, terms = _slowest(option)
        tables.append(
            TablePlacement(
                table=option.name,
                path=option.path,
                is_tt=shape is not None,
                sharding_type=option.sharding_type,
                ranks=[shard.rank for shard in option.shards],
                rank_bytes=max(getattr(shard.storage, memory) for shard in option.shards),
                storage=storages.get(option.fqn),
                compression=dense_bytes(shape) / core_bytes(shape) if shape else 1.0,
                ms=ms,
                terms=terms,
                alternatives=others,
                why=_why(option, ms, others, used, is_constrained=option.name in constrained),
            )
        )
    return PlanReport(
        tables=tables,
        step_ms=perf_model.rate(list(plan)),
        fixed_ms=perf_model.fixed_ms(list(plan)),
        rank_ms=perf_model.rank_ms(list(plan)),
        rank_bytes=rank_bytes,
        cap_bytes=min(getattr(device.storage, memory) for device in topology.devices),
    )


def _why(
    option: ShardingOption,
    ms: float,
    others: dict[str, float],
    used: set[tuple[str, str]],
    *,
    is_constrained: bool,
) -> str:
    """One line: what the best other types would have cost, and what spoke for this one."""
    if not others:
        return "the constraint leaves no other" if is_constrained else "it has no other"
    nearest = sorted(others, key=lambda kind: others[kind])[:3]
    fastest, beside = nearest[0], ", ".join(f"{kind} {others[kind]:.2f}" for kind in nearest)
    if ms <= others[fastest]:
        return f"fastest by itself; {beside} ms"
    if (option.path, fastest) not in used:
        return f"shares its collectives; {beside} ms, but {fastest} needs some of its own"
    return f"ranks balance or fit better so; {beside} ms"


def _slowest(option: ShardingOption) -> tuple[float, dict[str, float]]:
    perf = max((shard.perf for shard in option.shards), key=lambda perf: perf.total)
    return perf.total, {
        "input dist": perf.input_dist_comms,
        "forward": perf.fwd_compute,
        "output dist": perf.fwd_comms,
        "backward": perf.bwd_compute,
        "gradient dist": perf.bwd_comms,
        "prefetch": perf.prefetch_compute,
    }


def _parts(storage: TTStorage | None) -> str:
    if storage is None:
        return ""
    parts = {
        "cores": storage.cores,
        "optimizer": storage.optimizer,
        "gradients": storage.gradients,
        "cache": storage.cache,
        "workspace": storage.workspace,
    }
    return ", ".join(f"{name} {_size(value)}" for name, value in parts.items() if value)


def _ranks(ranks: list[int]) -> str:
    is_run = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[0] + len(ranks)))
    return f"{ranks[0]}-{ranks[-1]}" if is_run else ",".join(map(str, ranks))


def _size(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} GB"
