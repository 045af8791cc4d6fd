"""Sharded equals unsharded."""

import copy
import itertools

import pytest
import torch
from torchrec.distributed.types import ShardingType

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import (
    BATCH_SIZE,
    LR,
    OPTIMIZERS,
    batches,
    full_state,
    kjt,
    sharded,
    unsharded,
)

TW, RW, DP = (
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.DATA_PARALLEL.value,
)


def train_both(rank: int, types: dict[str, str], optimizer: str, is_weighted: bool) -> None:
    reference = unsharded(is_weighted=is_weighted)
    source = copy.deepcopy(reference)
    model, optimizers = sharded(source, types, optimizer=optimizer)
    reference_optimizer = OPTIMIZERS[optimizer][1](reference.parameters())
    world_size = torch.distributed.get_world_size()
    for step, batch in enumerate(batches(3, size=BATCH_SIZE * world_size)):
        start, stop = rank * BATCH_SIZE, (rank + 1) * BATCH_SIZE
        whole = kjt(batch, start=0, stop=BATCH_SIZE * world_size, is_weighted=is_weighted)
        output = model(kjt(batch, start=start, stop=stop, is_weighted=is_weighted))
        expected = reference(whole)
        torch.testing.assert_close(output, expected[start:stop], rtol=1e-4, atol=1e-5)
        optimizers.zero_grad()
        reference_optimizer.zero_grad()
        output.square().mean().backward()
        expected.square().mean().backward()
        optimizers.step()
        reference_optimizer.step()
        if step == 0 and optimizer == "sgd":  # the step is the gradient
            after = full_state(model.state_dict())
            for key, parameter in reference.named_parameters():
                gradient = (source.state_dict()[key] - after[key]) / LR
                torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)
    trained = full_state(model.state_dict())
    assert set(trained) == set(reference.state_dict())
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(trained[key], value, rtol=1e-4, atol=1e-5, msg=key)
        assert not torch.equal(value, source.state_dict()[key])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("pair", itertools.product([TW, RW, DP], repeat=2))
def test_sharded_training_equals_unsharded(
    two_ranks: Ranks, pair: tuple[str, str], optimizer: str
) -> None:
    two_ranks.run(train_both, {"t0": pair[0], "t1": pair[1]}, optimizer, False)
