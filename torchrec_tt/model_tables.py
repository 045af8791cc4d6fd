"""The tables of a model's collections: found, and put back as other tables."""

import difflib
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_tt.modules.embedding_configs import TTTableConfig
from torchrec_tt.modules.embedding_modules import (
    TTEmbeddingBagCollection,
    TTEmbeddingCollection,
)
from torchrec_tt.modules.row_ordered import RowOrderedCollection
from torchrec_tt.modules.unsharded import check_unsharded

Collection = Any  # one of _COLLECTIONS
Made = tuple[BaseEmbeddingConfig, nn.Module]  # a table anew
_COLLECTIONS = (
    EmbeddingBagCollection,
    EmbeddingCollection,
    TTEmbeddingBagCollection,
    TTEmbeddingCollection,
)


def collections_of(model: nn.Module) -> dict[str, Collection]:
    """The collections of a model by their path, each once."""
    check_unsharded(
        model,
        instead="compress it before DistributedModelParallel, or its checkpoint with torchrec-tt "
        "compress",
    )
    found = {path: m for path, m in model.named_modules() if type(m) in _COLLECTIONS}
    if not found:
        names = [kind.__name__ for kind in _COLLECTIONS]
        raise ValueError(
            f"model must hold one of {names}, got a {type(model).__name__} without one"
        )
    return cast(dict[str, Collection], found)


def owner_of(collections: Mapping[str, Collection], name: str) -> Collection:
    owners = [collection for collection in collections.values() if name in configs_of(collection)]
    if not owners:
        names = [known for collection in collections.values() for known in configs_of(collection)]
        near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.0)
        raise ValueError(
            f"tables must be of the model's {names}, got {name!r}; the nearest is {near[0]!r}"
        )
    if len(owners) > 1:
        raise NotImplementedError(
            f"tables must have a name of their own, got {name!r} in {len(owners)} collections: "
            "compress these one by one"
        )
    return owners[0]


def tt_config_of(owner: Collection, name: str) -> TTTableConfig:
    config = configs_of(owner)[name]
    if not isinstance(config, TTTableConfig):
        raise ValueError(f"tables must be Tensor-Train tables, got {name!r}, which has rows")
    return config


def is_pooled(collection: Collection) -> bool:
    return isinstance(collection, EmbeddingBagCollection | TTEmbeddingBagCollection)


def configs_of(collection: Collection) -> dict[str, BaseEmbeddingConfig]:
    if is_pooled(collection):
        return {config.name: config for config in collection.embedding_bag_configs()}
    return {config.name: config for config in collection.embedding_configs()}


def tables_of(collection: Collection) -> Any:
    return collection.embedding_bags if is_pooled(collection) else collection.embeddings


def swapped(
    model: nn.Module,
    collections: Mapping[str, Collection],
    made: Mapping[str, Made],
    *,
    row_orders: Mapping[str, Tensor] | None = None,
) -> nn.Module:
    """Puts collections with these tables where theirs were, in front of them their orders."""
    new = {
        id(collection): _rebuilt(collection, made)
        for collection in collections.values()
        if any(name in configs_of(collection) for name in made)
    }
    for collection in collections.values():
        known = configs_of(collection)
        orders = {name: order for name, order in (row_orders or {}).items() if name in known}
        if orders:
            new[id(collection)] = RowOrderedCollection(new[id(collection)], orders)
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in new and path:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, new[id(module)])
    return new.get(id(model), model)


def _rebuilt(collection: Collection, made: Mapping[str, Made]) -> nn.Module:
    """A collection of the same tables but for those that were made; the others move into it."""
    configs = [
        made[name][0] if name in made else config for name, config in configs_of(collection).items()
    ]
    has_tt = any(isinstance(config, TTTableConfig) for config in configs)
    new: Any
    meta = torch.device("meta")
    if is_pooled(collection):
        kind = TTEmbeddingBagCollection if has_tt else EmbeddingBagCollection
        new = kind(tables=configs, is_weighted=collection.is_weighted(), device=meta)
    else:
        sequence = TTEmbeddingCollection if has_tt else EmbeddingCollection
        new = sequence(tables=configs, need_indices=collection.need_indices(), device=meta)
    for name in configs_of(collection):
        tables_of(new)[name] = made[name][1] if name in made else tables_of(collection)[name]
    new._device = collection.device
    return new.train(collection.training)
