"""A small model that reads sequences: two regular and two Tensor-Train tables, unpooled."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from tests.distributed.toy_model import EPS, LR, OPTIMIZERS, plan_for
from torchrec_tt import TTEmbeddingCollection, TTEmbeddingCollectionSharder, TTEmbeddingConfig

OUTPUTS = ["f0@r0", "f2", "f0@t0", "f1", "f3"]
DIM = 8


class ToySequenceModel(nn.Module):
    def __init__(self, ec: nn.Module) -> None:
        super().__init__()
        self.ec = ec
        self.over = nn.Linear(len(OUTPUTS) * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:  # [B, 1]
        rows = self.ec(features)
        return self.over(torch.cat([_by_place(rows[key]) for key in OUTPUTS], dim=1))


class ToySequenceModelWithLoss(ToySequenceModel):
    """What train pipelines want of a model: it returns its loss first."""

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        output = super().forward(features)
        return output.square().mean(), output


@torch.fx.wrap  # a leaf to the tracer of train pipelines
def _by_place(rows: JaggedTensor) -> Tensor:  # [B, DIM]
    """Sums a sequence's rows, each times a factor of its place in the sequence."""
    lengths = rows.lengths().long()
    sample = torch.arange(lengths.numel()).repeat_interleave(lengths)
    place = torch.arange(sample.numel()) - (lengths.cumsum(0) - lengths)[sample]
    weighted = rows.values() * (1.0 + place).unsqueeze(1)
    return torch.zeros(lengths.numel(), DIM).index_add(0, sample, weighted)


def tables(data_type: DataType = DataType.FP32) -> list[EmbeddingConfig]:
    """Feature f0 is read by a regular and a TT table; rows do not fill the TT tables' factors."""
    return [
        EmbeddingConfig(name="r0", num_embeddings=100, embedding_dim=DIM, feature_names=["f0"]),
        TTEmbeddingConfig(
            name="t0",
            num_embeddings=110,
            embedding_dim=DIM,
            feature_names=["f2", "f0"],
            tt_ranks=[3, 5],
            row_factors=[4, 5, 6],
            col_factors=[2, 2, 2],
            data_type=data_type,
        ),
        EmbeddingConfig(name="r1", num_embeddings=200, embedding_dim=DIM, feature_names=["f1"]),
        TTEmbeddingConfig(
            name="t1",
            num_embeddings=119,
            embedding_dim=DIM,
            feature_names=["f3"],
            tt_ranks=[6],
            row_factors=[10, 12],
            col_factors=[2, 4],
            data_type=data_type,
        ),
    ]


def unsharded(
    *, seed: int = 0, need_indices: bool = False, data_type: DataType = DataType.FP32
) -> ToySequenceModel:
    torch.manual_seed(seed)
    model = ToySequenceModel(TTEmbeddingCollection(tables(data_type), need_indices=need_indices))
    with torch.no_grad():  # large enough that every step shows
        for name, parameter in model.named_parameters():
            if "tt_cores" in name:
                parameter.normal_(0, 0.5)
    return model


def on_meta(model: ToySequenceModel) -> ToySequenceModel:
    """A copy with the collection on meta and the rest as it is."""
    configs = copy.deepcopy(model.ec.embedding_configs())
    result = type(model)(TTEmbeddingCollection(configs, "meta", model.ec.need_indices()))
    result.over.load_state_dict(model.over.state_dict())
    return result


def sharder(optimizer: str = "sgd", **arguments: Any) -> TTEmbeddingCollectionSharder:
    fused_params = {"optimizer": OPTIMIZERS[optimizer][0], "learning_rate": LR, "eps": EPS}
    fused_params.update(arguments.pop("fused_params", {}))
    return TTEmbeddingCollectionSharder(fused_params=fused_params, **arguments)


def sharded(
    source: ToySequenceModel,
    sharding_types: Mapping[str, str],
    *,
    optimizer: str = "sgd",
    load: bool = True,
    tt_sharder: TTEmbeddingCollectionSharder | None = None,
    env: ShardingEnv | None = None,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The sharded model with the values of `source`, and the optimizer of all its parameters."""
    sharders = [tt_sharder or sharder(optimizer)]
    meta = on_meta(source)
    plan = plan_for(meta, sharding_types, sharders)
    model = DistributedModelParallel(
        meta, env=env, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    if load:
        model.load_state_dict(copy.deepcopy(source.state_dict()))
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), OPTIMIZERS[optimizer][1]
    )
    return model, CombinedOptimizer([model.fused_optimizer, dense])
