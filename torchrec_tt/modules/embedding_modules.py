"""Collections of tables, some of them in Tensor-Train form."""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    pooling_type_to_str,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_tt.modules.embedding import TTEmbedding
from torchrec_tt.modules.embedding_bag import TTEmbeddingBag
from torchrec_tt.modules.embedding_configs import (
    TTEmbeddingBagConfig,
    TTTableConfig,
    check_sequence_tables,
    check_tables,
)
from torchrec_tt.modules.features import check_features, with_one_batch_size
from torchrec_tt.tt.init import init_cores_, table_generator
from torchrec_tt.tt.shape import TTShape


class TTCollection(FusedOptimizerModule):
    """What collections have in common in which tables may be Tensor-Train tables.

    `tables_name` is the name of the ModuleDict that holds the tables, as in TorchRec's collection
    of the same kind; the tables' state dict keys begin with it.
    """

    tables_name: ClassVar[str]
    _device: torch.device

    @abc.abstractmethod
    def table_configs(self) -> Sequence[BaseEmbeddingConfig]:
        """Returns the configurations of all tables, in order."""

    def table_modules(self) -> nn.ModuleDict:
        """Returns the tables by name; a TT table has `tt_cores`, a regular one `weight`."""
        return getattr(self, self.tables_name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses TorchRec's quantisation, which marks what it will quantise with a qconfig."""
        if name == "qconfig" and value is not None:
            raise NotImplementedError(
                f"quantization_mapping must leave {type(self).__name__} out: TorchRec quantises "
                "rows, a TT table has cores; torchrec_tt.freeze(model, 'int8') quantises those"
            )
        super().__setattr__(name, value)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def tt_shapes(self) -> dict[str, TTShape]:
        """Shapes of the Tensor-Train tables by table name."""
        return {t.name: t.tt_shape for t in tt_configs(self.table_configs())}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws every table anew; TT tables get the values that their name and seed say."""
        if self._device.type == "meta":
            return
        for config in self.table_configs():
            table = self.table_modules()[config.name]
            if isinstance(config, TTTableConfig):
                reset_cores_(table.tt_cores, config=config, seed=torch.initial_seed())
                if getattr(table, "row_cache", None) is not None:
                    table.row_cache.clear()
            else:
                config.init_fn(table.weight)

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """Raises: DistributedModelParallel asks for it where it left this collection unsharded.

        Without this the tables would be replicated on every rank without a word.
        """
        raise ValueError(
            f"sharders must have a {type(self).__name__}Sharder and the plan must have every "
            f"{type(self).__name__}, got one that DistributedModelParallel left unsharded, "
            f"with the Tensor-Train tables {list(self.tt_shapes)}"
        )


class TTEmbeddingBagCollection(TTCollection, EmbeddingBagCollectionInterface):
    """An EmbeddingBagCollection in which tables may be Tensor-Train tables.

    Drop-in for torchrec's EmbeddingBagCollection: KeyedJaggedTensor in, KeyedTensor out, the same
    names and order of the outputs. Regular tables have the state dict key
    `embedding_bags.<table>.weight`, TT tables `embedding_bags.<table>.tt_cores.<k>`.

    A TT table's first values depend on its name and `torch.initial_seed()` alone, so they are the
    same unsharded and under any sharding.

    Args:
        tables: the tables, `TTEmbeddingBagConfig` for those in Tensor-Train form.
        is_weighted: whether the features carry per-sample weights.
        device: where the tables live; None is the CPU, "meta" allocates nothing.

    Raises:
        ValueError: if there is no table, two have the same name, or a pooling or data type is not
            supported.

    Example:
        >>> ebc = TTEmbeddingBagCollection(tables=[
        ...     EmbeddingBagConfig(name="a", num_embeddings=10, embedding_dim=8,
        ...                        feature_names=["fa"]),
        ...     TTEmbeddingBagConfig(name="b", num_embeddings=100_000, embedding_dim=8,
        ...                          feature_names=["fb"], tt_ranks=[4, 4]),
        ... ])
        >>> kjt = KeyedJaggedTensor(keys=["fa", "fb"], values=torch.tensor([1, 2, 77_777]),
        ...                         lengths=torch.tensor([1, 1, 0, 1]))
        >>> ebc(kjt).values().shape
        torch.Size([2, 16])
    """

    tables_name = "embedding_bags"

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_tables(tables, is_weighted=is_weighted)
        for table in tables:
            if not table.feature_names:
                table.feature_names = [table.name]
        self._is_weighted = is_weighted
        self._embedding_bag_configs = tables
        self._device = torch.device(device or "cpu")
        self._embedding_names = [n for names in get_embedding_names_by_table(tables) for n in names]
        self._lengths_per_embedding = [t.embedding_dim for t in tables for _ in t.feature_names]
        self.embedding_bags = nn.ModuleDict(
            {table.name: _embedding_bag(table, device=self._device) for table in tables}
        )
        self.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:  # values [B, sum of D]
        """Returns the pooled embedding of every feature of every table.

        Raises:
            ValueError: if an id is not a row of its table; the message names the table.
                Or if features of variable batch size (VBE) do not say where their bags belong.
        """
        features = maybe_td_to_kjt(features, None)
        check_features(features)
        feature_dict = with_one_batch_size(features).to_dict()
        pooled = []
        for table in self._embedding_bag_configs:
            own = [feature_dict[feature_name] for feature_name in table.feature_names]
            if getattr(table, "cache", None) is not None:
                pooled += self._pool_together(table.name, own)
            else:
                pooled += [self._pool(table.name, feature) for feature in own]
        return KeyedTensor(
            keys=self._embedding_names,
            values=torch.cat(pooled, dim=1),
            length_per_key=self._lengths_per_embedding,
        )

    def _pool_together(self, table: str, features: list[JaggedTensor]) -> list[Tensor]:
        """In one lookup, which is one training step of the table's row cache."""
        lengths = [feature.lengths() for feature in features]
        together = JaggedTensor(
            values=torch.cat([feature.values() for feature in features]),
            lengths=torch.cat(lengths),
            weights=torch.cat([feature.weights() for feature in features])
            if self._is_weighted
            else None,
        )
        return list(self._pool(table, together).split([len(each) for each in lengths]))

    def _pool(self, table: str, feature: JaggedTensor) -> Tensor:  # [B, D]
        weights = feature.weights() if self._is_weighted else None
        bag = self.embedding_bags[table]
        try:
            return bag(feature.values(), feature.offsets(), per_sample_weights=weights).float()
        except ValueError as error:
            raise ValueError(f"table {table!r}: {error}") from None

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._embedding_bag_configs

    def is_weighted(self) -> bool:
        return self._is_weighted

    def table_configs(self) -> list[EmbeddingBagConfig]:
        return self._embedding_bag_configs


class TTEmbeddingCollection(TTCollection, EmbeddingCollectionInterface):
    """An EmbeddingCollection in which tables may be Tensor-Train tables.

    Drop-in for torchrec's EmbeddingCollection: KeyedJaggedTensor in, a JaggedTensor per feature
    out, one row per id and in the order of the ids. Regular tables have the state dict key
    `embeddings.<table>.weight`, TT tables `embeddings.<table>.tt_cores.<k>`.

    A TT table's first values depend on its name and `torch.initial_seed()` alone, so they are the
    same unsharded and under any sharding.

    Args:
        tables: the tables, `TTEmbeddingConfig` for those in Tensor-Train form; all of the same
            `embedding_dim`.
        device: where the tables live; None is the CPU, "meta" allocates nothing.
        need_indices: whether the ids come back, as the weights of the outputs.

    Raises:
        ValueError: if there is no table, two have the same name or different dims, or a data type
            is not supported.

    Example:
        >>> ec = TTEmbeddingCollection(tables=[
        ...     EmbeddingConfig(name="a", num_embeddings=10, embedding_dim=8,
        ...                     feature_names=["fa"]),
        ...     TTEmbeddingConfig(name="b", num_embeddings=100_000, embedding_dim=8,
        ...                       feature_names=["fb"], tt_ranks=[4, 4]),
        ... ])
        >>> kjt = KeyedJaggedTensor(keys=["fa", "fb"], values=torch.tensor([1, 2, 77_777]),
        ...                         lengths=torch.tensor([1, 0, 0, 2]))
        >>> ec(kjt)["fb"].values().shape
        torch.Size([2, 8])
    """

    tables_name = "embeddings"

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
    ) -> None:
        super().__init__()
        check_sequence_tables(tables)
        for table in tables:
            if not table.feature_names:
                table.feature_names = [table.name]
        self._embedding_configs = tables
        self._need_indices = need_indices
        self._device = torch.device(device or "cpu")
        self._embedding_names_by_table = get_embedding_names_by_table(tables)
        self.embeddings = nn.ModuleDict(
            {table.name: _embedding(table, device=self._device) for table in tables}
        )
        self.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:  # values [N, D]
        """Returns the rows of every feature of every table.

        A feature that several tables read has the keys `<feature>@<table>`.

        Raises:
            ValueError: if an id is not a row of its table; the message names the table.
        """
        features = maybe_td_to_kjt(features, None)
        check_features(features)
        feature_dict = features.to_dict()
        rows = {}
        for table, names in zip(
            self._embedding_configs, self._embedding_names_by_table, strict=True
        ):
            for feature_name, name in zip(table.feature_names, names, strict=True):
                feature = feature_dict[feature_name]
                rows[name] = JaggedTensor(
                    values=self._look_up(table.name, feature.values()),
                    lengths=feature.lengths(),
                    weights=feature.values() if self._need_indices else None,
                )
        return rows

    def _look_up(self, table: str, ids: Tensor) -> Tensor:  # [N] -> [N, D]
        try:
            return self.embeddings[table](ids).float()
        except ValueError as error:
            raise ValueError(f"table {table!r}: {error}") from None

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return self._embedding_configs

    def table_configs(self) -> list[EmbeddingConfig]:
        return self._embedding_configs

    def need_indices(self) -> bool:
        return self._need_indices

    def embedding_dim(self) -> int:
        return self._embedding_configs[0].embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        return self._embedding_names_by_table

    # How TorchRec expands deduplicated ids, which TT tables have not; the last since 1.9.

    def use_gather_select(self) -> bool:
        return False

    def use_gather_select_per_sharding(self) -> dict[str, bool] | None:
        return None

    def use_sorted_select(self) -> bool:
        return False


def tt_configs(tables: Sequence[BaseEmbeddingConfig]) -> list[TTTableConfig]:
    """Returns those of `tables` that are Tensor-Train tables."""
    return [table for table in tables if isinstance(table, TTTableConfig)]


@torch.no_grad()
def reset_cores_(
    cores: Sequence[Tensor],  # d of [m_k, r_k * n_k * r_{k+1}]
    *,
    config: TTTableConfig,
    seed: int,
) -> None:
    """Draws a table's cores in place; the values depend on its name and `seed`, not the device."""
    drawn = [torch.empty(shape) for shape in config.tt_shape.core_shapes]
    generator = table_generator(config.name, seed=seed)
    init_cores_(drawn, shape=config.tt_shape, method=config.tt_init, generator=generator)
    for core, values in zip(cores, drawn, strict=True):
        core.copy_(values)


def _embedding_bag(table: EmbeddingBagConfig, *, device: torch.device) -> nn.Module:
    arguments = _table_arguments(table, device=device)
    kind = nn.EmbeddingBag
    if isinstance(table, TTEmbeddingBagConfig):
        kind = TTEmbeddingBag
        arguments |= {"cache": table.cache, "table_name": table.name}
    return kind(
        table.num_embeddings,
        table.embedding_dim,
        mode=pooling_type_to_str(table.pooling),
        include_last_offset=True,
        **arguments,
    )


def _embedding(table: EmbeddingConfig, *, device: torch.device) -> nn.Module:
    kind = TTEmbedding if isinstance(table, TTTableConfig) else nn.Embedding
    return kind(table.num_embeddings, table.embedding_dim, **_table_arguments(table, device=device))


def _table_arguments(table: BaseEmbeddingConfig, *, device: torch.device) -> dict[str, Any]:
    """What a table's module is made with, pooled or not."""
    if not isinstance(table, TTTableConfig):
        dtype = torch.float32 if table.data_type.value == "FP32" else torch.float16
        return {"device": device, "dtype": dtype}
    return {
        "tt_ranks": table.tt_shape.tt_ranks,
        "row_factors": table.tt_shape.row_factors,
        "col_factors": table.tt_shape.col_factors,
        "device": device,
        "dtype": table.core_dtype,
        "precision": table.precision,
    }
