import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tt import (
    RowCacheConfig,
    TTConfig,
    TTEmbeddingBagCollection,
    TTEmbeddingBagConfig,
    TTEmbeddingCollection,
    change_ranks,
    compress,
    make_shape,
    materialize,
)
from torchrec_tt.tt.cores import dense
from torchrec_tt.tt.init import init_cores_
from torchrec_tt.tt.row_order import similarity_order

ROWS, DIM, RANKS = 120, 8, [4, 4]


def low_rank_rows(rows: int = ROWS, dim: int = DIM) -> torch.Tensor:
    shape = make_shape(rows, dim, tt_ranks=RANKS)
    cores = [torch.empty(size) for size in shape.core_shapes]
    init_cores_(cores, shape=shape, generator=torch.Generator().manual_seed(1))
    return dense(cores, shape=shape)


def pooled(device: str = "cpu", pooling: PoolingType = PoolingType.SUM) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name="small", num_embeddings=10, embedding_dim=DIM, feature_names=["a"]
            ),
            EmbeddingBagConfig(
                name="large",
                num_embeddings=ROWS,
                embedding_dim=DIM,
                feature_names=["b", "c"],
                pooling=pooling,
            ),
        ],
        device=torch.device(device),
    )
    if device != "meta":
        collection.embedding_bags["large"].weight.data.copy_(low_rank_rows())
    return collection


def sequence() -> EmbeddingCollection:
    torch.manual_seed(0)
    collection = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name="large", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["b"]
            )
        ],
        need_indices=True,
    )
    collection.embeddings["large"].weight.data.copy_(low_rank_rows())
    return collection


def batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=torch.tensor([1, 9, 119, 0, 5, 77, 3]),
        lengths=torch.tensor([1, 1, 2, 0, 1, 2]),
    )


def dlrm() -> DLRM:
    torch.manual_seed(0)
    return DLRM(
        embedding_bag_collection=pooled(),
        dense_in_features=3,
        dense_arch_layer_sizes=[8, DIM],
        over_arch_layer_sizes=[8, 1],
    )


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_a_table_that_a_train_holds_gives_the_same_outputs(pooling: PoolingType) -> None:
    model = nn.ModuleDict({"tables": pooled(pooling=pooling)})
    expected = model["tables"](batch()).values().detach()
    small = model["tables"].embedding_bags["small"].weight
    done = []
    result = compress(model, {"large": TTConfig(tt_ranks=RANKS)}, on_table=done.append)
    assert result is model
    assert type(model["tables"]) is TTEmbeddingBagCollection
    assert model["tables"].embedding_bags["small"].weight is small
    assert set(model["tables"].tt_shapes) == {"large"}
    torch.testing.assert_close(model["tables"](batch()).values(), expected, rtol=1e-5, atol=1e-5)
    (table,) = done
    assert table.relative_error < 1e-5
    assert table.dense_bytes == ROWS * DIM * 4
    assert table.num_bytes == sum(
        core.nbytes for core in model["tables"].embedding_bags["large"].tt_cores
    )


def test_a_whole_dlrm_goes_there_and_back() -> None:  # U47
    model = dlrm()
    inputs = torch.randn(2, 3)
    expected = model(inputs, batch()).detach()
    over = model.over_arch
    compress(model, {"large": TTConfig(tt_ranks=RANKS)})
    assert model.over_arch is over
    torch.testing.assert_close(model(inputs, batch()), expected, rtol=1e-5, atol=1e-5)
    materialize(model)
    collection = model.sparse_arch.embedding_bag_collection
    assert type(collection) is EmbeddingBagCollection
    torch.testing.assert_close(model(inputs, batch()), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        collection.embedding_bags["large"].weight, low_rank_rows(), rtol=1e-4, atol=1e-5
    )


def test_every_torch_optimizer_trains_a_compressed_model() -> None:  # U63
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop):
        model = dlrm()
        compress(model, {"large": TTConfig(tt_ranks=RANKS)})
        optimizer = kind(model.parameters(), lr=0.01)
        before = copy.deepcopy(model.state_dict())
        model(torch.randn(2, 3), batch()).sum().backward()
        cores = model.sparse_arch.embedding_bag_collection.embedding_bags["large"].tt_cores
        assert all(not core.grad.is_sparse for core in cores)
        optimizer.step()
        key = "sparse_arch.embedding_bag_collection.embedding_bags.large.tt_cores.0"
        assert not torch.equal(before[key], model.state_dict()[key])


def test_sequence_tables_keep_their_indices() -> None:
    model = compress(sequence(), {"large": TTConfig(tt_ranks=RANKS)})
    assert type(model) is TTEmbeddingCollection
    out = model(batch())["b"]
    torch.testing.assert_close(
        out.values(), low_rank_rows()[out.weights_or_none()], rtol=1e-5, atol=1e-5
    )
    back = materialize(model)
    assert type(back) is EmbeddingCollection
    torch.testing.assert_close(back(batch())["b"].values(), out.values().detach())


def test_meta_tables_stay_on_meta() -> None:
    model = compress(pooled("meta"), {"large": TTConfig(tt_ranks=[8, 8])})
    cores = model.embedding_bags["large"].tt_cores
    assert all(core.is_meta for core in cores)
    assert model.device.type == "meta"
    assert materialize(model).embedding_bags["large"].weight.is_meta


def test_other_dtypes_and_max_error_are_taken() -> None:
    model = compress(pooled(), {"large": TTConfig(data_type="bf16", max_error=1e-3)})
    assert model.embedding_bags["large"].tt_cores[0].dtype == torch.bfloat16
    assert model.tt_shapes["large"].tt_ranks == (4, 4)


@pytest.mark.parametrize("model", [pooled, sequence])
def test_a_precision_reaches_the_lookup_and_stays_with_other_ranks(model: Callable) -> None:
    collection = compress(model(), {"large": TTConfig(tt_ranks=RANKS, precision="high")})
    collection = change_ranks(collection, {"large": [3, 3]})
    assert collection.table_modules()["large"]._lookup.precision == "high"


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match=r"precision must be None or one of .*, got 'tf32'"):
        TTConfig(tt_ranks=RANKS, precision="tf32")


def test_going_back_sees_cached_rows() -> None:
    config = TTConfig(tt_ranks=RANKS, cache=RowCacheConfig(num_rows=16, first_refresh=1))
    collection = compress(pooled(), {"large": config})
    bag = collection.embedding_bags["large"]
    ids = torch.arange(8)
    bag.row_cache.ids[:8] = ids
    bag.row_cache.rows[:8] = 7.0
    rows = materialize(collection).embedding_bags["large"].weight
    assert bool((rows[:8] == 7.0).all())
    torch.testing.assert_close(rows[8:], low_rank_rows()[8:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("ranks", "tolerance"), [([6, 8], 1e-6), ([4, 6], 1e-6), ([4, 4], 1e-6)])
def test_higher_ranks_leave_the_rows_and_train(ranks: list[int], tolerance: float) -> None:
    collection = compress(pooled(), {"large": TTConfig(tt_ranks=RANKS)})
    before = collection.embedding_bags["large"].to_dense().detach()
    collection = change_ranks(collection, {"large": ranks})
    assert collection.tt_shapes["large"].tt_ranks == tuple(ranks)
    table = collection.embedding_bags["large"]
    torch.testing.assert_close(table.to_dense(), before, rtol=tolerance, atol=tolerance)
    collection(batch()).values().square().sum().backward()
    optimizer = torch.optim.SGD(collection.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()
    collection(batch()).values().square().sum().backward()
    assert all(bool(core.grad.abs().sum() > 0) for core in table.tt_cores)


def test_lower_ranks_round_the_cores_and_keep_the_cache() -> None:
    config = TTConfig(tt_ranks=RANKS, cache=RowCacheConfig(num_rows=16, first_refresh=1))
    collection = compress(pooled(), {"large": config})
    collection.embedding_bags["large"].row_cache.ids[3] = 17
    rows = collection.embedding_bags["large"].to_dense()
    collection = change_ranks(collection, {"large": [2, 3]})
    table = collection.embedding_bags["large"]
    assert table.row_cache.ids[3] == 17
    error = (table.to_dense() - rows)[18:].norm() / rows[18:].norm()
    assert 0.01 < error < 0.9


def test_a_budget_is_kept() -> None:
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{i}", num_embeddings=20_000, embedding_dim=16, feature_names=[f"f{i}"]
            )
            for i in range(2)
        ]
    )
    done = []
    compressed = compress(collection, budget_bytes=200_000, on_table=done.append)
    num_bytes = sum(parameter.nbytes for parameter in compressed.parameters())
    assert num_bytes <= 200_000
    assert len(done) == 2
    with pytest.raises(ValueError, match=r"budget.*100"):
        compress(collection, budget_bytes=100)


def nan_model() -> EmbeddingBagCollection:
    collection = pooled()
    collection.embedding_bags["large"].weight.data[3, 1] = torch.nan
    return collection


@pytest.mark.parametrize(
    ("model", "tables", "words"),
    [
        (pooled, {"larg": TTConfig(tt_ranks=RANKS)}, "larg.*nearest is 'large'"),
        (pooled, {"large": TTConfig(tt_ranks=[4, 0])}, "'large'.*tt_ranks"),
        (pooled, {"large": TTConfig(tt_ranks=RANKS, col_factors=[3, 3, 1])}, "col_factors"),
        (pooled, {"large": TTConfig(max_error=2.0)}, "max_error.*2.0"),
        (pooled, {"large": TTConfig()}, "'large'.*exactly one of tt_ranks and max_error"),
        (lambda: pooled("meta"), {"large": TTConfig(max_error=0.1)}, "must be given.*meta.*large"),
        (nan_model, {"large": TTConfig(tt_ranks=RANKS)}, "'large'.*finite"),
        (lambda: nn.Linear(2, 2), {"large": TTConfig(tt_ranks=RANKS)}, "must hold.*ModuleDict"),
        (
            sequence,
            {"large": TTConfig(tt_ranks=RANKS, cache=RowCacheConfig(num_rows=8))},
            "cache must be None.*'large'",
        ),
    ],
)
def test_bad_input_leaves_the_model_as_it_was(model: object, tables: dict, words: str) -> None:
    built = nn.ModuleDict({"tables": model()})
    before = {name: id(module) for name, module in built.named_modules()}
    with pytest.raises(ValueError, match=words):
        compress(built, tables)
    assert before == {name: id(module) for name, module in built.named_modules()}


def test_tables_in_the_wrong_form_are_refused() -> None:
    collection = compress(pooled(), {"large": TTConfig(tt_ranks=RANKS)})
    with pytest.raises(ValueError, match="'large', a TT table already"):
        compress(collection, {"large": TTConfig(tt_ranks=RANKS)})
    for change in (
        lambda: materialize(collection, ["small"]),
        lambda: change_ranks(collection, {"small": [2, 2]}),
    ):
        with pytest.raises(ValueError, match="'small', which has rows"):
            change()
    with pytest.raises(ValueError, match="exactly one of tables and budget_bytes"):
        compress(collection)
    with pytest.raises(ValueError, match=r"'large'.*tt_ranks"):
        change_ranks(collection, {"large": [4]})


def test_ranks_are_those_that_a_table_can_use() -> None:
    collection = TTEmbeddingBagCollection(
        tables=[
            TTEmbeddingBagConfig(
                name="t", num_embeddings=50, embedding_dim=4, feature_names=["a"], tt_ranks=[2, 2]
            )
        ]
    )
    rows = collection.embedding_bags["t"].to_dense().detach()
    with pytest.warns(UserWarning, match=r"tt_ranks=\(3, 40\)"):
        changed = change_ranks(collection, {"t": [3, 40]})
    assert changed.tt_shapes["t"].tt_ranks < (3, 40)
    torch.testing.assert_close(changed.embedding_bags["t"].to_dense(), rows)


def test_a_row_order_lowers_the_error_and_is_kept_with_the_table() -> None:
    """Ids are those of before, whatever the rows' places; a second table has none."""
    source = pooled()
    generator = torch.Generator().manual_seed(5)
    centres = torch.randn(6, DIM, generator=generator)
    rows = centres[torch.randint(6, (ROWS,), generator=generator)]
    source.embedding_bags["large"].weight.data.copy_(rows)
    every = torch.arange(ROWS)
    ids = KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=torch.cat([every % 10, every, every]),
        lengths=torch.ones(3 * ROWS, dtype=torch.int64),
    )
    expected = source(ids).values().detach()
    ranks, errors = TTConfig(tt_ranks=RANKS), []
    order = similarity_order(rows, group_size=ranks.shape(ROWS, DIM).row_factors[-1])
    outputs = []
    for orders in ({}, {"large": order}):
        model = nn.ModuleList([copy.deepcopy(source)])
        compress(
            model,
            {"large": ranks},
            row_orders=orders,
            on_table=lambda table: errors.append(table.relative_error),
        )
        outputs.append(model[0](ids).values().detach())
    assert errors[1] < 0.7 * errors[0]
    for output, error in zip(outputs, errors, strict=True):
        off = (output - expected).norm() / expected[:, DIM:].norm()
        torch.testing.assert_close(float(off), error, rtol=1e-3, atol=0)
    assert isinstance(model[0].collection, TTEmbeddingBagCollection)
    materialize(model)
    torch.testing.assert_close(model[0](ids).values(), outputs[1], rtol=1e-4, atol=1e-5)


def test_a_refused_row_order_leaves_the_model() -> None:
    model = nn.ModuleList([pooled()])
    before = model[0]
    large = {"large": TTConfig(tt_ranks=RANKS)}
    with pytest.raises(ValueError, match=r"row_orders must be of tables \['large'\], got \['sm"):
        compress(model, large, row_orders={"small": torch.arange(10)})
    with pytest.raises(ValueError, match="order must be a permutation of its 120 ids"):
        compress(model, large, row_orders={"large": torch.ones(120, dtype=torch.int64)})
    assert model[0] is before
