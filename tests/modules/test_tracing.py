"""Models with Tensor-Train tables are traced by torch.fx, compiled, exported and copied."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torchrec.fx
from torch import Tensor, fx, nn
from torch.testing import assert_close
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tt import (
    TTEmbedding,
    TTEmbeddingBag,
    TTEmbeddingBagCollection,
    TTEmbeddingBagConfig,
    TTEmbeddingCollection,
    TTEmbeddingConfig,
)

BACKEND = "aot_eager"  # traces forward and backward, fakes included; compiles no C++


class Model(nn.Module):
    """A regular and a TT table, and a layer over them."""

    def __init__(self, *, is_weighted: bool = False, device: str = "cpu") -> None:
        super().__init__()
        pooling = PoolingType.SUM if is_weighted else PoolingType.MEAN
        tables = [
            EmbeddingBagConfig(name="r", num_embeddings=50, embedding_dim=4, feature_names=["a"]),
            TTEmbeddingBagConfig(
                name="t",
                num_embeddings=110,
                embedding_dim=8,
                feature_names=["b", "a"],
                tt_ranks=[3, 5],
                pooling=pooling,
            ),
        ]
        self.ebc = TTEmbeddingBagCollection(tables, is_weighted=is_weighted, device=device)
        self.over = nn.Linear(20, 1, device=device)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:  # [B, 1]
        return self.over(self.ebc(features).values())


class OfTensors(nn.Module):
    """The model as torch.export takes it: tensors in, tensors out."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.model(KeyedJaggedTensor(keys=["a", "b"], values=ids, lengths=lengths))


def batch(size: int, *, is_weighted: bool = False) -> KeyedJaggedTensor:
    lengths = torch.randint(0, 4, (2 * size,))
    ids = torch.randint(0, 50, (int(lengths.sum()),))
    weights = torch.rand(ids.numel()) if is_weighted else None
    return KeyedJaggedTensor(keys=["a", "b"], values=ids, lengths=lengths, weights=weights)


def assert_same_training(model: nn.Module, expected: nn.Module, *inputs: object) -> None:
    """Output and every gradient, bit for bit: the same operators run."""
    results = []
    for module in (model, expected):
        module.zero_grad()
        output = module(*inputs)
        output.square().sum().backward()
        results.append([output, *(p.grad.clone() for p in module.parameters())])
    assert_close(results[0], results[1], rtol=0, atol=0)


# U50
@pytest.mark.parametrize("trace", [fx.symbolic_trace, torchrec.fx.symbolic_trace])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_symbolic_trace_trains_as_the_model_does(trace: Callable, is_weighted: bool) -> None:
    model = Model(is_weighted=is_weighted)
    traced = trace(model)
    assert traced.state_dict().keys() == model.state_dict().keys()
    assert_same_training(traced, model, batch(5, is_weighted=is_weighted))


def test_a_symbolic_trace_has_tables_as_leaves() -> None:
    calls = [n.target for n in fx.symbolic_trace(Model()).graph.nodes if n.op == "call_module"]
    tables = ["ebc.embedding_bags.r", "ebc.embedding_bags.t", "ebc.embedding_bags.t"]
    assert calls == [*tables, "over"]


def test_a_sequence_collection_is_traced_with_tables_as_leaves() -> None:
    collection = TTEmbeddingCollection(
        [
            EmbeddingConfig(name="r", num_embeddings=50, embedding_dim=8, feature_names=["a"]),
            TTEmbeddingConfig(
                name="t",
                num_embeddings=110,
                embedding_dim=8,
                feature_names=["b"],
                tt_ranks=[3, 5],
            ),
        ]
    )
    traced = fx.symbolic_trace(collection)
    calls = [n.target for n in traced.graph.nodes if n.op == "call_module"]
    assert calls == ["embeddings.r", "embeddings.t"]
    features = batch(5)
    rows, expected = traced(features), collection(features)
    for name in ("a", "b"):
        assert_close(rows[name].values(), expected[name].values(), rtol=0, atol=0)


def test_one_bag_is_traced_inside_another_module() -> None:
    model = nn.Sequential(TTEmbeddingBag(110, 8, tt_ranks=[3, 5]), nn.Linear(8, 1))
    traced = fx.symbolic_trace(model)
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["0", "1"]
    assert_same_training(traced, model, torch.randint(0, 110, (4, 3)))


def test_one_embedding_is_traced_inside_another_module() -> None:
    model = nn.Sequential(TTEmbedding(110, 8, tt_ranks=[3, 5]), nn.Linear(8, 1))
    traced = fx.symbolic_trace(model)
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["0", "1"]
    assert_same_training(traced, model, torch.randint(0, 110, (4, 3)))


class Sequences(nn.Module):
    """A regular and a TT table of sequences."""

    def __init__(self) -> None:
        super().__init__()
        size = {"num_embeddings": 110, "embedding_dim": 8}
        self.ec = TTEmbeddingCollection(
            [
                EmbeddingConfig(name="r", feature_names=["a"], **size),
                TTEmbeddingConfig(name="t", feature_names=["b", "a"], tt_ranks=[3, 5], **size),
            ]
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:  # [N of all outputs, 8]
        rows = self.ec(features)
        return torch.cat([rows[key].values() for key in ("a@r", "b", "a@t")])


@pytest.mark.slow
def test_compiled_sequences_train_as_the_eager_ones_with_any_number_of_ids() -> None:
    torch.compiler.reset()
    model = Sequences()
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND, dynamic=True)
    for size in (5, 8, 3):
        assert_same_training(compiled, model, batch(size))


def test_a_model_on_meta_is_traced_without_values() -> None:
    traced = fx.symbolic_trace(Model(device="meta"))
    assert all(parameter.is_meta for parameter in traced.parameters())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("trace", [lambda m: m, fx.symbolic_trace])
def test_a_copy_has_its_own_cores(duplicate: Callable, trace: Callable) -> None:
    model = trace(Model())
    copied = duplicate(model)
    features = batch(5)
    assert_same_training(copied, model, features)
    before = model(features).clone()
    with torch.no_grad():
        copied.ebc.embedding_bags.t.tt_cores[0].add_(1)
    assert_close(model(features), before, rtol=0, atol=0)


@pytest.mark.slow
def test_a_compiled_bag_trains_as_the_eager_one_with_any_number_of_bags() -> None:
    torch.compiler.reset()
    bag = TTEmbeddingBag(110, 8, tt_ranks=[3, 5], mode="sum")
    compiled = torch.compile(bag, fullgraph=True, backend=BACKEND, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in (5, 8, 3):
            ids, offsets = torch.randint(0, 110, (4 * size,)), torch.arange(0, 4 * size, 4)
            assert_same_training(compiled, bag, ids, offsets)


@pytest.mark.slow
def test_a_compiled_model_trains_as_the_eager_one_with_any_batch_size() -> None:
    torch.compiler.reset()
    model = Model()
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND, dynamic=True)
    for size in (5, 8, 3):
        assert_same_training(compiled, model, batch(size))


# U48
@pytest.mark.slow
def test_an_exported_model_takes_other_batch_sizes() -> None:
    model = OfTensors(Model())
    example = batch(6)
    is_dynamic = {0: torch.export.Dim.AUTO}
    exported = torch.export.export(
        model, (example.values(), example.lengths()), dynamic_shapes=(is_dynamic, is_dynamic)
    ).module()
    other = batch(9)
    assert_close(exported(other.values(), other.lengths()), model.model(other), rtol=0, atol=0)


def test_quantizing_a_model_leaves_tt_collections_as_they_are() -> None:
    model = Model()
    features = batch(5)
    expected = model(features)
    quantized = quantize_embeddings(copy.deepcopy(model), torch.qint8, inplace=True)
    assert_close(quantized(features), expected, rtol=0, atol=0)
