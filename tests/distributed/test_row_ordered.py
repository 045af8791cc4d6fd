"""A row order in front of a sharded collection: ids stay what they are."""

from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingType

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import (
    BATCH_SIZE,
    NUM_IDS,
    ToyModelWithLoss,
    batches,
    full_state,
    kjt,
    plan_for,
    sharder,
    tables,
    unsharded,
)
from torchrec_tt import RowOrderedCollection, TTEmbeddingBagCollection

TYPES = {"t0": ShardingType.TABLE_WISE.value, "t1": ShardingType.ROW_WISE.value}
ORDER = torch.randperm(NUM_IDS["f3"], generator=torch.Generator().manual_seed(7))


def ordered(collection: nn.Module) -> ToyModelWithLoss:
    model = ToyModelWithLoss(RowOrderedCollection(collection, {"t1": ORDER}))
    torch.manual_seed(0)
    nn.init.normal_(model.over.weight, 0, 0.3)
    return model


def sharded_and_source() -> tuple[DistributedModelParallel, ToyModelWithLoss]:
    source = ordered(unsharded().ebc)
    meta = ordered(TTEmbeddingBagCollection(tables(), device=torch.device("meta")))
    sharders: list[Any] = [sharder()]
    plan = plan_for(meta, TYPES, sharders)
    model = DistributedModelParallel(meta, device=torch.device("cpu"), plan=plan, sharders=sharders)
    model.load_state_dict(source.state_dict())
    return model, source


def outputs_of_pipeline(rank: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """What a pipeline gives in training, and the unsharded model on the whole batches."""
    model, source = sharded_and_source()
    start = rank * BATCH_SIZE
    whole = batches(3, size=2 * BATCH_SIZE)
    local = iter([kjt(batch, start=start, stop=start + BATCH_SIZE) for batch in whole])
    dense = torch.optim.SGD(model.module.over.parameters(), lr=0.1)
    pipeline = TrainPipelineSparseDist(model, dense, torch.device("cpu"))
    found = [pipeline.progress(local).detach() for _ in whole]
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    expected = []
    for batch in whole:
        optimizer.zero_grad()
        loss, output = source(kjt(batch, start=0, stop=2 * BATCH_SIZE))
        loss.backward()
        optimizer.step()
        expected.append(output[start : start + BATCH_SIZE].detach())
    return found, expected, full_state(model.state_dict())["ebc.row_orders.t1"]


def test_a_pipeline_trains_as_the_unsharded_model(two_ranks: Ranks) -> None:
    for found, expected, order in two_ranks.run(outputs_of_pipeline):
        for output, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-5)
        assert order[ORDER].tolist() == list(range(NUM_IDS["f3"]))
