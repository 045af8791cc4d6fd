from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import (
    BATCH_SIZE,
    batches,
    full_state,
    kjt,
    on_meta,
    plan_for,
    sharded,
    sharder,
    unsharded,
)
from torchrec_tt.distributed.fused_optimizer import core_optimizer_config
from torchrec_tt.optim import TTOptimizerConfig

TW, RW, DP = (
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.DATA_PARALLEL.value,
)


def test_fused_params_become_a_core_optimizer() -> None:
    config = core_optimizer_config(
        {
            "optimizer": EmbOptimType.EXACT_ADAGRAD,
            "learning_rate": 0.5,
            "eps": 1e-3,
            "weight_decay": 0.25,
            "cache_load_factor": 0.2,  # the regular tables' affair
            "prefetch_pipeline": True,
        }
    )
    assert config == TTOptimizerConfig(
        optimizer="adagrad", learning_rate=0.5, eps=1e-3, weight_decay=0.25
    )


def test_the_default_is_plain_sgd() -> None:
    assert core_optimizer_config(None) == TTOptimizerConfig()
    for kind in (EmbOptimType.SGD, EmbOptimType.EXACT_SGD):
        assert core_optimizer_config({"optimizer": kind}).optimizer == "sgd"


@pytest.mark.parametrize(
    ("fused_params", "message"),
    [
        ({"optimizer": EmbOptimType.LAMB}, "SGD.*EXACT_SGD.*EXACT_ADAGRAD.*ADAM.*got .*LAMB"),
        ({"beta1": 1.5}, "betas must be two numbers in .* got .*1.5"),
        ({"optimizer": "sgd"}, "must be an EmbOptimType, got 'sgd'"),
        ({"optimizer": [1]}, r"'optimizer'.* must be an EmbOptimType, got \[1\]"),
        ({"gradient_clipping": True}, "gradient_clipping"),
        ({"weight_decay_mode": WeightDecayMode.COUNTER}, "weight_decay_mode"),
        ({"weight_decay_mode": "l2"}, "weight_decay_mode.* got 'l2'"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"learning_rate": None}, "'learning_rate'.* must be a number, got None"),
        ({"eps": "small"}, "'eps'.* must be a number, got 'small'"),
        ({"weight_decay": True}, "'weight_decay'.* must be a number, got True"),
    ],
)
def test_settings_that_cores_cannot_follow_raise(
    fused_params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        core_optimizer_config(fused_params)


def optimizer_message(rank: int) -> str:
    source = unsharded()
    plan = plan_for(on_meta(source), {"t0": TW, "t1": RW}, [sharder()])
    lamb = sharder(optimizer="sgd")
    lamb._fused_params["optimizer"] = EmbOptimType.LAMB
    meta = on_meta(source)
    with pytest.raises(ValueError, match="must be one of") as error:
        lamb.shard(meta.ebc, plan.plan["ebc"], ShardingEnv.from_process_group(dist.group.WORLD))
    return str(error.value)


@pytest.mark.slow
def test_an_unsupported_optimizer_raises_the_same_on_every_rank(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(optimizer_message)
    assert first == second
    assert "EXACT_ADAGRAD" in first


def state_types(rank: int) -> dict[str, tuple[str, ...]]:
    model, _ = sharded(unsharded(), {"t0": TW, "t1": RW}, optimizer="adagrad")
    state = model.fused_optimizer.state_dict()["state"]
    return {
        key: tuple(f"{k}:{type(v).__name__}" for k, v in values.items())
        for key, values in state.items()
        if "tt_cores" in key
    }


@pytest.mark.slow
def test_state_is_sharded_for_one_owner_and_plain_for_replicas(two_ranks: Ranks) -> None:
    prefix = "ebc.embedding_bags"
    replicated = {f"{prefix}.t1.tt_cores.{k}": ("sum:Tensor",) for k in range(2)}
    owned = {f"{prefix}.t0.tt_cores.{k}": ("sum:ShardedTensor",) for k in range(3)}
    first, second = two_ranks.run(state_types)
    assert sorted([first, second], key=len) == [replicated, {**owned, **replicated}]


def dense_optimizer_parameters(rank: int) -> list[str]:
    model, _ = sharded(unsharded(), {"t0": RW, "t1": DP, "r0": TW, "r1": TW})
    return list(dict(in_backward_optimizer_filter(model.named_parameters())))


@pytest.mark.slow
def test_only_data_parallel_cores_are_left_to_the_dense_optimizer(two_ranks: Ranks) -> None:
    expected = [
        "ebc.embedding_bags.t1.tt_cores.0",
        "ebc.embedding_bags.t1.tt_cores.1",
        "over.weight",
        "over.bias",
    ]
    assert two_ranks.run(dense_optimizer_parameters) == [expected, expected]


def cores_after_a_step_of_lr(rank: int, lr: float) -> dict[str, torch.Tensor]:
    """One SGD step, the learning rate having been set after the model was made."""
    model, optimizers = sharded(unsharded(), {"t0": TW, "t1": RW})
    for group in optimizers.param_groups:
        group["lr"] = lr
    (batch,) = batches(1, size=2 * BATCH_SIZE)
    features = kjt(batch, start=rank * BATCH_SIZE, stop=(rank + 1) * BATCH_SIZE)
    model(features).square().mean().backward()
    optimizers.step()
    return {k: v for k, v in full_state(model.state_dict()).items() if "tt_cores" in k}


@pytest.mark.slow
def test_the_learning_rate_is_read_from_param_groups(two_ranks: Ranks) -> None:
    start = unsharded().state_dict()
    (still, _), (once, _), (twice, _) = (
        two_ranks.run(cores_after_a_step_of_lr, lr) for lr in (0.0, 0.25, 0.5)
    )
    for key, value in start.items():
        if "tt_cores" in key:
            assert torch.equal(still[key], value)
            torch.testing.assert_close(
                twice[key] - value, 2 * (once[key] - value), rtol=1e-4, atol=1e-6
            )
            assert not torch.equal(once[key], value)


def apply_adagrad_to_a_table(rank: int) -> list[str]:
    source = unsharded()
    meta = on_meta(source)
    apply_optimizer_in_backward(
        torch.optim.Adagrad, meta.ebc.embedding_bags["t1"].parameters(), {"lr": 0.3}
    )
    sharders = [sharder("sgd")]
    model = DistributedModelParallel(
        meta, plan=plan_for(meta, {"t0": RW, "t1": RW}, sharders), sharders=sharders
    )
    state = model.fused_optimizer.state_dict()["state"]
    return sorted(key for key, value in state.items() if "tt_cores" in key and "sum" in value)


@pytest.mark.slow
def test_apply_optimizer_in_backward_overrides_a_table(two_ranks: Ranks) -> None:
    expected = [f"ebc.embedding_bags.t1.tt_cores.{k}" for k in range(2)]
    assert two_ranks.run(apply_adagrad_to_a_table) == [expected, expected]
