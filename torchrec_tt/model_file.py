"""A model's tables and the cluster to train them on, as a YAML file describes them."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType

from torchrec_tt.distributed.embeddingbag import TTEmbeddingBagCollectionSharder
from torchrec_tt.distributed.planner.hardware import Hardware, find_hardware
from torchrec_tt.distributed.planner.planners import TTEmbeddingShardingPlanner, tt_planner
from torchrec_tt.modules.embedding_configs import TTEmbeddingBagConfig
from torchrec_tt.modules.embedding_modules import TTEmbeddingBagCollection
from torchrec_tt.modules.row_cache_config import RowCacheConfig
from torchrec_tt.schema import (
    NonNegative,
    Positive,
    PositiveInt,
    Rule,
    Share,
    check_fields,
    read_yaml,
)
from torchrec_tt.tt.factorize import RowStrategy
from torchrec_tt.tt.traffic import CRITEO_EXPONENT, Traffic

_TYPES = [kind.value for kind in ShardingType]
Name = Annotated[str, Rule("not empty and without dots", lambda x: x != "" and "." not in x)]
Names = Annotated[list[str], Rule("distinct, one or more", lambda x: 0 < len(set(x)) == len(x))]
ShardingTypes = Annotated[Names, Rule(f"of {_TYPES}", lambda x: set(x) <= set(_TYPES))]
WorldSize = Annotated[int, Rule("in [1, 16384]", lambda x: 1 <= x <= 2**14)]
PoolingFactor = Annotated[Positive, Rule("at most 2^31", lambda x: x <= 2**31)]
_MAX_WEIGHTS = 2**60  # of a regular table: their bytes are counted in 64 bits
_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table; with `tt_ranks` a Tensor-Train one.

    Attributes:
        name: unique.
        num_embeddings: rows.
        embedding_dim: columns.
        feature_names: that read it; by default one, of the table's name.
        pooling: "sum" or "mean".
        data_type: "fp32" or "fp16", of a TT table also "bf16".
        tt_ranks: see TTEmbeddingBagConfig; absent for an uncompressed table.
        row_factors: see there.
        col_factors: see there.
        row_strategy: see there.
        cache_load_factor: the part of a rank's rows that its row cache keeps.
        pooling_factor: ids a sample has, on average and for each feature.
        zipf_exponent: of how its ids are drawn.
        sharding_types: that the planner may choose from.

    Raises:
        ValueError: for a value that its annotation does not allow.
    """

    name: Name
    num_embeddings: Annotated[int, Rule("in [1, 2^63)", lambda x: 1 <= x < 2**63)]
    embedding_dim: Annotated[int, Rule("in [1, 65536]", lambda x: 1 <= x <= 2**16)]
    feature_names: Names | None = None
    pooling: Literal["sum", "mean"] = "sum"
    data_type: Literal["fp32", "fp16", "bf16"] = "fp32"
    tt_ranks: list[PositiveInt] | None = None
    row_factors: list[PositiveInt] | None = None
    col_factors: list[PositiveInt] | None = None
    row_strategy: RowStrategy = "balanced"
    cache_load_factor: Annotated[float, Rule("in (0, 1)", lambda x: 0 < x < 1)] | None = None
    pooling_factor: PoolingFactor = 1.0
    zipf_exponent: NonNegative = CRITEO_EXPONENT
    sharding_types: ShardingTypes | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tt_ranks is None and self.num_embeddings * self.embedding_dim > _MAX_WEIGHTS:
            raise ValueError(
                f"num_embeddings * embedding_dim must be at most 2^60 without tt_ranks, got "
                f"{self.num_embeddings} * {self.embedding_dim}"
            )

    def config(self) -> EmbeddingBagConfig:
        """Returns the table's configuration.

        Raises:
            ValueError: if its values do not fit together.
        """
        common: dict[str, Any] = {
            "name": self.name,
            "num_embeddings": self.num_embeddings,
            "embedding_dim": self.embedding_dim,
            "feature_names": self.feature_names or [self.name],
            "pooling": PoolingType[self.pooling.upper()],
            "data_type": DataType[self.data_type.upper()],
        }
        if self.tt_ranks is None:
            for name in ("row_factors", "col_factors", "cache_load_factor"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} must be left out for a table without tt_ranks, "
                        f"got it for table {self.name!r}"
                    )
            return EmbeddingBagConfig(**common)
        cache = None
        if self.cache_load_factor is not None:
            cache = RowCacheConfig(load_factor=self.cache_load_factor)
        return TTEmbeddingBagConfig(
            **common,
            tt_ranks=self.tt_ranks,
            row_factors=self.row_factors,
            col_factors=self.col_factors,
            row_strategy=self.row_strategy,
            cache=cache,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The devices to plan for.

    Attributes:
        device: "cpu" or "cuda".
        world_size: ranks.
        local_world_size: ranks of a node; by default all.
        memory_gb: of a rank, in 10^9 bytes; by default the hardware's.
        hardware: a known device or a YAML file; see `tt_planner`.
        reserved: the part of the memory that is kept for all but the tables.

    Raises:
        ValueError: for a value that its annotation does not allow, or nodes that do not divide the
            ranks.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    world_size: WorldSize = 1
    local_world_size: WorldSize | None = None
    memory_gb: Annotated[Positive, Rule("at most 10^9", lambda x: x <= 1e9)] | None = None
    hardware: str | None = None
    reserved: Share = 0.15

    def __post_init__(self) -> None:
        check_fields(self)
        if self.local_world_size is not None and self.world_size % self.local_world_size:
            raise ValueError(
                f"local_world_size must divide world_size={self.world_size}, "
                f"got {self.local_world_size}"
            )

    def find_hardware(self) -> Hardware:
        """Returns the coefficients.

        Raises:
            ValueError: for unknown hardware.
        """
        return find_hardware(self.hardware, device=self.device)

    def memory_bytes(self) -> int:
        """Returns the bytes of a rank that tables may take."""
        memory = self.find_hardware().memory_bytes
        if self.memory_gb is not None:
            memory = int(self.memory_gb * 1e9)
        return int(memory * (1 - self.reserved))

    def topology(self, memory_bytes: int | None = None) -> Topology:
        """Returns the devices, each with `memory_bytes`, by default `self.memory_bytes()`."""
        memory = self.memory_bytes() if memory_bytes is None else memory_bytes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Topology(
                world_size=self.world_size,
                local_world_size=self.local_world_size,
                compute_device=self.device,
                **({"ddr_cap": memory} if self.device == "cpu" else {"hbm_cap": memory}),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFile:
    """What a model file has.

    Attributes:
        tables: of one collection.
        batch_size: samples per rank and step.
        optimizer: of the tables, in backward: "sgd", "adagrad", "rowwise_adagrad" or "adam".
        cluster: to plan for.

    Raises:
        ValueError: for a value that its annotation does not allow.
    """

    tables: list[Table]
    batch_size: PositiveInt = 512
    optimizer: Literal["sgd", "adagrad", "rowwise_adagrad", "adam"] = "sgd"
    cluster: Cluster = field(default_factory=Cluster)

    def __post_init__(self) -> None:
        check_fields(self)

    def module(self) -> nn.Module:
        """Returns the collection on `meta`, as `tables` of a module.

        Raises:
            ValueError: for tables that cannot be.
        """
        configs = []
        for table in self.tables:
            try:
                configs.append(table.config())
            except ValueError as error:
                raise ValueError(f"table {table.name!r}: {error}") from None
        return nn.ModuleDict({"tables": TTEmbeddingBagCollection(configs, device="meta")})

    def sharders(self) -> list[Any]:
        """Returns the sharder of the collection."""
        fused_params = {"optimizer": _OPTIMIZERS[self.optimizer]}
        return [TTEmbeddingBagCollectionSharder(fused_params=fused_params)]

    def planner(self, memory_bytes: int | None = None) -> TTEmbeddingShardingPlanner:
        """Returns the planner of the cluster; `memory_bytes` replace those of a rank.

        Raises:
            ValueError: for unknown hardware.
        """
        constraints = {
            table.name: ParameterConstraints(
                pooling_factors=[table.pooling_factor] * len(table.feature_names or [""]),
                sharding_types=table.sharding_types,
            )
            for table in self.tables
        }
        return tt_planner(
            self.cluster.topology(memory_bytes),
            batch_size=self.batch_size,
            constraints=constraints,
            hardware=self.cluster.find_hardware(),
            traffic={t.name: Traffic(zipf_exponent=t.zipf_exponent) for t in self.tables},
            storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        )


def read_model_file(path: str | Path) -> ModelFile:
    """Returns what the file says.

    Raises:
        ValueError: for a file that breaks the schema or tables that cannot be.
        OSError: for a file that cannot be read.
    """
    model = read_yaml(path, ModelFile)
    try:
        model.module()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return model
