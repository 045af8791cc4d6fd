import io

import pytest
from rich.console import Console
from torch import nn
from torchrec.distributed.planner.types import Topology

from tests.distributed.toy_model import ToyModel, tables
from torchrec_tt import (
    TTEmbeddingBagCollection,
    TTEmbeddingBagCollectionSharder,
    TTEmbeddingBagConfig,
    tt_planner,
)
from torchrec_tt.distributed.planner.planners import TTEmbeddingShardingPlanner
from torchrec_tt.distributed.planner.stats import TTEmbeddingStats


def planner() -> TTEmbeddingShardingPlanner:
    topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
    return tt_planner(topology, batch_size=128)


def toy() -> ToyModel:
    return ToyModel(TTEmbeddingBagCollection(tables(), device="meta"))


def test_the_report_says_where_tables_are_what_they_cost_and_why() -> None:
    one, model, sharders = planner(), toy(), [TTEmbeddingBagCollectionSharder()]
    plan = one.plan(model, sharders)
    report = one.report(model, sharders)
    assert [entry.table for entry in report.tables] == list(plan.plan["ebc"])
    for entry in report.tables:
        sharding = plan.plan["ebc"][entry.table]
        assert (entry.sharding_type, entry.ranks) == (sharding.sharding_type, sharding.ranks)
        assert sum(entry.terms.values()) == pytest.approx(entry.ms)
        assert entry.why
        assert (entry.storage is not None) == entry.is_tt == entry.table.startswith("t")
    assert report.step_ms == pytest.approx(max(report.rank_ms) + report.fixed_ms)
    assert one.report(model, sharders, plan) == report
    text = io.StringIO()
    Console(file=text, width=250).print(report.table())
    assert all(name in text.getvalue() for name in ("t0", "t1", "r0", "r1", "of which", "why"))


def test_a_report_of_no_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="plan must be given"):
        planner().report(toy(), [TTEmbeddingBagCollectionSharder()])


def test_torchrecs_statistics_count_cores_and_not_rows() -> None:
    tt = TTEmbeddingBagConfig(
        name="big", num_embeddings=10**7, embedding_dim=64, feature_names=["f"], tt_ranks=[128, 128]
    )
    model = nn.Sequential(TTEmbeddingBagCollection([tt], device="meta"))
    stats = TTEmbeddingStats()
    topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
    tt_planner(topology, batch_size=8, stats=stats).plan(model, [TTEmbeddingBagCollectionSharder()])
    lines = stats._stats_table
    found = [i for i, line in enumerate(lines) if "Compute Kernels Embedding Weights" in line]
    if not found:
        pytest.skip("this TorchRec prints no weights")
    weights = lines[found[0] + 1]
    num_bytes = 4 * (200 * 4 * 128 + 200 * 128 * 4 * 128 + 250 * 128 * 4)
    assert tt.tt_shape.num_parameters * 4 == num_bytes
    assert f"customized_kernel: {round(num_bytes / 2**30, 3)} GB" in weights  # the rows are 2.38 GB
