"""Collections whose TT tables are only looked up, all that are pooled alike in one call."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    pooling_type_to_str,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_tt.modules.embedding_configs import TTEmbeddingBagConfig
from torchrec_tt.modules.embedding_modules import (
    TTCollection,
    TTEmbeddingBagCollection,
    TTEmbeddingCollection,
    tt_configs,
)
from torchrec_tt.modules.features import check_features, with_one_batch_size
from torchrec_tt.modules.frozen_tables import FrozenTable, look_up, refuse_training
from torchrec_tt.ops.lookup import Lookup, TTTable


class FrozenTTCollection(TTCollection):
    """What frozen collections have in common.

    Args:
        collection: that it takes its settings and its regular tables from.
        tables: every TT table, frozen, by name.
    """

    def __init__(self, collection: TTCollection, tables: Mapping[str, FrozenTable]) -> None:
        nn.Module.__init__(self)
        settings = nn.Module().__dict__.keys()
        self.__dict__.update({k: v for k, v in collection.__dict__.items() if k not in settings})
        regular = {
            name: copy.deepcopy(table)
            for name, table in collection.table_modules().items()
            if name not in tables
        }
        names = [config.name for config in collection.table_configs()]
        modules = {name: tables[name] if name in tables else regular[name] for name in names}
        setattr(self, self.tables_name, nn.ModuleDict(modules))
        self.requires_grad_(False).eval()

    @property
    def fused_optimizer(self) -> NoReturn:
        """Raises: DistributedModelParallel asks for it, which would shard or replicate."""
        raise NotImplementedError(
            f"DistributedModelParallel must be given the model that was trained, got one with a "
            f"{type(self).__name__}: a frozen model is served by one process, or a copy by each"
        )

    def reset_parameters(self) -> None:
        """Raises NotImplementedError: there are no parameters."""
        raise NotImplementedError(
            "a frozen collection has no parameters to reset: freeze the model that was reset"
        )

    def train(self, mode: bool = True) -> "FrozenTTCollection":
        refuse_training(mode)
        return super().train(mode)


class FrozenTTEmbeddingBagCollection(FrozenTTCollection, TTEmbeddingBagCollection):
    """A TTEmbeddingBagCollection that is only looked up; made by `torchrec_tt.freeze`."""

    def __init__(
        self, collection: TTEmbeddingBagCollection, tables: Mapping[str, FrozenTable]
    ) -> None:
        super().__init__(collection, tables)
        self._embedding_bag_configs = [_without_cache(c) for c in self._embedding_bag_configs]
        self._lookups = _lookups(self._embedding_bag_configs)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:  # values [B, sum of D]
        """Returns the pooled embedding of every feature of every table.

        Raises:
            ValueError: if an id is not a row of its table; the message names the table.
        """
        if isinstance(features, fx.Proxy):  # tables are leaves of the graph
            return super().forward(features)
        features = maybe_td_to_kjt(features, None)
        check_features(features)
        feature_dict = with_one_batch_size(features).to_dict()
        pooled = {
            name: columns
            for lookup in self._lookups
            for name, columns in self._pool_tables(lookup, feature_dict).items()
        }
        for config in self._embedding_bag_configs:
            if config.name not in pooled:
                own = [feature_dict[feature] for feature in config.feature_names]
                pooled[config.name] = torch.cat([self._pool(config.name, f) for f in own], dim=1)
        return KeyedTensor(
            keys=self._embedding_names,
            values=torch.cat([pooled[c.name] for c in self._embedding_bag_configs], dim=1),
            length_per_key=self._lengths_per_embedding,
        )

    def _pool_tables(
        self, lookup: Lookup, features: Mapping[str, JaggedTensor]
    ) -> dict[str, Tensor]:  # each [B, features of the table * D]
        """In one call, whose bags are the features' one after the other."""
        configs = {config.name: config for config in self._embedding_bag_configs}
        tables = [configs[table.name] for table in lookup.tables]
        own = [features[name] for table in tables for name in table.feature_names]
        ends = torch.cat([feature.lengths() for feature in own]).cumsum(0)
        output = look_up(
            torch.cat([feature.values() for feature in own]),
            torch.cat([ends.new_zeros(1), ends]),
            tables=[self.embedding_bags[table.name] for table in tables],
            lookup=lookup,
            weights=torch.cat([f.weights() for f in own]) if self._is_weighted else None,
        )
        columns = [table.embedding_dim * len(table.feature_names) for table in tables]
        return dict(zip([t.name for t in tables], output.split(columns, dim=1), strict=True))


class FrozenTTEmbeddingCollection(FrozenTTCollection, TTEmbeddingCollection):
    """A TTEmbeddingCollection that is only looked up; made by `torchrec_tt.freeze`."""


def _without_cache(config: EmbeddingBagConfig) -> EmbeddingBagConfig:
    """What its rows learned is in the hot rows."""
    if not isinstance(config, TTEmbeddingBagConfig):
        return config
    config = copy.copy(config)
    config.cache = None
    return config


def _lookups(configs: Sequence[BaseEmbeddingConfig]) -> list[Lookup]:
    """Of the TT tables, one for each pooling."""
    by_pooling: dict[Any, list[TTTable]] = {}
    for config in tt_configs(configs):
        table = TTTable(
            name=config.name, shape=config.tt_shape, num_features=len(config.feature_names)
        )
        by_pooling.setdefault(pooling_type_to_str(config.pooling), []).append(table)
    return [Lookup(tables, pooling=pooling) for pooling, tables in by_pooling.items()]


_FROZEN: dict[type, type] = {
    TTEmbeddingBagCollection: FrozenTTEmbeddingBagCollection,
    TTEmbeddingCollection: FrozenTTEmbeddingCollection,
}


def frozen_collection(collection: TTCollection, tables: Mapping[str, FrozenTable]) -> Any:
    """Returns the frozen collection in place of `collection`, with these TT tables."""
    if type(collection) not in _FROZEN:
        raise NotImplementedError(
            f"model must hold {[kind.__name__ for kind in _FROZEN]} themselves, got a "
            f"{type(collection).__name__}: what a subclass adds would be lost"
        )
    return _FROZEN[type(collection)](collection, tables)
