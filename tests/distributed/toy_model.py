"""A small model with two regular and two Tensor-Train tables, its batches and its shardings."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tt import (
    RowCacheConfig,
    TTEmbeddingBagCollection,
    TTEmbeddingBagCollectionSharder,
)
from torchrec_tt.distributed.planner.planners import tt_planner
from torchrec_tt.modules.embedding_configs import TTEmbeddingBagConfig

KEYS = ["f0", "f1", "f2", "f3"]
NUM_IDS = {"f0": 100, "f1": 200, "f2": 110, "f3": 119}
OUTPUTS = ["f0@r0", "f2", "f0@t0", "f1", "f3"]
BATCH_SIZE = 8  # per rank
LR = 0.1
EPS = 1e-8

Pooling = PoolingType | Mapping[str, PoolingType]

OPTIMIZERS: dict[str, tuple[EmbOptimType, Any]] = {
    "sgd": (EmbOptimType.EXACT_SGD, lambda p: torch.optim.SGD(p, lr=LR)),
    "adagrad": (EmbOptimType.EXACT_ADAGRAD, lambda p: torch.optim.Adagrad(p, lr=LR, eps=EPS)),
}


class ToyModel(nn.Module):
    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc
        self.over = nn.Linear(64, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:  # [B, 1]
        pooled = self.ebc(features)
        # By key: the sharded collection returns them in another order than the unsharded.
        return self.over(torch.cat([pooled[key] for key in OUTPUTS], dim=1))


class ToyModelWithLoss(ToyModel):
    """What train pipelines want of a model: it returns its loss first."""

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        output = super().forward(features)
        return output.square().mean(), output


def tables(pooling: Pooling = PoolingType.SUM) -> list[EmbeddingBagConfig]:
    """Feature f0 is read by a regular and a TT table; rows do not fill the TT tables' factors.

    `pooling` is of all tables, or by name of those that do not pool by SUM.
    """
    configs = [
        EmbeddingBagConfig(name="r0", num_embeddings=100, embedding_dim=16, feature_names=["f0"]),
        TTEmbeddingBagConfig(
            name="t0",
            num_embeddings=110,
            embedding_dim=16,
            feature_names=["f2", "f0"],
            tt_ranks=[3, 5],
            row_factors=[4, 5, 6],
            col_factors=[2, 2, 4],
        ),
        EmbeddingBagConfig(name="r1", num_embeddings=200, embedding_dim=8, feature_names=["f1"]),
        TTEmbeddingBagConfig(
            name="t1",
            num_embeddings=119,
            embedding_dim=8,
            feature_names=["f3"],
            tt_ranks=[6],
            row_factors=[10, 12],
            col_factors=[2, 4],
        ),
    ]
    for config in configs:
        config.pooling = (
            pooling
            if isinstance(pooling, PoolingType)
            else pooling.get(config.name, PoolingType.SUM)
        )
    return configs


def unsharded(
    *,
    seed: int = 0,
    pooling: Pooling = PoolingType.SUM,
    is_weighted: bool = False,
    caches: Mapping[str, RowCacheConfig] | None = None,
) -> ToyModel:
    torch.manual_seed(seed)
    configs = tables(pooling)
    for config in configs:
        if caches and config.name in caches:
            config.cache = caches[config.name]
    model = ToyModel(TTEmbeddingBagCollection(configs, is_weighted=is_weighted))
    with torch.no_grad():  # large enough that every step shows
        for name, parameter in model.named_parameters():
            if "tt_cores" in name:
                parameter.normal_(0, 0.5)
    return model


def on_meta(model: ToyModel) -> ToyModel:
    """A copy with the collection on meta and the rest as it is."""
    ebc = TTEmbeddingBagCollection(
        copy.deepcopy(model.ebc.embedding_bag_configs()), model.ebc.is_weighted(), "meta"
    )
    result = type(model)(ebc)
    result.over.load_state_dict(model.over.state_dict())
    return result


def sharder(optimizer: str = "sgd", **fused_params: Any) -> TTEmbeddingBagCollectionSharder:
    return TTEmbeddingBagCollectionSharder(
        fused_params={
            "optimizer": OPTIMIZERS[optimizer][0],
            "learning_rate": LR,
            "eps": EPS,
            **fused_params,
        }
    )


def plan_for(
    model: nn.Module,
    sharding_types: Mapping[str, str],
    sharders: list[Any],
    *,
    pg: dist.ProcessGroup | None = None,
) -> ShardingPlan:
    world_size = dist.get_world_size(pg)
    topology = Topology(
        world_size=world_size,
        local_world_size=get_local_size(world_size),
        compute_device="cpu",
    )
    constraints = {
        name: ParameterConstraints(sharding_types=[kind]) for name, kind in sharding_types.items()
    }
    planner = tt_planner(topology, batch_size=BATCH_SIZE, constraints=constraints)
    return planner.collective_plan(model, sharders, pg)


def sharded(
    source: ToyModel,
    sharding_types: Mapping[str, str],
    *,
    optimizer: str = "sgd",
    load: bool = True,
    tt_sharder: Any = None,
    env: ShardingEnv | None = None,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The sharded model with the values of `source`, and the optimizer of all its parameters.

    It lies on all ranks, or on those of `env`.
    """
    sharders = [tt_sharder or sharder(optimizer)]
    meta = on_meta(source)
    env = env or ShardingEnv.from_process_group(dist.group.WORLD)
    plan = plan_for(meta, sharding_types, sharders, pg=env.process_group)
    model = DistributedModelParallel(
        meta, env=env, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    if load:
        values = {k: v for k, v in source.state_dict().items() if ".row_cache." not in k}
        has_cache = any(".row_cache." in key for key in model.state_dict())
        model.load_state_dict(copy.deepcopy(values), strict=not has_cache)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), OPTIMIZERS[optimizer][1]
    )
    return model, CombinedOptimizer([model.fused_optimizer, dense])


def batches(num: int, *, size: int, seed: int = 1) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Lengths and ids per feature of `num` global batches; some bags are empty."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(num):
        lengths = [torch.randint(0, 4, (size,), generator=generator) for _ in KEYS]
        ids = [
            torch.randint(0, NUM_IDS[key], (int(n.sum()),), generator=generator)
            for key, n in zip(KEYS, lengths, strict=True)
        ]
        result.append((lengths, ids))
    return result


def kjt(
    batch: tuple[list[Tensor], list[Tensor]], *, start: int, stop: int, is_weighted: bool = False
) -> KeyedJaggedTensor:
    """Samples `start` to `stop` of a global batch."""
    lengths, ids = [], []
    for n, values in zip(*batch, strict=True):
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), n.cumsum(0)])
        lengths.append(n[start:stop])
        ids.append(values[offsets[start] : offsets[stop]])
    values = torch.cat(ids)
    weights = values.float() * 0.01 + 0.5 if is_weighted else None
    return KeyedJaggedTensor(keys=KEYS, values=values, lengths=torch.cat(lengths), weights=weights)


def pieces(value: Any) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """What this rank holds of a tensor in a state dict, and where in the whole it belongs."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield shard.tensor, _slices(shard.metadata.shard_offsets, shard.metadata.shard_sizes)
    elif isinstance(value, DTensor):
        local = value.to_local()
        for tensor, offsets in zip(local.local_shards(), local.local_offsets(), strict=False):
            yield tensor, _slices(offsets, tensor.shape)
    else:
        yield value, ()


def full_state(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state dict with every ShardedTensor and DTensor whole, on every rank.

    Where several ranks say that they have the same part, they must have the same values.
    """
    result = {}
    for key, value in state_dict.items():
        if isinstance(value, ShardedTensor | DTensor):
            whole, count = torch.zeros(value.size()), torch.zeros(value.size())
            for piece, where in pieces(value):
                whole[where] = piece.detach()
                count[where] = 1
            dist.all_reduce(whole)
            dist.all_reduce(count)
            result[key] = whole / count  # exact: one rank, or two with equal values
        else:
            result[key] = value.detach().clone()
    return result


def _slices(offsets: Any, sizes: Any) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
