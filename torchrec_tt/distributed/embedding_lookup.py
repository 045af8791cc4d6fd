"""The grouped lookup that knows the Tensor-Train kernels beside TorchRec's own."""

from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingEnv, ShardingType

from torchrec_tt.distributed.embedding_kernel import (
    TTBatchedDenseEmbeddingBag,
    TTBatchedFusedEmbeddingBag,
)


class TTGroupedPooledEmbeddingsLookup(GroupedPooledEmbeddingsLookup):
    """GroupedPooledEmbeddingsLookup whose customized kernel is the Tensor-Train one.

    Args:
        replica_pg: the ranks that hold the same cores; None where each table has one owner.
        kwargs: those of GroupedPooledEmbeddingsLookup.
    """

    def __init__(self, *, replica_pg: dist.ProcessGroup | None = None, **kwargs: Any) -> None:
        self._replica_pg = replica_pg  # the kernels are made in the next line
        super().__init__(**kwargs)

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        sharding_type: ShardingType | None,
        env: ShardingEnv | None,
    ) -> BaseEmbedding:
        if config.compute_kernel != EmbeddingComputeKernel.CUSTOMIZED_KERNEL:
            return super()._create_embedding_kernel(config, device, pg, sharding_type, env)
        if config.embedding_tables[0].global_metadata is None:  # data-parallel
            return TTBatchedDenseEmbeddingBag(config, pg=pg, device=device)
        return TTBatchedFusedEmbeddingBag(
            config,
            pg=pg,
            device=device,
            sharding_type=sharding_type,
            replica_pg=self._replica_pg,
        )
