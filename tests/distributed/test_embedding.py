"""The sharded sequence collection computes and learns what the unsharded one does."""

import copy
import itertools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import CacheParams, ShardingType
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed import toy_model
from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import (
    BATCH_SIZE,
    KEYS,
    OPTIMIZERS,
    batches,
    full_state,
    kjt,
    plan_for,
)
from tests.distributed.toy_sequence_model import (
    OUTPUTS,
    ToySequenceModelWithLoss,
    on_meta,
    sharded,
    sharder,
    unsharded,
)
from torchrec_tt import RowCacheConfig, TTEmbeddingConfig
from torchrec_tt.distributed.embedding import ShardedTTEmbeddingCollection

pytestmark = pytest.mark.slow

TW, RW, DP = (
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.DATA_PARALLEL.value,
)
KINDS = (TW, RW, DP)


def train_both(
    rank: int, types: dict[str, str], optimizer: str = "sgd", data: list[Any] | None = None
) -> None:
    """Trains sharded and unsharded on the same data; asserts that both stay the same."""
    reference = unsharded()
    model, optimizers = sharded(copy.deepcopy(reference), types, optimizer=optimizer)
    reference_optimizer = OPTIMIZERS[optimizer][1](reference.parameters())
    size = BATCH_SIZE * dist.get_world_size()
    start, stop = rank * BATCH_SIZE, (rank + 1) * BATCH_SIZE
    for batch in data or batches(3, size=size):
        output = model(kjt(batch, start=start, stop=stop))
        expected = reference(kjt(batch, start=0, stop=size))
        torch.testing.assert_close(output, expected[start:stop], rtol=1e-4, atol=1e-5)
        optimizers.zero_grad()
        reference_optimizer.zero_grad()
        output.square().mean().backward()
        expected.square().mean().backward()
        optimizers.step()
        reference_optimizer.step()
    trained = full_state(model.state_dict())
    assert set(trained) == set(reference.state_dict())
    for key, value in reference.state_dict().items():
        # Sums in another order, three optimizer steps deep.
        torch.testing.assert_close(trained[key], value, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("types", itertools.product(KINDS, repeat=2))
def test_sharded_training_equals_unsharded(two_ranks: Ranks, types: tuple[str, str]) -> None:
    two_ranks.run(train_both, {"t0": types[0], "t1": types[1]}, "sgd")
    if types[0] == types[1]:
        two_ranks.run(train_both, {"t0": types[0], "t1": types[1]}, "adagrad")


@pytest.mark.parametrize("kind", ["table_wise", "column_wise", "row_wise"])
def test_regular_tables_keep_every_stock_type_beside_tt_tables(two_ranks: Ranks, kind: str) -> None:
    two_ranks.run(train_both, {"t0": RW, "t1": TW, "r0": kind, "r1": kind})


def test_a_single_rank_trains_as_the_unsharded(one_rank: Ranks) -> None:
    for kind in KINDS:
        one_rank.run(train_both, {"t0": kind, "t1": kind}, "adagrad")


def plan_with_a_cache(rank: int) -> str:
    """A plan's row cache for a table of sequences is refused before any collective."""
    model, sharders = on_meta(unsharded()), [sharder()]
    plan = plan_for(model, {"t0": RW, "t1": TW}, sharders)
    plan.plan["ec"]["t0"].cache_params = CacheParams(load_factor=0.2)
    with pytest.raises(ValueError, match="cache_params") as error:
        DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    return str(error.value)


def test_a_row_cache_of_a_sequence_table_is_refused_by_name_on_every_rank(two_ranks: Ranks) -> None:
    with pytest.raises(TypeError, match="cache"):
        TTEmbeddingConfig(
            num_embeddings=100,
            embedding_dim=8,
            feature_names=["f"],
            tt_ranks=[2],
            cache=RowCacheConfig(num_rows=8),
        )
    for message in two_ranks.run(plan_with_a_cache):
        assert "must be None for a Tensor-Train table of sequences, got" in message
        assert "for table 't0': only pooled tables have row caches" in message


def global_batch(ids: dict[str, list[list[int]]]) -> tuple[list[Tensor], list[Tensor]]:
    """The sequences of every sample, per feature; features that are left out have no ids."""
    size = 2 * BATCH_SIZE
    sequences = [ids.get(key, [[]] * size) for key in KEYS]
    lengths = [torch.tensor([len(s) for s in samples]) for samples in sequences]
    values = [
        torch.tensor([i for s in samples for i in s], dtype=torch.long) for samples in sequences
    ]
    return lengths, values


FIRST = [[3, 9, 3], *[[]] * (BATCH_SIZE - 1)]  # samples of rank 0
LAST = [*[[]] * (BATCH_SIZE - 1), [7] * 20]  # samples of rank 1
NONE = [[]] * BATCH_SIZE


@pytest.mark.parametrize("types", [(TW, RW), (RW, DP), (DP, TW)])
def test_ranks_without_ids_and_repeated_ids_train_as_the_unsharded(
    two_ranks: Ranks, types: tuple[str, str]
) -> None:
    data = [
        global_batch(dict.fromkeys(KEYS, FIRST + NONE)),
        global_batch({}),
        global_batch(dict.fromkeys(KEYS, NONE + LAST)),
        global_batch({"f3": FIRST + LAST, "f0": NONE + LAST}),
    ]
    two_ranks.run(train_both, {"t0": types[0], "t1": types[1]}, "sgd", data)


def same_output_as_stock(rank: int, types: dict[str, str]) -> None:
    """Compares with TorchRec's sharded collection of the same rows, stored."""
    source = unsharded(need_indices=True)
    configs = [
        EmbeddingConfig(
            name=c.name,
            num_embeddings=c.num_embeddings,
            embedding_dim=c.embedding_dim,
            feature_names=c.feature_names,
        )
        for c in source.ec.embedding_configs()
    ]
    dense = EmbeddingCollection(tables=configs, need_indices=True)
    for name, table in source.ec.embeddings.items():
        weight = table.to_dense() if hasattr(table, "tt_cores") else table.weight
        dense.embeddings[name].weight.data.copy_(weight.detach())
    model, _ = sharded(source, types)
    stock = DistributedModelParallel(dense, device=torch.device("cpu"), init_parameters=False)
    (batch,) = batches(1, size=2 * BATCH_SIZE)
    features = kjt(batch, start=rank * BATCH_SIZE, stop=(rank + 1) * BATCH_SIZE)
    output, expected = dict(model.module.ec(features)), dict(stock(features))
    assert set(output) == set(expected) == set(OUTPUTS)
    for key, rows in output.items():
        torch.testing.assert_close(rows.values(), expected[key].values(), rtol=1e-4, atol=1e-5)
        assert torch.equal(rows.lengths(), expected[key].lengths())
        assert torch.equal(rows.weights(), expected[key].weights())


def test_output_is_that_of_the_stock_sharded_collection(two_ranks: Ranks) -> None:
    for kind in KINDS:
        two_ranks.run(same_output_as_stock, {"t0": kind, "t1": kind})


def train_uneven(rank: int, types: dict[str, str]) -> None:
    """A step in which rank 0 has 8 samples and rank 1 has 3."""
    reference = unsharded()
    model, optimizers = sharded(copy.deepcopy(reference), types)
    (batch,) = batches(1, size=11)
    start, stop = ((0, 8), (8, 11))[rank]
    output = model(kjt(batch, start=start, stop=stop))
    expected = reference(kjt(batch, start=0, stop=11))
    torch.testing.assert_close(output, expected[start:stop], rtol=1e-4, atol=1e-5)
    optimizers.zero_grad()
    output.square().sum().backward()
    optimizers.step()
    (expected.square().sum() / 2).backward()  # TorchRec means over the ranks
    OPTIMIZERS["sgd"][1](reference.parameters()).step()
    trained = full_state(model.state_dict())
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(trained[key], value, rtol=1e-4, atol=1e-4, msg=key)


def test_batches_of_other_sizes_on_other_ranks_train_as_the_unsharded(two_ranks: Ranks) -> None:
    for kind in KINDS:
        two_ranks.run(train_uneven, {"t0": kind, "t1": kind, "r0": "row_wise"})


VBE: dict[str, Any] = {  # distinct samples: 1 of f0, 2 of f1, 1 of f2, 2 of f3
    "keys": KEYS,
    "lengths": torch.tensor([2, 1, 0, 3, 1, 2]),
    "stride_per_key_per_rank": [[1], [2], [1], [2]],
}
INVERSE = torch.tensor([[0, 0, 0], [1, 0, 1], [0, 0, 0], [1, 1, 0]])


def vbe_rows(rank: int, kind: str) -> None:
    """Compares with the rows of the distinct samples, each where the batch of 3 has it."""
    source = unsharded()
    model, _ = sharded(source, {"t0": kind, "t1": kind})
    features = KeyedJaggedTensor(
        **VBE, values=10 * rank + torch.arange(9), inverse_indices=(KEYS, INVERSE)
    )
    output, distinct = model.module.ec(features), source.ec(features)
    for key in OUTPUTS:
        rows = distinct[key].values().split(distinct[key].lengths().tolist())
        order = INVERSE[KEYS.index(key.partition("@")[0])].tolist()
        torch.testing.assert_close(output[key].values(), torch.cat([rows[i] for i in order]))
        assert output[key].lengths().tolist() == [len(rows[i]) for i in order]


def test_variable_batch_sizes_are_expanded_as_by_torchrec(two_ranks: Ranks) -> None:
    for kind in KINDS:
        two_ranks.run(vbe_rows, kind)


def vbe_refusal(rank: int) -> str:
    model, _ = sharded(unsharded(), {"t0": TW, "t1": RW})
    with pytest.raises(ValueError, match="must have inverse_indices") as error:
        model(KeyedJaggedTensor(**VBE, values=torch.arange(9)))
    return str(error.value)


def test_variable_batch_sizes_without_their_places_are_refused(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(vbe_refusal)
    assert first == second


def look_up_119(rank: int, kind: str, mode: BoundsCheckMode | None) -> Any:
    """Looks up the first id that the 119 rows of t1 do not have, though its cores could."""
    fused_params = {} if mode is None else {"bounds_check_mode": mode}
    features = KeyedJaggedTensor(
        keys=KEYS, values=torch.tensor([0, 0, 0, 119]), lengths=torch.tensor([1] * 4)
    )
    tt_sharder = sharder(fused_params=fused_params)
    model, _ = sharded(unsharded(), {"t0": kind, "t1": kind}, tt_sharder=tt_sharder)
    try:
        return model.module.ec(features)["f3"].values().detach()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_past_the_table_raises_though_the_cores_hold_it(one_rank: Ranks, kind: str) -> None:
    (message,) = one_rank.run(look_up_119, kind, None)
    assert "'t1'" in message
    assert "119" in message


def test_an_id_past_a_row_wise_table_raises_where_it_is_given(two_ranks: Ranks) -> None:
    for message in two_ranks.run(look_up_119, RW, None):
        assert message == "indices must be in [0, 119) for table 't1', got 119"


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_check_mode_ignore_reads_row_0(one_rank: Ranks, kind: str) -> None:
    (rows,) = one_rank.run(look_up_119, kind, BoundsCheckMode.IGNORE)
    torch.testing.assert_close(rows, unsharded().ec.embeddings["t1"].to_dense()[:1].detach())


def pipelined_and_not(rank: int) -> int:
    """Trains with and without a pipeline; returns how many modules were pipelined."""
    types = {"t0": TW, "t1": RW}
    source = unsharded()
    plain, plain_optimizer = sharded(source, types, optimizer="adagrad")
    with_loss = ToySequenceModelWithLoss(source.ec)
    with_loss.over = source.over
    piped, piped_optimizer = sharded(with_loss, types, optimizer="adagrad")
    data = [
        kjt(batch, start=rank * BATCH_SIZE, stop=(rank + 1) * BATCH_SIZE)
        for batch in batches(4, size=2 * BATCH_SIZE)
    ]
    pipeline = TrainPipelineSparseDist(piped, piped_optimizer, torch.device("cpu"))
    iterator = iter(data)
    for features in data:
        output = pipeline.progress(iterator)
        plain_optimizer.zero_grad()
        expected = plain(features)
        expected.square().mean().backward()
        plain_optimizer.step()
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    return len(pipeline._pipelined_modules)


def test_pipelined_training_equals_unpipelined(two_ranks: Ranks) -> None:
    assert two_ranks.run(pipelined_and_not) == [1, 1]


def applied_in_backward(rank: int, kind: str) -> dict[str, Tensor]:
    """Trains a step with an optimizer that the model brings, not the sharder."""
    source = unsharded()
    meta = on_meta(source)
    apply_optimizer_in_backward(
        torch.optim.Adagrad, meta.ec.embeddings["t1"].parameters(), {"lr": 0.5, "eps": 1.0}
    )
    sharders = [sharder()]
    plan = plan_for(meta, {"t0": kind, "t1": kind}, sharders)
    with pytest.warns(UserWarning, match="precedes the sharder's fused_params"):
        model = DistributedModelParallel(
            meta, device=torch.device("cpu"), plan=plan, sharders=sharders
        )
    model.load_state_dict(source.state_dict())
    (batch,) = batches(1, size=2 * BATCH_SIZE)
    features = kjt(batch, start=rank * BATCH_SIZE, stop=(rank + 1) * BATCH_SIZE)
    model(features).square().mean().backward()
    return {k: v for k, v in full_state(model.state_dict()).items() if ".t1.tt_cores" in k}


def test_an_optimizer_applied_in_backward_steps_instead_of_the_sharders(two_ranks: Ranks) -> None:
    reference = unsharded()
    cores = list(reference.ec.embeddings["t1"].parameters())
    (batch,) = batches(1, size=2 * BATCH_SIZE)
    reference(kjt(batch, start=0, stop=2 * BATCH_SIZE)).square().mean().backward()
    torch.optim.Adagrad(cores, lr=0.5, eps=1.0).step()  # eps: smooth where gradients are 0
    for kind in (TW, RW):
        for state in two_ranks.run(applied_in_backward, kind):
            for value, core in zip(state.values(), cores, strict=True):
                torch.testing.assert_close(value, core.detach(), rtol=1e-4, atol=1e-5)


def half_precision(rank: int, types: dict[str, str]) -> dict[str, Tensor]:
    """Checks the rows of bfloat16 cores, and returns the cores after some steps."""
    source = unsharded(data_type=DataType.BF16)
    model, optimizers = sharded(source, types, optimizer="adagrad")
    data = [
        kjt(batch, start=rank * BATCH_SIZE, stop=(rank + 1) * BATCH_SIZE)
        for batch in batches(3, size=2 * BATCH_SIZE)
    ]
    rows, expected = model.module.ec(data[0]).wait(), source.ec(data[0])
    for key in OUTPUTS:
        assert rows[key].values().dtype == torch.float32
        torch.testing.assert_close(rows[key].values(), expected[key].values())
    for features in data:
        optimizers.zero_grad()
        model(features).square().mean().backward()
        optimizers.step()
    return {k: v.detach() for k, v in model.named_parameters() if "tt_cores" in k and v.numel()}


def test_bfloat16_cores_give_float32_rows_and_equal_replicas(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(half_precision, {"t0": RW, "t1": DP})
    assert len(first) == 5
    for key, value in first.items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, second[key]), key
    two_ranks.run(half_precision, {"t0": TW, "t1": TW})


def refusal(rank: int, types: dict[str, str], arguments: dict[str, Any]) -> str:
    """The error of planning or sharding."""
    with pytest.raises((ValueError, NotImplementedError)) as error:
        sharded(unsharded(), types, tt_sharder=sharder(**arguments))
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize(
    ("types", "arguments", "message"),
    [
        ({"t1": "column_wise"}, {}, "sharding_type must be .*'column_wise' for table 't1'"),
        ({"t0": "table_row_wise"}, {}, "sharding_type must be .*'table_row_wise' for table 't0'"),
        ({"r1": DP}, {}, "sharding_type must not be 'data_parallel' .* on the CPU.* table 'r1'"),
        ({"t0": TW}, {"use_index_dedup": True}, "NotImplementedError: use_index_dedup must be"),
        ({"t0": RW}, {"fused_params": {"optimiser": 1}}, "the nearest is 'optimizer'"),
        ({"t0": TW}, {"fused_params": {"max_norm": 1.0}}, "'max_norm'. must be unset"),
    ],
)
def test_what_a_sequence_table_cannot_have_is_refused_on_every_rank(
    two_ranks: Ranks, types: dict[str, str], arguments: dict[str, Any], message: str
) -> None:
    first, second = two_ranks.run(refusal, types, arguments)
    assert first == second
    assert re.search(message, first), first


def reshard(rank: int, kind: str) -> None:
    model = sharded(unsharded(), {"t0": kind, "t1": kind})[0]
    (collection,) = (m for m in model.modules() if isinstance(m, ShardedTTEmbeddingCollection))
    with pytest.raises(NotImplementedError, match=r"got \['t0', 't1'\]; save it with"):
        sharder().reshard(collection, {}, None)


def test_resharding_in_place_is_refused(one_rank: Ranks) -> None:
    one_rank.run(reshard, TW)


def planned(rank: int) -> dict[str, tuple[str, str]]:
    """The planner's choice for a model with a pooled and a sequence collection."""
    pooled, sequence = toy_model.unsharded(), unsharded()
    meta = TwoCollections(toy_model.on_meta(pooled), on_meta(sequence))
    sharders = [toy_model.sharder(), sharder()]
    plan = plan_for(meta, {}, sharders)
    model = DistributedModelParallel(meta, device=torch.device("cpu"), plan=plan, sharders=sharders)
    reference = TwoCollections(pooled, sequence)
    model.load_state_dict(reference.state_dict())
    (batch,) = batches(1, size=2 * BATCH_SIZE)
    features = kjt(batch, start=rank * BATCH_SIZE, stop=(rank + 1) * BATCH_SIZE)
    torch.testing.assert_close(model(features), reference(features), rtol=1e-4, atol=1e-5)
    choice = plan.plan["sequence.ec"]
    return {name: (p.compute_kernel, p.sharding_type) for name, p in choice.items()}


class TwoCollections(nn.Module):
    def __init__(self, pooled: nn.Module, sequence: nn.Module) -> None:
        super().__init__()
        self.pooled, self.sequence = pooled, sequence

    def forward(self, features: KeyedJaggedTensor) -> Tensor:  # [B, 1]
        return self.pooled(features) + self.sequence(features)


def test_the_planner_plans_sequence_tables_beside_pooled_ones(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(planned)
    assert first == second
    for table in ("t0", "t1"):
        kernel, kind = first[table]
        assert kernel == "customized_kernel"
        assert kind in KINDS
    assert {first[table][0] for table in ("r0", "r1")} <= {"fused", "dense"}
