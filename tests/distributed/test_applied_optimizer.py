"""apply_optimizer_in_backward on the cores of the unsharded collection."""

import warnings
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import optim as torchrec_optim
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingType

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import (
    BATCH_SIZE,
    batches,
    kjt,
    on_meta,
    plan_for,
    sharder,
    unsharded,
)
from torchrec_tt import TTEmbeddingBagCollectionSharder
from torchrec_tt.distributed.applied_optimizer import applied_optimizer

RW, DP = ShardingType.ROW_WISE.value, ShardingType.DATA_PARALLEL.value


def test_arguments_get_the_names_of_fbgemm() -> None:
    cores = list(unsharded().ebc.embedding_bags["t0"].tt_cores)
    assert applied_optimizer(cores, table="t0") is None
    arguments = {"lr": 0.3, "betas": (0.5, 0.6), "eps": 1e-3, "foreach": False, "amsgrad": False}
    arguments["decoupled_weight_decay"] = True
    _apply_optimizer_in_backward(torch.optim.Adam, cores, arguments)
    optimizer, settings = applied_optimizer(cores, table="t0")
    assert optimizer is torch.optim.Adam
    assert settings == {
        "lr": 0.3,
        "beta1": 0.5,
        "beta2": 0.6,
        "eps": 1e-3,
        "weight_decay_mode": WeightDecayMode.DECOUPLE,
    }


def test_an_unsharded_collection_is_stepped_in_backward() -> None:
    """t0's cores are looked up twice, for two features; they are stepped once."""
    first, second = unsharded(), unsharded()
    cores = list(first.ebc.embedding_bags["t0"].tt_cores)
    expected = list(second.ebc.embedding_bags["t0"].tt_cores)
    _apply_optimizer_in_backward(torch.optim.Adagrad, cores, {"lr": 0.3})
    optimizer = torch.optim.Adagrad(expected, lr=0.3)
    for batch in batches(3, size=BATCH_SIZE):
        for model in (first, second):
            model(kjt(batch, start=0, stop=BATCH_SIZE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for core, other in zip(cores, expected, strict=True):
        assert core.grad is None
        torch.testing.assert_close(core, other)


@pytest.mark.parametrize(
    ("optimizer", "arguments", "message"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, "momentum must be left at 0 .* got 0.9 .*'t0'"),
        (torch.optim.Adagrad, {"lr_decay": 0.1}, "lr_decay must be left at 0 .* got 0.1"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad must be left at False .* got True"),
    ],
)
def test_arguments_that_no_fused_optimizer_follows_raise(
    optimizer: Any, arguments: dict[str, Any], message: str
) -> None:
    cores = list(unsharded().ebc.embedding_bags["t0"].tt_cores)
    _apply_optimizer_in_backward(optimizer, cores, {"lr": 0.1, **arguments})
    with pytest.raises(ValueError, match=message):
        applied_optimizer(cores, table="t0")


def test_cores_of_a_table_with_different_optimizers_raise() -> None:
    cores = list(unsharded().ebc.embedding_bags["t0"].tt_cores)
    _apply_optimizer_in_backward(torch.optim.SGD, cores[1:], {"lr": 0.1})
    with pytest.raises(ValueError, match=r"once with all cores .* for table 't0'"):
        applied_optimizer(cores, table="t0")


def with_settings_of_both(rank: int) -> tuple[list[str], dict[str, Any]]:
    """Adam for t1's cores by apply_optimizer_in_backward, Adagrad for the rest by fused_params.

    Returns the warnings, and the settings that t1's cores have in the end.
    """
    model = on_meta(unsharded())
    for table in ("t1", "t0"):  # t0 is data-parallel: the dense optimizer's, whatever is said here
        _apply_optimizer_in_backward(
            torchrec_optim.Adam,
            model.ebc.embedding_bags[table].tt_cores.parameters(),
            {"lr": 0.5, "beta1": 0.7, "gradient_clipping": True},
        )
    sharders = [sharder("adagrad", beta1=0.7, beta2=0.8)]
    plan = plan_for(model, {"t0": DP, "t1": RW}, sharders)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharded = DistributedModelParallel(model, plan=plan, sharders=sharders)
    (kernel,) = [k for k in sharded.module.ebc._tt_kernels() if "t1" in k.emb_module.cores]
    config = kernel.emb_module.optimizer.config
    names = ("optimizer", "learning_rate", "eps", "betas", "max_gradient")
    assert "t0" not in str(sharded.fused_optimizer.state_dict()["state"].keys())
    messages = [str(w.message) for w in caught if "apply_optimizer" in str(w.message)]
    return messages, {name: getattr(config, name) for name in names}


# U40
@pytest.mark.slow
def test_what_is_applied_to_cores_precedes_fused_params_and_a_conflict_warns_once(
    two_ranks: Ranks,
) -> None:
    for messages, settings in two_ranks.run(with_settings_of_both):
        assert settings == {
            "optimizer": "adam",
            "learning_rate": 0.5,
            "eps": 1e-8,  # the sharder's
            "betas": (0.7, 0.8),
            "max_gradient": 1.0,
        }
        (message,) = messages
        assert "learning_rate of 't1' is 0.5, not 0.1" in message
        assert "optimizer of 't1'" in message
        assert "beta1" not in message  # both say the same
        assert "t0" not in message


def unknown_setting(rank: int) -> str:
    model = on_meta(unsharded())
    cores = model.ebc.embedding_bags["t1"].tt_cores.parameters()
    _apply_optimizer_in_backward(torchrec_optim.Adam, cores, {"lr": 0.5, "beta3": 0.7})
    sharders = [TTEmbeddingBagCollectionSharder()]
    plan = plan_for(model, {"t0": RW, "t1": RW}, sharders)
    with pytest.raises(ValueError, match="got 'beta3'") as error:
        DistributedModelParallel(model, plan=plan, sharders=sharders)
    return str(error.value)


@pytest.mark.slow
def test_an_unknown_setting_is_refused_on_every_rank(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(unknown_setting)
    assert first == second
