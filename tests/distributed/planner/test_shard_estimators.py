"""Plain arithmetic of what a plan counts for a TT table."""

import math
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.planner.constants import DDR_MEM_BW
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
from torchrec_tt.distributed.planner.hardware import DENSE_UPDATE_PASSES, KNOWN, with_speeds
from torchrec_tt.distributed.planner.row_cache import row_cache_ms
from torchrec_tt.distributed.planner.shard_estimators import (
    TTPerfEstimator,
    TTStorage,
    TTStorageEstimator,
)
from torchrec_tt.modules.embedding_configs import TTEmbeddingBagConfig
from torchrec_tt.modules.row_cache_config import RowCacheConfig
from torchrec_tt.optim import TTOptimizerConfig
from torchrec_tt.tt.cost import step_work
from torchrec_tt.tt.traffic import Traffic, expected_prefixes
from torchrec_tt.tt.workspace import workspace_bytes

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


def constraints() -> dict[str, ParameterConstraints]:
    return {"big": ParameterConstraints(pooling_factors=[POOLING_FACTOR])}


def options(
    optimizer: EmbOptimType = EmbOptimType.EXACT_SGD,
    *,
    on: Topology | None = None,
    module: nn.Module | None = None,
    traffic: dict[str, Traffic] | None = None,
    **fused_params: Any,
) -> dict[tuple[str, str], ShardingOption]:
    """The enumerated options by table and sharding type."""
    on = on or topology()
    estimators = [
        TTPerfEstimator(on, constraints(), traffic=traffic),
        TTStorageEstimator(on, constraints(), traffic=traffic),
    ]
    enumerator = TTEmbeddingEnumerator(
        on, batch_size=BATCH_SIZE, constraints=constraints(), estimator=estimators
    )
    sharder = TTEmbeddingBagCollectionSharder({"optimizer": optimizer, **fused_params})
    found = enumerator.enumerate(module or model(), [sharder])
    return {(option.name, option.sharding_type): option for option in found}


def ddr(option: ShardingOption) -> list[int]:
    return [shard.storage.ddr for shard in option.shards]


def io_bytes(*, batches: int, outputs: int) -> int:
    """int64 ids and float32 pooled rows of that many ranks' batches, as TorchRec counts them."""
    return batches * BATCH_SIZE * POOLING_FACTOR * 8 + outputs * BATCH_SIZE * DIM * 4


def workspace(*, batches: float, bags: int, rows: int = ROWS) -> int:
    """What a step on that many ranks' ids allocates, ids following Zipf's law over `rows` rows."""
    num_indices = round(batches * BATCH_SIZE * POOLING_FACTOR)
    num_rows = Traffic().expected_unique(num_indices, num_values=rows)
    num_prefixes = expected_prefixes(num_rows, num_values=rows, num_prefixes=200 * 220)
    peak = workspace_bytes(
        model()[0].tt_shapes["big"],
        num_indices=num_indices,
        num_rows=math.ceil(num_rows),
        num_prefixes=math.ceil(num_prefixes),
        num_bags=bags * BATCH_SIZE,
    )
    return peak.kept + max(peak.plan, peak.forward, peak.backward)


def test_u03_a_table_wise_shard_is_cores_workspace_and_io_and_nothing_else() -> None:
    used = CORE_BYTES + workspace(batches=2, bags=2)
    assert ddr(options()["big", TW]) == [used + io_bytes(batches=2, outputs=2)]


def test_the_workspace_is_less_than_the_rows_of_the_batch_twice() -> None:
    rows = 2 * BATCH_SIZE * POOLING_FACTOR
    assert workspace(batches=2, bags=2) < 2 * 4 * DIM * rows


def test_a_row_wise_shard_is_whole_cores_and_their_gradients() -> None:
    shard = 2 * CORE_BYTES + io_bytes(batches=1, outputs=2)
    shard += workspace(batches=1, bags=2, rows=ROWS // 2)
    assert ddr(options()["big", RW]) == [shard, shard]


def test_table_row_wise_shards_are_whole_cores_and_their_gradients_on_one_node() -> None:
    on = Topology(world_size=4, local_world_size=2, compute_device="cpu")
    option = options(on=on)["big", TWRW]
    # Two ranks hold the cores; each serves half of the ids of four batches.
    shard = 2 * CORE_BYTES + io_bytes(batches=2, outputs=4)
    shard += workspace(batches=2, bags=4, rows=ROWS // 2)
    assert ddr(option) == [shard, shard]
    perf, row_wise = option.shards[0].perf, options(on=on)["big", RW].shards[0].perf
    assert perf.fwd_compute > row_wise.fwd_compute  # there four ranks share the ids


def test_core_gradients_are_summed_within_a_node_or_between_nodes() -> None:
    """A ring of W ranks moves every byte 2 (W - 1) / W times."""
    on = Topology(world_size=4, local_world_size=2, compute_device="cpu")
    found, stock = options(on=on), stock_options(with_speeds(on, KNOWN["cpu"]))
    cpu = KNOWN["cpu"]
    one_node = found["big", TWRW].shards[0].perf.bwd_comms
    assert one_node - stock["big", TWRW].shards[0].perf.bwd_comms == pytest.approx(
        CORE_BYTES / cpu.all_reduce_bytes_per_ms
    )
    # Two ranks of a node share its links to the other.
    between = min(cpu.all_reduce_bytes_per_ms, 2 * cpu.inter_node_bytes_per_ms)
    assert found["big", DP].shards[0].perf.bwd_comms == pytest.approx(
        2 * 3 / 4 * CORE_BYTES / between
    )


def test_a_row_wise_shard_on_one_rank_has_no_gradients() -> None:
    found = options(on=topology(world_size=1))
    used = CORE_BYTES + workspace(batches=1, bags=1)
    assert ddr(found["big", RW]) == [used + io_bytes(batches=1, outputs=1)]


def test_a_data_parallel_shard_is_whole_cores_and_their_gradients() -> None:
    shard = 2 * CORE_BYTES + io_bytes(batches=1, outputs=1) + workspace(batches=1, bags=1)
    assert ddr(options(EmbOptimType.EXACT_ADAGRAD)["big", DP]) == [shard, shard]


def test_u04_adagrad_adds_the_bytes_of_the_cores_where_backward_steps() -> None:
    sgd, adagrad = options(), options(EmbOptimType.EXACT_ADAGRAD)
    for kind in (TW, RW):
        more = zip(ddr(adagrad["big", kind]), ddr(sgd["big", kind]), strict=True)
        assert all(a - b == CORE_BYTES for a, b in more)
    assert ddr(adagrad["big", DP]) == ddr(sgd["big", DP])  # the user's optimizer is not known
    row_wise = options(EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    for kind in (TW, RW):
        more = zip(ddr(row_wise["big", kind]), ddr(sgd["big", kind]), strict=True)
        assert all(a - b == (200 + 220 + 250) * 4 for a, b in more)  # a number a slice


def storages(*, module: nn.Module | None = None, **kwargs: Any) -> dict[str, TTStorage]:
    """The parts of the TT table's bytes by sharding type."""
    estimator = TTStorageEstimator(topology(), constraints())
    fused_params = {"optimizer": EmbOptimType.EXACT_SGD, **kwargs}
    return {
        kind: estimator.table_storage(option, option.shards[0], fused_params=fused_params)
        for (name, kind), option in options(module=module, **kwargs).items()
        if name == "big"
    }


def test_16_bit_cores_take_half_the_bytes() -> None:
    adagrad = {"optimizer": EmbOptimType.EXACT_ADAGRAD}
    half, full = storages(module=model(DataType.BF16), **adagrad), storages(**adagrad)
    for kind in (TW, RW, DP):
        assert half[kind].cores == full[kind].cores // 2 == CORE_BYTES // 2
        assert half[kind].optimizer == full[kind].optimizer  # state and gradients are float32
        assert half[kind].gradients == full[kind].gradients


def test_16_bit_cores_send_float32_rows_and_gradients_like_the_optimizer_wants_them() -> None:
    half, full = options(module=model(DataType.BF16)), options()
    for kind in (TW, RW, DP):
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


# U04
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
    used = CORE_BYTES + workspace(batches=2, bags=2)
    assert shard.storage.hbm == used + io_bytes(batches=2, outputs=2)


def stock_options(on: Topology) -> dict[tuple[str, str], ShardingOption]:
    estimators = [EmbeddingPerfEstimator(on), EmbeddingStorageEstimator(on)]
    enumerator = EmbeddingEnumerator(on, batch_size=BATCH_SIZE, estimator=estimators)
    found = enumerator.enumerate(model(), [TTEmbeddingBagCollectionSharder()])
    return {(option.name, option.sharding_type): option for option in found}


def test_regular_tables_cost_what_torchrec_says_at_the_hardwares_speeds() -> None:
    found, stock = options(), stock_options(with_speeds(topology(), KNOWN["cpu"]))
    for ours, theirs in zip(found["regular", TW].shards, stock["regular", TW].shards, strict=True):
        assert ours.storage == theirs.storage
        assert ours.perf == theirs.perf


def test_a_data_parallel_regular_table_costs_an_all_reduce_and_passes_over_it_on_a_cpu() -> None:
    cpu, num_bytes = KNOWN["cpu"], 1000 * DIM * 4
    (perf, _) = (shard.perf for shard in options()["regular", DP].shards)
    assert perf.bwd_comms == pytest.approx(
        num_bytes / cpu.all_reduce_bytes_per_ms
        + DENSE_UPDATE_PASSES * num_bytes / cpu.sweep_bytes_per_ms
    )


def test_speeds_that_a_topology_sets_stay() -> None:
    own = Topology(world_size=2, compute_device="cpu", ddr_mem_bw=7.0, intra_host_bw=5.0)
    fast = with_speeds(own, KNOWN["cpu"])
    assert fast.ddr_mem_bw == 7.0
    assert fast.comms_bandwidths.intra_host_bw == 5.0
    assert with_speeds(topology(), KNOWN["cpu"]).ddr_mem_bw == KNOWN["cpu"].row_bytes_per_ms
    assert topology().ddr_mem_bw == DDR_MEM_BW  # the user's topology stays as it was


def test_u02_every_option_has_a_cost_in_time() -> None:
    for option in options().values():
        for shard in option.shards:
            assert shard.perf.total > 0


def test_time_by_hand() -> None:
    """A table-wise shard: two batches of 1280 ids and 128 bags each."""
    cpu, shape = KNOWN["cpu"], model()[0].tt_shapes["big"]
    perf = options()["big", TW].shards[0].perf
    indices, bags = 2 * BATCH_SIZE * POOLING_FACTOR, 2 * BATCH_SIZE
    rows = Traffic().expected_unique(indices, num_values=ROWS)
    prefixes = expected_prefixes(rows, num_values=ROWS, num_prefixes=200 * 220)
    work = step_work(shape, num_rows=rows, num_prefixes=prefixes)
    assert perf.fwd_compute == pytest.approx(
        work.forward_flops / cpu.flops_per_ms
        + work.forward_bytes / cpu.core_bytes_per_ms
        + (indices * (4 * DIM + 48) + bags * 4 * DIM) / cpu.pool_bytes_per_ms
        + cpu.table_ms / 3
    )
    assert perf.bwd_compute == pytest.approx(
        work.backward_flops / cpu.flops_per_ms
        + (work.backward_bytes + work.update_bytes) / cpu.core_bytes_per_ms
        + (indices * 4 * DIM + rows * 8 * DIM) / cpu.pool_bytes_per_ms
        + cpu.table_ms * 2 / 3
    )
    assert perf.fwd_comms == pytest.approx(bags * 4 * DIM / cpu.all_to_all_bytes_per_ms)
    assert perf.input_dist_comms == pytest.approx(indices * 8 / cpu.all_to_all_bytes_per_ms)


def test_replicated_cores_cost_passes_over_dense_gradients_and_their_sum() -> None:
    """A ring of two moves each byte once."""
    cpu, found = KNOWN["cpu"], options()
    data_parallel = found["big", DP].shards[0].perf
    assert data_parallel.fwd_comms == 0
    assert data_parallel.bwd_comms == pytest.approx(CORE_BYTES / cpu.all_reduce_bytes_per_ms)
    table_wise, row_wise = found["big", TW].shards[0].perf, found["big", RW].shards[0].perf
    assert table_wise.fwd_compute > row_wise.fwd_compute  # it serves both ranks' batches
    assert row_wise.bwd_compute > 4 * CORE_BYTES / cpu.sweep_bytes_per_ms


def test_adagrad_moves_the_state_with_the_slices() -> None:
    sgd, adagrad = options(), options(EmbOptimType.EXACT_ADAGRAD)
    more = adagrad["big", RW].shards[0].perf.bwd_compute - sgd["big", RW].shards[0].perf.bwd_compute
    assert more == pytest.approx(4 * CORE_BYTES / KNOWN["cpu"].sweep_bytes_per_ms)


def test_skewed_traffic_costs_less_than_uniform_traffic() -> None:
    uniform = options(traffic={"big": Traffic(zipf_exponent=0)})["big", TW].shards[0]
    skewed = options(traffic={"big": Traffic(zipf_exponent=1.2)})["big", TW].shards[0]
    assert skewed.perf.fwd_compute < uniform.perf.fwd_compute
    assert skewed.storage.ddr < uniform.storage.ddr


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


SLOTS = 10_000  # 0.1 % of the rows


def cached_model(**kwargs: Any) -> nn.Module:
    module = model()
    module[0].embedding_bag_configs()[0].cache = RowCacheConfig(load_factor=0.001, **kwargs)
    return module


def test_a_cache_takes_its_rows_their_state_tags_and_counter() -> None:
    module = cached_model()
    for optimizer, state in (
        (EmbOptimType.EXACT_SGD, 0),
        (EmbOptimType.EXACT_ADAGRAD, 4 * DIM),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, 4),
        (EmbOptimType.ADAM, 8 * DIM),
    ):
        storage = storages(module=module, optimizer=optimizer)
        # 8 a tag, 4 a heat, two cells of 12 for the counter, 88 for statistics and schedule
        step = 8 if optimizer == EmbOptimType.ADAM else 0
        assert storage[TW].cache == SLOTS * (4 * DIM + state + 8 + 4 + 2 * 12) + 88 + step
        assert abs(storage[RW].cache - storage[TW].cache / 2) <= 8 * (4 * DIM + state + 36) + 88


def test_a_table_with_a_cache_is_never_data_parallel() -> None:
    assert ("big", DP) not in options(module=cached_model())
    assert ("big", DP) in options()


def test_a_cache_leaves_the_cores_the_misses() -> None:
    module = cached_model()
    counts = TTStorageEstimator(topology(), constraints()).lookups(
        option := options(module=module)["big", TW],
        option.shards[0],
        module[0].tt_shapes["big"],
    )
    traffic, indices = Traffic(), 2 * BATCH_SIZE * POOLING_FACTOR
    assert counts.num_slots == SLOTS
    assert counts.hit_ratio == traffic.hit_ratio(SLOTS, num_values=ROWS)
    assert counts.num_rows == traffic.expected_unique_misses(
        indices, num_values=ROWS, num_cached=SLOTS
    )
    assert counts.num_rows + counts.num_cached_rows == pytest.approx(
        traffic.expected_unique(indices, num_values=ROWS)
    )


def test_the_time_of_a_cache_by_hand() -> None:
    cpu, shape = KNOWN["cpu"], model()[0].tt_shapes["big"]
    estimator = TTStorageEstimator(topology(), constraints())
    option = options(module=cached_model(max_refresh_interval=100))["big", TW]
    counts = estimator.lookups(option, option.shards[0], shape)
    forward, backward = row_cache_ms(
        option, counts, TTOptimizerConfig(optimizer="adagrad"), shape=shape, speed=cpu
    )
    distinct = counts.num_rows + counts.num_cached_rows
    assert forward == pytest.approx(128 * distinct / cpu.row_bytes_per_ms)
    stepped = 24 * distinct + 6 * 4 * DIM * counts.num_cached_rows
    refresh = step_work(shape, num_rows=SLOTS)
    num_bytes = SLOTS * (8 * DIM + 36) + 72
    assert backward == pytest.approx(
        stepped / cpu.row_bytes_per_ms
        + (
            refresh.forward_flops / cpu.flops_per_ms
            + refresh.forward_bytes / cpu.core_bytes_per_ms
            + 2 * num_bytes / cpu.row_bytes_per_ms
        )
        / 100
    )


def test_a_cache_of_hot_rows_makes_a_table_faster() -> None:
    plain, cached = options(), options(module=cached_model())
    hot = {"big": Traffic(zipf_exponent=1.5)}
    assert (
        options(module=cached_model(), traffic=hot)["big", TW].shards[0].perf.total
        < options(traffic=hot)["big", TW].shards[0].perf.total
    )
    assert cached["big", TW].shards[0].storage.ddr > plain["big", TW].shards[0].storage.ddr
