from collections.abc import Callable
from typing import Any

import pytest
from torchrec.distributed.planner.proposers import DynamicProgrammingProposer
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import CacheParams, ShardingType

from tests.distributed.toy_model import ToyModel, tables
from torchrec_tt import TTEmbeddingBagCollection, TTEmbeddingBagCollectionSharder
from torchrec_tt.distributed.planner.enumerators import TTEmbeddingEnumerator
from torchrec_tt.distributed.planner.planners import tt_planner
from torchrec_tt.modules.embedding_configs import TTEmbeddingBagConfig
from torchrec_tt.tt.traffic import Traffic

NAN, INF = float("nan"), float("inf")


def topology(device: str = "cpu") -> Topology:
    return Topology(world_size=2, local_world_size=2, compute_device=device)


def toy() -> ToyModel:
    return ToyModel(TTEmbeddingBagCollection(tables(), device="meta"))


def plan(constraints: Any = None, *, device: str = "cpu", **kwargs: Any) -> None:
    one = tt_planner(topology(device), batch_size=8, constraints=constraints, **kwargs)
    one.plan(toy(), [TTEmbeddingBagCollectionSharder()])


@pytest.mark.parametrize("table", ["t0", "r0"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("pooling_factors", v) for v in ([-1.0], [NAN], [INF], ["1"], [True], [], 3.0, None)],
        *[("num_poolings", v) for v in ([-1.0], [NAN], ["1"], 2.0)],
        *[("batch_sizes", v) for v in ([-4], [0], [4.5], [NAN], [True], 4)],
        ("sharding_types", "table_wise"),
        ("sharding_types", [ShardingType.TABLE_WISE]),
        ("sharding_types", ["TABLE_WISE"]),
        ("sharding_types", ["table_wse"]),
        ("sharding_types", [None]),
        ("compute_kernels", "fused"),
        ("compute_kernels", ["fusd"]),
        *[("min_partition", v) for v in (0, -1, 2.0, "8")],
        ("cache_params", 0.2),
        ("device_group", "cuda"),
    ],
)
def test_a_constraint_that_no_table_can_have_is_refused(field: str, value: Any, table: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be ") as error:
        plan({table: ParameterConstraints(**{field: value})})
    assert str(error.value).endswith(f"got {value!r} for table {table!r}")


@pytest.mark.parametrize("table", ["t0", "r0"])
@pytest.mark.parametrize("field", ["num_poolings", "batch_sizes"])
def test_lists_of_a_constraint_are_as_long_as_its_pooling_factors(field: str, table: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field} must have one entry .* for table '{table}'"):
        plan({table: ParameterConstraints(**{field: [4, 4, 4]})})


@pytest.mark.parametrize("table", ["t0", "r0"])
def test_pooling_factors_are_as_many_as_features(table: str) -> None:
    with pytest.raises(ValueError, match=rf"^pooling_factors must .* features .*'{table}'"):
        plan({table: ParameterConstraints(pooling_factors=[1.0, 2.0, 3.0])})


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        # U11
        *[
            (
                ParameterConstraints(cache_params=CacheParams(load_factor=load_factor)),
                rf"cache_params.load_factor must be in \(0, 1\], got {load_factor} .*'r0'",
            )
            for load_factor in (0.0, 1.5, NAN)
        ],
        (
            ParameterConstraints(compute_kernels=["customized_kernel"]),
            "compute_kernels must have another .* regular table 'r0'",
        ),
        # U10
        (
            ParameterConstraints(compute_kernels=["key_value"]),
            r"must leave one of .*\('table_wise', 'fused'\).* and \['key_value'\] for table 'r0'",
        ),
        (
            ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["quant_uvm"]),
            r"must leave one of .* got \['table_wise'\] and \['quant_uvm'\] for table 'r0'",
        ),
    ],
)
def test_a_constraint_that_a_regular_table_cannot_meet_is_refused(
    constraint: ParameterConstraints, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan({"r0": constraint})


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ([("t0", ParameterConstraints())], "constraints must be a dict of ParameterConstraints"),
        ("t0", "constraints must be a dict .* got 't0'"),
        ({0: ParameterConstraints()}, "constraints must have names of tables as keys, got 0"),
        ({"t0": None}, "a ParameterConstraints for each table, got None for table 't0'"),
        ({"t0": {}}, "a ParameterConstraints for each table, got {} for table 't0'"),
    ],
)
def test_constraints_of_the_wrong_type_are_refused(constraints: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(constraints)


@pytest.mark.parametrize(
    ("traffic", "message"),
    [
        (Traffic(), "traffic must be a dict of Traffic by table, got Traffic"),
        ([Traffic()], "traffic must be a dict of Traffic"),
        ({"t0": 1.05}, "traffic must have a Traffic for each table, got 1.05 for table 't0'"),
        ({"t0": None}, "got None for table 't0'"),
    ],
)
def test_traffic_of_the_wrong_type_is_refused(traffic: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(traffic=traffic)


@pytest.mark.parametrize(
    "make",
    [lambda value: tt_planner(value, batch_size=8), lambda value: TTEmbeddingEnumerator(value, 8)],
)
@pytest.mark.parametrize("value", [None, 2])
def test_what_is_no_topology_is_refused(make: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(ValueError, match=f"topology must be a Topology, got {value}"):
        make(value)


@pytest.mark.parametrize("kind", [EmbeddingPerfEstimator, EmbeddingStorageEstimator])
def test_estimators_of_torchrec_are_refused(kind: Any) -> None:
    for estimator in (kind(topology()), [kind(topology())]):
        with pytest.raises(ValueError, match=f"estimator must know .* got {kind.__name__}"):
            TTEmbeddingEnumerator(topology(), 8, estimator=estimator)


def test_an_enumerator_has_the_estimators_of_tt_tables_by_default() -> None:
    options = TTEmbeddingEnumerator(topology(), 8).enumerate(
        toy(), [TTEmbeddingBagCollectionSharder()]
    )
    assert all(shard.perf.total > 0 for option in options for shard in option.shards)


@pytest.mark.parametrize("listed", [False, True])
def test_a_proposer_of_hbm_is_refused_where_there_is_none(listed: bool) -> None:
    one = DynamicProgrammingProposer()
    with pytest.raises(ValueError, match=r"must not be a DynamicProgrammingProposer .* 'cpu'"):
        plan(proposer=[one] if listed else one)
    plan(proposer=one, device="cuda")


@pytest.mark.parametrize("proposer", ["greedy", DynamicProgrammingProposer])
def test_what_is_no_proposer_is_refused(proposer: Any) -> None:
    with pytest.raises(ValueError, match="proposer must be a Proposer or a list of them"):
        plan(proposer=proposer)


@pytest.mark.parametrize(
    "sharders",
    [None, TTEmbeddingBagCollectionSharder(), [TTEmbeddingBagCollectionSharder]],
)
def test_what_is_no_list_of_sharders_is_refused(sharders: Any) -> None:
    with pytest.raises(ValueError, match="sharders must be a list of ModuleSharders, got"):
        tt_planner(topology(), batch_size=8).plan(toy(), sharders)


def test_a_tt_table_of_more_weights_than_64_bits_count_is_named() -> None:
    huge = TTEmbeddingBagConfig(
        name="huge", num_embeddings=2**62, embedding_dim=16, feature_names=["f"], tt_ranks=[4, 4]
    )
    model = ToyModel(TTEmbeddingBagCollection([huge], device="meta"))
    with pytest.raises(ValueError, match=r"below 2\^61 .* got 4611686018427387904 \* 16 .*'huge'"):
        tt_planner(topology(), batch_size=8).plan(model, [TTEmbeddingBagCollectionSharder()])
