"""Row caches saved, and loaded under the same plan, another one, and another number of ranks."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingType

from tests.distributed.ranks import Ranks
from tests.distributed.test_checkpoint import envs_of
from tests.distributed.test_row_cache import (
    Table,
    check_replicas,
    collection_of,
    drifting_batch,
    own_part,
)
from tests.distributed.toy_model import full_state, plan_for, sharded, sharder, unsharded
from torchrec_tt import RowCacheConfig
from torchrec_tt.checkpoint import load
from torchrec_tt.modules.row_cache import STATISTICS
from torchrec_tt.optim import TTOptimizerConfig
from torchrec_tt.tt.cores import dense

pytestmark = pytest.mark.slow

TW, RW, TWRW, DP = (
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.DATA_PARALLEL.value,
)


def make(
    seed: int, types: Mapping[str, str], *, env: Any = None, num_rows: int | None = 16
) -> tuple[Any, Any]:
    caches = {}
    if num_rows is not None:
        cache = RowCacheConfig(num_rows=num_rows, first_refresh=2, refresh_growth=1)
        caches = {name: cache for name, kind in types.items() if kind != DP}
    types = {"r0": TW, "r1": TW, **types}
    return sharded(unsharded(seed=seed, caches=caches), types, optimizer="adagrad", env=env)


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        pooled = model(own_part(drifting_batch(step, busy=dist.get_world_size())))
        pooled.square().mean().backward()
        optimizer.step()


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def whole(model: Any) -> dict[str, Tensor]:
    return full_state(model.state_dict())


def restore(rank: int, folder: str, types: Mapping[str, str], output_dtensor: bool) -> int:
    """Training goes on from a checkpoint as if nothing had happened."""
    env = envs_of(dist.get_world_size())[output_dtensor]
    model, optimizer = make(0, types, env=env, num_rows=16)
    train(model, optimizer, range(7))
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    other, other_optimizer = make(5, types, env=env, num_rows=16)
    train(other, other_optimizer, range(20, 23))  # so that its schedule is another
    state = state_of(other, other_optimizer)
    if output_dtensor:  # both ways must do
        load(state, model=other, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    for trained in ((model, optimizer), (other, other_optimizer)):
        train(*trained, range(7, 14))
    expected = whole(model)
    for key, value in whole(other).items():
        assert torch.equal(value, expected[key]), key
    return sum(c["evictions"] for c in collection_of(other).row_cache_statistics().values())


@pytest.mark.parametrize("types", [{"t0": TW, "t1": RW}, {"t0": RW, "t1": TW}])
@pytest.mark.parametrize("output_dtensor", [False, True])
def test_training_goes_on_bit_for_bit_under_the_same_plan(
    two_ranks: Ranks, tmp_path: Path, types: Mapping[str, str], output_dtensor: bool
) -> None:
    assert sum(two_ranks.run(restore, str(tmp_path), types, output_dtensor)) > 0


PLANS: list[tuple[int, dict[str, str]]] = [  # ranks, sharding types
    (1, {"t0": TW, "t1": RW}),
    (2, {"t0": TW, "t1": RW}),
    (2, {"t0": RW, "t1": TW}),
    (3, {"t0": RW, "t1": RW}),
    (4, {"t0": TWRW, "t1": RW}),
]


def save_all(rank: int, folder: str) -> None:
    envs = {size: envs_of(size)[False] for size in (1, 2, 3, 4)}
    for number, (size, types) in enumerate(PLANS):
        if rank < size:
            model, optimizer = make(number, types, env=envs[size], num_rows=16)
            train(model, optimizer, range(9))
            pg = envs[size].process_group
            dcp.save(
                state_of(model, optimizer), checkpoint_id=f"{folder}/{number}", process_group=pg
            )


def load_all(rank: int, folder: str, num_rows: int) -> dict[tuple[int, int], dict[str, int]]:
    """Loads every checkpoint under every plan, and saves it so; returns what found no slot."""
    envs = {size: envs_of(size)[False] for size in (1, 2, 3, 4)}
    left: dict[tuple[int, int], dict[str, int]] = {}
    for target, (size, types) in enumerate(PLANS):
        for source in range(len(PLANS)) if rank < size else ():
            model, optimizer = make(9, types, env=envs[size], num_rows=num_rows)
            state = state_of(model, optimizer)
            pg = envs[size].process_group
            found = load(state, model=model, checkpoint_id=f"{folder}/{source}", process_group=pg)
            left[source, target] = {key.rpartition(".")[2]: n for key, n in found.items()}
            moved = {"model": model.state_dict()}
            dcp.save(moved, checkpoint_id=f"{folder}/{source}_{target}", process_group=pg)
    return left


def read(folder: Path, name: str) -> dict[str, Tensor]:
    dcp_to_torch_save(folder / name, folder / f"{name}.pt")
    return torch.load(folder / f"{name}.pt", weights_only=True)["model"]


def tables_in(state: Mapping[str, Tensor]) -> dict[str, Table]:
    shapes = unsharded().ebc.tt_shapes
    return {name: Table(state, name, shape) for name, shape in shapes.items()}


def hits_in(state: Mapping[str, Tensor], table: str) -> int:
    keys = [k for k in state if f".{table}.row_cache." in k and k.endswith(".statistics")]
    return sum(int(state[key][STATISTICS.index("hits")]) for key in keys)


@pytest.fixture(scope="module")
def saved(two_nodes: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    two_nodes.run(save_all, str(folder))
    return folder


def test_cached_rows_go_to_their_new_owners_under_any_plan(two_nodes: Ranks, saved: Path) -> None:
    for left in two_nodes.run(load_all, str(saved), 104):
        assert sum(n for tables in left.values() for n in tables.values()) == 0
    for source, target in itertools.product(range(len(PLANS)), repeat=2):
        old, new = read(saved, f"{source}"), read(saved, f"{source}_{target}")
        for name, table in tables_in(new).items():
            before = tables_in(old)[name]
            assert len(before.rows) > 8
            assert table.rows.keys() == before.rows.keys()
            for row, value in table.rows.items():
                assert torch.equal(value, before.rows[row])
                assert torch.equal(table.sums[row], before.sums[row])
            for core, same in zip(table.cores, before.cores, strict=True):
                assert torch.equal(core, same)
            assert hits_in(new, name) == hits_in(old, name) > 0


def test_rows_that_do_not_fit_are_folded_and_counted(two_nodes: Ranks, saved: Path) -> None:
    by_rank = two_nodes.run(load_all, str(saved), 8)
    for source, target in itertools.product(range(len(PLANS)), repeat=2):
        old, new = read(saved, f"{source}"), read(saved, f"{source}_{target}")
        for name, table in tables_in(new).items():
            before = tables_in(old)[name]
            left = sum(ranks.get((source, target), {}).get(name, 0) for ranks in by_rank)
            assert len(table.rows) + left == len(before.rows)
            for row, value in table.rows.items():
                assert torch.equal(value, before.rows[row])
            gone = torch.tensor([row for row in before.rows if row not in table.rows])
            if left < 4:
                continue
            wanted = torch.stack([before.rows[row] for row in gone.tolist()])
            error, dropped = (
                (dense(t.cores, shape=table.shape)[gone] - wanted).square().sum()
                for t in (table, before)
            )
            assert error < dropped


def load_otherwise(rank: int, folder: str) -> tuple[str, dict[str, int], list[Tensor]]:
    """Plain dcp under another plan; then our own into a model whose tables have no caches."""
    model, optimizer = make(9, {"t0": RW, "t1": TW})
    before = whole(model)
    with pytest.raises(CheckpointException) as error:
        dcp.load(state_of(model, optimizer), checkpoint_id=f"{folder}/1")
    for key, value in whole(model).items():
        assert torch.equal(value, before[key]), key
    bare, optimizer = make(9, {"t0": RW, "t1": DP}, num_rows=None)
    state = {"model": bare.state_dict()}
    left = load(state, model=bare, checkpoint_id=f"{folder}/1")
    check_replicas(whole(bare))
    return str(error.value), left, [whole(bare)["ebc.embedding_bags.t1.tt_cores.0"]]


def test_plain_dcp_under_another_plan_names_the_caches_and_none_are_folded_whole(
    two_ranks: Ranks, two_nodes: Ranks, saved: Path
) -> None:
    old = read(saved, "1")
    tables = tables_in(old)
    results = two_ranks.run(load_otherwise, str(saved))
    for message, _, (core,) in results:
        assert (
            "Missing key in checkpoint state_dict: model.ebc.embedding_bags.t0.row_cache" in message
        )
        assert not torch.equal(core, tables["t1"].cores[0])
    for name in ("t0", "t1"):
        left = sum(found[f"ebc.embedding_bags.{name}"] for _, found, _ in results)
        assert left == len(tables[name].rows)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_unsharded_model_gets_the_rows_of_all_ranks(saved: Path) -> None:
    own = TTOptimizerConfig(optimizer="adagrad")
    cache = RowCacheConfig(num_rows=104, optimizer=own)
    model = unsharded(seed=9, caches={"t0": cache, "t1": cache})
    state = {"model": model.state_dict()}
    assert load(state, model=model, checkpoint_id=saved / "4") == dict.fromkeys(
        ["ebc.embedding_bags.t0", "ebc.embedding_bags.t1"], 0
    )
    for name, table in tables_in(read(saved, "4")).items():
        found = model.ebc.embedding_bags[name].to_dense().detach()
        wanted = table.dense(table.cores, torch.stack([*table.rows.values()]))
        torch.testing.assert_close(found, wanted)


def load_another_capacity(rank: int) -> str:
    types = {"t0": RW, "t1": TW}
    saved, model = make(9, types)[0], make(9, types, num_rows=24)[0]
    with pytest.raises(ValueError, match="row_cache") as error:
        model.load_state_dict(saved.state_dict())
    return str(error.value)


def test_another_capacity_is_named_on_every_rank(two_ranks: Ranks) -> None:
    for message in two_ranks.run(load_another_capacity):
        assert "must have the capacity of the row cache, 24 slots, got 16: torchrec_tt" in message


def test_what_load_is_not_given_is_named(tmp_path: Path) -> None:
    model = unsharded()
    with pytest.raises(ValueError, match=r"state must have 'model', .* got \['optimizer'\]"):
        load({"optimizer": {}}, model=model, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match="exactly one of checkpoint_id and storage_reader"):
        load({"model": model.state_dict()}, model=model)


def shard_a_trained_module(rank: int) -> str:
    cache = RowCacheConfig(
        num_rows=8, first_refresh=1, optimizer=TTOptimizerConfig(optimizer="adagrad")
    )
    model = unsharded(caches={"t0": cache})
    if rank == 0:  # the values that count
        for step in range(2):
            model(own_part(drifting_batch(step, busy=1))).sum().backward()
    sharders = [sharder()]
    plan = plan_for(model, {"t0": RW, "t1": TW}, sharders)
    with pytest.raises(ValueError, match="row caches must be empty") as error:
        DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    return str(error.value)


def test_a_module_with_cached_rows_is_not_sharded_on_any_rank(two_ranks: Ranks) -> None:
    for message in two_ranks.run(shard_a_trained_module):
        assert "got rows in those of ['t0']: save it" in message
