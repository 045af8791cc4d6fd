"""TorchRec's sequence shardings with a lookup that serves Tensor-Train tables beside regular ones.

Input and output distributions are inherited: TT tables share the all-to-all of the regular tables.
"""

from typing import Any

import torch
from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.types import ShardingType

from torchrec_tt.distributed.embedding_lookup import TTGroupedEmbeddingsLookup
from torchrec_tt.distributed.sharding import TTLookupMixin, TTRowWiseMixin, TTTableWiseMixin


class _SequenceLookupMixin(TTLookupMixin):
    """Gives a sequence sharding the lookup that knows TT tables."""

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> TTGroupedEmbeddingsLookup:
        return TTGroupedEmbeddingsLookup(
            grouped_configs=self._local_configs(),
            pg=self._env.process_group,
            device=device if device is not None else self._device,
            env=self._env,
            sharding_type=self._lookup_sharding_type,
            replica_pg=self._replica_pg(),
        )


class TTTwSequenceEmbeddingSharding(
    _SequenceLookupMixin, TTTableWiseMixin, TwSequenceEmbeddingSharding
):
    """Whole tables, each on one rank."""


class TTRwSequenceEmbeddingSharding(
    _SequenceLookupMixin, TTRowWiseMixin, RwSequenceEmbeddingSharding
):
    """Blocks of rows over all ranks."""


class TTDpSequenceEmbeddingSharding(_SequenceLookupMixin, DpSequenceEmbeddingSharding):
    """Whole tables on every rank."""


SEQUENCE_SHARDINGS: dict[str, Any] = {
    ShardingType.DATA_PARALLEL.value: TTDpSequenceEmbeddingSharding,
    ShardingType.TABLE_WISE.value: TTTwSequenceEmbeddingSharding,
    ShardingType.ROW_WISE.value: TTRwSequenceEmbeddingSharding,
}
