"""The sharded collection computes and learns what the unsharded one does."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import (
    BATCH_SIZE,
    KEYS,
    LR,
    OPTIMIZERS,
    OUTPUTS,
    Pooling,
    batches,
    full_state,
    kjt,
    on_meta,
    plan_for,
    sharded,
    sharder,
    unsharded,
)
from torchrec_tt import (
    TTEmbeddingBagCollection,
    TTEmbeddingBagCollectionSharder,
    TTEmbeddingBagConfig,
)

pytestmark = pytest.mark.slow

TW, RW, DP, TWRW = (
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.DATA_PARALLEL.value,
    ShardingType.TABLE_ROW_WISE.value,
)
CW, TWCW, GRID = (
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
    ShardingType.GRID_SHARD.value,
)


def train_both(
    rank: int,
    types: dict[str, str],
    optimizer: str = "sgd",
    pooling: Pooling = PoolingType.SUM,
    is_weighted: bool = False,
    data: list[Any] | None = None,
) -> None:
    """Trains sharded and unsharded on the same data; asserts that both stay the same."""
    reference = unsharded(pooling=pooling, is_weighted=is_weighted)
    start_state = copy.deepcopy(reference.state_dict())
    model, optimizers = sharded(copy.deepcopy(reference), types, optimizer=optimizer)
    reference_optimizer = OPTIMIZERS[optimizer][1](reference.parameters())
    size = BATCH_SIZE * dist.get_world_size()
    start, stop = rank * BATCH_SIZE, (rank + 1) * BATCH_SIZE
    for step, batch in enumerate(data or batches(3, size=size)):
        output = model(kjt(batch, start=start, stop=stop, is_weighted=is_weighted))
        expected = reference(kjt(batch, start=0, stop=size, is_weighted=is_weighted))
        torch.testing.assert_close(output, expected[start:stop], rtol=1e-4, atol=1e-5)
        optimizers.zero_grad()
        reference_optimizer.zero_grad()
        output.square().mean().backward()
        expected.square().mean().backward()
        optimizers.step()
        reference_optimizer.step()
        if step == 0 and optimizer == "sgd":
            assert_steps_are_gradients(model, reference, start_state)
    trained = full_state(model.state_dict())
    assert set(trained) == set(start_state)
    for key, value in reference.state_dict().items():
        # Sums in another order, three optimizer steps deep.
        torch.testing.assert_close(trained[key], value, rtol=1e-4, atol=1e-5, msg=key)


def assert_steps_are_gradients(
    model: DistributedModelParallel, reference: Any, start_state: dict[str, Tensor]
) -> None:
    after = full_state(model.state_dict())
    for key, parameter in reference.named_parameters():
        gradient = (start_state[key] - after[key]) / LR
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5, msg=key)


# U15: `make test-versions` runs it on other versions of TorchRec.
# U34, U83
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("types", itertools.product([TW, RW, DP], repeat=2))
def test_sharded_training_equals_unsharded(
    two_ranks: Ranks, types: tuple[str, str], optimizer: str
) -> None:
    two_ranks.run(train_both, {"t0": types[0], "t1": types[1]}, optimizer)


@pytest.mark.parametrize("kind", [CW, TWCW, RW, DP])
def test_regular_tables_keep_every_stock_type_beside_tt_tables(two_ranks: Ranks, kind: str) -> None:
    two_ranks.run(train_both, {"t0": TW, "t1": RW, "r0": kind, "r1": TW})


@pytest.mark.parametrize("types", [(TW, RW), (DP, TW), (RW, DP)])
def test_weighted_training_equals_unsharded(two_ranks: Ranks, types: tuple[str, str]) -> None:
    two_ranks.run(train_both, {"t0": types[0], "t1": types[1]}, "adagrad", PoolingType.SUM, True)


MEANS = ["t0 t1 r0 r1", "t0 r0", "r0", "t1 r1"]  # f0 is read by t0 and r0


# U17
@pytest.mark.parametrize("means", MEANS)
def test_mean_pooling_equals_unsharded_in_any_mix(two_ranks: Ranks, means: str) -> None:
    for kinds in [
        (RW, RW, RW, RW),
        (TW, DP, DP, TW),
        (RW, TW, DP, RW),
        (DP, RW, RW, CW),
        (TW, TW, RW, TWCW),
    ]:
        types = dict(zip(["t0", "t1", "r0", "r1"], kinds, strict=True))
        pooling = dict.fromkeys(means.split(), PoolingType.MEAN)
        two_ranks.run(train_both, types, "sgd", pooling)


# U17
@pytest.mark.parametrize("means", MEANS[:2])
def test_mean_pooling_on_two_nodes_equals_unsharded(two_nodes: Ranks, means: str) -> None:
    for kinds in [(TWRW, TW, GRID, RW), (RW, TWRW, DP, GRID), (TWRW, TWRW, TWRW, CW)]:
        types = dict(zip(["t0", "t1", "r0", "r1"], kinds, strict=True))
        pooling = dict.fromkeys(means.split(), PoolingType.MEAN)
        two_nodes.run(train_both, types, "sgd", pooling)


def without_ids(batch: Any, *, start: int, stop: int) -> Any:
    """The batch with empty bags for samples `start` to `stop`."""
    lengths, ids = [], []
    for n, values in zip(*batch, strict=True):
        keep = torch.ones_like(n, dtype=torch.bool)
        keep[start:stop] = False
        ids.append(values[torch.repeat_interleave(keep, n)])
        lengths.append(torch.where(keep, n, 0))
    return lengths, ids


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_ranks_without_ids_take_part(two_ranks: Ranks, optimizer: str) -> None:
    """U20: no ids on rank 1, on rank 0, anywhere, and then some again."""
    size = 2 * BATCH_SIZE
    spans = [(BATCH_SIZE, size), (0, BATCH_SIZE), (0, size), (0, 0)]
    data = [
        without_ids(batch, start=a, stop=b)
        for batch, (a, b) in zip(batches(4, size=size), spans, strict=True)
    ]
    for types in ({"t0": TW, "t1": RW}, {"t0": RW, "t1": DP}):
        two_ranks.run(train_both, types, optimizer, PoolingType.SUM, False, data)


def table_wise_with_an_empty_rank(rank: int) -> tuple[int, int]:
    model, _ = sharded(unsharded(), {"t0": TW, "t1": TW, "r0": TW, "r1": TW})
    (batch,) = batches(1, size=BATCH_SIZE)
    features = kjt(batch, start=0, stop=0 if rank else BATCH_SIZE)
    pooled = model.module.ebc(features)
    return tuple(torch.cat([pooled[key] for key in OUTPUTS], dim=1).shape)


def test_u21_a_rank_with_batch_size_0_gets_an_empty_output(two_ranks: Ranks) -> None:
    assert two_ranks.run(table_wise_with_an_empty_rank) == [(BATCH_SIZE, 64), (0, 64)]


def replicas_after_20_steps(rank: int, optimizer: str, kind: str) -> list[Tensor]:
    model, optimizers = sharded(unsharded(), {"t0": kind, "t1": DP}, optimizer=optimizer)
    size = dist.get_world_size() * BATCH_SIZE
    for batch in batches(20, size=size):
        features = kjt(batch, start=rank * BATCH_SIZE, stop=(rank + 1) * BATCH_SIZE)
        optimizers.zero_grad()
        model(features).square().mean().backward()
        optimizers.step()
    cores = [p.detach() for k, p in model.named_parameters() if "tt_cores" in k and p.numel()]
    states = model.fused_optimizer.state_dict()["state"]
    sums = [local_part(s["sum"]) for k, s in states.items() if "tt_cores" in k and s]
    assert len(sums) == (len(cores) - 2 if optimizer == "adagrad" else 0)
    return [*cores, *sums]


def local_part(value: Tensor | ShardedTensor) -> Tensor:
    return value.local_shards()[0].tensor if isinstance(value, ShardedTensor) else value


def assert_bitwise_equal(first: list[Tensor], second: list[Tensor]) -> None:
    for a, b in zip(first, second, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_replicas_are_bitwise_equal_after_20_steps(two_ranks: Ranks, optimizer: str) -> None:
    first, second = two_ranks.run(replicas_after_20_steps, optimizer, RW)
    assert len(first) == (8 if optimizer == "adagrad" else 5)
    assert_bitwise_equal(first, second)


def test_replicas_of_a_node_are_bitwise_equal_after_20_steps(two_nodes: Ranks) -> None:
    on_ranks = two_nodes.run(replicas_after_20_steps, "adagrad", TWRW)
    assert sorted(len(values) for values in on_ranks) == [2, 2, 8, 8]  # t0 is on one node
    assert_bitwise_equal(on_ranks[0], on_ranks[1])
    assert_bitwise_equal(on_ranks[2], on_ranks[3])


def pooled_f3(model: DistributedModelParallel, features: KeyedJaggedTensor) -> Tensor:  # [B, 8]
    return torch.cat([model.module.ebc(features)["f3"]], dim=1)


def gradient_by_sgd(rank: int, kind: str, divides: bool) -> Tensor:
    """Lookups {2r, 2r + 1} on rank r, output gradient 0.5: the core gradient, by SGD of lr 1."""
    source = unsharded()
    model, _ = sharded(source, {"t0": kind, "t1": kind}, tt_sharder=sharder(learning_rate=1.0))
    ids = [2 * rank, 2 * rank + 1]
    features = KeyedJaggedTensor(
        keys=KEYS, values=torch.tensor(ids * 4), lengths=torch.tensor([2] * 4)
    )
    set_gradient_division(divides)
    try:
        (pooled_f3(model, features).sum() * 0.5).backward()
    finally:
        set_gradient_division(True)
    key = "ebc.embedding_bags.t1.tt_cores.1"
    return source.state_dict()[key] - full_state(model.state_dict())[key]


# U18
@pytest.mark.parametrize("divides", [True, False])
def test_core_gradients_are_the_mean_over_ranks_or_their_sum_as_torchrec_is_set(
    two_ranks: Ranks, divides: bool
) -> None:
    source = unsharded()
    whole = KeyedJaggedTensor(
        keys=KEYS, values=torch.arange(4).repeat(4), lengths=torch.tensor([4] * 4)
    )
    (source.ebc(whole)["f3"].sum() * 0.5).backward()
    expected = source.ebc.embedding_bags["t1"].tt_cores[1].grad / (2 if divides else 1)
    for kind in (TW, RW):
        for gradient in two_ranks.run(gradient_by_sgd, kind, divides):
            torch.testing.assert_close(gradient, expected)


def lower_precision_output(rank: int) -> float:
    codecs = get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
    )
    source = unsharded()
    half = TTEmbeddingBagCollectionSharder(
        fused_params=sharder().fused_params, qcomm_codecs_registry=codecs
    )
    (batch,) = batches(1, size=BATCH_SIZE)
    features = kjt(batch, start=0, stop=BATCH_SIZE)
    expected = source.ebc(features)["f3"]
    error = 0.0
    for kind in (TW, RW):
        model, _ = sharded(source, {"t0": kind, "t1": kind}, tt_sharder=half)
        output = pooled_f3(model, features)
        torch.testing.assert_close(output, expected, rtol=2e-3, atol=2e-3)  # half precision
        error = max(error, (output - expected).abs().max().item())
    return error


def test_qcomm_codecs_are_honoured(two_ranks: Ranks) -> None:
    for error in two_ranks.run(lower_precision_output):
        assert error > 1e-5  # in float32 the outputs agree to 1e-6: the codec was there


def pooled_int32(rank: int) -> None:
    source = unsharded()
    (batch,) = batches(1, size=BATCH_SIZE)
    features = kjt(batch, start=0, stop=BATCH_SIZE)
    narrow = KeyedJaggedTensor(
        keys=KEYS, values=features.values().int(), lengths=features.lengths().int()
    )
    for kind in (TW, RW, DP):
        model, _ = sharded(source, {"t0": kind, "t1": kind})
        assert torch.equal(model(narrow), model(features))


def test_int32_ids_and_lengths_give_the_same_output(two_ranks: Ranks) -> None:
    two_ranks.run(pooled_int32)


def train_rows_beyond_int32(rank: int, kind: str) -> None:
    """A step on a table of more than 2^31 rows, sharded and unsharded; both ranks have all ids."""
    config = TTEmbeddingBagConfig(
        name="t",
        num_embeddings=2**31 + 10,
        embedding_dim=8,
        feature_names=["f"],
        tt_ranks=[2, 2],
    )
    ids = torch.tensor([0, 9, 2**31 - 1, 2**31, 2**31 + 9])
    features = KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.ones_like(ids))
    source = nn.ModuleDict({"ebc": TTEmbeddingBagCollection([config])})
    model = nn.ModuleDict({"ebc": TTEmbeddingBagCollection([config], device="meta")})
    own = sharder(learning_rate=LR)
    model = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan_for(model, {"t": kind}, [own]), sharders=[own]
    )
    ebc = model.module["ebc"]
    ebc.load_state_dict(source["ebc"].state_dict())
    output, expected = ebc(features).wait()["f"], source["ebc"](features)["f"]
    torch.testing.assert_close(output, expected)
    cotangent = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    (output * cotangent).sum().backward()
    (expected * cotangent).sum().backward()
    after = full_state(ebc.state_dict())
    for key, value in source["ebc"].named_parameters():
        torch.testing.assert_close(after[key], value - LR * value.grad)


@pytest.mark.parametrize("kind", [TW, RW])
def test_u30_rows_beyond_int32_train_as_the_unsharded(two_ranks: Ranks, kind: str) -> None:
    two_ranks.run(train_rows_beyond_int32, kind)


def initial_values(rank: int, kind: str) -> dict[str, Tensor]:
    torch.manual_seed(7 + rank)  # rank 0's seed counts
    model, _ = sharded(unsharded(seed=7 + rank), {"t0": kind, "t1": kind}, load=False)
    return {k: v for k, v in full_state(model.state_dict()).items() if "tt_cores" in k}


def test_first_values_are_the_same_whatever_the_sharding(two_ranks: Ranks) -> None:
    torch.manual_seed(7)
    ebc = unsharded(seed=7).ebc
    ebc.reset_parameters()
    for kind in (TW, RW, DP):
        for values in two_ranks.run(initial_values, kind):
            assert len(values) == 5
            for key, value in values.items():
                assert torch.equal(value, ebc.state_dict()[key.removeprefix("ebc.")]), (kind, key)


def values_of_a_cpu_module(rank: int) -> dict[str, Tensor]:
    source = unsharded(seed=rank)
    sharders = [sharder()]
    plan = plan_for(on_meta(source), {"t0": TW, "t1": RW}, sharders)
    model = DistributedModelParallel(source, plan=plan, sharders=sharders)
    return {k: v for k, v in full_state(model.state_dict()).items() if "tt_cores" in k}


def test_a_module_with_values_keeps_those_of_rank_0(two_ranks: Ranks) -> None:
    expected = unsharded(seed=0).state_dict()
    for values in two_ranks.run(values_of_a_cpu_module):
        for key, value in values.items():
            assert torch.equal(value, expected[key]), key


def look_up_119(rank: int, kind: str, mode: BoundsCheckMode | None) -> Any:
    """Looks up the first id that the 119 rows of t1 do not have, though its cores could."""
    tt_sharder = sharder() if mode is None else sharder(bounds_check_mode=mode)
    source = unsharded()
    features = KeyedJaggedTensor(
        keys=KEYS, values=torch.tensor([0, 0, 0, 119]), lengths=torch.tensor([1] * 4)
    )
    try:
        model, _ = sharded(source, {"t0": kind, "t1": kind}, tt_sharder=tt_sharder)
        return pooled_f3(model, features).detach()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("kind", [TW, RW, DP])
def test_an_id_past_the_table_raises_though_the_cores_hold_it(one_rank: Ranks, kind: str) -> None:
    (message,) = one_rank.run(look_up_119, kind, None)
    assert "'t1'" in message
    assert "119" in message


@pytest.mark.parametrize("kind", [TW, RW, DP])
def test_u25_bounds_check_mode_ignore_reads_row_0(one_rank: Ranks, kind: str) -> None:
    row_0 = KeyedJaggedTensor(
        keys=KEYS, values=torch.zeros(4, dtype=torch.long), lengths=torch.tensor([1] * 4)
    )
    (output,) = one_rank.run(look_up_119, kind, BoundsCheckMode.IGNORE)
    torch.testing.assert_close(output, unsharded().ebc(row_0)["f3"].detach())


def test_a_bounds_check_mode_without_a_check_is_refused(one_rank: Ranks) -> None:
    (message,) = one_rank.run(look_up_119, TW, BoundsCheckMode.NONE)
    assert "bounds_check_mode must be one of ['FATAL', 'WARNING', 'IGNORE']" in message


# U83: as for 2 and 4 ranks, over gloo.
def test_three_ranks_train_as_the_unsharded() -> None:
    ranks = Ranks(3)
    try:
        ranks.run(train_both, {"t0": RW, "t1": TW, "r0": RW}, "adagrad")
        ranks.run(train_both, {"t0": DP, "t1": RW}, "sgd")
    finally:
        ranks.stop()


# U83
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_two_nodes_train_as_the_unsharded(two_nodes: Ranks, optimizer: str) -> None:
    for kinds in [(TWRW, TWRW), (TWRW, RW), (TW, TWRW), (DP, TWRW), (RW, DP)]:
        two_nodes.run(train_both, dict(zip(["t0", "t1"], kinds, strict=True)), optimizer)


def test_regular_tables_keep_every_stock_type_beside_tt_tables_of_two_nodes(
    two_nodes: Ranks,
) -> None:
    for kinds in [(TW, CW), (RW, TWCW), (DP, TWRW), (TWRW, GRID), (GRID, DP)]:
        two_nodes.run(train_both, {"t0": TWRW, "t1": RW, "r0": kinds[0], "r1": kinds[1]})


def test_a_single_rank_trains_as_the_unsharded(one_rank: Ranks) -> None:
    for kinds in itertools.product([TW, RW, DP], repeat=2):
        one_rank.run(train_both, {"t0": kinds[0], "t1": kinds[1]}, "adagrad")
