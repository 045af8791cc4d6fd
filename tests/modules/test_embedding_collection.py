"""TTEmbeddingCollection beside TorchRec's EmbeddingCollection of the same rows, stored."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tt import TTEmbeddingBagConfig, TTEmbeddingCollection, TTEmbeddingConfig
from torchrec_tt.modules.embedding_configs import check_sequence_tables


def tables() -> list[EmbeddingConfig]:
    """Feature "shared" is read by a TT and a regular table; table "tt" has two features."""
    return [
        TTEmbeddingConfig(
            name="tt",
            num_embeddings=110,
            embedding_dim=8,
            feature_names=["shared", "a"],
            tt_ranks=[3, 4],
            row_factors=[4, 5, 6],
            col_factors=[2, 2, 2],
        ),
        EmbeddingConfig(
            name="regular", num_embeddings=110, embedding_dim=8, feature_names=["b", "shared"]
        ),
    ]


def features() -> KeyedJaggedTensor:
    """4 samples of 4 keys, one of which no table reads; the second sequence of each is empty."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 4, (4, 4), generator=generator)
    lengths[:, 1] = 0
    values = torch.randint(0, 110, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(
        keys=["b", "unread", "shared", "a"], values=values, lengths=lengths.flatten()
    )


def collection(**arguments: Any) -> TTEmbeddingCollection:
    """A collection of values of order 1."""
    torch.manual_seed(0)
    ec = TTEmbeddingCollection(**{"tables": tables(), **arguments})
    with torch.no_grad():
        for parameter in ec.parameters():
            parameter.normal_()
    return ec


def with_dense_tables(ec: TTEmbeddingCollection) -> EmbeddingCollection:
    """TorchRec's collection holding the same tables, stored."""
    configs = [
        EmbeddingConfig(
            name=c.name,
            num_embeddings=c.num_embeddings,
            embedding_dim=c.embedding_dim,
            feature_names=c.feature_names,
        )
        for c in ec.embedding_configs()
    ]
    result = EmbeddingCollection(tables=configs, need_indices=ec.need_indices())
    with torch.no_grad():
        result.embeddings["tt"].weight.copy_(ec.embeddings["tt"].to_dense())
        result.embeddings["regular"].weight.copy_(ec.embeddings["regular"].weight)
    return result


def all_rows(output: dict[str, Any]) -> Tensor:
    return torch.cat([output[key].values() for key in sorted(output)])


@pytest.mark.parametrize("need_indices", [False, True])
def test_output_is_that_of_the_dense_tables(need_indices: bool) -> None:
    ec = collection(need_indices=need_indices)
    output, expected = ec(features()), with_dense_tables(ec)(features())
    assert list(output) == list(expected) == ["shared@tt", "a", "b", "shared@regular"]
    for key, rows in output.items():
        torch.testing.assert_close(rows.values(), expected[key].values())
        assert torch.equal(rows.lengths(), expected[key].lengths())
        if need_indices:
            assert torch.equal(rows.weights(), expected[key].weights())
        assert (rows.weights_or_none() is not None) == need_indices


def test_gradients_are_those_of_the_dense_tables() -> None:
    ec = collection()
    reference = with_dense_tables(ec)
    rows, expected = all_rows(ec(features())), all_rows(reference(features()))
    cotangent = torch.randn(rows.shape)
    rows.backward(cotangent)
    expected.backward(cotangent)
    torch.testing.assert_close(
        ec.embeddings["regular"].weight.grad, reference.embeddings["regular"].weight.grad
    )
    cores = list(ec.embeddings["tt"].tt_cores)
    through_dense = torch.autograd.grad(
        ec.embeddings["tt"].to_dense(), cores, reference.embeddings["tt"].weight.grad
    )
    for core, gradient in zip(cores, through_dense, strict=True):
        torch.testing.assert_close(core.grad, gradient)


def test_variable_batch_sizes_give_what_the_dense_tables_give() -> None:
    ec = collection()
    kjt = KeyedJaggedTensor(
        keys=["b", "shared", "a"],
        values=torch.arange(6),
        lengths=torch.tensor([1, 0, 2, 1, 1, 1]),
        stride_per_key_per_rank=[[2], [3], [1]],
    )
    output, expected = ec(kjt), with_dense_tables(ec)(kjt)
    for key, rows in output.items():
        torch.testing.assert_close(rows.values(), expected[key].values())
        assert torch.equal(rows.lengths(), expected[key].lengths())


def test_a_batch_without_ids_gives_no_rows_and_zero_gradients() -> None:
    ec = collection()
    kjt = KeyedJaggedTensor(
        keys=["b", "shared", "a"],
        values=torch.empty(0, dtype=torch.long),
        lengths=torch.zeros(6, dtype=torch.long),
    )
    output = ec(kjt)
    assert all(rows.values().shape == (0, 8) for rows in output.values())
    all_rows(output).sum().backward()
    assert ec.embeddings["tt"].tt_cores[0].grad.eq(0).all()


def test_an_id_past_the_table_raises_though_the_cores_hold_it() -> None:
    kjt = KeyedJaggedTensor(
        keys=["b", "shared", "a"],
        values=torch.tensor([0, 0, 110]),
        lengths=torch.ones(3, dtype=torch.long),
    )
    with pytest.raises(ValueError, match=r"table 'tt': .*110"):
        collection()(kjt)


def test_state_dict_has_a_key_per_core() -> None:
    assert set(collection().state_dict()) == {
        "embeddings.tt.tt_cores.0",
        "embeddings.tt.tt_cores.1",
        "embeddings.tt.tt_cores.2",
        "embeddings.regular.weight",
    }


def test_first_values_depend_on_name_and_seed_alone() -> None:
    torch.manual_seed(3)
    first = TTEmbeddingCollection(tables=tables()).state_dict()
    torch.manual_seed(3)
    torch.rand(5)
    reordered = TTEmbeddingCollection(tables=list(reversed(tables()))).state_dict()
    torch.manual_seed(4)
    other = TTEmbeddingCollection(tables=tables()).state_dict()
    for k in range(3):
        key = f"embeddings.tt.tt_cores.{k}"
        assert torch.equal(first[key], reordered[key])
        assert not torch.equal(first[key], other[key])


def test_a_collection_on_meta_allocates_nothing() -> None:
    ec = TTEmbeddingCollection(tables=tables(), device="meta")
    assert all(parameter.is_meta for parameter in ec.parameters())
    assert ec.device == torch.device("meta")


def test_a_half_precision_regular_table_gives_float32_rows() -> None:
    half = tables()
    half[1].data_type = DataType.FP16
    ec = collection(tables=half)
    assert ec.embeddings["regular"].weight.dtype == torch.float16
    assert {rows.values().dtype for rows in ec(features()).values()} == {torch.float32}


def test_a_table_without_feature_names_reads_the_feature_of_its_name() -> None:
    config = TTEmbeddingConfig(name="a", num_embeddings=1000, embedding_dim=8, tt_ranks=[2, 2])
    assert list(TTEmbeddingCollection(tables=[config])(features())) == ["a"]


def test_a_collection_left_unsharded_says_which_sharder_it_needs() -> None:
    with pytest.raises(ValueError, match=r"a TTEmbeddingCollectionSharder .* tables \['tt'\]"):
        collection().fused_optimizer  # noqa: B018


def regular(name: str = "t", **arguments: Any) -> EmbeddingConfig:
    return EmbeddingConfig(**{"name": name, "num_embeddings": 10, "embedding_dim": 8, **arguments})


BAG = TTEmbeddingBagConfig(name="t", num_embeddings=110, embedding_dim=8, tt_ranks=[2, 2])


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ([], "at least one table"),
        ([regular(), regular()], "distinct names, got 't' twice"),
        ([regular(data_type=DataType.INT8)], "data_type must be one of"),
        ([regular(), regular("u", embedding_dim=4)], "embedding_dim must be the same .*4 .*'u'"),
        ([BAG], "tables must be EmbeddingConfig or TTEmbeddingConfig, got TTEmbeddingBagConfig"),
        (
            [*tables(), regular(enable_embedding_update=True)],
            "enable_embedding_update must be False .*'t'",
        ),
    ],
)
def test_tables_that_cannot_form_a_collection_raise(
    configs: list[EmbeddingConfig], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_sequence_tables(configs)
