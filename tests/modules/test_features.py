"""Features that no collection can read are refused with the rule."""

from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tt import (
    TTEmbeddingBagCollection,
    TTEmbeddingBagConfig,
    TTEmbeddingCollection,
    TTEmbeddingConfig,
    freeze,
)

KEYS = ["a", "b"]
IDS, LENGTHS = torch.tensor([1, 2, 3]), torch.tensor([1, 1, 0, 1])


def features(**changes: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(**{"keys": KEYS, "values": IDS, "lengths": LENGTHS, **changes})


BAD = {
    "None": (None, "features must be a KeyedJaggedTensor or a TensorDict, got NoneType"),
    "tensor": (IDS, "features must be a KeyedJaggedTensor or a TensorDict, got Tensor"),
    "float ids": (
        features(values=IDS.float()),
        "values of features must be int32 or int64 ids, got torch.float32",
    ),
    "few weights": (
        features(weights=torch.ones(2)),
        "weights of features must be one per id, 3, got 2",
    ),
    "ragged": (
        features(lengths=torch.tensor([1, 1, 1])),
        "lengths of features must be one per sample and key, 2 with the batch sizes "
        "{'a': 1, 'b': 1}, got 3",
    ),
    "few lengths": (
        features(stride=3),
        "lengths of features must be one per sample and key, 6 with the batch sizes "
        "{'a': 3, 'b': 3}, got 4",
    ),
}


def collection(kind: str) -> Any:
    config, of_tables = {
        "sequence": (TTEmbeddingConfig, TTEmbeddingCollection),
    }.get(kind, (TTEmbeddingBagConfig, TTEmbeddingBagCollection))
    made = of_tables(
        tables=[
            config(
                name=f"t{key}",
                num_embeddings=100,
                embedding_dim=8,
                feature_names=[key],
                tt_ranks=[2, 2],
            )
            for key in KEYS
        ]
    )
    return freeze(made, "float32") if kind == "frozen" else made


@pytest.mark.parametrize("kind", ["pooled", "sequence", "frozen"])
@pytest.mark.parametrize("case", BAD)
def test_features_of_no_form_are_refused(kind: str, case: str) -> None:
    given, message = BAD[case]
    with pytest.raises(ValueError, match="features") as error:
        collection(kind)(given)
    assert str(error.value) == message


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", ["pooled", "sequence", "frozen"])
def test_ids_of_both_dtypes_are_looked_up(kind: str, dtype: torch.dtype) -> None:
    made = collection(kind)
    assert made(features(values=IDS.to(dtype)))["a"] is not None
