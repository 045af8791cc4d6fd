"""freeze: equal outputs in less memory, nothing that trains, and clear refusals."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tt import (
    RowCacheConfig,
    TTEmbedding,
    TTEmbeddingBag,
    TTEmbeddingBagCollection,
    TTEmbeddingBagConfig,
    TTEmbeddingCollection,
    TTEmbeddingConfig,
    freeze,
)
from torchrec_tt.modules.frozen_tables import FrozenTTEmbeddingBag
from torchrec_tt.optim import TTOptimizerConfig
from torchrec_tt.tt.quantization import dequantize_core

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
ERRORS = {"float32": 0.0, "bfloat16": 0.006, "int8": 0.025}  # of a row, relative


def a_bag(**kwargs) -> TTEmbeddingBag:
    torch.manual_seed(0)
    return TTEmbeddingBag(1000, 16, **{"tt_ranks": [8, 8], "mode": "sum", **kwargs})


def a_cache(**kwargs) -> RowCacheConfig:
    return RowCacheConfig(
        num_rows=32,
        optimizer=TTOptimizerConfig(optimizer="sgd", learning_rate=0.5),
        first_refresh=1,
        **kwargs,
    )


def tables(*, cache: RowCacheConfig | None = None) -> list[EmbeddingBagConfig]:
    """Two poolings, a feature that several tables read, tables of several features."""
    size = {"num_embeddings": 500, "embedding_dim": 8}
    return [
        TTEmbeddingBagConfig(name="t0", feature_names=["b", "a"], tt_ranks=[4, 4], **size),
        EmbeddingBagConfig(name="r", feature_names=["a"], num_embeddings=500, embedding_dim=8),
        TTEmbeddingBagConfig(
            name="t1",
            feature_names=["c"],
            tt_ranks=[4],
            pooling=PoolingType.MEAN,
            **size,
        ),
        TTEmbeddingBagConfig(name="t2", feature_names=["c"], tt_ranks=[4], cache=cache, **size),
    ]


def a_collection(**kwargs) -> TTEmbeddingBagCollection:
    torch.manual_seed(0)
    return TTEmbeddingBagCollection(tables(**kwargs))


def features(size: int = 6, *, seed: int = 1, keys: str = "abc") -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(keys) * size,), generator=generator)
    ids = torch.randint(0, 500, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=list(keys), values=ids, lengths=lengths)


def trained(model: nn.Module, *inputs: object, steps: int = 3) -> nn.Module:
    """After steps that fill and train the row cache, if there is one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        output = model(*inputs)
        output = output if isinstance(output, Tensor) else output.values()
        output.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_near(actual: Tensor, expected: Tensor, *, dtype: str) -> None:
    """Every row by its relative error; the regular tables' rows are exact."""
    if dtype == "float32":
        assert_close(actual, expected)
        return
    error = (actual - expected).norm(dim=-1)
    assert error.max() > 0
    assert (error <= ERRORS[dtype] * expected.norm(dim=-1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kwargs", [{}, {"mode": "mean"}, {"padding_idx": 3}, {"tt_ranks": [8]}])
def test_a_bag(dtype: str, kwargs: dict) -> None:
    bag = a_bag(**kwargs)
    frozen = freeze(bag, dtype)
    inputs = (torch.randint(0, 1000, (40,)), torch.arange(0, 40, 4))
    assert_near(frozen(*inputs), bag(*inputs), dtype=dtype)
    assert {core.dtype for core in frozen.tt_cores} == {DTYPES[dtype]}
    assert_near(frozen(inputs[0].view(10, 4)), bag(inputs[0].view(10, 4)), dtype=dtype)


def test_weights_and_the_dtype_of_the_output() -> None:
    bag = a_bag(output_dtype=torch.bfloat16)
    ids, weights = torch.randint(0, 1000, (10, 4)), torch.rand(10, 4)
    output = freeze(bag, "float32")(ids, per_sample_weights=weights)
    assert output.dtype == torch.bfloat16
    assert_close(output, bag(ids, per_sample_weights=weights))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_cores_of_any_dtype_are_frozen(dtype: torch.dtype) -> None:
    bag = a_bag(dtype=dtype)
    ids = torch.randint(0, 1000, (10, 4))
    for name in DTYPES:
        output = freeze(bag, name)(ids)
        assert output.dtype == torch.float32
        expected = bag(ids).float()
        assert ((output - expected).norm(dim=1) <= 0.03 * expected.norm(dim=1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embedding(dtype: str) -> None:
    torch.manual_seed(0)
    embedding = TTEmbedding(1000, 16, tt_ranks=[8, 8])
    ids = torch.randint(0, 1000, (5, 7))
    assert_near(freeze(embedding, dtype)(ids), embedding(ids), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_collection(dtype: str) -> None:
    collection = a_collection()
    frozen = freeze(collection, dtype)
    for keys in ("abc", "cab"):
        batch = features(keys=keys)
        output, expected = frozen(batch), collection(batch)
        assert output.keys() == expected.keys()
        assert_close(output["a@r"], expected["a@r"], rtol=0, atol=0)
        for key in set(expected.keys()) - {"a@r"}:
            assert ((output[key] - expected[key]).norm(dim=1)).max() <= 0.06
            if dtype == "float32":
                assert_close(output[key], expected[key])


def test_an_empty_batch() -> None:
    batch = KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=torch.empty(0, dtype=torch.int64),
        lengths=torch.zeros(9, dtype=torch.int64),
    )
    output = freeze(a_collection(), "int8")(batch).values()
    assert_close(output, torch.zeros(3, 40), rtol=0, atol=0)


def test_a_weighted_collection() -> None:
    configs = [config for config in tables() if config.name != "t1"]
    collection = TTEmbeddingBagCollection(configs, is_weighted=True)
    batch = features()
    batch = KeyedJaggedTensor(
        batch.keys(), batch.values(), torch.rand(len(batch.values())), lengths=batch.lengths()
    )
    output = freeze(collection, "float32")(batch)
    assert_close(output.values(), collection(batch).values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_collection(dtype: str) -> None:
    size = {"num_embeddings": 500, "embedding_dim": 8}
    torch.manual_seed(0)
    collection = TTEmbeddingCollection(
        [
            EmbeddingConfig(name="r", feature_names=["a"], **size),
            TTEmbeddingConfig(name="t", feature_names=["b", "a"], tt_ranks=[4, 4], **size),
        ]
    )
    batch = features()
    output, expected = freeze(collection, dtype)(batch), collection(batch)
    assert output.keys() == expected.keys()
    for key in ("b", "a@t"):
        assert_near(output[key].values(), expected[key].values(), dtype=dtype)


def a_dlrm() -> DLRM:
    torch.manual_seed(0)
    own = [config for config in tables(cache=a_cache()) if config.name in ("t0", "t2")]
    return DLRM(
        embedding_bag_collection=TTEmbeddingBagCollection(own),
        dense_in_features=3,
        dense_arch_layer_sizes=[4, 8],
        over_arch_layer_sizes=[4, 1],
    )


def test_torchrecs_dlrm() -> None:
    model, batch = a_dlrm(), (torch.rand(6, 3), features())
    trained(model, *batch)
    frozen = freeze(model, "float32")
    assert type(frozen) is DLRM
    assert_close(frozen(*batch), model.eval()(*batch))
    assert not frozen.training
    assert not any(p.requires_grad for p in frozen.parameters())
    assert all("row_cache" not in key for key in frozen.state_dict())


def test_the_model_stays_as_it_was_and_shares_nothing_with_the_copy() -> None:
    model, batch = a_dlrm(), (torch.rand(6, 3), features())
    trained(model, *batch)
    before = copy.deepcopy(model.state_dict())
    frozen = freeze(model, "float32")
    own = {t.data_ptr() for t in frozen.state_dict().values() if t.numel()}
    assert not own & {t.data_ptr() for t in model.state_dict().values()}
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_int8_takes_a_quarter_of_the_bytes_and_a_scale_a_slice() -> None:
    bag = a_bag()
    frozen = freeze(bag, "int8")
    bytes_of_cores = sum(core.nbytes for core in frozen.tt_cores)
    slices = sum(bag.shape.row_factors)
    assert bytes_of_cores == sum(core.numel() for core in bag.tt_cores) + 4 * slices


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 9, 300, 1000])
def test_hot_rows_are_what_the_cores_gave_before_they_were_rounded(dtype: str, count: int) -> None:
    bag = a_bag()
    ids = torch.randperm(1000)[:count]
    frozen = freeze(bag, dtype, hot_rows=ids.int().repeat(2))
    assert sorted(frozen.hot_ids[frozen.hot_ids >= 0].tolist()) == sorted(ids.tolist())
    assert len(frozen.hot_ids) <= 8 + 1.3 * count
    rows, expected = frozen(ids.view(-1, 1)), bag.to_dense()[ids].detach()
    if dtype == "float32":
        assert_close(rows, expected)
    else:
        assert_close(rows, expected.bfloat16().float(), rtol=2**-8, atol=1e-6)
    others = torch.tensor(sorted(set(range(1000)) - set(ids.tolist())), dtype=torch.int64)
    wide = [dequantize_core(c) if dtype == "int8" else c.float() for c in frozen.tt_cores]
    plain = freeze(bag, dtype)
    assert_close(frozen(others.view(-1, 1)), plain(others.view(-1, 1)), rtol=0, atol=0)
    assert_close([core.float() for core in plain.tt_cores.wide()], wide, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_to_dense_is_the_table_that_is_looked_up(dtype: str) -> None:
    frozen = freeze(a_bag(), dtype, hot_rows=torch.arange(50))
    assert_close(frozen.to_dense(), frozen(torch.arange(1000).view(-1, 1)))


def test_cached_rows_stay_hot_with_what_they_learned() -> None:
    ids = torch.randint(0, 40, (30, 3))
    bag = trained(a_bag(cache=a_cache()), ids)
    cached = bag.row_cache.ids[bag.row_cache.ids >= 0]
    assert len(cached) > 10
    frozen = freeze(bag, "int8", hot_rows=torch.arange(60))
    kept = frozen.hot_ids[frozen.hot_ids >= 0].tolist()
    assert sorted(kept) == sorted({*cached.tolist(), *range(60)})
    rows = bag.row_cache.rows[bag.row_cache.ids >= 0]
    assert_close(frozen(cached.view(-1, 1)), rows, rtol=2**-8, atol=0)
    assert_close(freeze(bag, "float32").to_dense(), bag.to_dense().detach())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy(duplicate: Callable) -> None:
    frozen = freeze(a_collection(), "int8", hot_rows={"t2": torch.arange(9)})
    copied = duplicate(frozen)
    assert_close(copied(features()).values(), frozen(features()).values(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_dict_loads_into_a_model_frozen_alike(dtype: str) -> None:
    hot_rows = {"t0": torch.arange(20)}
    frozen = freeze(a_collection(), dtype, hot_rows=hot_rows)
    torch.manual_seed(9)
    other = freeze(TTEmbeddingBagCollection(tables()), dtype, hot_rows=hot_rows)
    assert not torch.equal(other(features()).values(), frozen(features()).values())
    other.load_state_dict(frozen.state_dict())
    assert_close(other(features()).values(), frozen(features()).values(), rtol=0, atol=0)
    assert "embedding_bags.t0.tt_cores.1" in frozen.state_dict()


@pytest.mark.parametrize("source", ["trained", "bfloat16", "int8"])
def test_a_state_dict_of_another_dtype_is_refused(source: str) -> None:
    bag = a_bag()
    state = (bag if source == "trained" else freeze(bag, source)).state_dict()
    target = freeze(bag, "int8" if source == "bfloat16" else "bfloat16")
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(RuntimeError, match=r"tt_cores.0 must be torch.\w+ of \(\d+, \d+\) as the"):
        target.load_state_dict(state, strict=False)
    for key, value in target.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_training_is_refused() -> None:
    for model in (a_bag(), a_collection(), TTEmbedding(1000, 16, tt_ranks=[8])):
        frozen = nn.Sequential(freeze(model, "bfloat16"))
        with pytest.raises(ValueError, match="mode must be False for a frozen model, got True"):
            frozen.train()
        frozen.eval()
        with pytest.raises(NotImplementedError, match="no parameters to reset"):
            frozen[0].reset_parameters()
    weights = torch.rand(3, 2, requires_grad=True)
    with pytest.raises(ValueError, match="per_sample_weights must not require a gradient"):
        freeze(a_bag())(torch.zeros(3, 2, dtype=torch.int64), per_sample_weights=weights)


@pytest.mark.parametrize("dtype", ["float16", "int4", torch.bfloat16, None])
def test_an_unknown_dtype_is_refused(dtype: object) -> None:
    with pytest.raises(ValueError, match=r"dtype must be one of \('float32', 'bfloat16', 'int8'\)"):
        freeze(a_bag(), dtype)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cores_that_are_not_finite_are_refused(value: float, dtype: str) -> None:
    collection = a_collection()
    with torch.no_grad():
        collection.embedding_bags.t1.tt_cores[1][5, 2] = value
    with pytest.raises(ValueError, match=r"tt_cores.1 must be finite for table 't1', .* in row 5"):
        freeze(collection, dtype)


def test_cached_rows_that_are_not_finite_are_refused() -> None:
    bag = trained(a_bag(cache=a_cache()), torch.randint(0, 40, (30, 3)))
    slot = int((bag.row_cache.ids >= 0).nonzero()[0])
    bag.row_cache.rows[slot, 3] = torch.nan
    with pytest.raises(ValueError, match=f"must be finite .*, got row {bag.row_cache.ids[slot]}"):
        freeze(bag)


@pytest.mark.parametrize(
    ("hot_rows", "message"),
    [
        ({"t0": torch.tensor([499, 500])}, r"hot_rows must be in \[0, 500\) for .* 't0', got 500"),
        ({"t0": torch.tensor([-1])}, r"hot_rows must be in \[0, 500\) for table 't0', got -1"),
        ({"t0": torch.tensor([1.0])}, r"hot_rows must be ids \[H\] .*, got torch.float32 \(1,\)"),
        ({"t0": torch.tensor([[1]])}, r"hot_rows must be ids .*, got torch.int64 \(1, 1\)"),
        ({"t0": [1, 2]}, r"hot_rows must be ids \[H\] int32 or int64 .*, got \[1, 2\]"),
        (
            {"t0": torch.ones(2, dtype=torch.int64).to_sparse()},
            "must be dense .*, got torch.sparse",
        ),
        ({"t0": torch.ones(2, dtype=torch.int64, device="meta")}, "must be dense .*, got meta"),
        ({"r": torch.tensor([1])}, r"hot_rows must be of the TT tables \['t0', 't1', .* got 'r'"),
        (torch.tensor([1]), "hot_rows must give ids by table for a model with"),
        ([1, 2], "hot_rows must be ids or a mapping from tables to ids, got list"),
    ],
)
def test_wrong_hot_rows_are_refused(hot_rows: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        freeze(a_collection(), hot_rows=hot_rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hot_rows_of_sequences(dtype: str) -> None:
    torch.manual_seed(0)
    embedding = TTEmbedding(1000, 16, tt_ranks=[8])
    ids = torch.arange(60)
    frozen = freeze(embedding, dtype, hot_rows=ids[:30])
    expected = embedding(ids)
    assert_close(frozen(ids)[:30], expected[:30], rtol=2**-8, atol=1e-6)
    assert_near(frozen(ids)[30:], expected[30:], dtype=dtype)


def test_subclasses_are_refused() -> None:
    class Bag(TTEmbeddingBag):
        """Adds something."""

    class Collection(TTEmbeddingBagCollection):
        """Adds something."""

    for model in (Bag(1000, 16, tt_ranks=[8]), Collection(tables())):
        with pytest.raises(NotImplementedError, match=r"themselves, got .*: what a subclass adds"):
            freeze(model)


def test_models_that_cannot_be_frozen_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model must be a torch.nn.Module, got OrderedDict"):
        freeze(a_bag().state_dict())
    with pytest.raises(ValueError, match="model must hold TT tables, got a Linear without one"):
        freeze(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="model must have values, got table 't0' on meta"):
        freeze(TTEmbeddingBagCollection(tables(), device="meta"))
    with pytest.raises(ValueError, match="must not be frozen yet, got a FrozenTTEmbeddingBag at"):
        freeze(nn.Sequential(freeze(a_bag())))
    two = nn.ModuleList([a_collection(), a_collection()])
    with pytest.raises(NotImplementedError, match="one TT table of a name, got two of 't0'"):
        freeze(two)


def test_a_table_used_twice_stays_one() -> None:
    bag = a_bag()
    frozen = freeze(nn.ModuleList([bag, nn.Sequential(bag)]), hot_rows={"0": torch.arange(3)})
    assert frozen[0] is frozen[1][0]
    assert isinstance(frozen[0], FrozenTTEmbeddingBag)


def test_an_id_out_of_range_names_its_table() -> None:
    batch = KeyedJaggedTensor(
        keys=["a", "b", "c"], values=torch.tensor([1, 2, 500]), lengths=torch.tensor([1, 1, 1])
    )
    with pytest.raises(ValueError, match=r"indices must be in \[0, 500\) for table 't2'"):
        freeze(a_collection())(batch)


def test_a_wrapped_model_is_refused(tmp_path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"DistributedDataParallel, got one: .* its \.module"):
            freeze(DistributedDataParallel(a_bag()))
    finally:
        torch.distributed.destroy_process_group()
