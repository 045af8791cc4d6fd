"""Chooses which tables to compress, and how, under a budget of memory: the best trade-offs."""

import dataclasses
import itertools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchrec.distributed.planner.types import PlannerError, ShardingOption
from torchrec.distributed.types import ShardingType

from torchrec_tt.distributed.planner.lookups import tt_shape_of
from torchrec_tt.distributed.planner.planners import TTEmbeddingShardingPlanner
from torchrec_tt.distributed.planner.stats import PlanReport
from torchrec_tt.model_file import ModelFile, Table
from torchrec_tt.quality import MeasuredQuality, measured_quality, prior_error, svd_error
from torchrec_tt.tt.factorize import RowStrategy, make_shape
from torchrec_tt.tt.row_cache import num_slots_of_ratio
from torchrec_tt.tt.shape import TTShape, positive_ints
from torchrec_tt.tt.traffic import Traffic

TT_RANKS = (4, 8, 16, 32, 64, 128)
ROW_STRATEGIES: tuple[RowStrategy, ...] = ("balanced", "fast")
CACHE_LOAD_FACTORS = (0.0, 0.0001, 0.001, 0.01)
_WEIGHTS = (0.0, *(10.0 ** (k / 3) for k in range(-12, 13)))  # of bytes and of error beside time
_MAX_PLANS = 16
_STATE = {"sgd": 0.0, "adagrad": 1.0, "adam": 2.0}  # elements of optimizer state per element


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedPlan:
    """One trade-off.

    Attributes:
        model: the model file with the tables as chosen.
        rank_bytes: what tables keep on the fullest rank: rows or cores, optimizer state, caches.
        step_ms: predicted for a step's embeddings.
        error: the tables' errors, weighed by their share of the lookups; see `prior_error`.
        compression: bytes of all tables uncompressed over those of the plan, each table once;
            optimizer state counts on both sides, caches on the plan's.
        sharding_types: of the plan, by table.
    """

    model: ModelFile
    rank_bytes: int
    step_ms: float
    error: float
    compression: float
    sharding_types: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """One way to keep one table."""

    table: Table
    num_bytes: float
    ms: float
    error: float


def tune(
    model: ModelFile,
    budget_bytes: int,
    *,
    tt_ranks: Sequence[int] = TT_RANKS,
    row_strategies: Sequence[RowStrategy] = ROW_STRATEGIES,
    cache_load_factors: Sequence[float] = CACHE_LOAD_FACTORS,
    max_error: float = math.inf,
    quality: MeasuredQuality | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> list[TunedPlan]:
    """Returns the Pareto frontier of memory, time and error under a budget, fastest first.

    Every table may stay uncompressed or become a TT table of three cores (two or four where its
    file says so) of one rank, with a row strategy and a row cache. Each choice is costed by itself
    with the planner's estimators; choices of all tables are combined by weighing bytes and error
    against time, over a grid of weights; the combinations that are not dominated are planned, and
    what the plans say is compared again.

    Args:
        model: the tables as they are, the batch and the cluster. `tt_ranks` of a table are read
            for the number of cores only; where `row_factors` or `col_factors` are given, they stay.
        budget_bytes: what tables may keep on a rank; inputs, outputs and workspace are held to the
            cluster's memory apart from it.
        tt_ranks: to choose from.
        row_strategies: to choose from.
        cache_load_factors: to choose from; 0 is no cache.
        max_error: plans with more are left out.
        quality: measurements that correct the prior.
        weights: trained rows `[num_embeddings, D]` by table: there the error is TT-SVD's
            (`svd_error`) in place of the prior.

    Raises:
        ValueError: for an argument out of range, or if nothing fits: the message has the least that
            a rank needs, or the least error that fits.
        PlannerError: if what fits the budget does not fit the cluster's memory.
    """
    _check(budget_bytes, tt_ranks, cache_load_factors, max_error)
    choices = _choices(
        model,
        list(_variants(model.tables, tt_ranks, row_strategies, cache_load_factors)),
        quality or MeasuredQuality(),
        weights or {},
    )
    total = budget_bytes * model.cluster.world_size
    fitting = [c for c in _combinations(choices) if sum(choice.num_bytes for choice in c) <= total]
    errors = [sum(choice.error for choice in combination) for combination in fitting]
    if errors and min(errors) > max_error:
        raise ValueError(
            f"max_error must be at least {min(errors):.4g} for budget_bytes={budget_bytes:,}, "
            f"got {max_error}"
        )
    combined = [c for c, error in zip(fitting, errors, strict=True) if error <= max_error]
    dense_bytes = sum(table[0].num_bytes for table in choices)
    least = sum(min(choice.num_bytes for choice in table) for table in choices)
    plans, last_error = [], None
    for combination in _spread(_pareto(combined, _costs), _MAX_PLANS):
        try:
            plan = _plan(model, combination, budget_bytes, dense_bytes=dense_bytes)
        except PlannerError as error:
            last_error = error
            continue
        if plan is not None:
            plans.append(plan)
    if not plans and last_error is not None:
        raise last_error
    if not plans:
        raise ValueError(
            f"budget_bytes must be at least {math.ceil(least / model.cluster.world_size):,} a rank "
            f"for these tables and choices, got {budget_bytes:,}"
        )
    frontier = _pareto(plans, lambda plan: (plan.rank_bytes, plan.step_ms, plan.error))
    return sorted(frontier, key=lambda plan: plan.step_ms)


def quality_of_sweep(records: Sequence[Mapping[str, Any]], model: ModelFile) -> MeasuredQuality:
    """Returns what the runs of a sweep say of the prior; see `measured_quality`.

    Args:
        records: of `results.json`, of runs whose tables are the model's, with `--compare_dense`.
        model: the tables that were swept.

    Raises:
        ValueError: for a run of more TT tables than there are; as `measured_quality`.
    """
    for record in records:
        if record["tt_tables"] > len(model.tables):
            raise ValueError(
                f"tt_tables of a sweep's run must be at most the {len(model.tables)} tables of "
                f"the model, got {record['tt_tables']}"
            )
    order = sorted(range(len(model.tables)), key=lambda i: -model.tables[i].num_embeddings)
    shares = lookup_shares(model.tables)
    prior = {}
    for rank, count in {(record["tt_rank"], record["tt_tables"]) for record in records}:
        prior[rank, count] = sum(
            table_error(
                dataclasses.replace(model.tables[i], tt_ranks=[rank, rank]),
                share=shares[i],
                quality=MeasuredQuality(),
            )
            for i in order[:count]
        )
    return measured_quality(records, prior=prior)


def table_error(
    table: Table, *, share: float, quality: MeasuredQuality, weight: Tensor | None = None
) -> float:
    """Returns a table's part in the error of the model.

    Args:
        table: as it is kept.
        share: of all lookups.
        quality: measurements that correct the prior.
        weight: its trained rows, whose TT-SVD is looked at then.
    """
    shape, hit_ratio = _shape(table), 0.0
    traffic = Traffic(zipf_exponent=table.zipf_exponent)
    if shape is None:
        return 0.0
    if table.cache_load_factor:
        slots = num_slots_of_ratio(table.cache_load_factor, block_size=table.num_embeddings)
        hit_ratio = traffic.hit_ratio(slots, num_values=table.num_embeddings)
    if weight is not None:
        return share * (1.0 - hit_ratio) * svd_error(weight, shape)
    prior = prior_error(
        shape, traffic=traffic, num_embeddings=table.num_embeddings, hit_ratio=hit_ratio
    )
    return share * prior * quality.scale(max(shape.tt_ranks))


def lookup_shares(tables: Sequence[Table]) -> list[float]:
    """Returns each table's share of all lookups."""
    lookups = [t.pooling_factor * len(t.feature_names or [""]) for t in tables]
    return [count / sum(lookups) for count in lookups]


def _check(
    budget_bytes: int, tt_ranks: Sequence[int], load_factors: Sequence[float], max_error: float
) -> None:
    if budget_bytes <= 0:
        raise ValueError(f"budget_bytes must be positive, got {budget_bytes}")
    positive_ints(tt_ranks, name="tt_ranks")
    if not all(0 <= load_factor < 1 for load_factor in load_factors):
        raise ValueError(f"cache_load_factors must be in [0, 1), got {list(load_factors)}")
    if not max_error >= 0:
        raise ValueError(f"max_error must be at least 0, got {max_error}")


def _shape(table: Table) -> TTShape | None:
    if table.tt_ranks is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tables that are larger as TT are left out
        return make_shape(
            table.num_embeddings,
            table.embedding_dim,
            tt_ranks=table.tt_ranks,
            row_factors=table.row_factors,
            col_factors=table.col_factors,
            row_strategy=table.row_strategy,
        )


def _variants(
    tables: Sequence[Table],
    tt_ranks: Sequence[int],
    row_strategies: Sequence[RowStrategy],
    cache_load_factors: Sequence[float],
) -> Iterable[list[Table]]:
    """The ways to keep each table, uncompressed first; TT where it takes less than half as much."""
    for table in tables:
        num_cores = 3 if table.tt_ranks is None else len(table.tt_ranks) + 1
        plain = dataclasses.replace(
            table, tt_ranks=None, row_factors=None, col_factors=None, cache_load_factor=None
        )
        if plain.data_type == "bf16":
            plain = dataclasses.replace(plain, data_type="fp16")
        found = [plain]
        strategies = row_strategies if table.row_factors is None else ("balanced",)
        for rank, strategy, load_factor in itertools.product(
            tt_ranks, strategies, cache_load_factors
        ):
            variant = dataclasses.replace(
                table,
                tt_ranks=[rank] * (num_cores - 1),
                row_strategy=strategy,
                cache_load_factor=load_factor or None,
            )
            try:
                shape = _shape(variant)
            except ValueError:  # too few rows or columns for so many cores
                continue
            if shape is not None and 2 * shape.num_parameters < (
                table.num_embeddings * table.embedding_dim
            ):
                found.append(variant)
        yield found


def _choices(
    model: ModelFile,
    variants: list[list[Table]],
    quality: MeasuredQuality,
    weights: Mapping[str, Tensor],
) -> list[list[_Choice]]:
    """Each variant's bytes, milliseconds and error, by the planner's estimators, table-wise."""
    flat = [
        dataclasses.replace(
            variant,
            name=f"{variant.name}/{i}",
            feature_names=variant.feature_names or [variant.name],
            sharding_types=[ShardingType.TABLE_WISE.value],
        )
        for table in variants
        for i, variant in enumerate(table)
    ]
    everything = dataclasses.replace(model, tables=flat)
    planner, module = everything.planner(), everything.module()
    options = planner._enumerator.enumerate(module, everything.sharders())
    found = {option.name: option for option in options}
    return [
        [
            _Choice(
                table=variant,
                num_bytes=_kept_bytes(found[f"{variant.name}/{i}"], planner, everything),
                ms=found[f"{variant.name}/{i}"].shards[0].perf.total,
                error=table_error(
                    variant, share=share, quality=quality, weight=weights.get(variant.name)
                ),
            )
            for i, variant in enumerate(table)
        ]
        for table, share in zip(variants, lookup_shares(model.tables), strict=True)
    ]


def _kept_bytes(
    option: ShardingOption, planner: TTEmbeddingShardingPlanner, model: ModelFile
) -> float:
    """Parameters, optimizer state and cache of one of the table's ranks."""
    if tt_shape_of(option) is not None:
        storage = planner._storage_estimator.table_storage(
            option, option.shards[0], fused_params=model.sharders()[0].fused_params
        )
        return storage.cores + storage.optimizer + storage.cache
    rows, columns = option.shards[0].size
    if option.sharding_type == ShardingType.DATA_PARALLEL.value:
        return rows * columns * option.tensor.element_size()
    if model.optimizer == "rowwise_adagrad":
        return rows * (columns * option.tensor.element_size() + 4)
    return rows * columns * (option.tensor.element_size() + 4 * _STATE[model.optimizer])


def _combinations(choices: list[list[_Choice]]) -> list[tuple[_Choice, ...]]:
    """For each weighing of bytes and of error against time, the best choice of every table."""
    unit_bytes = sum(max(c.num_bytes for c in table) for table in choices) or 1.0
    unit_ms = sum(max(c.ms for c in table) for table in choices) or 1.0
    found = {}
    for of_bytes, of_error in itertools.product(_WEIGHTS, repeat=2):
        best = tuple(
            min(
                table,
                key=lambda c: (
                    c.ms / unit_ms + of_bytes * c.num_bytes / unit_bytes + of_error * c.error
                ),
            )
            for table in choices
        )
        found[tuple(id(choice) for choice in best)] = best
    return list(found.values())


def _costs(combination: tuple[_Choice, ...]) -> tuple[float, ...]:
    return tuple(
        sum(getattr(choice, name) for choice in combination)
        for name in ("num_bytes", "ms", "error")
    )


def _pareto(items: Sequence, costs: Any) -> list:
    """The items that no other one beats or equals in every cost, cheapest first."""
    kept: list[tuple[tuple[float, ...], Any]] = []
    for item in sorted(items, key=costs):
        cost = costs(item)
        if not any(all(a <= b for a, b in zip(other, cost, strict=True)) for other, _ in kept):
            kept.append((cost, item))
    return [item for _, item in kept]


def _spread(items: list, count: int) -> list:
    """At most `count` of the items, evenly over them, with the first and the last."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _plan(
    model: ModelFile,
    combination: tuple[_Choice, ...],
    budget_bytes: int,
    *,
    dense_bytes: float,
) -> TunedPlan | None:
    """The planned combination, its tables table-wise if they fit no other way; else None."""
    for types in (None, [ShardingType.TABLE_WISE.value]):
        tables = [
            dataclasses.replace(choice.table, sharding_types=choice.table.sharding_types or types)
            for choice in combination
        ]
        chosen = dataclasses.replace(model, tables=tables)
        planner, module = chosen.planner(), chosen.module()
        planner.plan(module, chosen.sharders())
        kept = [0.0] * model.cluster.world_size
        for option in planner._best_plan or []:
            for shard in option.shards:
                kept[shard.rank] += _kept_bytes(option, planner, chosen)
        if max(kept) <= budget_bytes:
            report = planner.report(module, chosen.sharders())
            return TunedPlan(
                model=chosen,
                rank_bytes=math.ceil(max(kept)),
                step_ms=report.step_ms,
                error=sum(choice.error for choice in combination),
                compression=dense_bytes / sum(choice.num_bytes for choice in combination),
                sharding_types=_sharding_types(report),
            )
    return None


def _sharding_types(report: PlanReport) -> dict[str, str]:
    return {entry.table: entry.sharding_type for entry in report.tables}
