"""Batches of every form, through every sharding type: as the unsharded collection, and no hang."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import LR, NUM_IDS, full_state, plan_for, sharder, tables
from torchrec_tt import TTEmbeddingBagCollection

pytestmark = pytest.mark.slow

TW, RW, DP, TWRW, CW, GRID = (
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.DATA_PARALLEL.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.GRID_SHARD.value,
)
TABLES = ["t0", "t1", "r0", "r1"]
TWO_RANKS = [(TW, TW, TW, TW), (RW, RW, RW, RW), (DP, DP, DP, DP), (RW, TW, DP, CW)]
TWO_NODES = [(TWRW, TWRW, TWRW, TWRW), (TWRW, RW, GRID, TW)]
ALL_MEAN = dict.fromkeys(TABLES, PoolingType.MEAN)
SOME_MEAN = dict.fromkeys(["t0", "r1"], PoolingType.MEAN)
SIZE = 6  # samples of a full batch

Bags = dict[str, list[list[int]]]  # ids per bag, by feature


class Concat(nn.Module):
    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc

    def forward(self, features: KeyedJaggedTensor) -> Tensor:  # [B, sum of D]
        pooled = self.ebc(features)
        return torch.cat([pooled[key] for key in sorted(pooled.keys())], dim=1)


def random_bags(sizes: dict[str, int], *, seed: int) -> Bags:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: [
            torch.randint(0, NUM_IDS[key], (int(n),), generator=generator).tolist()
            for n in torch.randint(0, 4, (size,), generator=generator)
        ]
        for key, size in sizes.items()
    }


def to_kjt(bags: Bags, *, is_weighted: bool, **kwargs: Any) -> KeyedJaggedTensor:
    flat = [bag for of_feature in bags.values() for bag in of_feature]
    values = torch.tensor([i for bag in flat for i in bag], dtype=torch.long)
    return KeyedJaggedTensor(
        keys=list(bags),
        values=values,
        lengths=torch.tensor([len(bag) for bag in flat], dtype=torch.long),
        weights=values.float() * 0.01 + 0.5 if is_weighted else None,
        **kwargs,
    )


def batch_of(
    rank: int, *, form: str, step: int, is_weighted: bool
) -> tuple[KeyedJaggedTensor, Bags]:
    """A rank's features, and the bags of its samples that they stand for."""
    keys = ["f0", "f1", "f2", "f3"]
    seed = 100 * step + rank
    size = SIZE
    if form == "uneven":
        size = SIZE - 2 * rank % 5
    elif form == "a rank without samples":
        size = 0 if rank == 1 else SIZE
    elif form == "another order":
        keys = ["f3", "f1", "f0", "f2"]
    if form == "variable":
        strides = {key: 1 + (k + rank + step) % SIZE for k, key in enumerate(keys)}
        generator = torch.Generator().manual_seed(seed)
        inverse = torch.stack(
            [torch.randint(0, n, (SIZE,), generator=generator) for n in strides.values()]
        )
        distinct = random_bags(strides, seed=seed)
        features = to_kjt(
            distinct,
            is_weighted=is_weighted,
            stride_per_key_per_rank=[[n] for n in strides.values()],
            inverse_indices=(keys, inverse),
        )
        rows = zip(keys, inverse.tolist(), strict=True)
        return features, {key: [distinct[key][i] for i in row] for key, row in rows}
    bags = random_bags(dict.fromkeys(keys, size), seed=seed)
    if form == "a rank without ids" and rank == step % 2:
        bags = {key: [[] for _ in of_feature] for key, of_feature in bags.items()}
    return to_kjt(bags, is_weighted=is_weighted), bags


def collection(
    kinds: str, *, pooling: Any = PoolingType.SUM, is_weighted: bool = False, device: str = "cpu"
) -> TTEmbeddingBagCollection:
    """The toy model's tables, or only those whose names begin with one of `kinds`."""
    chosen = [config for config in tables(pooling) if config.name[0] in kinds]
    return TTEmbeddingBagCollection(chosen, is_weighted, device)


def train_on(
    rank: int,
    form: str,
    types: Sequence[str],
    pooling: Any = PoolingType.SUM,
    is_weighted: bool = False,
    kinds: str = "tr",
) -> None:
    """Two steps of SGD, sharded and unsharded, on the same samples: outputs and tables agree."""
    world_size = dist.get_world_size()
    torch.manual_seed(3)
    reference = Concat(collection(kinds, pooling=pooling, is_weighted=is_weighted))
    meta = Concat(collection(kinds, pooling=pooling, is_weighted=is_weighted, device="meta"))
    by_table = dict(zip(TABLES, types, strict=True))
    plan = plan_for(meta, {c.name: by_table[c.name] for c in meta.ebc.table_configs()}, [sharder()])
    model = DistributedModelParallel(
        meta, device=torch.device("cpu"), plan=plan, sharders=[sharder()]
    )
    model.load_state_dict(copy.deepcopy(reference.state_dict()))
    dense = [p for p in model.parameters() if not hasattr(p, "_in_backward_optimizers")]
    optimizers = [torch.optim.SGD(m, lr=LR) for m in (dense, reference.parameters()) if m]
    for step in range(2):
        of_ranks = [
            batch_of(r, form=form, step=step, is_weighted=is_weighted) for r in range(world_size)
        ]
        output = model(of_ranks[rank][0])
        sizes = [len(bags["f0"]) for _, bags in of_ranks]
        merged = {k: list(itertools.chain(*(bags[k] for _, bags in of_ranks))) for k in NUM_IDS}
        expected = reference(to_kjt(merged, is_weighted=is_weighted))
        torch.testing.assert_close(output, expected.split(sizes)[rank], rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.zero_grad()
        output.square().sum().backward()
        (expected.square().sum() / world_size).backward()  # gradients are averaged over ranks
        for optimizer in optimizers:
            optimizer.step()
    for key, value in full_state(model.state_dict()).items():
        torch.testing.assert_close(
            value, reference.state_dict()[key], rtol=1e-4, atol=1e-5, msg=f"{form} {types} {key}"
        )


def train_all(rank: int, form: str, plans: list[Sequence[str]]) -> None:
    for types in plans:
        train_on(rank, form, types)
        train_on(rank, form, types, ALL_MEAN)
        train_on(rank, form, types, SOME_MEAN)
        train_on(rank, form, types, is_weighted=True)
        train_on(rank, form, types, kinds="t")
        train_on(rank, form, types, kinds="r")


FORMS = [
    "plain",
    "another order",
    "a rank without ids",
    "a rank without samples",
    "uneven",
    "variable",
]


# U24: the form "variable".
# U21
@pytest.mark.parametrize("form", FORMS)
def test_batches_of_every_form_train_as_the_unsharded(two_ranks: Ranks, form: str) -> None:
    two_ranks.run(train_all, form, TWO_RANKS)


@pytest.mark.parametrize("form", FORMS)
def test_batches_of_every_form_train_on_two_nodes(two_nodes: Ranks, form: str) -> None:
    two_nodes.run(train_all, form, TWO_NODES)


def without_places(rank: int, types: Sequence[str]) -> str:
    """The message of a batch of variable sizes that does not say whose its bags are."""
    meta = Concat(collection("tr", device="meta"))
    plan = plan_for(meta, dict(zip(TABLES, types, strict=True)), [sharder()])
    model = DistributedModelParallel(
        meta, device=torch.device("cpu"), plan=plan, sharders=[sharder()]
    )
    sizes = {"f0": 2, "f1": 3, "f2": 2, "f3": 1}
    strides = [[size] for size in sizes.values()]
    features = to_kjt(
        random_bags(sizes, seed=rank), is_weighted=False, stride_per_key_per_rank=strides
    )
    with pytest.raises(ValueError, match="VBE") as error:
        model(features)
    dist.barrier()  # nobody is stuck in a collective
    return str(error.value)


# U24
@pytest.mark.parametrize("types", TWO_RANKS)
def test_variable_batch_sizes_without_their_places_are_refused(
    two_ranks: Ranks, types: Sequence[str]
) -> None:
    for message in two_ranks.run(without_places, types):
        assert "must have inverse_indices, got none" in message
