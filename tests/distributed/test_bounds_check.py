import warnings
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import BoundsCheckMode
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import KEYS, sharded, sharder, unsharded
from torchrec_tt.distributed.bounds_check import _DeviceCheck

KINDS = {"t0": "row_wise", "t1": "table_wise"}
# f2 is read by t0 of 110 rows, in blocks of 55; f0 by t0 and by the regular r0
BAD_IDS = [-1, -2, 110, 111, 119, 165, 300, 500, 2**40]


def features_of(ids: list[int]) -> KeyedJaggedTensor:
    """Bags of one id each: these for f2, 0 for the other features."""
    values = torch.zeros(len(KEYS), len(ids), dtype=torch.int64)
    values[KEYS.index("f2")] = torch.tensor(ids)
    lengths = torch.ones(values.numel(), dtype=torch.int64)
    return KeyedJaggedTensor(keys=KEYS, values=values.view(-1), lengths=lengths)


def look_up_everywhere(rank: int, ids: list[int], mode: BoundsCheckMode) -> Tensor:
    model, _ = sharded(unsharded(), KINDS, tt_sharder=sharder(bounds_check_mode=mode))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.module.ebc(features_of(ids))["f2"].detach()


@pytest.mark.parametrize("mode", [BoundsCheckMode.IGNORE, BoundsCheckMode.WARNING])
def test_u25_u26_bad_ids_of_a_row_wise_table_read_row_0_of_the_table(
    two_ranks: Ranks, mode: BoundsCheckMode
) -> None:
    ids = [5, *BAD_IDS, 109]
    expected = unsharded().ebc(features_of([5, *[0] * len(BAD_IDS), 109]))["f2"].detach()
    for output in two_ranks.run(look_up_everywhere, ids, mode):
        torch.testing.assert_close(output, expected)


def look_up_one_by_one(rank: int) -> list[Any]:
    """What every rank's lookup of each bad id says; both ranks hold the same id."""
    model, _ = sharded(unsharded(), KINDS)
    messages = []
    for bad_id in BAD_IDS:
        try:
            model(features_of([bad_id]))
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_u25_u26_a_bad_id_of_a_row_wise_table_is_named_as_the_user_gave_it(
    two_ranks: Ranks,
) -> None:
    expected = [f"indices must be in [0, 110) for table 't0', got {bad_id}" for bad_id in BAD_IDS]
    for messages in two_ranks.run(look_up_one_by_one):
        assert messages == expected


def test_u25_on_a_device_bad_ids_read_row_0_and_the_first_is_told_at_the_next_batch() -> None:
    check = _DeviceCheck([10, None, 5], device=torch.device("cpu"))
    features = KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=torch.tensor([9, 99, -5, 10, 7, 4, 5, -1]),
        lengths=torch.tensor([0, 1, 1, 1, 2, 3]),
    )
    assert check.take_found() is None
    assert check.values(features).tolist() == [9, 99, -5, 0, 0, 4, 0, 0]
    assert check.values(features).tolist() == [9, 99, -5, 0, 0, 4, 0, 0]
    assert check.take_found() == (2, 10)
    assert check.take_found() is None


def test_u25_warning_warns_once_and_names_the_table(one_rank: Ranks) -> None:
    ((first, second),) = one_rank.run(count_warnings)
    assert len(first) == 1
    assert "for table 't0', got 300: such ids read row 0" in first[0]
    assert second == []


def count_warnings(rank: int) -> tuple[list[str], list[str]]:
    mode = BoundsCheckMode.WARNING
    model, _ = sharded(unsharded(), KINDS, tt_sharder=sharder(bounds_check_mode=mode))
    said = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            model(features_of([300, 1]))
        said.append([str(w.message) for w in caught if "indices must" in str(w.message)])
    return said[0], said[1]


def test_the_features_given_are_left_as_they_are(one_rank: Ranks) -> None:
    assert one_rank.run(look_up_and_return_the_values) == [[0, 300, 0, 0]]


def look_up_and_return_the_values(rank: int) -> list[int]:
    mode = BoundsCheckMode.IGNORE
    model, _ = sharded(unsharded(), KINDS, tt_sharder=sharder(bounds_check_mode=mode))
    features = features_of([300])
    model(features)
    values = features.values().tolist()
    return [values[KEYS.index(key)] for key in ("f0", "f2", "f1", "f3")]


def messages_of_lengths(rank: int, kind: str) -> list[str]:
    """Of lengths whose sum is right, as far as int32 can tell, though some cannot be."""
    model, _ = sharded(unsharded(), dict.fromkeys(["t0", "t1", "r0", "r1"], kind))
    huge = 2**31 - 1
    messages = []
    for lengths in ([1, 1, -1, 1, 1, 1, 1, 3], [huge, huge, 2, 1, 1, 1, 1, 4]):
        values, counts = torch.zeros(8, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int32)
        with pytest.raises(ValueError, match="lengths must be in") as error:
            model.module.ebc(KeyedJaggedTensor(keys=KEYS, values=values, lengths=counts))
        messages.append(str(error.value))
    return messages


# U84
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "data_parallel"])
def test_lengths_that_cannot_be_are_refused_before_they_are_cut(one_rank: Ranks, kind: str) -> None:
    rule = "lengths must be in [0, 8], the number of ids, got "
    expected = [rule + "-1 to 3", rule + f"1 to {2**31 - 1}"]
    assert one_rank.run(messages_of_lengths, kind) == [expected]


def features_with(keys: list[str], weights: Tensor | None = None) -> KeyedJaggedTensor:
    """One sample with one id per feature: its place in KEYS."""
    values = torch.tensor([KEYS.index(key) for key in keys])
    return KeyedJaggedTensor(
        keys=keys, values=values, lengths=torch.ones(len(keys), dtype=torch.int64), weights=weights
    )


def messages_of_keys(rank: int) -> list[str]:
    model, _ = sharded(unsharded(), KINDS)
    messages = []
    for keys in (KEYS[:3], KEYS, KEYS[::-1], KEYS[:3]):
        try:
            model.module.ebc(features_with(keys))
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_keys_that_are_missing_or_not_the_first_batchs_are_refused(one_rank: Ranks) -> None:
    """TorchRec notes each feature's place at the first batch, and would mix features up later."""
    every, first = KEYS[:3], "features must have the keys of the first batch in its order"
    assert one_rank.run(messages_of_keys) == [
        [
            f"features must have a key for every feature of the tables, got {every} without ['f3']",
            f"{first}, {KEYS}, got {KEYS[::-1]}",
            f"{first}, {KEYS}, got {KEYS[:3]}",
        ]
    ]


def outputs_with_weights(rank: int, kind: str) -> tuple[Tensor, Tensor]:
    model, _ = sharded(unsharded(), dict.fromkeys(["t0", "t1", "r0", "r1"], kind))
    weights = torch.arange(2.0, 6.0)
    return tuple(
        model.module.ebc(features_with(KEYS, w)).values().detach() for w in (weights, None)
    )


@pytest.mark.parametrize("kind", ["table_wise", "data_parallel"])
def test_weights_count_for_nothing_in_an_unweighted_collection(one_rank: Ranks, kind: str) -> None:
    ((weighted, plain),) = one_rank.run(outputs_with_weights, kind)
    torch.testing.assert_close(weighted, plain)


def message_without_weights(rank: int) -> str:
    model, _ = sharded(unsharded(is_weighted=True), KINDS)
    with pytest.raises(ValueError, match="features must have weights") as error:
        model.module.ebc(features_with(KEYS)).values()
    return str(error.value)


def test_a_weighted_collection_wants_weights(one_rank: Ranks) -> None:
    (message,) = one_rank.run(message_without_weights)
    assert message.startswith("features must have weights for the weighted tables ['t")
