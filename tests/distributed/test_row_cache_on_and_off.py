"""Checkpoints of tables with row caches loaded into tables without, and the other way round."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torchrec.distributed.types import ShardingType

from tests.distributed.ranks import Ranks
from tests.distributed.test_row_cache import Table, check_replicas, collection_of
from tests.distributed.test_row_cache_checkpoint import make, state_of, train, whole
from tests.distributed.toy_model import KEYS, NUM_IDS, kjt, unsharded
from torchrec_tt.checkpoint import load
from torchrec_tt.tt.cores import dense

pytestmark = pytest.mark.slow

TW, RW = ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value
FEATURES = {"t0": "f2", "t1": "f3"}  # of which each reads its table alone


def look_all_up(model: Any) -> dict[str, Tensor]:
    """Every row of the TT tables, as a lookup in evaluation returns it on this rank."""
    most = max(NUM_IDS.values())
    lengths = [torch.ones(most, dtype=torch.long) for _ in KEYS]
    ids = [torch.arange(most) % NUM_IDS[key] for key in KEYS]
    model.eval()
    with torch.no_grad():
        pooled = collection_of(model)(kjt((lengths, ids), start=0, stop=most)).wait()
    model.train()
    return {name: pooled[key][: NUM_IDS[key]] for name, key in FEATURES.items()}


def tables_of(model: Any) -> dict[str, Table]:
    state = whole(model)
    check_replicas(state)
    return {name: Table(state, name, shape) for name, shape in unsharded().ebc.tt_shapes.items()}


def cached_to_plain(
    rank: int, folder: str, types: Mapping[str, str], is_apart: bool
) -> dict[str, int]:
    """Lookups stay what they were as far as cores can give it; returns what was folded."""
    model, optimizer = make(0, types)
    train(model, optimizer, range(2))
    if not is_apart:
        for group in model.fused_optimizer.param_groups:
            group["lr"] = 0.0
    train(model, optimizer, range(2, 12 if is_apart else 3))  # filled before the third step
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    before, looked_up = tables_of(model), look_all_up(model)
    plain, plain_optimizer = make(5, types, num_rows=None)
    folded = load({"model": plain.state_dict()}, model=plain, checkpoint_id=folder)
    found = look_all_up(plain)
    for name, table in before.items():
        assert not tables_of(plain)[name].rows
        of_cores = dense(table.cores, shape=table.shape)
        cached = torch.tensor(list(table.rows), dtype=torch.long)
        wanted = looked_up[name]
        assert torch.equal(wanted[cached], torch.stack([*table.rows.values()]))
        if not is_apart:  # from what the cores give
            torch.testing.assert_close(found[name], wanted)
            continue
        lost = (found[name] - wanted)[cached].square().sum()
        dropped = (of_cores - wanted)[cached].square().sum()
        assert lost < 0.9 * dropped
    train(plain, plain_optimizer, range(12, 14))
    return {key.rpartition(".")[2]: n for key, n in folded.items()} | {
        f"cached {name}": len(table.rows) for name, table in before.items()
    }


@pytest.mark.parametrize("types", [{"t0": TW, "t1": RW}, {"t0": RW, "t1": TW}])
@pytest.mark.parametrize("is_apart", [False, True])
def test_a_table_without_a_cache_takes_what_its_cached_rows_were(
    two_ranks: Ranks, tmp_path: Path, types: Mapping[str, str], is_apart: bool
) -> None:
    results = two_ranks.run(cached_to_plain, str(tmp_path), types, is_apart)
    for name in FEATURES:
        assert sum(result.get(name, 0) for result in results) == results[0][f"cached {name}"] > 8


def plain_to_cached(rank: int, folder: str, types: Mapping[str, str]) -> None:
    """Lookups stay what they were, bit for bit, and the caches start anew."""
    plain, plain_optimizer = make(0, types, num_rows=None)
    train(plain, plain_optimizer, range(5))
    dcp.save(state_of(plain, plain_optimizer), checkpoint_id=folder)
    looked_up = look_all_up(plain)
    model, optimizer = make(5, types)
    train(model, optimizer, range(20, 26))  # so that its caches have rows to forget
    assert all(table.rows for table in tables_of(model).values())
    state = state_of(model, optimizer)
    assert load(state, model=model, checkpoint_id=folder) == {}
    optimizer.load_state_dict(state["optimizer"])
    for name, found in look_all_up(model).items():
        assert torch.equal(found, looked_up[name])
    assert not any(table.rows for table in tables_of(model).values())
    for each in ((plain, plain_optimizer), (model, optimizer)):
        train(*each, range(5, 7))  # until the first refresh
    found = look_all_up(model)
    for name, wanted in look_all_up(plain).items():
        assert torch.equal(found[name], wanted)
    train(model, optimizer, range(7, 14))
    counted = collection_of(model).row_cache_statistics()
    assert all(table["hits"] > 0 for table in counted.values())


@pytest.mark.parametrize("types", [{"t0": TW, "t1": RW}, {"t0": RW, "t1": TW}])
def test_a_table_with_a_cache_looks_up_what_it_did_without(
    two_ranks: Ranks, tmp_path: Path, types: Mapping[str, str]
) -> None:
    two_ranks.run(plain_to_cached, str(tmp_path), types)
