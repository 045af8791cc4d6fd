"""U47: a sharded model's state in one process, where it gives the same outputs and is frozen."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.inference.state_dict_transform import state_dict_gather
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import BATCH_SIZE, batches, kjt, sharded, sharder, unsharded
from torchrec_tt import RowCacheConfig, checkpoint, freeze
from torchrec_tt.optim import TTOptimizerConfig

CACHE = RowCacheConfig(
    num_rows=16,
    optimizer=TTOptimizerConfig(optimizer="sgd", learning_rate=0.1),
    first_refresh=1,
)


def gather(rank: int, folder: str, caches: dict[str, RowCacheConfig]) -> tuple[dict, Tensor]:
    """Trains two steps and saves; returns the state, on rank 0 gathered, and held-out outputs."""
    source = unsharded(caches=caches)
    model, optimizer = sharded(source, {"t0": "row_wise", "t1": "table_wise"}, tt_sharder=sharder())
    part = {"start": rank * BATCH_SIZE, "stop": (rank + 1) * BATCH_SIZE}
    *steps, held_out = batches(3, size=2 * BATCH_SIZE)
    for batch in steps:
        model(kjt(batch, **part)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    output = model(kjt(held_out, **part)).detach()
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    gathered = {}
    if not caches:
        state = model.state_dict()
        gathered = {key: torch.zeros(value.size()) for key, value in state.items()}
        state_dict_gather(state, gathered)
    return gathered, output


def refuse(rank: int) -> None:
    model, _ = sharded(unsharded(), {"t0": "row_wise", "t1": "data_parallel"})
    message = (
        "be unsharded, got a ShardedTTEmbeddingBagCollection at .*: gather its state dict into"
    )
    with pytest.raises(NotImplementedError, match=message):
        freeze(model)


def test_a_gathered_state_serves_in_one_process(two_ranks: Ranks, tmp_path: Path) -> None:
    results = two_ranks.run(gather, str(tmp_path), {})
    expected = torch.cat([output for _, output in results])
    model = unsharded(seed=9)
    model.load_state_dict(results[0][0])
    features = kjt(batches(3, size=2 * BATCH_SIZE)[2], start=0, stop=2 * BATCH_SIZE)
    torch.testing.assert_close(model(features), expected)
    torch.testing.assert_close(freeze(model, "float32")(features), expected)
    for dtype, most in (("bfloat16", 0.02), ("int8", 0.06)):
        error = (freeze(model, dtype)(features) - expected).norm() / expected.norm()
        assert 0 < error < most


def test_its_dense_tables_serve_in_torchrecs_own_collection(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    results = two_ranks.run(gather, str(tmp_path), {})
    model = unsharded(seed=9)
    model.load_state_dict(results[0][0])
    configs = [
        EmbeddingBagConfig(
            name=c.name,
            num_embeddings=c.num_embeddings,
            embedding_dim=c.embedding_dim,
            feature_names=c.feature_names,
        )
        for c in model.ebc.embedding_bag_configs()
    ]
    dense = EmbeddingBagCollection(tables=configs)
    with torch.no_grad():
        for name, table in model.ebc.embedding_bags.items():
            values = table.to_dense() if hasattr(table, "tt_cores") else table.weight
            dense.embedding_bags[name].weight.copy_(values)
    features = kjt(batches(3, size=2 * BATCH_SIZE)[2], start=0, stop=2 * BATCH_SIZE)
    model.ebc = dense
    expected = torch.cat([output for _, output in results])
    torch.testing.assert_close(model(features), expected, rtol=1e-5, atol=1e-5)


def test_row_caches_of_two_ranks_become_hot_rows(two_ranks: Ranks, tmp_path: Path) -> None:
    results = two_ranks.run(gather, str(tmp_path), {"t0": CACHE})
    model = unsharded(seed=9, caches={"t0": replace(CACHE, num_rows=64)})
    checkpoint.load({"model": model.state_dict()}, model=model, checkpoint_id=tmp_path)
    frozen = freeze(model, "float32")
    table = frozen.ebc.embedding_bags["t0"]
    assert int((table.hot_ids >= 0).sum()) > 0
    features = kjt(batches(3, size=2 * BATCH_SIZE)[2], start=0, stop=2 * BATCH_SIZE)
    expected = torch.cat([output for _, output in results])
    torch.testing.assert_close(frozen(features), model.eval()(features))
    torch.testing.assert_close(frozen(features), expected)


def test_a_sharded_model_is_refused_and_told_what_to_do(two_ranks: Ranks) -> None:
    two_ranks.run(refuse)


def shard_frozen(rank: int) -> None:
    frozen = freeze(unsharded())
    plan = ShardingPlan(plan={})
    with pytest.raises(NotImplementedError, match="must be given the model that was trained"):
        DistributedModelParallel(
            frozen, device=torch.device("cpu"), plan=plan, sharders=[sharder()]
        )


def test_a_frozen_model_is_refused_by_distributed_model_parallel(two_ranks: Ranks) -> None:
    two_ranks.run(shard_frozen)
