import pickle
from typing import Any

import pytest

from torchrec_tt.tt.shape import TTShape

TABLE = {
    "num_embeddings": 22,
    "embedding_dim": 12,
    "row_factors": (2, 3, 4),
    "col_factors": (2, 2, 3),
    "tt_ranks": (5, 6),
}


def _shape(**changes: Any) -> TTShape:
    return TTShape(**{**TABLE, **changes})


def test_sizes_of_a_table_worked_by_hand() -> None:
    shape = _shape()
    assert shape.num_cores == 3
    assert shape.num_rows_padded == 24
    assert shape.slice_shapes == ((1, 2, 5), (5, 2, 6), (6, 3, 1))
    assert shape.core_shapes == ((2, 10), (3, 60), (4, 18))
    assert shape.num_parameters == 20 + 180 + 72


def test_lists_become_tuples_so_that_a_shape_is_hashable() -> None:
    shape = _shape(row_factors=[2, 3, 4], col_factors=[2, 2, 3], tt_ranks=[5, 6])
    assert shape == _shape()
    assert hash(shape) == hash(_shape())


def test_a_shape_survives_pickling() -> None:
    assert pickle.loads(pickle.dumps(_shape())) == _shape()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_embeddings": 0}, "num_embeddings must be a positive integer, got"),
        ({"embedding_dim": -4}, "embedding_dim must be a positive integer, got"),
        ({"num_embeddings": 22.0}, "num_embeddings must be a positive integer, got"),
        ({"row_factors": (2, 0, 4)}, r"row_factors must be positive integers, got \(2, 0, 4\)"),
        ({"tt_ranks": (5, True)}, r"tt_ranks must be positive integers, got \(5, True\)"),
        ({"row_factors": (24,)}, r"row_factors must have 2 to 4 entries, got \(24,\)"),
        ({"row_factors": (2, 2, 2, 2, 2)}, "row_factors must have 2 to 4 entries"),
        ({"col_factors": (3, 4)}, r"col_factors must have 3 entries .* got \(3, 4\)"),
        ({"tt_ranks": (5,)}, r"tt_ranks must have 2 entries for 3 cores, got \(5,\)"),
        ({"num_embeddings": 25}, "product of at least num_embeddings=25, got .* product 24"),
        ({"tt_ranks": (10**8, 10**8)}, r"slices .* below 2\^31 elements, got \(100000000, 1"),
        ({"row_factors": (2**21, 2**21, 2**21)}, r"row_factors must have a product below 2\^63"),
        ({"row_factors": (2**40, 1, 1), "tt_ranks": (2**21, 1)}, r"cores of at most 2\^60"),
        ({"embedding_dim": 16}, "the product embedding_dim=16, got .* product 12"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _shape(**changes)
