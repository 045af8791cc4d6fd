from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import nn
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.optim.keyed import CombinedOptimizer
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
from torchrec_tt.distributed.fused_optimizer import TTFusedOptimizer, core_optimizer_config
from torchrec_tt.optim import CoreOptimizer, TTOptimizerConfig

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


def test_weight_decay_is_coupled_unless_the_mode_decouples_it() -> None:
    for mode, is_decoupled in ((WeightDecayMode.L2, False), (WeightDecayMode.DECOUPLE, True)):
        config = core_optimizer_config({"weight_decay": 0.1, "weight_decay_mode": mode})
        assert (config.weight_decay, config.decoupled_weight_decay) == (0.1, is_decoupled)
    assert not core_optimizer_config({"weight_decay": 0.1}).decoupled_weight_decay


def test_gradients_are_clipped_where_asked_and_at_one_by_default() -> None:
    assert core_optimizer_config({"max_gradient": 0.5}).max_gradient is None
    assert core_optimizer_config({"gradient_clipping": True}).max_gradient == 1.0
    clipped = core_optimizer_config({"gradient_clipping": True, "max_gradient": 0.5})
    assert clipped.max_gradient == 0.5


SUPPORTED = ("SGD", "EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD", "ADAM")


# U39
@pytest.mark.parametrize("optimizer", [o for o in EmbOptimType if o.name not in SUPPORTED])
def test_every_other_optimizer_of_fbgemm_raises_with_the_list_of_ours(
    optimizer: EmbOptimType,
) -> None:
    with pytest.raises(ValueError, match=r"must be one of .*'SGD'.*'ADAM'\].* got ") as error:
        core_optimizer_config({"optimizer": optimizer})
    assert all(repr(name) in str(error.value) for name in SUPPORTED)


def fused_adam() -> tuple[nn.Parameter, CoreOptimizer, TTFusedOptimizer]:
    core = nn.Parameter(torch.ones(2, 3))
    optimizer = CoreOptimizer([core], TTOptimizerConfig(optimizer="adam"))
    fused = TTFusedOptimizer(optimizer, params={"t.tt_cores.0": core}, owned={}, pg=None)
    return core, optimizer, fused


def test_torchrecs_setters_reach_the_cores_optimizer() -> None:
    core, optimizer, fused = fused_adam()
    combined = CombinedOptimizer([fused])
    combined.set_optimizer_step(7)
    combined.update_hyper_parameters({"lr": 0.5, "eps": 1e-3, "beta1": 0.5})
    assert optimizer.state[core]["step"].tolist() == [7]
    assert optimizer.learning_rate == fused.param_groups[0]["lr"] == 0.5
    assert (optimizer.config.eps, optimizer.config.betas) == (1e-3, (0.5, 0.999))
    with pytest.raises(ValueError, match=r"params_dict must have .* got \['lower_bound'\]"):
        fused.update_hyper_parameters({"lower_bound": 1.0})


def test_state_is_whole_from_the_start_and_loads_in_place() -> None:
    core, optimizer, fused = fused_adam()
    fused.init_state()
    assert core.grad is None
    optimizer.step([core], [torch.ones(2, 3)])
    _, other, loaded = fused_adam()
    loaded.load_state_dict(fused.state_dict())
    for name, value in optimizer.state[core].items():
        assert torch.equal(next(iter(other.state.values()))[name], value), name


@pytest.mark.parametrize(
    ("fused_params", "message"),
    [
        ({"optimizer": EmbOptimType.LAMB}, "SGD.*EXACT_SGD.*EXACT_ADAGRAD.*ADAM.*got .*LAMB"),
        ({"beta1": 1.5}, "betas must be two numbers in .* got .*1.5"),
        ({"optimizer": "sgd"}, "must be an EmbOptimType, got 'sgd'"),
        ({"optimizer": [1]}, r"'optimizer'.* must be an EmbOptimType, got \[1\]"),
        ({"max_norm": 1.0}, "'max_norm'.* must be unset .* got 1.0"),
        (
            {"gradient_clipping": True, "max_gradient": -1.0},
            "max_gradient must be a number and not neg",
        ),
        ({"gradient_clipping": True, "max_gradient": "1"}, "'max_gradient'.* must be a number"),
        ({"weight_decay_mode": WeightDecayMode.COUNTER}, "weight_decay_mode"),
        (
            {"weight_decay_mode": WeightDecayMode.NONE, "weight_decay": 0.1},
            "'weight_decay'.* must be 0 with the weight_decay_mode NONE .* got 0.1",
        ),
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
    types = {"t0": TW, "t1": RW, "r0": DP, "r1": DP}
    plan = plan_for(on_meta(source), types, [sharder()])
    lamb = sharder(optimizer="sgd")
    lamb._fused_params["optimizer"] = EmbOptimType.LAMB
    meta = on_meta(source)
    with pytest.raises(ValueError, match="must be one of") as error:
        lamb.shard(meta.ebc, plan.plan["ebc"], ShardingEnv.from_process_group(dist.group.WORLD))
    return str(error.value)


# U39
@pytest.mark.slow
def test_an_unsupported_optimizer_raises_the_same_on_every_rank(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(optimizer_message)
    assert first == second
    assert "EXACT_ADAGRAD" in first


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
