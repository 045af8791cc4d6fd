"""Features that differ in form between ranks are refused, with one message on every rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed import toy_sequence_model
from tests.distributed.ranks import Ranks
from tests.distributed.test_train_pipeline import PrefetchOnCpu, needs_torchrec_1_7
from tests.distributed.toy_model import (
    KEYS,
    ToyModelWithLoss,
    plan_for,
    sharded,
    sharder,
    tables,
    unsharded,
)
from torchrec_tt import TTEmbeddingBagCollection

BOTH_TYPES = {"t0": "row_wise", "t1": "table_wise"}
ALL_KINDS = ["pooled", "weighted", "sequence", "regular tables"]


def features_with(
    keys: list[str], *, is_weighted: bool = False, ids: Any = torch.int64, lengths: Any = None
) -> KeyedJaggedTensor:
    """Two samples of one id per feature: its place in KEYS."""
    values = torch.tensor([KEYS.index(key) for key in keys for _ in range(2)])
    return KeyedJaggedTensor(
        keys=keys,
        values=values.to(ids),
        lengths=torch.ones(len(values), dtype=lengths or torch.int64),
        weights=values * 0.5 + 1 if is_weighted else None,
    )


def without_f0(keys: list[str]) -> list[str]:
    return [key for key in keys if key != "f0"]


def ragged(keys: list[str]) -> KeyedJaggedTensor:
    features = features_with(keys)
    return KeyedJaggedTensor(keys=keys, values=features.values(), lengths=features.lengths()[:-1])


def collection(kind: str) -> tuple[Any, Any]:
    """A sharded collection on two ranks, and the same unsharded."""
    if kind == "sequence":
        source: Any = toy_sequence_model.unsharded()
        return toy_sequence_model.sharded(source, BOTH_TYPES)[0].module.ec, source.ec
    if kind == "regular tables":
        configs = [config for config in tables() if config.name[0] == "r"]
        meta = TTEmbeddingBagCollection(configs, device="meta")
        plan = plan_for(meta, {"r0": "row_wise", "r1": "table_wise"}, [sharder()])
        model = DistributedModelParallel(
            meta, device=torch.device("cpu"), plan=plan, sharders=[sharder()]
        )
        return model.module, None
    source = unsharded(is_weighted=kind == "weighted")
    return sharded(source, BOTH_TYPES)[0].module.ebc, source.ebc


def values_of(output: Any) -> dict[str, Tensor]:
    if isinstance(output, dict):
        return {key: rows.values().detach() for key, rows in output.items()}
    return {key: output[key].detach() for key in output.keys()}  # noqa: SIM118


def lookup(module: Any, features: Any) -> dict[str, Tensor]:
    output = module(features)
    return values_of(output.wait() if hasattr(output, "wait") else output)


def message_of(module: Any, features: Any) -> str:
    with pytest.raises(ValueError, match="features") as error:
        lookup(module, features)
    return str(error.value)


def messages_of_first_batches(rank: int, kind: str, keys: list[str]) -> dict[str, str]:
    """What is said where rank 1's features differ; those of both then are looked up right."""
    module, reference = collection(kind)
    is_weighted = kind == "weighted"
    good = features_with(keys, is_weighted=is_weighted)
    others = {
        "order": features_with(keys[::-1], is_weighted=is_weighted),
        "missing": features_with(without_f0(keys), is_weighted=is_weighted),
        "id dtype": features_with(keys, is_weighted=is_weighted, ids=torch.int32),
        "lengths dtype": features_with(keys, is_weighted=is_weighted, lengths=torch.int32),
        "weights": features_with(keys, is_weighted=not is_weighted),
        "float": features_with(keys, is_weighted=is_weighted, ids=torch.float32),
        "none": None,
        "dict": {key: torch.zeros(2) for key in keys},
        "ragged": ragged(keys),
    }
    if kind in ("pooled", "regular tables"):  # which read no weights
        others.pop("weights")
    messages = {
        name: message_of(module, other if rank == 1 else good) for name, other in others.items()
    }
    output = lookup(module, good)
    if reference is not None:
        expected = lookup(reference, good)
        assert output.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(output[key], value)
    return messages


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("keys", [KEYS, KEYS[2:] + KEYS[:2]], ids=["in order", "another order"])
def test_a_rank_of_another_form_is_refused_on_every_rank(
    two_ranks: Ranks, kind: str, keys: list[str]
) -> None:
    messages, others = two_ranks.run(messages_of_first_batches, kind, keys)
    assert messages == others
    same, dtype = "must be the same in the same order on every rank", "must have the same dtype"
    sizes = dict.fromkeys(keys, 1)
    expected = {
        "order": f"keys of features {same} at the first batch, got {keys} on rank 0, "
        f"{keys[::-1]} on rank 1",
        "missing": "rank 1: features must have a key for every feature of the tables, got "
        f"{without_f0(keys)} without ['f0']",
        "id dtype": f"values of features {dtype} on every rank at the first batch, got "
        "torch.int64 on rank 0, torch.int32 on rank 1",
        "lengths dtype": f"lengths of features {dtype} on every rank at the first batch, got "
        "torch.int64 on rank 0, torch.int32 on rank 1",
        "float": "rank 1: values of features must be int32 or int64 ids, got torch.float32",
        "none": "rank 1: features must be a KeyedJaggedTensor or a TensorDict, got NoneType",
        "dict": "rank 1: features must be a KeyedJaggedTensor or a TensorDict, got dict",
        "ragged": "rank 1: lengths of features must be one per sample and key, 4 with the batch "
        f"sizes {sizes}, got 7",
    }
    if kind in ("weighted", "sequence"):
        got = ["None", "torch.float32"]
        if kind == "weighted":
            got.reverse()
        expected["weights"] = (
            "weights of features must be on every rank, of one dtype, or on none at the first "
            f"batch, got {got[0]} on rank 0, {got[1]} on rank 1"
        )
    assert messages == expected


def messages_of_later_batches(rank: int, kind: str) -> list[str]:
    module, _ = collection(kind)
    is_weighted = kind == "weighted"
    lookup(module, features_with(KEYS, is_weighted=is_weighted))
    return [
        message_of(module, features)
        for features in (
            features_with(KEYS[::-1], is_weighted=is_weighted),
            features_with(KEYS, is_weighted=not is_weighted),
            features_with(KEYS, is_weighted=is_weighted, ids=torch.float64),
            None,
        )
    ]


@pytest.mark.parametrize("kind", ["weighted", "sequence"])
def test_a_later_batch_has_the_form_of_the_first(one_rank: Ranks, kind: str) -> None:
    """On the rank whose batch is another, before any collective."""
    (messages,) = one_rank.run(messages_of_later_batches, kind)
    words = ["no weights", "weights"]
    if kind == "weighted":
        words.reverse()
    assert messages == [
        f"features must have the keys of the first batch in its order, {KEYS}, got {KEYS[::-1]}",
        f"features must have {words[0]} as in the first batch, got {words[1]}",
        "values of features must be int32 or int64 ids, got torch.float64",
        "features must be a KeyedJaggedTensor or a TensorDict, got NoneType",
    ]


def message_of_a_pipeline(rank: int, pipeline_type: Callable[..., Any]) -> str:
    source = unsharded()
    with_loss = ToyModelWithLoss(source.ebc)
    model, optimizer = sharded(with_loss, BOTH_TYPES)
    keys = KEYS if rank == 0 else KEYS[::-1]
    pipeline = pipeline_type(model, optimizer, torch.device("cpu"))
    with pytest.raises(ValueError, match="features") as error:
        pipeline.progress(iter([features_with(keys)] * 3))
    dist.barrier()  # nobody is stuck in a collective
    return str(error.value)


@pytest.mark.parametrize(
    "pipeline_type",
    [TrainPipelineSparseDist, pytest.param(PrefetchOnCpu, marks=needs_torchrec_1_7)],
)
def test_a_rank_of_another_form_is_refused_in_a_pipeline(
    two_ranks: Ranks, pipeline_type: Callable[..., Any]
) -> None:
    message, other = two_ranks.run(message_of_a_pipeline, pipeline_type)
    assert message == other
    assert message.endswith(f"got {KEYS} on rank 0, {KEYS[::-1]} on rank 1")


def look_up_alone(rank: int) -> int:
    model, _ = sharded(unsharded(), dict.fromkeys(["t0", "t1", "r0", "r1"], "data_parallel"))
    if rank == 1:
        return 0
    return len(lookup(model.module.ebc, features_with(KEYS)))


def test_a_rank_looks_data_parallel_tables_up_alone(two_ranks: Ranks) -> None:
    assert two_ranks.run(look_up_alone) == [5, 0]
