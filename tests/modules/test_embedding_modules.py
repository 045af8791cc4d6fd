import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tt import RowCacheConfig, TTEmbeddingBagCollection
from torchrec_tt.modules.embedding_configs import TTEmbeddingBagConfig
from torchrec_tt.optim import TTOptimizerConfig
from torchrec_tt.tt.cores import dense


def tables(pooling: PoolingType = PoolingType.SUM) -> list[EmbeddingBagConfig]:
    """U34: "shared" is read by a TT and a regular table; U35: table "tt" has two features."""
    return [
        TTEmbeddingBagConfig(
            name="tt",
            num_embeddings=110,
            embedding_dim=8,
            feature_names=["shared", "a"],
            pooling=pooling,
            tt_ranks=[3, 4],
            row_factors=[4, 5, 6],
            col_factors=[2, 2, 2],
        ),
        EmbeddingBagConfig(
            name="regular",
            num_embeddings=110,
            embedding_dim=4,
            feature_names=["b", "shared"],
            pooling=pooling,
        ),
    ]


def features(*, is_weighted: bool = False) -> KeyedJaggedTensor:
    """4 samples of 4 keys, one of which no table reads; the second bag of each is empty."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 4, (4, 4), generator=generator)
    lengths[:, 1] = 0
    values = torch.randint(0, 110, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(values.shape, generator=generator) if is_weighted else None
    return KeyedJaggedTensor(
        keys=["b", "unread", "shared", "a"],
        values=values,
        lengths=lengths.flatten(),
        weights=weights,
    )


def collection(**arguments: Any) -> TTEmbeddingBagCollection:
    """A collection of values of order 1."""
    torch.manual_seed(0)
    ebc = TTEmbeddingBagCollection(**{"tables": tables(), **arguments})
    with torch.no_grad():
        for parameter in ebc.parameters():
            parameter.normal_()
    return ebc


def dense_table(ebc: TTEmbeddingBagCollection) -> Tensor:  # [110, 8], differentiable in the cores
    return dense(list(ebc.embedding_bags["tt"].tt_cores), shape=ebc.tt_shapes["tt"])


def with_dense_tables(ebc: TTEmbeddingBagCollection) -> EmbeddingBagCollection:
    """TorchRec's collection holding the same tables, stored."""
    configs = [
        EmbeddingBagConfig(
            name=c.name,
            num_embeddings=c.num_embeddings,
            embedding_dim=c.embedding_dim,
            feature_names=c.feature_names,
            pooling=c.pooling,
        )
        for c in ebc.embedding_bag_configs()
    ]
    result = EmbeddingBagCollection(tables=configs, is_weighted=ebc.is_weighted())
    with torch.no_grad():
        result.embedding_bags["tt"].weight.copy_(dense_table(ebc))
        result.embedding_bags["regular"].weight.copy_(ebc.embedding_bags["regular"].weight)
    return result


# U34
@pytest.mark.parametrize(
    ("pooling", "is_weighted"),
    [(PoolingType.SUM, False), (PoolingType.MEAN, False), (PoolingType.SUM, True)],
)
def test_output_and_gradients_are_those_of_the_dense_tables(
    pooling: PoolingType, is_weighted: bool
) -> None:
    ebc = collection(tables=tables(pooling), is_weighted=is_weighted)
    reference = with_dense_tables(ebc)
    kjt = features(is_weighted=is_weighted)
    output, expected = ebc(kjt), reference(kjt)
    assert output.keys() == expected.keys() == ["shared@tt", "a", "b", "shared@regular"]
    assert output.length_per_key() == expected.length_per_key()
    torch.testing.assert_close(output.values(), expected.values())
    cotangent = torch.randn(output.values().shape)
    output.values().backward(cotangent)
    expected.values().backward(cotangent)
    torch.testing.assert_close(
        ebc.embedding_bags["regular"].weight.grad, reference.embedding_bags["regular"].weight.grad
    )
    cores = list(ebc.embedding_bags["tt"].tt_cores)
    through_dense = torch.autograd.grad(
        dense_table(ebc), cores, reference.embedding_bags["tt"].weight.grad
    )
    for core, gradient in zip(cores, through_dense, strict=True):
        torch.testing.assert_close(core.grad, gradient)


def test_u19_a_mean_of_an_empty_bag_is_zero_with_finite_gradients() -> None:
    ebc = collection(tables=tables(PoolingType.MEAN))
    values = ebc(features()).values()
    assert values[1].eq(0).all()
    values.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ebc.parameters())


def test_u20_a_batch_without_ids_gives_zeros() -> None:
    ebc = collection()
    kjt = KeyedJaggedTensor(
        keys=["b", "shared", "a"],
        values=torch.empty(0, dtype=torch.long),
        lengths=torch.zeros(6, dtype=torch.long),
    )
    values = ebc(kjt).values()
    assert values.shape == (2, 24)
    assert values.eq(0).all()
    values.sum().backward()
    assert ebc.embedding_bags["tt"].tt_cores[0].grad.eq(0).all()


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
        "embedding_bags.tt.tt_cores.0",
        "embedding_bags.tt.tt_cores.1",
        "embedding_bags.tt.tt_cores.2",
        "embedding_bags.regular.weight",
    }


def test_first_values_depend_on_name_and_seed_alone() -> None:
    torch.manual_seed(3)
    first = TTEmbeddingBagCollection(tables=tables())
    torch.manual_seed(3)
    torch.rand(5)
    reordered = TTEmbeddingBagCollection(tables=list(reversed(tables())))
    torch.manual_seed(4)
    other = TTEmbeddingBagCollection(tables=tables())
    for k in range(3):
        key = f"embedding_bags.tt.tt_cores.{k}"
        assert torch.equal(first.state_dict()[key], reordered.state_dict()[key])
        assert not torch.equal(first.state_dict()[key], other.state_dict()[key])


def test_a_collection_on_meta_allocates_nothing() -> None:
    ebc = TTEmbeddingBagCollection(tables=tables(), device="meta")
    assert all(parameter.is_meta for parameter in ebc.parameters())
    assert ebc.device == torch.device("meta")


def test_a_half_precision_regular_table_gives_float32_output() -> None:
    half = tables()
    half[1].data_type = DataType.FP16
    ebc = collection(tables=half)
    assert ebc.embedding_bags["regular"].weight.dtype == torch.float16
    assert ebc(features()).values().dtype == torch.float32


# U36
@pytest.mark.parametrize("data_type", [DataType.BF16, DataType.FP16])
def test_16_bit_cores_give_the_float32_output_of_their_values(data_type: DataType) -> None:
    configs = tables()
    configs[0].data_type = data_type
    ebc = collection(tables=configs)
    cores = ebc.embedding_bags["tt"].tt_cores
    assert {core.dtype for core in cores} == {configs[0].core_dtype}
    float_ebc = collection()
    float_ebc.load_state_dict(ebc.state_dict())
    output, expected = ebc(features()).values(), float_ebc(features()).values()
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, expected)
    again = TTEmbeddingBagCollection(tables=configs)
    again.load_state_dict(ebc.state_dict())
    for key, value in ebc.state_dict().items():
        assert torch.equal(again.state_dict()[key], value)
    output.sum().backward()
    expected.sum().backward()
    for core, other in zip(cores, float_ebc.embedding_bags["tt"].tt_cores, strict=True):
        # The gradients of two lookups are added in 16 bits.
        rtol = 4 * torch.finfo(core.dtype).eps
        torch.testing.assert_close(core.grad.float(), other.grad, rtol=rtol, atol=rtol)


def test_a_table_without_feature_names_reads_the_feature_of_its_name() -> None:
    config = TTEmbeddingBagConfig(name="a", num_embeddings=1000, embedding_dim=8, tt_ranks=[2, 2])
    ebc = TTEmbeddingBagCollection(tables=[config])
    assert ebc(features()).keys() == ["a"]


def test_duplicate_names_raise() -> None:
    with pytest.raises(ValueError, match="distinct names, got 'tt' twice"):
        TTEmbeddingBagCollection(tables=[tables()[0], tables()[0]])


def test_a_copy_is_independent() -> None:
    ebc = collection()
    other = copy.deepcopy(ebc)
    with torch.no_grad():
        ebc.embedding_bags["tt"].tt_cores[0].zero_()
    assert ebc(features())["a"].eq(0).all()
    assert not other(features())["a"].eq(0).all()


def variable_features(inverse: Tensor | None, *, is_weighted: bool = False) -> KeyedJaggedTensor:
    """2 bags of b, 3 of shared and 1 of a; `inverse` says which one each sample has."""
    values = torch.arange(9)
    return KeyedJaggedTensor(
        keys=["b", "shared", "a"],
        values=values,
        lengths=torch.tensor([2, 1, 0, 3, 1, 2]),
        weights=values / 10 if is_weighted else None,
        stride_per_key_per_rank=[[2], [3], [1]],
        inverse_indices=None if inverse is None else (["b", "shared", "a"], inverse),
    )


# U24
@pytest.mark.parametrize("is_weighted", [False, True])
def test_variable_batch_sizes_pool_as_in_torchrecs_collection(is_weighted: bool) -> None:
    inverse = torch.tensor([[0, 1, 1, 0], [2, 0, 1, 1], [0, 0, 0, 0]])
    ebc = collection(is_weighted=is_weighted)
    kjt = variable_features(inverse, is_weighted=is_weighted)
    output, expected = ebc(kjt), with_dense_tables(ebc)(kjt)
    assert output.keys() == expected.keys()
    torch.testing.assert_close(output.values(), expected.values())


def test_variable_batch_sizes_that_say_not_where_bags_belong_are_refused() -> None:
    with pytest.raises(ValueError, match=r"VBE.* must have inverse_indices, got none"):
        collection()(variable_features(None))
    with pytest.raises(ValueError, match=r"in \[0, 3\) for feature 'shared', got .*3"):
        collection()(variable_features(torch.tensor([[0, 1], [0, 3], [0, 0]])))


# U35
@pytest.mark.parametrize("is_weighted", [False, True])
def test_u35_features_of_a_cached_table_are_one_lookup_with_the_same_result(is_weighted: bool):
    plain = TTEmbeddingBagCollection(tables=tables(), is_weighted=is_weighted)
    cached_tables = tables()
    cached_tables[0].cache = RowCacheConfig(
        num_rows=16, first_refresh=1, optimizer=TTOptimizerConfig(learning_rate=0.01)
    )
    cached = TTEmbeddingBagCollection(tables=cached_tables, is_weighted=is_weighted)
    cached.load_state_dict(plain.state_dict(), strict=False)
    batch = features(is_weighted=is_weighted)
    torch.testing.assert_close(cached(batch).values(), plain(batch).values())
    cache = cached.embedding_bags["tt"].row_cache
    lookups = len(batch["shared"].values()) + len(batch["a"].values())
    for _ in range(3):
        cached(batch).values().square().sum().backward()
    assert cache.num_steps == 4
    counts = cache.statistics_dict()
    assert counts["hits"] + counts["misses"] == 4 * lookups
    assert counts["hits"] > 2 * lookups
    keys = [key for key in cached.state_dict() if key.startswith("embedding_bags.tt.row_cache.")]
    assert "embedding_bags.tt.row_cache.rows" in keys
    before = cached(batch).values().detach()
    restored = TTEmbeddingBagCollection(tables=cached_tables, is_weighted=is_weighted)
    restored.load_state_dict(cached.state_dict())
    assert torch.equal(restored.eval()(batch).values(), before)
