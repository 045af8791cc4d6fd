"""Every optimizer under every sharding type, against torch.optim on the unsharded collection."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import full_state, pieces, plan_for
from torchrec_tt import (
    TTEmbeddingBagCollection,
    TTEmbeddingBagCollectionSharder,
    TTEmbeddingBagConfig,
)

pytestmark = pytest.mark.slow

KINDS = (
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.DATA_PARALLEL.value,
)
ONE_OWNER = (KINDS[0], KINDS[2])  # of a rank, or of a node whose ranks hold it as one shard each
NUM_ROWS = 110
BATCH_SIZE = 6  # per rank
SETTINGS = {"lr": 0.1, "weight_decay": 0.02}
FUSED = {"learning_rate": 0.1, "weight_decay": 0.02}
# A large eps keeps Adam's step from being the sign of gradients that are all but zero.
OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (
        {"optimizer": EmbOptimType.EXACT_SGD},
        lambda params: torch.optim.SGD(params, **SETTINGS),
    ),
    "adagrad": (
        {"optimizer": EmbOptimType.EXACT_ADAGRAD},
        lambda params: torch.optim.Adagrad(params, **SETTINGS),
    ),
    "rowwise_adagrad": (
        {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD},
        lambda params: RowWiseAdagrad(params, **SETTINGS),
    ),
    "adam": (
        {"optimizer": EmbOptimType.ADAM, "eps": 1e-3, "beta1": 0.8, "beta2": 0.9},
        lambda params: torch.optim.Adam(params, eps=1e-3, betas=(0.8, 0.9), **SETTINGS),
    ),
    "adamw": (
        {
            "optimizer": EmbOptimType.ADAM,
            "eps": 1e-3,
            "weight_decay_mode": WeightDecayMode.DECOUPLE,
        },
        lambda params: torch.optim.AdamW(params, eps=1e-3, **SETTINGS),
    ),
}


def collection(
    *, device: str | None = None, data_type: DataType = DataType.FP32
) -> TTEmbeddingBagCollection:
    """A table for every sharding type, named by it."""
    torch.manual_seed(0)
    ebc = TTEmbeddingBagCollection(
        [
            TTEmbeddingBagConfig(
                name=kind,
                num_embeddings=NUM_ROWS,
                embedding_dim=8,
                feature_names=[f"f_{kind}"],
                tt_ranks=[3, 5],
                row_factors=[4, 5, 6],
                col_factors=[2, 2, 2],
                data_type=data_type,
            )
            for kind in KINDS
        ],
        device=device,
    )
    with torch.no_grad():  # large enough that every step shows
        for parameter in ebc.parameters():
            parameter.normal_(0, 0.5)
    return ebc


def features(step: int, *, ranks: range) -> KeyedJaggedTensor:
    """The samples of `ranks` in the global batch of a step."""
    lengths, values = [], []
    for k in range(len(KINDS)):
        for rank in ranks:
            generator = torch.Generator().manual_seed(1000 * step + 10 * rank + k)
            lengths.append(torch.randint(0, 4, (BATCH_SIZE,), generator=generator))
            size = (int(lengths[-1].sum()),)
            values.append(torch.randint(0, NUM_ROWS, size, generator=generator))
    keys = [f"f_{kind}" for kind in KINDS]
    return KeyedJaggedTensor(keys=keys, values=torch.cat(values), lengths=torch.cat(lengths))


def outputs_of(ebc: Any, kjt: KeyedJaggedTensor) -> Tensor:  # [B, 8 * number of tables]
    pooled = ebc(kjt)
    return torch.cat([pooled[f"f_{kind}"] for kind in KINDS], dim=1)


def loss_of(outputs: Tensor) -> Tensor:
    return (outputs * torch.linspace(0.5, 2.0, outputs.shape[1])).square().sum(1).mean()


def sharded(
    name: str,
    *,
    data_type: DataType = DataType.FP32,
    kinds: Sequence[str] = KINDS,
    output_dtensor: bool = False,
    **fused_params: Any,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    chosen, factory = OPTIMIZERS[name]
    sharders = [TTEmbeddingBagCollectionSharder({**FUSED, **chosen, **fused_params})]
    meta = collection(device="meta", data_type=data_type)
    plan = plan_for(meta, dict(zip(KINDS, kinds, strict=True)), sharders)
    env = ShardingEnv(dist.get_world_size(), dist.get_rank(), output_dtensor=output_dtensor)
    env.device_mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    env.process_group = env.device_mesh.get_group()
    model = DistributedModelParallel(
        meta, env=env, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    model.load_state_dict(collection(data_type=data_type).state_dict())
    params = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(params, factory)
    return model, CombinedOptimizer([model.fused_optimizer, dense])


def local(value: Any) -> Tensor:
    """The part of a state that this rank has."""
    ((piece, _),) = pieces(value)
    return piece


def train(rank: int, model: Any, optimizers: Any, *, steps: range) -> None:
    for step in steps:
        optimizers.zero_grad()
        loss_of(outputs_of(model, features(step, ranks=range(rank, rank + 1)))).backward()
        optimizers.step()


def state_size(name: str, entry: str, core: Tensor) -> torch.Size:
    if entry == "step":
        return torch.Size([1])
    return core.shape[:1] if name == "rowwise_adagrad" else core.shape


def ten_steps(rank: int, name: str) -> set[str]:
    """Returns the names of the states that were compared."""
    model, optimizers = sharded(name)
    ebc = collection()
    oracle = OPTIMIZERS[name][1](ebc.parameters())
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(each, gamma=0.9) for each in (optimizers, oracle)
    ]
    for step in range(10):
        train(rank, model, optimizers, steps=range(step, step + 1))
        oracle.zero_grad()
        loss_of(outputs_of(ebc, features(step, ranks=range(dist.get_world_size())))).backward()
        oracle.step()
        for schedule in schedules:
            schedule.step()
    expected = dict(ebc.named_parameters())
    cores = full_state(model.state_dict())
    assert set(cores) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(cores[key], value.detach(), rtol=1e-4, atol=1e-5, msg=key)
    compared = set()
    for key, state in model.fused_optimizer.state_dict()["state"].items():
        for entry, value in state.items():
            assert isinstance(value, ShardedTensor) == (key.split(".")[1] in ONE_OWNER)
            actual = local(value)
            assert value.size() == actual.size() == state_size(name, entry, expected[key])
            wanted = oracle.state[expected[key]][entry].reshape(actual.shape).to(actual.dtype)
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5, msg=f"{key}.{entry}")
            compared.add(entry)
    return compared


def half_precision(rank: int, folder: str, data_type: DataType) -> None:
    """Output, state dict and a move to other ranks' plan of a model with 16-bit cores."""
    model, optimizers = sharded("adam", data_type=data_type)
    ebc = collection(data_type=data_type)
    kjt = features(0, ranks=range(rank, rank + 1))
    outputs = outputs_of(model, kjt)
    assert outputs.dtype == torch.float32
    torch.testing.assert_close(outputs, outputs_of(ebc, kjt))
    train(rank, model, optimizers, steps=range(3))
    state = model.state_dict()
    assert {value.dtype for value in state.values()} == {ebc.state_dict().popitem()[1].dtype}
    optim = model.fused_optimizer.state_dict()
    dcp.save({"model": state, "optim": optim}, checkpoint_id=folder)
    kinds = (*KINDS[1:3], KINDS[0], KINDS[3])  # a data-parallel table's state is the user's
    other, _ = sharded("adam", data_type=data_type, kinds=kinds, output_dtensor=True)
    loaded = {"model": other.state_dict(), "optim": other.fused_optimizer.state_dict()}
    dcp.load(loaded, checkpoint_id=folder)
    other.load_state_dict(loaded["model"])
    other.fused_optimizer.load_state_dict(loaded["optim"])
    before, after = full_state(state), full_state(other.state_dict())
    for key, value in before.items():
        assert torch.equal(after[key], value), key
    states = other.fused_optimizer.state_dict()["state"].values()
    assert {int(local(state["step"])) for state in states} == {3}


# U36
@pytest.mark.parametrize("data_type", [DataType.BF16, DataType.FP16])
def test_16_bit_cores_and_adam_move_between_plans(
    two_nodes: Ranks, tmp_path: Path, data_type: DataType
) -> None:
    two_nodes.run(half_precision, str(tmp_path), data_type)


# U38
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_ten_steps_on_a_schedule_equal_torch_optim_under_every_sharding_type(
    two_nodes: Ranks, name: str
) -> None:
    entries = {
        "sgd": set(),
        "adagrad": {"sum"},
        "rowwise_adagrad": {"sum"},
        "adam": {"exp_avg", "exp_avg_sq", "step"},
    }
    assert two_nodes.run(ten_steps, name) == [entries[name.removesuffix("w")]] * 4


def replicas(rank: int, name: str, data_type: DataType) -> dict[str, list[Tensor]]:
    """Every core on this rank, and its state, after many steps on ids of its own."""
    model, optimizers = sharded(name, data_type=data_type)
    train(rank, model, optimizers, steps=range(20))
    state = model.fused_optimizer.state_dict()["state"]
    result = {}
    for key, parameter in model.named_parameters():
        if parameter.numel():
            result[key] = [parameter.detach(), *map(local, state.get(key, {}).values())]
    return result


@pytest.mark.parametrize(
    ("name", "data_type"),
    [
        ("adagrad", DataType.FP32),
        ("adam", DataType.BF16),
        ("rowwise_adagrad", DataType.FP16),
    ],
)
def test_replicas_are_bitwise_equal_after_many_steps(
    two_nodes: Ranks, name: str, data_type: DataType
) -> None:
    by_rank = two_nodes.run(replicas, name, data_type)
    holders = dict.fromkeys(KINDS, 0)
    first: dict[str, list[Tensor]] = {}
    for cores in by_rank:
        for key, values in cores.items():
            holders[key.split(".")[1]] += key.endswith("tt_cores.0")
            for value, other in zip(values, first.setdefault(key, values), strict=True):
                assert torch.equal(value, other), key
                assert value.isfinite().all()
    assert list(holders.values()) == [1, 4, 2, 4]


def clipped_steps(rank: int) -> None:
    """The lookups' gradients of tables stepped in backward, the cores' of the others."""
    limit = 0.02
    model, combined = sharded("sgd", gradient_clipping=True, max_gradient=limit)
    optimizers = GradientClippingOptimizer(
        combined, clipping=GradientClipping.VALUE, max_gradient=limit
    )
    ebc = collection()
    oracle = torch.optim.SGD(ebc.parameters(), **SETTINGS)
    dense = list(ebc.embedding_bags[ShardingType.DATA_PARALLEL.value].parameters())
    num_clipped = 0
    for step in range(3):
        train(rank, model, optimizers, steps=range(step, step + 1))
        oracle.zero_grad()
        outputs = outputs_of(ebc, features(step, ranks=range(dist.get_world_size())))
        *in_backward, last = outputs.split(8, dim=1)
        clipped = [part.clone() for part in in_backward]
        for part in clipped:
            part.register_hook(lambda grad: grad.clamp(-limit, limit))
        loss_of(torch.cat([*clipped, last], dim=1)).backward()
        num_clipped += sum(int((core.grad.abs() > limit).sum()) for core in dense)
        torch.nn.utils.clip_grad_value_(dense, limit)
        oracle.step()
    assert num_clipped > 0
    unclipped, their_optimizers = sharded("sgd")
    train(rank, unclipped, their_optimizers, steps=range(3))
    far = full_state(unclipped.state_dict())
    for key, value in full_state(model.state_dict()).items():
        torch.testing.assert_close(value, ebc.state_dict()[key], rtol=1e-4, atol=1e-5, msg=key)
        assert not torch.allclose(value, far[key], rtol=1e-2), key


def test_gradients_are_clipped_as_fbgemm_and_torchrec_do(two_nodes: Ranks) -> None:
    two_nodes.run(clipped_steps)


def warmed_up_steps(rank: int) -> None:
    stages = [
        WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=3, value=0.1),
        WarmupStage(policy=WarmupPolicy.STEP, max_iters=6, value=0.5, decay_iters=1),
    ]
    model, combined = sharded("sgd")
    ebc = collection()
    oracle = KeyedOptimizerWrapper(dict(ebc.named_parameters()), OPTIMIZERS["sgd"][1])
    optimizers, expected = (WarmupOptimizer(o, stages, lr=0.2) for o in (combined, oracle))
    rates = set()
    for step in range(5):
        rates.update(group["lr"] for group in model.fused_optimizer.param_groups)
        train(rank, model, optimizers, steps=range(step, step + 1))
        expected.zero_grad()
        loss_of(outputs_of(ebc, features(step, ranks=range(dist.get_world_size())))).backward()
        expected.step()
    assert len(rates) == 5
    for key, value in full_state(model.state_dict()).items():
        torch.testing.assert_close(value, ebc.state_dict()[key], rtol=1e-4, atol=1e-5, msg=key)


def test_a_warm_up_sets_the_rate_of_every_step(two_nodes: Ranks) -> None:
    two_nodes.run(warmed_up_steps)


def all_reduces(rank: int) -> int:
    """How many there are in backward, where two tables are row-wise and two table-row-wise."""
    types = dict(zip(KINDS, [*KINDS[1:3]] * 2, strict=True))
    sharders = [TTEmbeddingBagCollectionSharder({**FUSED, **OPTIMIZERS["adam"][0]})]
    meta = collection(device="meta")
    plan = plan_for(meta, types, sharders)
    model = DistributedModelParallel(meta, device=torch.device("cpu"), plan=plan, sharders=sharders)
    loss = loss_of(outputs_of(model, features(0, ranks=range(rank, rank + 1))))
    with CommDebugMode() as collectives:
        loss.backward()
    return collectives.get_comm_counts()[torch.ops.c10d.allreduce_]


def test_core_gradients_of_all_tables_with_the_same_ranks_are_summed_at_once(
    two_nodes: Ranks,
) -> None:
    counts = two_nodes.run(all_reduces)
    assert max(counts) == 2
    assert min(counts) >= 1  # a node may have none of the table-row-wise tables
