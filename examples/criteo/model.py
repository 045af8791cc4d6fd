"""The DLRM of the Criteo example: which tables are Tensor-Train (TT), and how they are sharded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from baselines import Hashed, HashedEmbeddingBagCollection, int4_bytes
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingType
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_tt import (
    RowCacheConfig,
    TTEmbeddingBagCollection,
    TTEmbeddingBagCollectionSharder,
    TTEmbeddingBagConfig,
    tt_planner,
)
from torchrec_tt.distributed.planner.stats import PlanReport
from torchrec_tt.model_file import read_model_file
from torchrec_tt.tt.factorize import RowStrategy
from torchrec_tt.tt.init import TTInit

_FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """One optimizer for every parameter: SGD, or Adagrad where `adagrad` is set."""

    learning_rate: float
    adagrad: bool
    freeze_tt: bool
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True, slots=True)
class DLRMConfig:
    """All of a DLRM but its tables.

    Args:
        dense_arch_layer_sizes: bottom MLP; ends in the embedding dimension.
        over_arch_layer_sizes: top MLP; ends in 1.
        interaction_type: of the dense and sparse features: "original" is pairwise dot products.
        dcn_num_layers: of the cross network of "dcn".
        dcn_low_rank_dim: of its layers.
        interaction_branch1_layer_sizes: an MLP of "projection"; ends in a multiple of the
            embedding dimension.
        interaction_branch2_layer_sizes: the other.
    """

    dense_arch_layer_sizes: list[int]
    over_arch_layer_sizes: list[int]
    interaction_type: Literal["original", "dcn", "projection"] = "original"
    dcn_num_layers: int = 3
    dcn_low_rank_dim: int = 512
    interaction_branch1_layer_sizes: list[int] = field(default_factory=lambda: [2048, 2048])
    interaction_branch2_layer_sizes: list[int] = field(default_factory=lambda: [2048, 2048])


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A model on `meta`, how it is to be sharded, and on rank 0 why so."""

    model: DLRMTrain
    sharders: list[ModuleSharder[nn.Module]]
    plan: ShardingPlan
    report: PlanReport | None


def largest_columns(num_embeddings: Sequence[int], *, count: int) -> list[int]:
    """Returns the `count` columns with the largest tables, the largest first."""
    return sorted(range(len(num_embeddings)), key=lambda c: -num_embeddings[c])[:count]


def table_configs(
    num_embeddings: Sequence[int],
    *,
    embedding_dim: int,
    tt_columns: Sequence[int] = (),
    tt_ranks: Sequence[int] = (),
    cache: RowCacheConfig | None = None,
    tt_init: TTInit = "sampled_gaussian",
    row_strategy: RowStrategy = "balanced",
) -> list[EmbeddingBagConfig]:
    """Returns a table per categorical column, those of `tt_columns` in TT form with a `cache`."""
    configs = []
    for column, (feature, rows) in enumerate(zip(DEFAULT_CAT_NAMES, num_embeddings, strict=True)):
        kwargs = {
            "name": f"t_{feature}",
            "num_embeddings": rows,
            "embedding_dim": embedding_dim,
            "feature_names": [feature],
        }
        if column in tt_columns:
            configs.append(
                TTEmbeddingBagConfig(
                    **kwargs,
                    tt_ranks=list(tt_ranks),
                    cache=cache,
                    tt_init=tt_init,
                    row_strategy=row_strategy,
                )
            )
        else:
            configs.append(EmbeddingBagConfig(**kwargs))
    return configs


def configs_of_file(path: Path, *, embedding_dim: int) -> list[EmbeddingBagConfig]:
    """Returns the tables of a model file, one for each categorical column in the columns' order.

    Raises:
        ValueError: if the file has other features or columns of another dimension.
    """
    configs = [table.config() for table in read_model_file(path).tables]
    features = [config.feature_names for config in configs]
    if features != [[name] for name in DEFAULT_CAT_NAMES]:
        raise ValueError(
            f"{path} must have a table for each of {DEFAULT_CAT_NAMES}, got {features}"
        )
    for config in configs:
        if config.embedding_dim != embedding_dim:
            raise ValueError(
                f"{path} must have tables of dim {embedding_dim}, got {config.embedding_dim} for "
                f"table {config.name!r}"
            )
    return configs


def table_bytes(config: EmbeddingBagConfig) -> int:
    """Returns the bytes of a table's parameters, in whichever form it is kept."""
    if isinstance(config, TTEmbeddingBagConfig):
        return config.tt_shape.num_parameters * _FLOAT_BYTES
    if config.data_type == DataType.INT4:
        return int4_bytes(config)
    return dense_bytes(config)


def dense_bytes(config: EmbeddingBagConfig) -> int:
    """Returns the bytes of a table's rows."""
    return config.num_embeddings * config.embedding_dim * _FLOAT_BYTES


def plan_dlrm(
    configs: list[EmbeddingBagConfig],
    *,
    dlrm: DLRMConfig,
    batch_size: int,
    optimizer: OptimizerConfig,
    is_planned_freely: bool = False,
    fixed_types: Mapping[str, str] | None = None,
    hashed: Hashed | None = None,
) -> Planned:
    """Returns the DLRM and a plan to shard it over the process group.

    Without TT tables it is stock TorchRec: its collection and its sharders.

    Args:
        configs: the tables.
        dlrm: the rest of the model.
        batch_size: rows per rank, for the planner.
        optimizer: of the MLPs and of the tables.
        is_planned_freely: whether the planner chooses every table's sharding type; else the TT
            tables show all three of theirs.
        fixed_types: each table's sharding type, in place of both.
        hashed: smaller tables in place of the TT tables.

    Raises:
        ValueError: if sizes do not fit together.
        PlannerError: if the tables do not fit the ranks.
    """
    try:
        model = DLRMTrain(_dlrm(_collection(configs, hashed), dlrm))
    except RuntimeError as error:
        (reason, *_) = str(error).splitlines()
        raise ValueError(f"the model's layers must fit in memory, got {reason}") from None
    sharders = _sharders(optimizer)
    if fixed_types is None:
        is_free = is_planned_freely or hashed is not None
        fixed_types = {} if is_free else _demonstration(configs)
    planner = tt_planner(
        Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        batch_size=batch_size,
        constraints={
            name: ParameterConstraints(sharding_types=[kind]) for name, kind in fixed_types.items()
        },
        storage_reservation=FixedPercentageStorageReservation(percentage=0.05),
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    report = planner.report(model, sharders) if dist.get_rank() == 0 else None
    return Planned(model=model, sharders=sharders, plan=plan, report=report)


def shard(
    planned: Planned, *, optimizer: OptimizerConfig
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Returns the sharded model, and the optimizer of all its parameters."""
    sharded = DistributedModelParallel(
        planned.model, device=torch.device("cpu"), plan=planned.plan, sharders=planned.sharders
    )
    return sharded, _optimizer(sharded, config=optimizer)


def _collection(configs: list[EmbeddingBagConfig], hashed: Hashed | None) -> nn.Module:
    if hashed is not None:
        return HashedEmbeddingBagCollection(hashed)
    has_tt = any(isinstance(config, TTEmbeddingBagConfig) for config in configs)
    collection_type = TTEmbeddingBagCollection if has_tt else EmbeddingBagCollection
    return collection_type(tables=configs, device="meta")


def _dlrm(collection: nn.Module, dlrm: DLRMConfig) -> DLRM:
    common = {
        "embedding_bag_collection": collection,
        "dense_in_features": len(DEFAULT_INT_NAMES),
        "dense_arch_layer_sizes": dlrm.dense_arch_layer_sizes,
        "over_arch_layer_sizes": dlrm.over_arch_layer_sizes,
    }
    if dlrm.interaction_type == "dcn":
        return DLRM_DCN(
            **common, dcn_num_layers=dlrm.dcn_num_layers, dcn_low_rank_dim=dlrm.dcn_low_rank_dim
        )
    if dlrm.interaction_type == "projection":
        return DLRM_Projection(
            **common,
            interaction_branch1_layer_sizes=dlrm.interaction_branch1_layer_sizes,
            interaction_branch2_layer_sizes=dlrm.interaction_branch2_layer_sizes,
        )
    return DLRM(**common)


def sharding_types(model: DistributedModelParallel) -> dict[str, str]:
    """Returns each table's sharding type."""
    plan: ShardingPlan = model.plan
    return {
        table: sharding.sharding_type
        for module_plan in plan.plan.values()
        for table, sharding in module_plan.items()
    }


def _sharders(config: OptimizerConfig) -> list[ModuleSharder[nn.Module]]:
    """Returns TorchRec's sharders and ours; tables take the optimizer from them."""
    fused_params = {
        "optimizer": EmbOptimType.EXACT_ADAGRAD if config.adagrad else EmbOptimType.EXACT_SGD,
        "learning_rate": config.learning_rate,
        "eps": config.eps,
    }
    return [
        TTEmbeddingBagCollectionSharder(fused_params=fused_params),
        EmbeddingBagCollectionSharder(fused_params=fused_params),
        *(s for s in get_default_sharders() if s.module_type is not EmbeddingBagCollection),
    ]


def _demonstration(configs: Sequence[EmbeddingBagConfig]) -> dict[str, str]:
    """Gives the TT tables all three of their sharding types, the cheapest on CPUs the most.

    TABLE_WISE has no sum of core gradients; the largest table is ROW_WISE, which spreads its rows
    over all ranks, and the smallest of three or more DATA_PARALLEL, which exchanges no ids, unless
    it has a row cache.
    """
    tables = [config for config in configs if isinstance(config, TTEmbeddingBagConfig)]
    tables.sort(key=lambda config: -config.num_embeddings)
    types = {table.name: ShardingType.TABLE_WISE.value for table in tables}
    if len(tables) > 2 and tables[-1].cache is None:
        types[tables[-1].name] = ShardingType.DATA_PARALLEL.value
    if tables:
        types[tables[0].name] = ShardingType.ROW_WISE.value
    return types


def _optimizer(model: DistributedModelParallel, *, config: OptimizerConfig) -> CombinedOptimizer:
    """Joins the optimizers that step in backward with one for every other parameter.

    Frozen TT cores get a learning rate of 0 where backward steps them; elsewhere the optimizer
    does not see them.
    """
    if config.freeze_tt:
        cores = {id(core) for name, core in model.named_parameters() if _is_core(name)}
        for group in model.fused_optimizer.param_groups:
            if any(id(parameter) in cores for parameter in group["params"]):
                group["lr"] = 0.0

    def with_params(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        if config.adagrad:
            return torch.optim.Adagrad(params, lr=config.learning_rate, eps=config.eps)
        return torch.optim.SGD(params, lr=config.learning_rate)

    dense = KeyedOptimizerWrapper(
        {
            name: parameter
            for name, parameter in in_backward_optimizer_filter(model.named_parameters())
            if not (config.freeze_tt and _is_core(name))
        },
        with_params,
    )
    return CombinedOptimizer([model.fused_optimizer, dense])


def _is_core(parameter_name: str) -> bool:
    return ".tt_cores." in parameter_name
