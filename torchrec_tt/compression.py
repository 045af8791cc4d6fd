"""compress and materialize: tables of a model into Tensor-Train form, and back."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    pooling_type_to_str,
)

from torchrec_tt.compression_config import CompressedTable, OnTable, TTConfig, naming
from torchrec_tt.model_file import ModelFile, Table
from torchrec_tt.model_tables import (
    Collection,
    Made,
    collections_of,
    configs_of,
    is_pooled,
    owner_of,
    swapped,
    tables_of,
    tt_config_of,
)
from torchrec_tt.modules.embedding_configs import (
    TTEmbeddingBagConfig,
    TTEmbeddingConfig,
    TTTableConfig,
)
from torchrec_tt.modules.embedding_modules import (
    TTEmbeddingBagCollection,
    TTEmbeddingCollection,
)
from torchrec_tt.modules.row_ordered import RowOrderedCollection, order_bytes
from torchrec_tt.tt.cost import core_bytes
from torchrec_tt.tt.shape import TTShape
from torchrec_tt.tt.svd import grow_ranks, round_cores
from torchrec_tt.tuner import tune

_STORED_ROWS = ("init_fn", "weight_init_max", "weight_init_min")  # how rows that are there began


@torch.no_grad()
def compress(
    model: nn.Module,
    tables: Mapping[str, TTConfig] | None = None,
    *,
    budget_bytes: int | None = None,
    row_orders: Mapping[str, Tensor] | None = None,
    on_table: OnTable | None = None,
) -> nn.Module:
    """Puts tables of a model's embedding collections into Tensor-Train form.

    Each EmbeddingBagCollection or EmbeddingCollection with such a table becomes a
    TTEmbeddingBagCollection or TTEmbeddingCollection, in place; all else, the other tables too,
    stays the same objects. Rows that have values are approximated by TT-SVD; on "meta" the cores
    stay there, and are drawn when the model is. Parameters change: make optimizers afterwards. If
    anything is refused the model is as it was.

    Args:
        model: unsharded; compress before DistributedModelParallel.
        tables: by name. None: those that `torchrec_tt.tuner.tune` chooses for the least error.
        budget_bytes: for all tables together, where `tables` is None.
        row_orders: by table, int [num_embeddings]: another order of its rows before they are
            compressed, as of `torchrec_tt.tt.row_order`. It is kept with the table, and ids stay
            what they are: the collection is put into a RowOrderedCollection.
        on_table: called with each table as it is done.

    Returns:
        `model`; a new collection, if it is one itself.

    Raises:
        ValueError: for tables that are not there or compressed already, factors or ranks that do
            not fit, values that are not finite, a budget that cannot be met, or a row order that
            RowOrderedCollection refuses.
        NotImplementedError: for a sharded model, or a name that two collections have.

    Example:
        >>> model = compress(model, {"t_cat_2": TTConfig(tt_ranks=[32, 32])})
    """
    collections = collections_of(model)
    if (tables is None) == (budget_bytes is None):
        raise ValueError(
            "exactly one of tables and budget_bytes must be given, got "
            f"{tables!r} and {budget_bytes!r}"
        )
    if tables is None:
        tables = _tuned(collections, cast(int, budget_bytes))
    for name, config in tables.items():
        owner = owner_of(collections, name)
        table = configs_of(owner)[name]
        if isinstance(table, TTTableConfig):
            raise ValueError(f"tables must be uncompressed, got {name!r}, a TT table already")
        if config.cache is not None and not isinstance(table, EmbeddingBagConfig):
            raise ValueError(f"cache must be None for a table without pooling, got it for {name!r}")
        with naming(name):
            config.shape(table.num_embeddings, table.embedding_dim)
        if config.max_error is not None and tables_of(owner)[name].weight.is_meta:
            raise ValueError(f"tt_ranks must be given for a table on meta, got None for {name!r}")
    row_orders = row_orders or {}
    _check_row_orders(collections, row_orders, tables)
    made = {
        name: _compressed(collections, name, config, row_orders.get(name), on_table)
        for name, config in tables.items()
    }
    return swapped(model, collections, made, row_orders=row_orders)


@torch.no_grad()
def materialize(model: nn.Module, tables: Sequence[str] | None = None) -> nn.Module:
    """Puts Tensor-Train tables back into rows, those of row caches with what they learned.

    A collection without a Tensor-Train table left becomes TorchRec's own. Otherwise as `compress`.

    Args:
        model: unsharded.
        tables: their names; None: all.

    Returns:
        `model`; a new collection, if it is one itself.

    Raises:
        ValueError: for tables that are not there or not Tensor-Train tables.
        NotImplementedError: for a sharded model, or a name that two collections have.
    """
    collections = collections_of(model)
    if tables is None:
        tables = [
            name
            for collection in collections.values()
            for name, config in configs_of(collection).items()
            if isinstance(config, TTTableConfig)
        ]
    made: dict[str, Made] = {}
    for name in tables:
        owner = owner_of(collections, name)
        config = tt_config_of(owner, name)
        made[name] = (_dense_config(config), _dense_table(config, tables_of(owner)[name]))
    return swapped(model, collections, made)


@torch.no_grad()
def change_ranks(model: nn.Module, tables: Mapping[str, Sequence[int]]) -> nn.Module:
    """Gives Tensor-Train tables of a model other ranks.

    Higher ranks leave every row as it was, and are lowered to those that a table of its size can
    use, with a warning; the new entries get gradients from the first step on.
    Lower ones round the cores, the best that TT-SVD finds. Row caches stay. Parameters
    change: make optimizers afterwards. Otherwise as `compress`.

    Args:
        model: unsharded.
        tables: the new inner ranks by table.

    Raises:
        ValueError: for tables that are not there or not Tensor-Train tables, or wrong ranks.
        NotImplementedError: for a sharded model, or a name that two collections have.
    """
    collections = collections_of(model)
    shapes = {}
    for name, ranks in tables.items():
        shape = tt_config_of(owner_of(collections, name), name).tt_shape
        with naming(name):
            shapes[name] = dataclasses.replace(shape, tt_ranks=tuple(ranks))
    made = {name: _changed(owner_of(collections, name), name, new) for name, new in shapes.items()}
    return swapped(model, collections, made)


def _check_row_orders(
    collections: Mapping[str, Collection],
    row_orders: Mapping[str, Tensor],
    tables: Mapping[str, TTConfig],
) -> None:
    """Refuses what RowOrderedCollection would, before anything is computed."""
    if unknown := set(row_orders) - set(tables):
        raise ValueError(f"row_orders must be of tables {list(tables)}, got {sorted(unknown)}")
    for name, order in row_orders.items():
        RowOrderedCollection(owner_of(collections, name), {name: order})


def _compressed(
    collections: Mapping[str, Collection],
    name: str,
    config: TTConfig,
    row_order: Tensor | None,
    on_table: OnTable | None,
) -> Made:
    owner = owner_of(collections, name)
    table, weight = configs_of(owner)[name], tables_of(owner)[name].weight
    cores = None
    if weight.is_meta:
        shape = config.shape(*weight.shape)
        done = CompressedTable(
            name=name,
            shape=shape,
            dense_bytes=weight.nbytes,
            num_bytes=core_bytes(shape, element_size=config.core_dtype.itemsize),
            relative_error=None,
            order_bytes=order_bytes(row_order),
        )
    else:
        done, cores = config.compress(name, weight, row_order=row_order)
    data_type = DataType[config.data_type.upper()]
    tt = _tt_table_config(
        table,
        done.shape,
        data_type=data_type,
        cache=config.cache,
        precision=config.precision,
    )
    if on_table is not None:
        on_table(done)
    return tt, _tt_table(owner, tt, cores, like=weight)


def _changed(owner: Collection, name: str, shape: TTShape) -> Made:
    config, table = tt_config_of(owner, name), tables_of(owner)[name]
    cores = None
    if not table.tt_cores[0].is_meta:
        shape, cores = _reranked(list(table.tt_cores), config.tt_shape, shape.tt_ranks)
    config = _tt_table_config(config, shape)
    changed = _tt_table(owner, config, cores, like=table.tt_cores[0])
    if getattr(table, "row_cache", None) is not None:
        changed.row_cache.load_state_dict(table.row_cache.state_dict())
    return config, changed


def _tt_table_config(
    table: BaseEmbeddingConfig, shape: TTShape, **changed: Any
) -> TTEmbeddingBagConfig | TTEmbeddingConfig:
    is_pooled = isinstance(table, EmbeddingBagConfig)
    kind = TTEmbeddingBagConfig if is_pooled else TTEmbeddingConfig
    if not is_pooled:
        changed.pop("cache", None)
    names = {field.name for field in dataclasses.fields(kind)} - set(_STORED_ROWS)
    kept = {f.name: getattr(table, f.name) for f in dataclasses.fields(table) if f.name in names}
    factors = {"row_factors": shape.row_factors, "col_factors": shape.col_factors}
    return kind(
        **{**kept, "tt_ranks": shape.tt_ranks, **factors, "row_strategy": "balanced", **changed}
    )


def _dense_config(table: TTTableConfig) -> BaseEmbeddingConfig:
    kind = EmbeddingBagConfig if isinstance(table, EmbeddingBagConfig) else EmbeddingConfig
    kept = {field.name: getattr(table, field.name) for field in dataclasses.fields(kind)}
    narrow = DataType.FP16 if table.data_type == DataType.FP16 else DataType.FP32
    return kind(**{**kept, "init_fn": None, "data_type": narrow})


def _tt_table(
    owner: Collection, config: TTTableConfig, cores: Sequence[Tensor] | None, *, like: Tensor
) -> nn.Module:
    """A table's module with these cores, on the device of `like`; None: on meta."""
    kind = TTEmbeddingBagCollection if is_pooled(owner) else TTEmbeddingCollection
    table = kind(tables=[config], device="meta").table_modules()[config.name]
    if cores is not None:
        table = table.to_empty(device=like.device)
        for core, values in zip(table.tt_cores, cores, strict=True):
            core.copy_(values)
        if getattr(table, "row_cache", None) is not None:
            table.row_cache.clear()
    return table.requires_grad_(like.requires_grad)


def _dense_table(config: TTTableConfig, table: nn.Module) -> nn.Module:
    dtype = torch.float16 if config.data_type == DataType.FP16 else torch.float32
    core = table.tt_cores[0]
    if core.is_meta:
        weight = torch.empty(config.num_embeddings, config.embedding_dim, device="meta")
    else:
        weight = table.to_dense().detach()
    size = (config.num_embeddings, config.embedding_dim)
    if isinstance(config, EmbeddingBagConfig):
        mode = pooling_type_to_str(config.pooling)
        dense = nn.EmbeddingBag(
            *size, mode=mode, include_last_offset=True, _weight=weight.to(dtype)
        )
    else:
        dense = nn.Embedding(*size, _weight=weight.to(dtype))
    return dense.requires_grad_(core.requires_grad)


def _reranked(
    cores: list[Tensor], shape: TTShape, tt_ranks: Sequence[int]
) -> tuple[TTShape, list[Tensor]]:
    lower = tuple(min(pair) for pair in zip(shape.tt_ranks, tt_ranks, strict=True))
    if lower != shape.tt_ranks:
        rounded = round_cores(cores, shape=shape, tt_ranks=lower)
        cores, shape = rounded.cores, rounded.shape
    if shape.tt_ranks == tuple(tt_ranks):
        return shape, cores
    return grow_ranks(cores, shape=shape, tt_ranks=tt_ranks)


def _tuned(collections: Mapping[str, Collection], budget_bytes: int) -> dict[str, TTConfig]:
    """The choice of least error for the pooled tables that are not compressed yet."""
    tables = [
        Table(
            name=config.name,
            num_embeddings=config.num_embeddings,
            embedding_dim=config.embedding_dim,
            data_type="fp16" if config.data_type == DataType.FP16 else "fp32",
        )
        for collection in collections.values()
        if is_pooled(collection)
        for config in configs_of(collection).values()
        if not isinstance(config, TTTableConfig)
    ]
    if not tables:
        raise ValueError("model must have uncompressed pooled tables for a budget, got none")
    plans = tune(ModelFile(tables=tables), budget_bytes, cache_load_factors=(0.0,))
    best = min(plans, key=lambda plan: plan.error)
    return {
        table.name: TTConfig(
            tt_ranks=table.tt_ranks,
            row_factors=table.row_factors,
            col_factors=table.col_factors,
            row_strategy=table.row_strategy,
        )
        for table in best.model.tables
        if table.tt_ranks is not None
    }
