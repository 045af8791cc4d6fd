"""The configurations of tables that are kept in Tensor-Train form."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

import torch
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    data_type_to_dtype,
)

from torchrec_tt.modules.row_cache_config import RowCacheConfig
from torchrec_tt.ops.lookup import Precision
from torchrec_tt.tt.factorize import RowStrategy, make_shape
from torchrec_tt.tt.init import TTInit
from torchrec_tt.tt.shape import TTShape

_DENSE_ONLY = (  # fields of BaseEmbeddingConfig that speak of stored rows; a TT table has none
    "init_fn",
    "weight_init_max",
    "weight_init_min",
    "num_embeddings_post_pruning",
    "need_pos",
    "input_dim",
    "total_num_buckets",
    "use_virtual_table",
    "virtual_table_eviction_policy",
    "enable_embedding_update",
    "stash_weights",
)
MAX_WEIGHTS = 2**61  # of a regular table or a sharded one, whose bytes are counted in 64 bits
_POOLINGS = (PoolingType.SUM, PoolingType.MEAN)
_DENSE_DATA_TYPES = (DataType.FP32, DataType.FP16)  # those of torchrec's collections
_TT_DATA_TYPES = (DataType.FP32, DataType.BF16, DataType.FP16)


@dataclass
class TTTableConfig(BaseEmbeddingConfig):
    """What every configuration of a Tensor-Train table has.

    Args:
        tt_ranks: the inner ranks, one fewer than there are cores. Required.
        row_factors: factors of the rows, one per core; None chooses them by `row_strategy`.
        col_factors: factors of the columns, one per core; None chooses balanced ones.
        tt_init: distribution the cores are drawn from.
        row_strategy: "balanced" or "fast" row factors (see `factorize_rows`); leave it out where
            `row_factors` are given.
        precision: of products on CUDA: "highest", "high" (TF32) or "medium" (BF16); None follows
            `torch.set_float32_matmul_precision`. The CPU computes in float32 whatever it says.
        data_type: of the cores: FP32, BF16 or FP16. Sums, optimizer state and output are float32.

    Raises:
        ValueError: if the factors or ranks do not fit the table, or an argument has no meaning
            for a table without stored rows.
    """

    tt_ranks: Sequence[int] = field(default_factory=list)
    row_factors: Sequence[int] | None = None
    col_factors: Sequence[int] | None = None
    tt_init: TTInit = "sampled_gaussian"
    row_strategy: RowStrategy = "balanced"
    precision: Precision | None = None

    def __post_init__(self) -> None:
        # BaseEmbeddingConfig.__post_init__ only sets init_fn, which a TT table has not.
        for name in ("tt_ranks", "row_factors", "col_factors"):
            value = getattr(self, name)
            if not isinstance(value, Sequence) and (name == "tt_ranks" or value is not None):
                raise ValueError(
                    f"{name} must be a list of integers, got {value!r} for table {self.name!r}"
                )
        if not self.tt_ranks:
            raise ValueError(
                f"tt_ranks must have one entry fewer than the table has cores, got {self.tt_ranks}"
                f" for table {self.name!r}"
            )
        for name in _DENSE_ONLY:
            value = getattr(self, name, None)
            if value is not None and value is not False:
                raise ValueError(
                    f"{name} must be left unset for a Tensor-Train table, which stores no rows, "
                    f"got {value!r} for table {self.name!r}"
                )
        if self.data_type not in _TT_DATA_TYPES:
            raise ValueError(
                f"data_type must be one of {[str(t) for t in _TT_DATA_TYPES]} for a Tensor-Train "
                f"table, got {self.data_type!r} for table {self.name!r}"
            )
        if self.tt_init not in get_args(TTInit):
            raise ValueError(
                f"tt_init must be one of {get_args(TTInit)}, "
                f"got {self.tt_init!r} for table {self.name!r}"
            )
        if self.precision not in (None, *get_args(Precision)):
            raise ValueError(
                f"precision must be None or one of {get_args(Precision)}, "
                f"got {self.precision!r} for table {self.name!r}"
            )
        self._tt_shape = make_shape(
            self.num_embeddings,
            self.embedding_dim,
            tt_ranks=self.tt_ranks,
            row_factors=self.row_factors,
            col_factors=self.col_factors,
            row_strategy=self.row_strategy,
        )

    @property
    def tt_shape(self) -> TTShape:
        return self._tt_shape

    @property
    def core_dtype(self) -> torch.dtype:
        return data_type_to_dtype(self.data_type)


@dataclass
class TTEmbeddingBagConfig(TTTableConfig, EmbeddingBagConfig):
    """An EmbeddingBagConfig whose table is stored as Tensor-Train cores.

    Args:
        tt_ranks: the inner ranks, one fewer than there are cores. Required.
        row_factors: factors of the rows, one per core; None chooses them by `row_strategy`.
        col_factors: factors of the columns, one per core; None chooses balanced ones.
        tt_init: distribution the cores are drawn from.
        row_strategy: "balanced" or "fast" row factors (see `factorize_rows`); leave it out where
            `row_factors` are given.
        precision: of products on CUDA: "highest", "high" (TF32) or "medium" (BF16); None follows
            `torch.set_float32_matmul_precision`. The CPU computes in float32 whatever it says.
        data_type: of the cores: FP32, BF16 or FP16. Sums, optimizer state and output are float32.
        cache: which rows are kept uncompressed, on every rank of the table; None: none.

    The other arguments are those of EmbeddingBagConfig. `init_fn` and the `weight_init` limits
    describe stored rows and are refused: `tt_init` takes their place.

    Raises:
        ValueError: if the factors or ranks do not fit the table, or an argument has no meaning
            for a table without stored rows.

    Example:
        >>> config = TTEmbeddingBagConfig(name="t", num_embeddings=1000, embedding_dim=16,
        ...                               feature_names=["f"], tt_ranks=[8, 8])
        >>> config.tt_shape.num_cores
        3
    """

    cache: RowCacheConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_pooling(self)
        if not isinstance(self.cache, RowCacheConfig | None):
            raise ValueError(
                f"cache must be a RowCacheConfig or None, got {self.cache!r} for table "
                f"{self.name!r}"
            )
        if self.cache is not None and (self.cache.num_rows or 0) > self.num_embeddings:
            raise ValueError(
                f"cache.num_rows must be at most num_embeddings, {self.num_embeddings}, got "
                f"{self.cache.num_rows} for table {self.name!r}"
            )


@dataclass
class TTEmbeddingConfig(TTTableConfig, EmbeddingConfig):
    """An EmbeddingConfig whose table is stored as Tensor-Train cores.

    Args:
        tt_ranks: the inner ranks, one fewer than there are cores. Required.
        row_factors: factors of the rows, one per core; None chooses them by `row_strategy`.
        col_factors: factors of the columns, one per core; None chooses balanced ones.
        tt_init: distribution the cores are drawn from.
        row_strategy: "balanced" or "fast" row factors (see `factorize_rows`); leave it out where
            `row_factors` are given.
        precision: of products on CUDA: "highest", "high" (TF32) or "medium" (BF16); None follows
            `torch.set_float32_matmul_precision`. The CPU computes in float32 whatever it says.

    The other arguments are those of EmbeddingConfig. `init_fn` and the `weight_init` limits
    describe stored rows and are refused: `tt_init` takes their place.

    Raises:
        ValueError: if the factors or ranks do not fit the table, or an argument has no meaning
            for a table without stored rows.

    Example:
        >>> config = TTEmbeddingConfig(name="t", num_embeddings=1000, embedding_dim=16,
        ...                            feature_names=["f"], tt_ranks=[8, 8])
        >>> config.tt_shape.num_cores
        3
    """


def check_tables(tables: Sequence[EmbeddingBagConfig], *, is_weighted: bool) -> None:
    """Raises ValueError, naming the table, for configs that cannot form a pooled collection."""
    _check_each(tables, kind=EmbeddingBagConfig)
    for table in tables:
        _check_pooling(table)
        if is_weighted and table.pooling != PoolingType.SUM:
            raise ValueError(
                f"pooling must be SUM in a weighted collection, as nn.EmbeddingBag demands, "
                f"got {table.pooling.value} for table {table.name!r}"
            )


def check_sequence_tables(tables: Sequence[EmbeddingConfig]) -> None:
    """Raises ValueError, naming the table, for configs that cannot form a sequence collection."""
    _check_each(tables, kind=EmbeddingConfig)
    has_tt = any(isinstance(table, TTTableConfig) for table in tables)
    for table in tables:
        if table.embedding_dim != tables[0].embedding_dim:
            raise ValueError(
                f"embedding_dim must be the same for all tables of a sequence collection, "
                f"got {tables[0].embedding_dim} for table {tables[0].name!r} and "
                f"{table.embedding_dim} for table {table.name!r}"
            )
        if has_tt and table.enable_embedding_update:
            raise ValueError(
                f"enable_embedding_update must be False in a collection with Tensor-Train tables, "
                f"whose rows cannot be written, got True for table {table.name!r}"
            )


def _check_each(tables: Sequence[BaseEmbeddingConfig], *, kind: type[BaseEmbeddingConfig]) -> None:
    if not tables:
        raise ValueError(f"tables must have at least one table, got {tables}")
    names = [table.name for table in tables]
    for table in tables:
        if not isinstance(table, kind):
            raise ValueError(
                f"tables must be {kind.__name__} or TT{kind.__name__}, "
                f"got {type(table).__name__} for table {table.name!r}"
            )
        if names.count(table.name) > 1:
            raise ValueError(f"tables must have distinct names, got {table.name!r} twice")
        if not isinstance(table, TTTableConfig) and table.data_type not in _DENSE_DATA_TYPES:
            raise ValueError(
                f"data_type must be one of {[str(t) for t in _DENSE_DATA_TYPES]}, "
                f"got {table.data_type!r} for table {table.name!r}"
            )
        num_weights = table.num_embeddings * table.embedding_dim
        if not isinstance(table, TTTableConfig) and num_weights >= MAX_WEIGHTS:
            raise ValueError(
                "num_embeddings * embedding_dim must be below 2^61 for a regular table, got "
                f"{table.num_embeddings} * {table.embedding_dim} for table {table.name!r}"
            )


def _check_pooling(table: EmbeddingBagConfig) -> None:
    if table.pooling not in _POOLINGS:
        raise ValueError(
            f"pooling must be PoolingType.SUM or MEAN, got {table.pooling!r} "
            f"for table {table.name!r}"
        )
