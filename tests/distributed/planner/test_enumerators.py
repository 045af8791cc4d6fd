import pytest
from torch import nn
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from tests.distributed import toy_sequence_model
from tests.distributed.toy_model import ToyModel, tables
from torchrec_tt import (
    TTEmbeddingBagCollection,
    TTEmbeddingBagCollectionSharder,
    TTEmbeddingCollection,
    TTEmbeddingCollectionSharder,
)
from torchrec_tt.distributed.planner.planners import tt_planner
from torchrec_tt.distributed.sharding_plan import TT_COMPUTE_KERNEL
from torchrec_tt.modules.embedding_configs import TTEmbeddingBagConfig


def option_kinds(
    constraints: dict[str, ParameterConstraints] | None = None,
    *,
    pooling: PoolingType = PoolingType.SUM,
    device: str = "cpu",
) -> dict[str, set[tuple[str, str]]]:
    """Sharding type and kernel of every option, by table."""
    topology = Topology(world_size=2, local_world_size=2, compute_device=device)
    planner = tt_planner(topology, batch_size=8, constraints=constraints)
    model = ToyModel(TTEmbeddingBagCollection(tables(pooling), device="meta"))
    found: dict[str, set[tuple[str, str]]] = {}
    for option in planner._enumerator.enumerate(model, [TTEmbeddingBagCollectionSharder()]):
        found.setdefault(option.name, set()).add((option.sharding_type, option.compute_kernel))
    return found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tt_tables_get_the_tt_kernel_and_regular_tables_never_do(device: str) -> None:
    found = option_kinds(device=device)
    for name in ("t0", "t1"):
        assert found[name] == {
            (kind, TT_COMPUTE_KERNEL) for kind in ("table_wise", "row_wise", "data_parallel")
        }
    for name in ("r0", "r1"):
        assert found[name]
        assert all(kernel != TT_COMPUTE_KERNEL for _, kernel in found[name])


def test_regular_tables_keep_the_stock_types_of_the_cpu() -> None:
    kinds = {kind for kind, _ in option_kinds()["r0"]}
    assert kinds == {"data_parallel", "table_wise", "column_wise", "table_column_wise"}


def test_u10_row_wise_on_the_cpu_is_there_for_whom_asks() -> None:
    asks = ParameterConstraints(sharding_types=["row_wise"])
    found = option_kinds({"t0": asks, "r0": asks})
    assert found["t0"] == {("row_wise", TT_COMPUTE_KERNEL)}
    assert {kind for kind, _ in found["r0"]} == {"row_wise"}


def test_mean_tables_have_the_options_of_sum_tables() -> None:
    for device in ("cpu", "cuda"):
        found = option_kinds(pooling=PoolingType.MEAN, device=device)
        assert found == option_kinds(pooling=PoolingType.SUM, device=device)


# U10
@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        (ParameterConstraints(sharding_types=["column_wise"]), "sharding_type must be one of"),
        (
            ParameterConstraints(sharding_types=["table_wise", "grid_shard"]),
            "got 'grid_shard' for table 't0'",
        ),
        (ParameterConstraints(cache_params=CacheParams(load_factor=1.2)), "cache_params"),
        (
            ParameterConstraints(
                sharding_types=["data_parallel"], cache_params=CacheParams(load_factor=0.2)
            ),
            "with a row cache every replica",
        ),
        (ParameterConstraints(compute_kernels=["fused"]), "compute_kernels must have"),
    ],
)
def test_a_constraint_that_a_tt_table_cannot_meet_raises(
    constraints: ParameterConstraints, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        option_kinds({"t0": constraints})
    option_kinds({"r0": ParameterConstraints(sharding_types=["column_wise"])})


def test_cache_params_keep_a_table_from_data_parallel() -> None:
    found = option_kinds({"t0": ParameterConstraints(cache_params=CacheParams(load_factor=0.2))})
    assert {kind for kind, _ in found["t0"]} == {"table_wise", "row_wise"}
    assert "data_parallel" in {kind for kind, _ in found["t1"]}


@pytest.mark.parametrize(("local_world_size", "is_offered"), [(4, False), (2, True), (1, False)])
def test_table_row_wise_is_offered_where_it_differs_from_other_types(
    local_world_size: int, is_offered: bool
) -> None:
    topology = Topology(world_size=4, local_world_size=local_world_size, compute_device="cpu")
    enumerator = tt_planner(topology, batch_size=8)._enumerator
    ebc = TTEmbeddingBagCollection(tables(), device="meta")
    found = enumerator.enumerate(nn.ModuleDict({"ebc": ebc}), [TTEmbeddingBagCollectionSharder()])
    kinds = {(o.name, o.sharding_type) for o in found}
    assert (("t0", "table_row_wise") in kinds) == is_offered
    assert ("r0", "table_row_wise") not in kinds  # a regular table on the CPU: only if asked for


@pytest.mark.parametrize(
    ("device", "stock_types"),
    [
        ("cpu", {"table_wise", "column_wise", "row_wise"}),  # FBGEMM pools data-parallel ones there
        ("cuda", {"table_wise", "column_wise", "row_wise", "data_parallel"}),
    ],
)
def test_sequence_tables_get_the_types_that_sequences_have(
    device: str, stock_types: set[str]
) -> None:
    topology = Topology(world_size=4, local_world_size=2, compute_device=device)
    ec = TTEmbeddingCollection(toy_sequence_model.tables(), device="meta")
    options = tt_planner(topology, batch_size=8)._enumerator.enumerate(
        nn.ModuleDict({"ec": ec}), [TTEmbeddingCollectionSharder()]
    )
    assert all(not option.is_pooled for option in options)
    for name in ("t0", "t1"):
        assert {(o.sharding_type, o.compute_kernel) for o in options if o.name == name} == {
            (kind, TT_COMPUTE_KERNEL) for kind in ("table_wise", "row_wise", "data_parallel")
        }
    for name in ("r0", "r1"):
        regular = {(o.sharding_type, o.compute_kernel) for o in options if o.name == name}
        assert {kind for kind, _ in regular} == stock_types
        assert TT_COMPUTE_KERNEL not in {kernel for _, kernel in regular}


def test_tables_of_one_name_in_several_collections_keep_their_own_options() -> None:
    size = {"name": "same", "num_embeddings": 1000, "embedding_dim": 16, "feature_names": ["f"]}
    regular = EmbeddingBagConfig(**size)
    collections = {
        "tt": TTEmbeddingBagCollection(
            [TTEmbeddingBagConfig(**size, tt_ranks=[4, 4])], device="meta"
        ),
        "regular": TTEmbeddingBagCollection([regular], device="meta"),
        "stock": EmbeddingBagCollection([regular], device="meta"),
    }
    topology = Topology(world_size=2, local_world_size=2, compute_device="cuda")
    sharders = [*get_default_sharders(), TTEmbeddingBagCollectionSharder()]
    found: dict[str, set[tuple[str, str]]] = {path: set() for path in collections}
    enumerator = tt_planner(topology, batch_size=8)._enumerator
    for option in enumerator.enumerate(nn.ModuleDict(collections), sharders):
        found[option.path].add((option.sharding_type, option.compute_kernel))
    assert found["tt"] == {
        (kind, TT_COMPUTE_KERNEL) for kind in ("table_wise", "row_wise", "data_parallel")
    }
    assert found["regular"] == found["stock"]
    assert TT_COMPUTE_KERNEL not in {kernel for _, kernel in found["regular"]}
