import dataclasses
import math

import pytest
import torch

from torchrec_tt.model_file import Cluster, ModelFile, Table
from torchrec_tt.quality import MeasuredQuality
from torchrec_tt.tt.cores import dense
from torchrec_tt.tt.factorize import make_shape
from torchrec_tt.tuner import TunedPlan, lookup_shares, quality_of_sweep, table_error, tune

ROWS = {"large": 1_000_000, "middle": 100_000, "small": 1_000}
DENSE_BYTES = sum(ROWS.values()) * 16 * 4
MODEL = ModelFile(
    tables=[Table(name=n, num_embeddings=rows, embedding_dim=16) for n, rows in ROWS.items()],
    batch_size=64,
    cluster=Cluster(world_size=2, memory_gb=4),
)


def kept_bytes(plan: TunedPlan) -> int:
    """Of all tables, once each, for SGD: parameters and nothing else."""
    total = 0
    for table in plan.model.tables:
        parameters = table.num_embeddings * table.embedding_dim
        if table.tt_ranks is not None:
            parameters = make_shape(
                table.num_embeddings,
                table.embedding_dim,
                tt_ranks=table.tt_ranks,
                row_strategy=table.row_strategy,
            ).num_parameters
        total += 4 * parameters
    return total


@pytest.fixture(scope="module")
def plans() -> list[TunedPlan]:
    return tune(MODEL, DENSE_BYTES // 20, tt_ranks=[4, 16, 64], cache_load_factors=[0.0])


def test_every_plan_fits_the_budget_and_says_its_bytes(plans: list[TunedPlan]) -> None:
    for plan in plans:
        assert plan.rank_bytes <= DENSE_BYTES // 20
        kept = kept_bytes(plan)
        assert kept / 2 <= plan.rank_bytes <= kept
        assert plan.compression == pytest.approx(DENSE_BYTES / kept)
        assert set(plan.sharding_types) == set(ROWS)


def test_no_plan_is_beaten_by_another(plans: list[TunedPlan]) -> None:
    assert len(plans) > 2
    for one in plans:
        for other in plans:
            assert one is other or not (
                other.rank_bytes <= one.rank_bytes
                and other.step_ms <= one.step_ms
                and other.error <= one.error
            )


def test_the_large_table_is_compressed_and_the_small_one_need_not_be(
    plans: list[TunedPlan],
) -> None:
    for plan in plans:
        assert plan.model.tables[0].tt_ranks is not None
    assert any(plan.model.tables[2].tt_ranks is None for plan in plans)


def test_a_budget_for_all_rows_leaves_all_rows() -> None:
    best = min(tune(MODEL, 2 * DENSE_BYTES), key=lambda plan: plan.error)
    assert best.error == 0
    assert all(table.tt_ranks is None for table in best.model.tables)
    assert best.compression == 1


def test_a_bound_on_the_error_is_kept() -> None:
    loose = tune(MODEL, DENSE_BYTES // 20)
    bound = sorted(plan.error for plan in loose)[1]
    for plan in tune(MODEL, DENSE_BYTES // 20, max_error=bound):
        assert plan.error <= bound


def test_a_budget_that_nothing_fits_is_refused_with_the_least_that_fits() -> None:
    with pytest.raises(ValueError, match=r"budget_bytes must be at least [\d,]+ a rank .* got 100"):
        tune(MODEL, 100)
    with pytest.raises(ValueError, match="budget_bytes must be positive, got 0"):
        tune(MODEL, 0)


@pytest.mark.parametrize("load_factor", [float("nan"), 1.0, -0.1])
def test_a_load_factor_that_no_cache_can_have_is_refused(load_factor: float) -> None:
    with pytest.raises(ValueError, match=r"cache_load_factors must be in \[0, 1\), got \[0"):
        tune(MODEL, DENSE_BYTES // 20, cache_load_factors=[0, load_factor])


def test_caches_are_chosen_and_count_against_the_budget() -> None:
    found = tune(MODEL, DENSE_BYTES // 20, tt_ranks=[16])
    cached = [plan for plan in found if plan.model.tables[0].cache_load_factor]
    assert cached
    for plan in cached:
        slots = math.ceil(plan.model.tables[0].cache_load_factor * ROWS["large"] / 8) * 8
        assert plan.compression < DENSE_BYTES / (kept_bytes(plan) + slots * 16 * 4)
        assert plan.rank_bytes <= DENSE_BYTES // 20


def test_optimizer_state_counts_against_the_budget() -> None:
    adagrad = dataclasses.replace(MODEL, optimizer="adagrad")
    best = min(tune(adagrad, 4 * DENSE_BYTES), key=lambda plan: plan.error)
    assert best.rank_bytes > DENSE_BYTES / 2  # half of the rows, and as much state


def test_errors_are_weighed_by_lookups() -> None:
    tables = [
        dataclasses.replace(MODEL.tables[0], pooling_factor=3.0),
        dataclasses.replace(MODEL.tables[1], feature_names=["a", "b"]),
        MODEL.tables[2],
    ]
    assert lookup_shares(tables) == [3 / 6, 2 / 6, 1 / 6]
    tt = dataclasses.replace(MODEL.tables[0], tt_ranks=[8, 8])
    whole = table_error(tt, share=1.0, quality=MeasuredQuality())
    assert table_error(tt, share=0.25, quality=MeasuredQuality()) == pytest.approx(whole / 4)
    cached = dataclasses.replace(tt, cache_load_factor=0.01)
    assert table_error(cached, share=1.0, quality=MeasuredQuality()) < whole
    assert table_error(MODEL.tables[0], share=1.0, quality=MeasuredQuality()) == 0


def test_a_sweep_of_the_largest_tables_corrects_the_prior() -> None:
    prior = sum(
        table_error(
            dataclasses.replace(table, tt_ranks=[8, 8]), share=1 / 3, quality=MeasuredQuality()
        )
        for table in MODEL.tables[:2]
    )
    records = [{"tt_rank": 8, "tt_tables": 2, "logloss": 0.51, "dense_logloss": 0.5}]
    assert quality_of_sweep(records, MODEL).scale(8) == pytest.approx(0.02 / prior)
    assert math.isfinite(prior)


def test_runs_that_cannot_correct_the_prior_are_refused() -> None:
    records = [{"tt_rank": 8, "tt_tables": 4, "logloss": 0.51, "dense_logloss": 0.5}]
    with pytest.raises(ValueError, match="at most the 3 tables of the model, got 4"):
        quality_of_sweep(records, MODEL)
    with pytest.raises(ValueError, match=r"records must have dense_logloss .* got 1 without"):
        quality_of_sweep([{"tt_rank": 8, "tt_tables": 2, "logloss": 0.51}], MODEL)


def test_a_model_made_in_python_is_held_to_the_files_rules() -> None:
    with pytest.raises(ValueError, match=r"num_embeddings must be in \[1, 2\^63\), got -5"):
        Table(name="t", num_embeddings=-5, embedding_dim=16)
    with pytest.raises(ValueError, match="without tt_ranks, got 1152921504606846976 \\* 16"):
        Table(name="t", num_embeddings=2**60, embedding_dim=16)


def test_trained_weights_take_the_place_of_the_prior() -> None:
    torch.manual_seed(0)
    small = dataclasses.replace(MODEL.tables[2], tt_ranks=[4, 4])
    shape = make_shape(1_000, 16, tt_ranks=[4, 4])
    cores = [torch.randn(size) for size in shape.core_shapes]
    weight = dense(cores, shape=shape)
    error = table_error(small, share=0.5, quality=MeasuredQuality(), weight=weight)
    assert error == pytest.approx(0, abs=1e-3)  # it has these ranks
    lower = dataclasses.replace(small, tt_ranks=[2, 2])
    assert table_error(lower, share=0.5, quality=MeasuredQuality(), weight=weight) > 0.1
    one = dataclasses.replace(MODEL, tables=[MODEL.tables[2]])
    plans = tune(one, 64_000, tt_ranks=[2, 4], weights={"small": weight})
    exact = [p for p in plans if p.model.tables[0].tt_ranks == [4, 4]]
    assert all(plan.error < 1e-3 for plan in exact)
