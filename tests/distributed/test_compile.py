"""A compiled model trains its sharded tables, which run eagerly between the compiled parts."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingType

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import (
    ToyModel,
    ToyModelWithLoss,
    batches,
    full_state,
    kjt,
    sharded,
    unsharded,
)

TW = ShardingType.TABLE_WISE.value
RW = ShardingType.ROW_WISE.value
DP = ShardingType.DATA_PARALLEL.value
BACKEND = "aot_eager"


class Over(nn.Module):
    """A dense part to compile by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 1)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.linear(pooled).relu() - 1


class CompiledOver(ToyModelWithLoss):
    def __init__(self, ebc: nn.Module) -> None:
        super().__init__(ebc)
        self.over = Over()
        self.over.compile(backend=BACKEND)


class EagerOver(ToyModel):
    def __init__(self, ebc: nn.Module) -> None:
        super().__init__(ebc)
        self.over = Over()


def num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def assert_same_state(model: nn.Module, expected: nn.Module) -> None:
    expected_state = full_state(expected.state_dict())
    for key, value in full_state(model.state_dict()).items():
        torch.testing.assert_close(value, expected_state[key], rtol=1e-6, atol=1e-6, msg=key)


def train_compiled_and_eager(rank: int, types: Mapping[str, str]) -> None:
    torch.compiler.reset()
    source = unsharded()
    pairs = [sharded(source, types, optimizer="adagrad") for _ in range(2)]
    graphs = num_graphs()
    forwards = [torch.compile(pairs[0][0], backend=BACKEND), pairs[1][0]]
    for step, size in enumerate((8, 8, 5, 7)):
        (batch,) = batches(1, size=2 * size, seed=step)
        outputs = []
        for forward, (_, optimizer) in zip(forwards, pairs, strict=True):
            optimizer.zero_grad()
            output = forward(kjt(batch, start=rank * size, stop=(rank + 1) * size))
            output.square().mean().backward()
            optimizer.step()
            outputs.append(output)
        torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-6)
    assert num_graphs() > graphs
    assert_same_state(pairs[0][0], pairs[1][0])


@pytest.mark.slow
@pytest.mark.parametrize("types", [{"t0": TW, "t1": RW}, {"t0": DP, "t1": TW}])
def test_a_model_compiled_whole_trains_as_the_eager_one(
    two_ranks: Ranks, types: Mapping[str, str]
) -> None:
    two_ranks.run(train_compiled_and_eager, types)


def pipeline_with_compiled_part(rank: int) -> None:
    torch.compiler.reset()
    ebc = unsharded().ebc
    compiled, eager = CompiledOver(ebc), EagerOver(ebc)
    compiled.over.load_state_dict(eager.over.state_dict())
    types = {"t0": TW, "t1": RW}
    model, optimizer = sharded(eager, types)
    piped, piped_optimizer = sharded(compiled, types)
    graphs = num_graphs()
    pipeline = TrainPipelineSparseDist(piped, piped_optimizer, torch.device("cpu"))
    data = [kjt(batch, start=8 * rank, stop=8 * (rank + 1)) for batch in batches(3, size=16)]
    iterator = iter(data)
    for features in data:
        output = pipeline.progress(iterator)
        optimizer.zero_grad()
        expected = model(features)
        expected.square().mean().backward()
        optimizer.step()
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    assert num_graphs() > graphs
    assert_same_state(piped, model)


@pytest.mark.slow
def test_a_compiled_dense_part_trains_under_a_pipeline(two_ranks: Ranks) -> None:
    two_ranks.run(pipeline_with_compiled_part)
