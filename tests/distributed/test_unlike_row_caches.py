"""Row caches that are unlike each other, on few rows and few ranks, averaged and weighted."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import embedding_bag
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.ranks import Ranks
from tests.distributed.test_row_cache import check_replicas
from tests.distributed.toy_model import LR, full_state, plan_for, sharder
from torchrec_tt import RowCacheConfig, TTEmbeddingBagCollection, TTEmbeddingBagConfig
from torchrec_tt.distributed.sharded_collection import ShardedTTCollection
from torchrec_tt.optim import TTOptimizerConfig
from torchrec_tt.tt.cores import dense

pytestmark = pytest.mark.slow

TW, RW, TWRW = (
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
)
BAGS = 5  # on every rank
OWN_RATE = 0.02
ROWS = {"lru": 110, "lfu": 119, "narrow": 60, "none": 50, "five": 5, "one": 1}
CACHES: dict[str, RowCacheConfig | None] = {
    "lru": RowCacheConfig(
        num_rows=8, policy="lru", first_refresh=3, refresh_growth=1, on_evict="drop"
    ),
    "lfu": RowCacheConfig(load_factor=0.2, first_refresh=2, refresh_growth=1),
    "narrow": RowCacheConfig(
        num_rows=1,
        dtype=torch.bfloat16,
        first_refresh=1,
        refresh_growth=1,
        optimizer=TTOptimizerConfig(optimizer="sgd", learning_rate=OWN_RATE),
    ),
    "none": None,
    "five": RowCacheConfig(num_rows=5, first_refresh=1, refresh_growth=2),  # all rows
    "one": RowCacheConfig(num_rows=1, first_refresh=1),
}


class Holder(nn.Module):
    def __init__(self, pooling: PoolingType, *, is_weighted: bool) -> None:
        super().__init__()
        tables = [
            TTEmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=8,
                feature_names=[name],
                tt_ranks={"lru": [3, 5], "five": [1], "one": [1]}.get(name, [4]),
                pooling=pooling,
                cache=CACHES[name],
            )
            for name, rows in ROWS.items()
        ]
        self.ebc = TTEmbeddingBagCollection(tables, is_weighted=is_weighted, device="meta")

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.ebc(features)


def batch_of(step: int, *, ranks: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Lengths and ids of all ranks' bags by table; hot rows move, the last rank has no ids."""
    generator = torch.Generator().manual_seed(step)
    result = {}
    for name, rows in ROWS.items():
        lengths = torch.randint(0, 6, (BAGS * ranks,), generator=generator)
        lengths[BAGS * (ranks - 1) :] = 0
        hot = torch.randint(0, 9, (int(lengths.sum()),), generator=generator) * 5 + step // 4
        rare = torch.randint(0, rows, hot.shape, generator=generator)
        is_hot = torch.rand(hot.shape, generator=generator) < 0.8
        result[name] = (lengths, torch.where(is_hot, hot, rare) % rows)
    return result


def weights_of(ids: Tensor) -> Tensor:
    return 0.5 + 0.01 * ids


def own_part(batch: Mapping[str, tuple[Tensor, Tensor]], *, is_weighted: bool) -> KeyedJaggedTensor:
    first = dist.get_rank() * BAGS
    lengths, values = [], []
    for n, ids in batch.values():
        begin, count = int(n[:first].sum()), int(n[first : first + BAGS].sum())
        lengths.append(n[first : first + BAGS])
        values.append(ids[begin : begin + count])
    ids = torch.cat(values)
    weights = weights_of(ids) if is_weighted else None
    return KeyedJaggedTensor(list(batch), ids, lengths=torch.cat(lengths), weights=weights)


class Table:
    """A table by the state dict of the whole model: what its cores give, and its cached rows."""

    def __init__(self, state: Mapping[str, Tensor], name: str, shape: Any) -> None:
        prefix = f"ebc.embedding_bags.{name}."
        own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        self.cores = [own[f"tt_cores.{k}"] for k in range(shape.num_cores)]
        self.weights = dense(self.cores, shape=shape)
        self.rows: dict[int, Tensor] = {}
        for key in (key for key in own if key.endswith(".ids")):
            for slot, row in enumerate(own[key].long().tolist()):
                if row >= 0:
                    assert row not in self.rows
                    self.rows[row] = self.weights[row] = own[f"{key[:-3]}rows"][slot]


def look_up(
    table: Tensor, lengths: Tensor, ids: Tensor, pooling: PoolingType, *, is_weighted: bool
) -> Tensor:
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    return embedding_bag(
        ids,
        table,
        offsets,
        mode=pooling.value.lower(),
        include_last_offset=True,
        per_sample_weights=weights_of(ids) if is_weighted else None,
    )


def drive(
    rank: int, types: Mapping[str, str], pooling: PoolingType, is_weighted: bool
) -> dict[str, dict[str, int | float]]:
    """Trains; every output, and every step of a cached row by SGD, is what the state dict says."""
    model = Holder(pooling, is_weighted=is_weighted)
    shapes = copy.deepcopy(model.ebc.tt_shapes)
    sharders = [sharder("sgd")]
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    plan = plan_for(model, types, sharders)
    sharded = DistributedModelParallel(
        model, env=env, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    collection = next(m for m in sharded.modules() if isinstance(m, ShardedTTCollection))
    ranks = dist.get_world_size()
    first = rank * BAGS

    def tables() -> dict[str, Table]:
        state = full_state(sharded.state_dict())
        check_replicas(state)
        return {name: Table(state, name, shape) for name, shape in shapes.items()}

    for step in range(10):
        batch = batch_of(step, ranks=ranks)
        pooled = collection(own_part(batch, is_weighted=is_weighted)).wait()
        now = tables()
        loss = torch.zeros(())
        leaves = {}
        for name, table in now.items():
            leaves[name] = table.weights.clone().requires_grad_()
            output = look_up(leaves[name], *batch[name], pooling, is_weighted=is_weighted)
            torch.testing.assert_close(
                pooled[name], output[first : first + BAGS], rtol=1e-5, atol=1e-6
            )
            loss = loss + output.square().sum() / ranks
        loss.backward()
        sum(pooled[name].square().sum() for name in now).backward()
        for name, table in tables().items():
            cache = CACHES[name]
            rate = LR if cache is None or cache.optimizer is None else OWN_RATE
            is_narrow = cache is not None and cache.dtype is not None
            assert table.rows.keys() == now[name].rows.keys()
            for row, value in table.rows.items():
                wanted = now[name].rows[row] - rate * leaves[name].grad[row]
                tolerance = {"rtol": 0.01, "atol": 1e-3} if is_narrow else {}
                torch.testing.assert_close(
                    value, wanted, **({"rtol": 1e-4, "atol": 1e-5} | tolerance)
                )
    return collection.row_cache_statistics()


def lookups(ranks: int) -> dict[str, int]:
    return {
        name: sum(len(batch_of(step, ranks=ranks)[name][1]) for step in range(10)) for name in ROWS
    }


def check_counts(results: list[dict[str, dict[str, int | float]]]) -> None:
    expected = lookups(len(results))
    for name, cache in CACHES.items():
        found = [result[name] for result in results if name in result]
        if cache is None:
            assert not found
            continue
        assert sum(int(one["hits"] + one["misses"]) for one in found) == expected[name]
        assert sum(int(one["hits"]) for one in found) > 0
        assert len({one["refreshes"] for one in found}) == 1


def test_unlike_caches_weighted_on_two_ranks(two_ranks: Ranks) -> None:
    types = {name: (RW, TW)[k % 2] for k, name in enumerate(ROWS)}
    check_counts(two_ranks.run(drive, types, PoolingType.SUM, True))


def test_unlike_caches_averaged_on_two_nodes(two_nodes: Ranks) -> None:
    types = dict(zip(ROWS, (TWRW, RW, TWRW, TW, RW, TWRW), strict=True))
    check_counts(two_nodes.run(drive, types, PoolingType.MEAN, False))
