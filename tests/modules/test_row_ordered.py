import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tt import RowOrderedCollection
from torchrec_tt.tt.row_order import frequency_order

ROWS = {"a": 30, "b": 20}


def tables(kind: type) -> list:
    return [
        kind(name="a", num_embeddings=30, embedding_dim=4, feature_names=["f", "g"]),
        kind(name="b", num_embeddings=20, embedding_dim=4, feature_names=["h"]),
    ]


def orders() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randperm(rows, generator=generator) for name, rows in ROWS.items()}


def features(*, dtype: torch.dtype = torch.int64, weighted: bool = False) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(0, 4, (15,), generator=generator)
    ends = lengths.view(3, 5).sum(1).tolist()
    ids = [
        torch.randint(0, n, (count,), generator=generator)
        for n, count in zip((30, 30, 20), ends, strict=True)
    ]
    weights = torch.rand(int(lengths.sum()), generator=generator) if weighted else None
    return KeyedJaggedTensor(
        keys=["f", "g", "h"], values=torch.cat(ids).to(dtype), lengths=lengths, weights=weights
    )


def pooled(*, is_weighted: bool = False) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    return EmbeddingBagCollection(tables=tables(EmbeddingBagConfig), is_weighted=is_weighted)


def reordered(collection: EmbeddingBagCollection, names: list[str]) -> RowOrderedCollection:
    """The same function: rows moved, and the order kept."""
    chosen = {name: order for name, order in orders().items() if name in names}
    with torch.no_grad():
        for name, order in chosen.items():
            weight = collection.embedding_bags[name].weight
            weight.copy_(weight[order])
    return RowOrderedCollection(collection, chosen)


@pytest.mark.parametrize("names", [[], ["a"], ["b"], ["a", "b"]])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_ids_stay_what_they_are(names: list[str], is_weighted: bool) -> None:
    batch = features(weighted=is_weighted)
    ordered = reordered(pooled(is_weighted=is_weighted), names)
    expected = pooled(is_weighted=is_weighted)(batch).values()
    torch.testing.assert_close(ordered(batch).values(), expected, rtol=0, atol=0)


def test_sequences_and_int32_ids() -> None:
    torch.manual_seed(0)
    collection = EmbeddingCollection(tables=tables(EmbeddingConfig))
    batch = features(dtype=torch.int32)
    expected = {key: value.values().clone() for key, value in collection(batch).items()}
    order = orders()["a"]
    with torch.no_grad():
        weight = collection.embeddings["a"].weight
        weight.copy_(weight[order])
    found = RowOrderedCollection(collection, {"a": order})(batch)
    for key, values in expected.items():
        torch.testing.assert_close(found[key].values(), values, rtol=0, atol=0)


def test_features_of_their_own_batch_sizes_keep_them() -> None:
    batch = KeyedJaggedTensor(
        keys=["f", "h"],
        values=torch.tensor([3, 29, 1, 19, 0]),
        lengths=torch.tensor([2, 1, 1, 0, 1]),
        stride_per_key_per_rank=[[2], [3]],
        inverse_indices=(["f", "h"], torch.tensor([[0, 1, 0], [2, 0, 1]])),
    )
    seen = []
    collection = pooled()
    collection.forward = seen.append
    order = orders()["b"]
    RowOrderedCollection(collection, {"b": order})(batch)
    renamed = seen[0]
    assert renamed.stride_per_key_per_rank() == [[2], [3]]
    assert renamed.inverse_indices()[1].tolist() == [[0, 1, 0], [2, 0, 1]]
    assert renamed.values()[:3].tolist() == [3, 29, 1]
    assert order[renamed.values()[3:]].tolist() == [19, 0]


def test_ids_outside_the_table_are_left_to_the_collection() -> None:
    collection = pooled()
    seen = []
    collection.forward = seen.append
    batch = KeyedJaggedTensor(
        keys=["h"], values=torch.tensor([-1, 20, 2**40]), lengths=torch.tensor([3])
    )
    RowOrderedCollection(collection, {"b": orders()["b"]})(batch)
    assert seen[0].values().tolist() == [-1, 20, 2**40]


def test_the_order_is_kept_in_the_state_dict() -> None:
    source, target = (reordered(pooled(), ["a"]) for _ in range(2))
    target.row_orders.a.copy_(torch.arange(30))
    state = source.state_dict()
    assert state["row_orders.a"].dtype == torch.int32  # 4 bytes a row
    target.load_state_dict(state)
    batch = features()
    torch.testing.assert_close(target(batch).values(), source(batch).values(), rtol=0, atol=0)


def test_bad_orders_are_named() -> None:
    with pytest.raises(ValueError, match=r"row_orders must be of tables \['a', 'b'\], got 'c'"):
        RowOrderedCollection(pooled(), {"c": torch.arange(3)})
    with pytest.raises(ValueError, match=r"row_orders\['b'\] must have shape \[20\], got \[30\]"):
        RowOrderedCollection(pooled(), {"b": torch.arange(30)})
    with pytest.raises(ValueError, match="order must be a permutation of its 20 ids"):
        RowOrderedCollection(pooled(), {"b": torch.zeros(20, dtype=torch.int64)})
    with pytest.raises(ValueError, match="collection must be an EmbeddingBagCollection or"):
        RowOrderedCollection(torch.nn.Linear(1, 1), {})
    shared = tables(EmbeddingBagConfig)
    shared[1].feature_names = ["h", "g"]
    collection = EmbeddingBagCollection(tables=shared)
    with pytest.raises(ValueError, match=r"features of its own, got 'g', which another table"):
        RowOrderedCollection(collection, {"a": frequency_order(torch.arange(30))})


def test_a_tensor_dict_is_looked_up_and_other_features_are_refused() -> None:
    ordered, batch = reordered(pooled(), ["a"]), features()
    columns = {
        key: torch.nested.nested_tensor_from_jagged(jagged.values(), jagged.offsets())
        for key, jagged in batch.to_dict().items()
    }
    found = ordered(TensorDict(columns, batch_size=[5]))
    torch.testing.assert_close(found.values(), ordered(batch).values(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="features must be a KeyedJaggedTensor or a Ten"):
        ordered(None)
