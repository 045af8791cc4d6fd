"""MEAN pooling of tables whose rows are divided over ranks: sums first, one division afterwards.

No rank of a row-wise table sees a whole bag. TorchRec divides afterwards too, but with them the
outputs of the collection's other tables; docs/upstream.md has the report.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_tt.distributed.sharding_plan import ROW_SPLITTING_TYPES


class RowWiseMean:
    """Divides the outputs of MEAN tables that are pooled by SUM because their rows are divided.

    Args:
        configs: the collection's tables.
        sharding_types: by table.
        embedding_names: of the outputs, in order.
        embedding_dims: of the outputs, in order.
    """

    def __init__(
        self,
        configs: list[EmbeddingBagConfig],
        sharding_types: Mapping[str, str],
        *,
        embedding_names: Sequence[str],
        embedding_dims: Sequence[int],
    ) -> None:
        features = {
            name: feature if is_summed_mean(config, sharding_types[config.name]) else None
            for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True)
            for name, feature in zip(names, config.feature_names, strict=True)
        }
        self._features = [features[name] for name in embedding_names]  # None: leave it as it is
        self._dims = torch.tensor(embedding_dims)

    def divisor(self, features: KeyedJaggedTensor) -> Tensor | None:  # [B, sum of dims]
        """Returns what to divide the outputs by: the length of a bag, 1 for an empty one.

        None where nothing is to be divided.
        """
        if not any(self._features):
            return None
        lengths = (
            features.lengths().view(len(features.keys()), features.stride()).clamp(min=1)
        )  # [F, B]
        by_feature = dict(zip(features.keys(), lengths, strict=True))
        ones = torch.ones_like(lengths[0])
        columns = [ones if name is None else by_feature[name] for name in self._features]
        dims = self._dims.to(lengths.device)
        return torch.stack(columns, dim=1).repeat_interleave(dims, dim=1)


def is_summed_mean(config: EmbeddingBagConfig, sharding_type: str) -> bool:
    """Whether the table's kernels pool by SUM though its pooling is MEAN."""
    return config.pooling == PoolingType.MEAN and sharding_type in ROW_SPLITTING_TYPES


def divide(pooled: KeyedTensor, *, divisor: Tensor) -> KeyedTensor:
    """Returns the outputs divided by the divisor."""
    return KeyedTensor(
        keys=pooled.keys(),
        values=pooled.values() / divisor,
        length_per_key=pooled.length_per_key(),
    )
