"""RowOrderedCollection: a collection whose ids are renamed by an order kept with its tables."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_tt.modules.features import check_features
from torchrec_tt.tt.row_order import new_ids


class RowOrderedCollection(nn.Module):
    """Looks up row `new_ids(order)[id]` for each id of the tables that have an order.

    So the ids that a user has stay what they are where a table's rows are in another order, which
    its cores express better. The order is a buffer, 4 bytes a row (8 beyond 2^31 rows), whole on
    every rank and in the state dict; DistributedModelParallel shards the collection inside. Ids
    outside the table are left as they are: the collection treats them as it does without an order.

    Args:
        collection: an EmbeddingBagCollection or EmbeddingCollection, of TorchRec or ours, whose
            tables' rows are in that order: `table[order]`.
        row_orders: by table, int [num_embeddings], as of `torchrec_tt.tt.row_order`.

    Raises:
        ValueError: for a table that is not there, an order that is no permutation of its ids, or
            a feature that another table looks up too.

    Example:
        >>> RowOrderedCollection(collection, {"t_cat_2": order})(features)
    """

    def __init__(self, collection: nn.Module, row_orders: Mapping[str, Tensor]) -> None:
        super().__init__()
        configs = _configs(collection)
        shared = Counter(name for config in configs.values() for name in config.feature_names)
        self.collection = collection
        self.row_orders = nn.Module()
        self._tables_of_features: dict[str, str] = {}
        for table, order in row_orders.items():
            if table not in configs:
                raise ValueError(f"row_orders must be of tables {list(configs)}, got {table!r}")
            config = configs[table]
            if order.shape != (config.num_embeddings,):
                raise ValueError(
                    f"row_orders[{table!r}] must have shape [{config.num_embeddings}], got "
                    f"{list(order.shape)}"
                )
            for feature in config.feature_names:
                if shared[feature] > 1:
                    raise ValueError(
                        f"row_orders[{table!r}] must be of a table with features of its own, got "
                        f"{feature!r}, which another table looks up too"
                    )
                self._tables_of_features[feature] = table
            self.row_orders.register_buffer(table, kept_order(order))

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Returns what the collection does for the renamed ids."""
        tables = list(self.row_orders._buffers)
        orders = [getattr(self.row_orders, table) for table in tables]
        places = {feature: tables.index(t) for feature, t in self._tables_of_features.items()}
        return self.collection(_renamed(features, orders, places))


def kept_order(order: Tensor) -> Tensor:  # int [num_embeddings] each
    """Returns the buffer that a RowOrderedCollection keeps of an order: where each id went.

    Raises:
        ValueError: if `order` is no permutation.
    """
    return new_ids(order).to(_kept_dtype(order))


def order_bytes(order: Tensor | None) -> int:
    """Returns the bytes of that buffer; None has none."""
    return 0 if order is None else len(order) * _kept_dtype(order).itemsize


def _kept_dtype(order: Tensor) -> torch.dtype:
    return torch.int32 if len(order) < 2**31 else torch.int64


@torch.fx.wrap
def _renamed(
    features: KeyedJaggedTensor, orders: Sequence[Tensor], places: Mapping[str, int]
) -> KeyedJaggedTensor:
    """Renames the ids of each feature by the order at its place."""
    features = maybe_td_to_kjt(features, None)
    check_features(features)
    ends = features.offset_per_key()
    values = features.values()
    parts = []
    for key, begin, end in zip(features.keys(), ends, ends[1:], strict=False):
        part = values[begin:end]
        if key in places:
            order = orders[places[key]]
            is_row = (part >= 0) & (part < len(order))
            part = torch.where(is_row, order[part.where(is_row, 0).long()].to(part.dtype), part)
        parts.append(part)
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=torch.cat(parts) if parts else values,
        weights=features.weights_or_none(),
        lengths=features.lengths_or_none(),
        offsets=features.offsets_or_none(),
        stride=None if features.variable_stride_per_key() else features.stride(),
        stride_per_key_per_rank=(
            features.stride_per_key_per_rank() if features.variable_stride_per_key() else None
        ),
        inverse_indices=features.inverse_indices_or_none(),
    )


def _configs(collection: nn.Module) -> dict[str, Any]:
    for name in ("embedding_bag_configs", "embedding_configs"):
        if hasattr(collection, name):
            return {config.name: config for config in getattr(collection, name)()}
    raise ValueError(
        "collection must be an EmbeddingBagCollection or EmbeddingCollection, got a "
        f"{type(collection).__name__}"
    )
