"""Plain arithmetic of what a plan counts for a TT table."""

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Topology
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from torchrec_tt import TTEmbeddingBagCollection, TTEmbeddingBagCollectionSharder
from torchrec_tt.distributed.planner.enumerators import TTEmbeddingEnumerator
from torchrec_tt.distributed.planner.shard_estimators import TTPerfEstimator, TTStorageEstimator
from torchrec_tt.modules.embedding_configs import TTEmbeddingBagConfig

TW, RW, DP, TWRW = (
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.DATA_PARALLEL.value,
    ShardingType.TABLE_ROW_WISE.value,
)
# U03: 200*4*16 + 220*16*4*16 + 250*16*4 = 254,080 floats
CORE_BYTES = 1_016_320
ROWS, DIM, BATCH_SIZE, POOLING_FACTOR = 10_000_000, 64, 128, 10


def model(data_type: DataType = DataType.FP32) -> nn.Module:
    big = TTEmbeddingBagConfig(
        name="big",
        num_embeddings=ROWS,
        embedding_dim=DIM,
        feature_names=["f"],
        tt_ranks=[16, 16],
        row_factors=[200, 220, 250],
        col_factors=[4, 4, 4],
        data_type=data_type,
    )
    regular = EmbeddingBagConfig(
        name="regular", num_embeddings=1000, embedding_dim=DIM, feature_names=["g"]
    )
    return nn.Sequential(TTEmbeddingBagCollection([big, regular], device="meta"))


def topology(device: str = "cpu", world_size: int = 2) -> Topology:
    return Topology(world_size=world_size, local_world_size=world_size, compute_device=device)


def options(
    optimizer: EmbOptimType = EmbOptimType.EXACT_SGD,
    *,
    on: Topology | None = None,
    module: nn.Module | None = None,
    **fused_params: Any,
) -> dict[tuple[str, str], ShardingOption]:
    """The enumerated options by table and sharding type."""
    on = on or topology()
    constraints = {"big": ParameterConstraints(pooling_factors=[POOLING_FACTOR])}
    estimators = [TTPerfEstimator(on, constraints), TTStorageEstimator(on, constraints)]
    enumerator = TTEmbeddingEnumerator(
        on, batch_size=BATCH_SIZE, constraints=constraints, estimator=estimators
    )
    sharder = TTEmbeddingBagCollectionSharder({"optimizer": optimizer, **fused_params})
    found = enumerator.enumerate(module or model(), [sharder])
    return {(option.name, option.sharding_type): option for option in found}


def ddr(option: ShardingOption) -> list[int]:
    return [shard.storage.ddr for shard in option.shards]


def io_bytes(*, batches: int, outputs: int) -> int:
    """int64 ids and float32 pooled rows of that many ranks' batches, as TorchRec counts them."""
    return batches * BATCH_SIZE * POOLING_FACTOR * 8 + outputs * BATCH_SIZE * DIM * 4


def test_u03_a_table_wise_shard_is_cores_and_io_and_nothing_else() -> None:
    assert ddr(options()["big", TW]) == [CORE_BYTES + io_bytes(batches=2, outputs=2)]


def test_a_row_wise_shard_is_whole_cores_and_their_gradients() -> None:
    shard = 2 * CORE_BYTES + io_bytes(batches=1, outputs=2)
    assert ddr(options()["big", RW]) == [shard, shard]


def test_table_row_wise_shards_are_whole_cores_and_their_gradients_on_one_node() -> None:
    on = Topology(world_size=4, local_world_size=2, compute_device="cpu")
    option = options(on=on)["big", TWRW]
    # Two ranks hold the cores; each serves half of the ids of four batches.
    shard = 2 * CORE_BYTES + io_bytes(batches=2, outputs=4)
    assert ddr(option) == [shard, shard]
    perf, row_wise = option.shards[0].perf, options(on=on)["big", RW].shards[0].perf
    bandwidth = on.comms_bandwidths.inter_host_bw * 2
    stock = stock_options(on)["big", TWRW].shards[0].perf
    assert perf.bwd_comms - stock.bwd_comms == pytest.approx(CORE_BYTES / bandwidth)
    assert perf.fwd_compute > row_wise.fwd_compute  # there four ranks share the ids


def test_a_row_wise_shard_on_one_rank_has_no_gradients() -> None:
    found = options(on=topology(world_size=1))
    assert ddr(found["big", RW]) == [CORE_BYTES + io_bytes(batches=1, outputs=1)]


def test_a_data_parallel_shard_is_whole_cores_and_their_gradients() -> None:
    shard = 2 * CORE_BYTES + io_bytes(batches=1, outputs=1)
    assert ddr(options(EmbOptimType.EXACT_ADAGRAD)["big", DP]) == [shard, shard]


def test_u04_adagrad_adds_the_bytes_of_the_cores_where_backward_steps() -> None:
    sgd, adagrad = options(), options(EmbOptimType.EXACT_ADAGRAD)
    for kind in (TW, RW):
        more = zip(ddr(adagrad["big", kind]), ddr(sgd["big", kind]), strict=True)
        assert all(a - b == CORE_BYTES for a, b in more)
    assert ddr(adagrad["big", DP]) == ddr(sgd["big", DP])  # the user's optimizer is not known


def test_16_bit_cores_take_half_the_bytes_and_nothing_else_changes() -> None:
    half = options(EmbOptimType.EXACT_ADAGRAD, module=model(DataType.BF16))
    full = options(EmbOptimType.EXACT_ADAGRAD)
    for kind in (TW, RW, DP):
        fewer = zip(ddr(full["big", kind]), ddr(half["big", kind]), strict=True)
        assert all(a - b == CORE_BYTES // 2 for a, b in fewer)
        perf, expected = half["big", kind].shards[0].perf, full["big", kind].shards[0].perf
        assert perf.fwd_comms == expected.fwd_comms
    perf, expected = half["big", DP].shards[0].perf, full["big", DP].shards[0].perf
    assert perf.bwd_comms == pytest.approx(expected.bwd_comms / 2)  # gradients like the cores


def test_u04_an_optimizer_applied_in_backward_counts_instead_of_the_sharders() -> None:
    module = model()
    apply_optimizer_in_backward(
        torch.optim.Adagrad, module[0].embedding_bags["big"].parameters(), {"lr": 0.1}
    )
    applied = ddr(options(EmbOptimType.EXACT_SGD, module=module)["big", TW])
    assert applied == ddr(options(EmbOptimType.EXACT_ADAGRAD)["big", TW])


def test_an_optimizer_that_cores_cannot_have_raises_when_planning() -> None:
    with pytest.raises(ValueError, match=r"EXACT_ADAGRAD.*got .*LAMB"):
        options(EmbOptimType.LAMB)


def test_an_optimizer_that_steps_every_slice_adds_dense_gradients() -> None:
    sgd, adam = options(), options(EmbOptimType.ADAM)
    assert ddr(adam["big", TW])[0] - ddr(sgd["big", TW])[0] == 3 * CORE_BYTES  # 2 moments
    assert ddr(adam["big", RW])[0] - ddr(sgd["big", RW])[0] == 2 * CORE_BYTES  # there anyway
    decayed = options(weight_decay=0.1)
    assert ddr(decayed["big", TW])[0] - ddr(sgd["big", TW])[0] == CORE_BYTES


def test_core_bytes_are_those_of_the_real_cores() -> None:
    config = model()[0].embedding_bag_configs()[0]
    cores = TTEmbeddingBagCollection([config]).embedding_bags["big"].tt_cores
    assert sum(core.nbytes for core in cores) == CORE_BYTES


def test_on_cuda_the_cores_are_in_hbm() -> None:
    (shard,) = options(on=topology("cuda"))["big", TW].shards
    assert shard.storage.hbm == CORE_BYTES + io_bytes(batches=2, outputs=2)


def stock_options(on: Topology) -> dict[tuple[str, str], ShardingOption]:
    estimators = [EmbeddingPerfEstimator(on), EmbeddingStorageEstimator(on)]
    enumerator = EmbeddingEnumerator(on, batch_size=BATCH_SIZE, estimator=estimators)
    found = enumerator.enumerate(model(), [TTEmbeddingBagCollectionSharder()])
    return {(option.name, option.sharding_type): option for option in found}


def test_regular_tables_cost_what_torchrec_says() -> None:
    found, stock = options(), stock_options(topology())
    for kind in (TW, DP):
        for ours, theirs in zip(
            found["regular", kind].shards, stock["regular", kind].shards, strict=True
        ):
            assert ours.storage == theirs.storage
            assert ours.perf == theirs.perf


def test_u02_every_option_has_a_cost_in_time() -> None:
    for option in options().values():
        for shard in option.shards:
            assert shard.perf.total > 0


def test_time_counts_flops_on_top_of_dense_rows_and_core_bytes_in_the_all_reduce() -> None:
    found = options()
    stock = stock_options(topology())["big", TW].shards[0].perf
    table_wise, row_wise = found["big", TW].shards[0].perf, found["big", RW].shards[0].perf
    data_parallel = found["big", DP].shards[0].perf
    assert table_wise.fwd_compute > stock.fwd_compute
    assert table_wise.bwd_compute > table_wise.fwd_compute
    assert table_wise.fwd_compute > row_wise.fwd_compute  # it serves both ranks' batches
    assert data_parallel.fwd_comms == 0
    # A ring of two moves each byte once; TorchRec's default is 12.5 GB/s per rank between hosts.
    bandwidth = topology().comms_bandwidths.inter_host_bw * 2
    assert data_parallel.bwd_comms == pytest.approx(CORE_BYTES / bandwidth)


def test_higher_ranks_cost_more_time_and_memory() -> None:
    on = topology()
    costs = []
    for rank in (4, 16, 64):
        config = TTEmbeddingBagConfig(
            name="big", num_embeddings=ROWS, embedding_dim=DIM, tt_ranks=[rank, rank]
        )
        module = nn.Sequential(TTEmbeddingBagCollection([config], device="meta"))
        (shard,) = options(on=on, module=module)["big", TW].shards
        costs.append((shard.storage.ddr, shard.perf.total))
    assert costs == sorted(costs)
    assert len(set(costs)) == 3
