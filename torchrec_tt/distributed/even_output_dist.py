"""Row-wise outputs of ranks whose batches differ in size, over a backend that cannot scatter them.

Gloo gathers and scatters equal parts only, so a last batch that is not whole on every rank would
abort in TorchRec's reduce-scatter. NCCL needs none of this.
"""

import copy
import functools

from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding_sharding import BaseEmbeddingDist, EmbeddingShardingContext
from torchrec.distributed.types import Awaitable, ShardingEnv, ShardingType


class EvenOutputDist(nn.Module):
    """A row-wise output distribution that pads all ranks' batches to the largest.

    Args:
        output_dist: TorchRec's, which gets batches of equal size.
        sharding_type: ROW_WISE, TABLE_ROW_WISE or GRID_SHARD.
        env: the ranks.
    """

    def __init__(
        self, output_dist: BaseEmbeddingDist, sharding_type: str, *, env: ShardingEnv
    ) -> None:
        super().__init__()
        self.output_dist = output_dist
        self._rank = env.rank
        world_size = env.world_size
        self._order = list(range(world_size))  # of the ranks' batches in what the lookup returns
        if sharding_type != ShardingType.ROW_WISE.value:  # by place in the node, then by node
            local_size = get_local_size(world_size)
            self._order.sort(key=lambda rank: (rank % local_size, rank // local_size))

    def forward(
        self,
        local_embs: Tensor,  # [sum of all ranks' B, sum of D]
        sharding_ctx: EmbeddingShardingContext,
    ) -> Awaitable[Tensor]:  # [B of this rank, sum of D]
        sizes = sharding_ctx.batch_size_per_rank
        if len(set(sizes)) <= 1:
            return self.output_dist(local_embs, sharding_ctx)
        batches = local_embs.split([sizes[rank] for rank in self._order])
        even = copy.copy(sharding_ctx)
        even.batch_size_per_rank = [max(sizes)] * len(sizes)
        padded = pad_sequence(batches, batch_first=True).flatten(0, 1)
        result = self.output_dist(padded, even)
        result.callbacks.append(functools.partial(_first_rows, size=sizes[self._rank]))
        return result


def _first_rows(values: Tensor, *, size: int) -> Tensor:
    return values[:size]
