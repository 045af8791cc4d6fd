import pytest
import torch
from torch import Tensor

from torchrec_tt.quality import svd_error
from torchrec_tt.tt.row_order import (
    co_access_order,
    frequency_order,
    new_ids,
    similarity_order,
)
from torchrec_tt.tt.shape import TTShape

SHAPE = TTShape(
    num_embeddings=990,  # of 1000: the last rows pad
    embedding_dim=8,
    row_factors=(10, 10, 10),
    col_factors=(2, 2, 2),
    tt_ranks=(8, 8),
)


def _clustered() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(30, 8, generator=generator)
    members = torch.randint(30, (990,), generator=generator)
    return centres[members] + 0.05 * torch.randn(990, 8, generator=generator)


def test_frequent_ids_come_first_and_equals_keep_their_order() -> None:
    assert frequency_order(torch.tensor([1, 5, 1, 9])).tolist() == [3, 1, 0, 2]


def test_similar_rows_are_neighbours() -> None:
    table = torch.tensor([[0.0, 0], [9, 9], [0.1, 0], [9, 8.9], [-0.1, 0.1], [8.9, 9]])
    order = similarity_order(table, group_size=3).tolist()
    assert {frozenset(order[:3]), frozenset(order[3:])} == {
        frozenset({0, 2, 4}),
        frozenset({1, 3, 5}),
    }


@pytest.mark.parametrize("group_size", [1, 7, 10, 2000])
def test_every_id_is_in_the_order_once(group_size: int) -> None:
    order = similarity_order(_clustered(), group_size=group_size)
    torch.testing.assert_close(order.sort().values, torch.arange(990))


def test_new_ids_find_the_old_rows() -> None:
    table = _clustered()
    order = similarity_order(table, group_size=10)
    torch.testing.assert_close(table[order][new_ids(order)], table, rtol=0, atol=0)


def test_similarity_order_halves_the_error_of_a_clustered_table() -> None:
    table = _clustered()
    order = similarity_order(table, group_size=SHAPE.row_factors[-1])
    assert svd_error(table[order], SHAPE) < 0.5 * svd_error(table, SHAPE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_the_same_bags_are_neighbours(dtype: torch.dtype) -> None:
    """Ids 0, 2, 4 and 1, 3, 5 come together, in bags of two, with empty bags between."""
    indices = torch.tensor([0, 2, 1, 5, 2, 4, 3, 1, 4, 0, 5, 3], dtype=dtype)
    offsets = torch.tensor([0, 2, 2, 4, 6, 8, 8, 10, 12, 12])
    order = co_access_order(indices, offsets, num_embeddings=6, group_size=3).tolist()
    assert {frozenset(order[:3]), frozenset(order[3:])} == {
        frozenset({0, 2, 4}),
        frozenset({1, 3, 5}),
    }


def test_co_access_order_without_ids_is_an_order() -> None:
    none = torch.empty(0, dtype=torch.int64)
    order = co_access_order(none, torch.tensor([0]), num_embeddings=7, group_size=2)
    assert sorted(order.tolist()) == list(range(7))


def test_bad_bags_are_named() -> None:
    ids = torch.tensor([0, 5])
    size = {"num_embeddings": 5, "group_size": 2}
    with pytest.raises(ValueError, match=r"indices must be in \[0, 5\), got 0 to 5"):
        co_access_order(ids, torch.tensor([0, 2]), **size)
    for offsets in ([], [0, 1], [1, 2], [0, 3, 2]):
        with pytest.raises(ValueError, match="offsets must rise from 0 to the 2 indices"):
            co_access_order(ids % 5, torch.tensor(offsets), **size)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"counts must have 1 dimension, got \[2, 2\]"):
        frequency_order(torch.ones(2, 2))
    with pytest.raises(ValueError, match="counts must be finite, got 1 NaN"):
        frequency_order(torch.tensor([1.0, torch.nan]))
    with pytest.raises(ValueError, match=r"table must have 2 dimensions, got \[3\]"):
        similarity_order(torch.ones(3), group_size=1)
    with pytest.raises(ValueError, match="group_size must be a positive integer, got 0"):
        similarity_order(torch.ones(3, 2), group_size=0)
    with pytest.raises(ValueError, match="table must be finite, got 1 NaN or infinite"):
        similarity_order(torch.tensor([[1.0], [torch.inf]]), group_size=1)
    with pytest.raises(ValueError, match="order must be a permutation of its 3 ids"):
        new_ids(torch.tensor([0, 0, 2]))
