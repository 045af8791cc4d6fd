"""autocast and GradScaler around a sharded collection: what TorchRec has for regular tables."""

import pytest
import torch
from torch import Tensor
from torchrec.distributed.types import ShardingType

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import BATCH_SIZE, batches, full_state, kjt, sharded, unsharded

pytestmark = pytest.mark.slow

TW, RW, DP = (
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.DATA_PARALLEL.value,
)
KINDS = {"t0": TW, "t1": RW, "r0": TW, "r1": TW}


def pooled(rank: int, enabled: bool) -> Tensor:
    """The collection's output, and in it a whole step in mixed precision."""
    model, optimizers = sharded(unsharded(), {**KINDS, "t1": DP})
    (batch,) = batches(1, size=2 * BATCH_SIZE)
    features = kjt(batch, start=rank * BATCH_SIZE, stop=(rank + 1) * BATCH_SIZE)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        values = model.module.ebc(features).wait().values().detach()
        output = model(features)
    assert output.dtype == (torch.bfloat16 if enabled else torch.float32)
    optimizers.zero_grad()
    output.float().square().mean().backward()
    optimizers.step()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return values


def test_autocast_leaves_pooled_outputs_alone(two_ranks: Ranks) -> None:
    for plain, cast in zip(two_ranks.run(pooled, False), two_ranks.run(pooled, True), strict=True):
        assert cast.dtype == torch.float32
        assert torch.equal(plain, cast)


def scaled_step(rank: int, scale: float) -> dict[str, Tensor]:
    """How far one SGD step with a scaled loss moves every parameter."""
    model, optimizers = sharded(unsharded(), KINDS)
    start = full_state(model.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    (batch,) = batches(1, size=2 * BATCH_SIZE)
    output = model(kjt(batch, start=rank * BATCH_SIZE, stop=(rank + 1) * BATCH_SIZE))
    scaler.scale(output.square().mean()).backward()
    _, (_, dense) = optimizers.optimizers
    scaler.step(dense)
    scaler.update()
    return {key: value - start[key] for key, value in full_state(model.state_dict()).items()}


def test_a_grad_scaler_unscales_the_dense_optimizers_gradients_alone(two_ranks: Ranks) -> None:
    """As for TorchRec's own tables, the step in backward is over before a scaler can unscale."""
    (plain, _), (scaled, _) = (two_ranks.run(scaled_step, scale) for scale in (1.0, 4.0))
    for key, moved in plain.items():
        factor = 4.0 if "embedding_bags" in key else 1.0
        assert moved.abs().max() > 0
        torch.testing.assert_close(scaled[key], factor * moved, rtol=1e-3, atol=1e-6, msg=key)
