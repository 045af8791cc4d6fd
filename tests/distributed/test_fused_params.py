"""fused_params that some kernel would not take; refused the same on every rank."""

from typing import Any

import pytest
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import on_meta, unsharded
from torchrec_tt import (
    TTEmbeddingBagCollection,
    TTEmbeddingBagCollectionSharder,
    TTEmbeddingBagConfig,
)
from torchrec_tt.distributed.embedding_kernel import TTBatchedDenseEmbeddingBag
from torchrec_tt.distributed.fused_params import check_fused_params, check_mode_of, precision_of


def test_what_torchrec_and_fbgemm_read_is_accepted() -> None:
    check_fused_params(None)
    check_fused_params(
        {
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,  # data-parallel cores do not use it
            "learning_rate": 1,
            "eps": 1e-8,
            "momentum": 0.9,
            "output_dtype": SparseType.FP32,
            "bounds_check_mode": BoundsCheckMode.V2_WARNING,
            "cache_load_factor": 0.2,
            "prefetch_pipeline": True,
            "use_one_tbe_per_table": True,
            "res_store_shards": 2,
            "l2_cache_size": 1,
            "precision": "high",
            "__register_ssd_table_list": [],
        }
    )


@pytest.mark.parametrize(
    ("fused_params", "message"),
    [
        ({"learning_rat": 0.1}, "got 'learning_rat'; the nearest is 'learning_rate'"),
        ({"optimiser": EmbOptimType.SGD}, "got 'optimiser'; the nearest is 'optimizer'"),
        ({"zzz": 1}, "got 'zzz'$"),
        ({"self": 1}, "got 'self'"),
        ({"learning_rate": None}, "'learning_rate'.* must be a number, got None"),
        ({"optimizer": [1]}, "'optimizer'.* must be an EmbOptimType"),
        ({"bounds_check_mode": 3}, "bounds_check_mode must be one of .*, got 3"),
        ({"bounds_check_mode": 0}, "bounds_check_mode must be one of .*, got 0"),
        ({"bounds_check_mode": None}, "bounds_check_mode must be one of .*, got None"),
        ({"bounds_check_mode": BoundsCheckMode.NONE}, "bounds_check_mode must be one .*NONE"),
        ({"output_dtype": SparseType.FP16}, "output_dtype must be FP32 .*FP16"),
        ({"output_dtype": DataType.BF16}, "output_dtype must be FP32 .*BF16"),
        ({"precision": "tf32"}, "'precision'.* must be None or one of .*, got 'tf32'"),
        ({"output_dtype": None}, "output_dtype must be FP32 .*None"),
    ],
)
def test_what_no_kernel_takes_is_refused(fused_params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_fused_params(fused_params)


def test_second_versions_of_bounds_checks_are_the_first() -> None:
    assert check_mode_of({}) == "fatal"
    for mode, name in (("WARNING", "warning"), ("V2_WARNING", "warning"), ("V2_FATAL", "fatal")):
        assert check_mode_of({"bounds_check_mode": BoundsCheckMode[mode]}) == name


def test_a_table_has_its_own_precision_or_that_of_fused_params() -> None:
    assert precision_of(None, {}, table="t") is None
    assert precision_of("high", {}, table="t") == "high"
    assert precision_of(None, {"precision": "medium"}, table="t") == "medium"
    assert precision_of("high", {"precision": "high"}, table="t") == "high"
    with pytest.raises(ValueError, match="got 'medium' and 'high' for table 't'"):
        precision_of("high", {"precision": "medium"}, table="t")


def refused_when_sharded(rank: int) -> list[str]:
    """Every table on rank 0: the other rank makes no kernel that could complain."""
    messages = []
    for bad in (
        {"learning_rat": 0.1},
        {"output_dtype": SparseType.FP16},
        {"eps": None},
        {"optimizer": EmbOptimType.ADAM},  # for regular tables on the CPU
    ):
        model, sharders = on_meta(unsharded()), [TTEmbeddingBagCollectionSharder(bad)]
        plan = construct_module_sharding_plan(
            model.ebc,
            {c.name: table_wise(rank=0) for c in model.ebc.embedding_bag_configs()},
            sharder=sharders[0],
            local_size=2,
            world_size=2,
            device_type="cpu",
        )
        with pytest.raises(ValueError, match="must") as error:
            DistributedModelParallel(model, plan=ShardingPlan({"ebc": plan}), sharders=sharders)
        messages.append(str(error.value))
    dist.barrier()  # nobody is stuck in an earlier collective
    return messages


@pytest.mark.slow
def test_a_bad_fused_param_raises_the_same_on_every_rank(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(refused_when_sharded)
    assert first == second
    for message, key in zip(
        first, ("learning_rat", "output_dtype", "eps", "table 'r0' (Optimizer adam"), strict=True
    ):
        assert key in message


def regular_tables_alone(rank: int) -> str:
    """A collection without TT tables takes what TorchRec takes of it."""
    config = EmbeddingBagConfig(
        name="r", num_embeddings=10, embedding_dim=8, feature_names=["f"], data_type=DataType.FP32
    )
    ebc = TTEmbeddingBagCollection([config], device="meta")
    half = TTEmbeddingBagCollectionSharder(fused_params={"output_dtype": SparseType.FP16})
    plan = construct_module_sharding_plan(
        ebc, {"r": table_wise(rank=0)}, sharder=half, local_size=1, world_size=1, device_type="cpu"
    )
    model = DistributedModelParallel(ebc, plan=ShardingPlan({"": plan}), sharders=[half])
    (lookup,) = model.module._lookups
    return str(lookup.grouped_configs[0].fused_params["output_dtype"])


@pytest.mark.slow
def test_a_collection_of_regular_tables_is_left_to_torchrec(one_rank: Ranks) -> None:
    assert one_rank.run(regular_tables_alone) == [str(SparseType.FP16)]


def check_precisions(rank: int) -> None:
    """Four TT tables of two precisions beside a regular one, which knows none."""
    tt = [
        TTEmbeddingBagConfig(
            name=f"t{i}",
            num_embeddings=100,
            embedding_dim=8,
            feature_names=[f"f{i}"],
            tt_ranks=[2, 2],
            precision=precision,
        )
        for i, precision in enumerate(("high", None, "high", None))
    ]
    regular = EmbeddingBagConfig(
        name="r", num_embeddings=10, embedding_dim=8, feature_names=["f"], data_type=DataType.FP32
    )
    ebc = TTEmbeddingBagCollection([*tt, regular], device="meta")
    kinds = (table_wise(rank=0), table_wise(rank=0), row_wise(), data_parallel())
    sharder = TTEmbeddingBagCollectionSharder(fused_params={"precision": "high"})
    plan = construct_module_sharding_plan(
        ebc,
        {**{f"t{i}": kind for i, kind in enumerate(kinds)}, "r": table_wise(rank=0)},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    for without in (False, True):
        chosen = TTEmbeddingBagCollectionSharder() if without else sharder
        model = DistributedModelParallel(ebc, plan=ShardingPlan({"": plan}), sharders=[chosen])
        found = {
            table.name: kernel._emb_module.lookup.precision
            for lookup in model.module._lookups
            for kernel in lookup.modules()
            if isinstance(kernel, TTBatchedDenseEmbeddingBag)
            for table in kernel.config.embedding_tables
        }
        fallback = None if without else "high"
        assert found == {"t0": "high", "t1": fallback, "t2": "high", "t3": fallback}, found
    with pytest.raises(ValueError, match="got 'medium' and 'high' for table 't0'"):
        DistributedModelParallel(
            ebc,
            plan=ShardingPlan({"": plan}),
            sharders=[TTEmbeddingBagCollectionSharder(fused_params={"precision": "medium"})],
        )


@pytest.mark.slow
def test_precision_reaches_the_kernels_of_every_sharding_type(one_rank: Ranks) -> None:
    one_rank.run(check_precisions)
