"""Features as collections take them: of the right form, and of one batch size."""

import itertools
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def check_features(features: Any) -> None:
    """Raises ValueError for what is no KeyedJaggedTensor of ids; reads no tensor's values."""
    if torch.compiler.is_compiling() or isinstance(features, torch.fx.Proxy):
        return
    if not isinstance(features, KeyedJaggedTensor):
        raise ValueError(
            f"features must be a KeyedJaggedTensor or a TensorDict, got {type(features).__name__}"
        )
    values, weights = features.values(), features.weights_or_none()
    if values.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"values of features must be int32 or int64 ids, got {values.dtype}")
    if weights is not None and weights.numel() != values.numel():
        raise ValueError(
            f"weights of features must be one per id, {values.numel()}, got {weights.numel()}"
        )
    strides, num_lengths = features.stride_per_key(), features.lengths().numel()
    if num_lengths != sum(strides):
        raise ValueError(
            f"lengths of features must be one per sample and key, {sum(strides)} with the batch "
            f"sizes {dict(zip(features.keys(), strides, strict=True))}, got {num_lengths}"
        )


def with_one_batch_size(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns features of one batch size: of variable ones (VBE), each bag where the batch has it.

    Raises:
        ValueError: if the features have variable batch sizes and no `inverse_indices`, which say
            where in the batch a bag belongs, or these name bags that are not there.
    """
    if not isinstance(features, KeyedJaggedTensor) or not features.variable_stride_per_key():
        return features
    check_inverse_indices(features)
    names, bags_of_feature = features.inverse_indices()  # [F, B]
    strides = dict(zip(features.keys(), features.stride_per_key(), strict=True))
    first_bags = dict(zip(strides, itertools.accumulate(strides.values(), initial=0), strict=False))
    for name, row in zip(names, bags_of_feature, strict=True):
        if row.numel() and not 0 <= row.min() <= row.max() < strides[name]:
            raise ValueError(
                f"inverse_indices must be in [0, {strides[name]}) for feature {name!r}, got {row}"
            )
    shifts = bags_of_feature.new_tensor([first_bags[name] for name in names])
    bags = (bags_of_feature + shifts.unsqueeze(1)).flatten()
    lengths = features.lengths().index_select(0, bags)
    begins, ends = features.offsets().index_select(0, bags), lengths.cumsum(0)
    places = torch.repeat_interleave(begins - (ends - lengths), lengths)
    places = places + torch.arange(len(places), device=places.device)
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        keys=names,
        values=features.values().index_select(0, places),
        lengths=lengths,
        weights=None if weights is None else weights.index_select(0, places),
    )


def check_inverse_indices(features: KeyedJaggedTensor) -> None:
    """Raises ValueError for variable batch sizes (VBE) that do not say where samples belong."""
    if features.variable_stride_per_key() and features.inverse_indices_or_none() is None:
        raise ValueError(
            "features with a variable batch size per feature (VBE) must have inverse_indices, got "
            f"none with stride_per_key_per_rank={features.stride_per_key_per_rank()}"
        )
