"""U48: frozen models traced by torch.fx, exported, and in TorchRec's own inference path."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torchrec.fx
from torch import Tensor, fx, nn
from torch.testing import assert_close
from torchrec.inference.modules import (
    DEFAULT_QUANT_MAPPING,
    quantize_inference_model,
    shard_quant_model,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.quant.embedding_modules import (
    EmbeddingBagCollection as QuantEmbeddingBagCollection,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tt import TTEmbeddingBagCollection, TTEmbeddingBagConfig, freeze
from torchrec_tt.modules.frozen_collections import FrozenTTEmbeddingBagCollection

SIZE = {"num_embeddings": 500, "embedding_dim": 8}


class Model(nn.Module):
    """A collection of TorchRec's, and one with TT tables, under a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ebc = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(name="r0", feature_names=["a"], **SIZE)]
        )
        self.tt = TTEmbeddingBagCollection(
            [
                EmbeddingBagConfig(name="r1", feature_names=["a"], **SIZE),
                TTEmbeddingBagConfig(name="t0", feature_names=["b", "a"], tt_ranks=[4, 4], **SIZE),
                TTEmbeddingBagConfig(
                    name="t1",
                    feature_names=["a"],
                    tt_ranks=[4],
                    pooling=PoolingType.MEAN,
                    **SIZE,
                ),
            ]
        )
        self.over = nn.Linear(40, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:  # [B, 1]
        return self.over(torch.cat([self.ebc(features).values(), self.tt(features).values()], 1))


class OfTensors(nn.Module):
    """What torch.export takes: tensors in, tensors out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.model(KeyedJaggedTensor(keys=["a", "b"], values=ids, lengths=lengths))


def a_frozen_model() -> nn.Module:
    return freeze(Model(), "int8", hot_rows={"t0": torch.arange(20)})


def batch(size: int = 6) -> KeyedJaggedTensor:
    lengths = torch.randint(0, 4, (2 * size,))
    ids = torch.randint(0, 500, (int(lengths.sum()),))
    return KeyedJaggedTensor(keys=["a", "b"], values=ids, lengths=lengths)


@pytest.mark.parametrize("trace", [fx.symbolic_trace, torchrec.fx.symbolic_trace])
def test_a_symbolic_trace_has_tables_as_leaves(trace: Callable) -> None:
    frozen = a_frozen_model().tt
    traced = trace(frozen)
    calls = [n.target for n in traced.graph.nodes if n.op == "call_module"]
    assert calls == [f"embedding_bags.{name}" for name in ("r1", "t0", "t0", "t1")]
    features = batch(4)
    assert_close(traced(features).values(), frozen(features).values(), rtol=0, atol=0)
    assert traced.state_dict().keys() == frozen.state_dict().keys()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_an_exported_model_takes_other_batch_sizes(dtype: str) -> None:
    frozen = freeze(Model().tt, dtype, hot_rows={"t0": torch.arange(20)})
    model, example = OfTensors(ValuesOf(frozen)), batch()
    is_dynamic = {0: torch.export.Dim.AUTO}
    with torch.no_grad(), torch.fx.experimental._config.patch(backed_size_oblivious=True):
        exported = torch.export.export(
            model, (example.values(), example.lengths()), dynamic_shapes=(is_dynamic, is_dynamic)
        ).module()
    for other in (batch(9), batch(1)):
        output = exported(other.values(), other.lengths())
        assert_close(output, frozen(other).values(), rtol=0, atol=0)


class ValuesOf(nn.Module):
    """The collection's output as one tensor."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.collection(features).values()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy(duplicate: Callable) -> None:
    frozen, features = a_frozen_model(), batch()
    assert_close(duplicate(frozen)(features), frozen(features), rtol=0, atol=0)


def test_batches_of_a_size_for_each_feature() -> None:
    """VBE: bags lie where the batch has them."""
    frozen = a_frozen_model().tt
    features = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([1, 2, 3, 40, 50]),
        lengths=torch.tensor([1, 2, 2]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["a", "b"], torch.tensor([[0, 1, 0], [0, 0, 0]])),
    )
    plain = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([1, 2, 3, 1, 40, 50, 40, 50, 40, 50]),
        lengths=torch.tensor([1, 2, 1, 2, 2, 2]),
    )
    assert_close(frozen(features).values(), frozen(plain).values(), rtol=0, atol=0)


def test_torchrec_quantises_its_own_collections_beside_frozen_ones() -> None:
    features = batch()
    expected = Model()(features)
    model = quantize_inference_model(a_frozen_model())
    assert type(model.ebc) is QuantEmbeddingBagCollection
    assert type(model.tt) is FrozenTTEmbeddingBagCollection
    error = (model(features) - expected).abs().max()
    assert 0 < error < 1e-3


@pytest.mark.parametrize("make", [Model, a_frozen_model])
def test_torchrec_is_refused_tt_collections_to_quantise(make: Callable) -> None:
    model = make()
    name = f"{type(model.tt).__module__}.{type(model.tt).__name__}"
    mapping = {**DEFAULT_QUANT_MAPPING, name: QuantEmbeddingBagCollection}
    with pytest.raises(NotImplementedError, match=r"must leave .* out: .*freeze\(model, 'int8'\)"):
        quantize_inference_model(model, quantization_mapping=mapping)


def test_sharding_for_inference_leaves_frozen_collections_whole() -> None:
    frozen, features = freeze(nn.Sequential(Model().tt), "int8"), batch()
    expected = frozen(features).values()
    model, _ = shard_quant_model(frozen, compute_device="cpu", sharding_device="cpu")
    assert type(model[0]) is FrozenTTEmbeddingBagCollection
    assert_close(model(features).values(), expected, rtol=0, atol=0)


def test_a_frozen_model_is_not_sharded() -> None:
    with pytest.raises(NotImplementedError, match="must be given the model that was trained, got"):
        _ = a_frozen_model().tt.fused_optimizer
