"""Stock train pipelines drive a sharded model with Tensor-Train tables."""

import pytest
import torch
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.types import ShardingType

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import (
    BATCH_SIZE,
    ToyModelWithLoss,
    batches,
    full_state,
    kjt,
    sharded,
    unsharded,
)


def pipelined_and_not(rank: int, pipeline_type: type) -> int:
    """Trains 5 steps with and without a pipeline; returns how many modules were pipelined."""
    types = {"t0": ShardingType.TABLE_WISE.value, "t1": ShardingType.ROW_WISE.value}
    source = unsharded()
    plain, plain_optimizer = sharded(source, types, optimizer="adagrad")
    with_loss = ToyModelWithLoss(source.ebc)
    with_loss.over = source.over
    piped, piped_optimizer = sharded(with_loss, types, optimizer="adagrad")
    data = [
        kjt(batch, start=rank * BATCH_SIZE, stop=(rank + 1) * BATCH_SIZE)
        for batch in batches(5, size=2 * BATCH_SIZE)
    ]
    pipeline = pipeline_type(piped, piped_optimizer, torch.device("cpu"))
    iterator = iter(data)
    for features in data:
        output = pipeline.progress(iterator)
        plain_optimizer.zero_grad()
        expected = plain(features)
        expected.square().mean().backward()
        plain_optimizer.step()
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    expected_state = full_state(plain.state_dict())
    for key, value in full_state(piped.state_dict()).items():
        torch.testing.assert_close(value, expected_state[key], rtol=1e-6, atol=1e-6, msg=key)
    return len(getattr(pipeline, "_pipelined_modules", []))


@pytest.mark.slow
def test_u49_pipelined_training_equals_unpipelined(two_ranks: Ranks) -> None:
    assert two_ranks.run(pipelined_and_not, TrainPipelineBase) == [0, 0]
    assert two_ranks.run(pipelined_and_not, TrainPipelineSparseDist) == [1, 1]
