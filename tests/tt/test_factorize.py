import dataclasses
import itertools
import math
import time
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_tt.tt.cost import (
    chunk_sum_bytes,
    core_bytes,
    dense_bytes,
    expected_unique,
    step_cost,
)
from torchrec_tt.tt.factorize import (
    BATCH_ROWS,
    MAX_CHUNK_SUM_BYTES,
    MAX_FACTOR_RATIO,
    MAX_PADDING_RATIO,
    factorize_columns,
    factorize_rows,
    make_shape,
)
from torchrec_tt.tt.shape import TTShape

# Yin et al., "TT-Rec", MLSys 2021: rows, row factors, parameters at rank 16, 32 and 64.
KAGGLE_TT_TABLES = [
    (10131227, (200, 220, 250), (135_040, 495_360, 1_891_840)),
    (8351593, (200, 200, 209), (122_176, 449_152, 1_717_504)),
    (7046547, (200, 200, 200), (121_600, 448_000, 1_715_200)),
    (5461306, (166, 175, 188), (106_944, 393_088, 1_502_976)),
    (2202608, (125, 130, 136), (79_264, 291_648, 1_115_776)),
    (286181, (53, 72, 75), (43_360, 160_448, 615_808)),
    (142572, (50, 52, 55), (31_744, 116_736, 446_464)),
]
KAGGLE_ROWS = 33_762_577  # of all 26 tables

num_cores_strategy = st.integers(min_value=2, max_value=4)


def _sorted_factorizations(product: int, *, num_factors: int) -> list[tuple[int, ...]]:
    divisors = [f for f in range(1, product + 1) if product % f == 0]
    return [
        factors
        for factors in itertools.combinations_with_replacement(divisors, num_factors)
        if math.prod(factors) == product
    ]


@pytest.mark.parametrize(("num_embeddings", "row_factors", "_"), KAGGLE_TT_TABLES)
def test_row_factors_are_those_of_the_paper(
    num_embeddings: int, row_factors: tuple[int, ...], _: object
) -> None:
    assert factorize_rows(num_embeddings) == row_factors


@pytest.mark.parametrize(("num_embeddings", "_", "parameters"), KAGGLE_TT_TABLES)
def test_parameters_are_those_of_the_paper(
    num_embeddings: int, _: object, parameters: tuple[int, ...]
) -> None:
    actual = tuple(
        make_shape(num_embeddings, 16, tt_ranks=(rank, rank)).num_parameters
        for rank in (16, 32, 64)
    )
    assert actual == parameters


@pytest.mark.parametrize(
    ("num_tables", "compression"),
    [
        (3, {8: 4.1, 16: 4.1, 32: 4.1, 64: 3.9}),
        (5, {8: 58.3, 16: 55.8, 32: 48.3, 64: 31.7}),
        (7, {8: 221.9, 16: 187.0, 32: 117.4, 64: 48.0}),
    ],
)
def test_compression_of_kaggle_is_that_of_the_paper(
    num_tables: int, compression: dict[int, float]
) -> None:
    compressed = [rows for rows, _, _ in KAGGLE_TT_TABLES[:num_tables]]
    actual = {}
    for rank in compression:
        parameters = (KAGGLE_ROWS - sum(compressed)) * 16
        parameters += sum(
            make_shape(rows, 16, tt_ranks=(rank, rank)).num_parameters for rows in compressed
        )
        actual[rank] = round(KAGGLE_ROWS * 16 / parameters, 1)
    assert actual == compression


@pytest.mark.parametrize(
    ("num_embeddings", "num_cores", "row_factors"),
    [
        (1, 2, (1, 1)),
        (1, 4, (1, 1, 1, 1)),
        (2, 3, (1, 1, 2)),
        (3, 3, (1, 1, 3)),
        (7, 2, (2, 4)),
        (7, 3, (2, 2, 2)),
        (7, 4, (1, 2, 2, 2)),
        (97, 3, (4, 5, 5)),
        (1_000_003, 2, (1000, 1001)),
        (1_000_003, 3, (100, 100, 101)),
        (2**31 + 10, 2, (45824, 46875)),
        (2**31 + 10, 3, (1250, 1284, 1338)),
        (2**31 + 10, 4, (200, 214, 223, 225)),
    ],
)
def test_tiny_prime_and_huge_row_counts_get_sane_factors(
    num_embeddings: int, num_cores: int, row_factors: tuple[int, ...]
) -> None:
    assert factorize_rows(num_embeddings, num_cores=num_cores) == row_factors


# From 4^d rows on the padding bound is certain: the counts m^(d-k) (m+1)^k are balanced and at most
# a share 1/m apart. Below that the test of every small table is the proof.
def _check_row_factors(num_embeddings: int, *, num_cores: int) -> None:
    factors = factorize_rows(num_embeddings, num_cores=num_cores)
    assert len(factors) == num_cores
    assert list(factors) == sorted(factors)
    assert factors[-1] <= MAX_FACTOR_RATIO * factors[0]
    padding_ratio = math.prod(factors) / num_embeddings
    limit = MAX_PADDING_RATIO if num_embeddings >= 20 else 4 / 3
    assert 1 <= padding_ratio <= limit


@pytest.mark.parametrize("num_cores", [2, 3, 4])
def test_row_factors_of_every_small_table_are_balanced_and_pad_little(num_cores: int) -> None:
    for num_embeddings in range(1, 3000):
        _check_row_factors(num_embeddings, num_cores=num_cores)


@settings(deadline=None)  # the machine may be busy
@given(
    num_embeddings=st.integers(min_value=1, max_value=2**32),
    num_cores=num_cores_strategy,
)
def test_row_factors_of_any_table_are_balanced_and_pad_little(
    num_embeddings: int, num_cores: int
) -> None:
    _check_row_factors(num_embeddings, num_cores=num_cores)


@pytest.mark.parametrize("num_cores", [2, 3, 4])
@pytest.mark.parametrize("num_embeddings", [10131227, 2**31 - 1, 2**31 + 10, 2_205_403_200])
def test_row_factors_take_milliseconds(num_embeddings: int, num_cores: int) -> None:
    start = time.process_time()
    factorize_rows(num_embeddings, num_cores=num_cores)
    assert time.process_time() - start < 0.05


@pytest.mark.parametrize(
    ("embedding_dim", "num_cores", "col_factors"),
    [
        (16, 2, (4, 4)),
        (16, 3, (2, 2, 4)),
        (16, 4, (2, 2, 2, 2)),
        (64, 2, (8, 8)),
        (64, 3, (4, 4, 4)),
        (64, 4, (2, 2, 4, 4)),
        (128, 2, (8, 16)),
        (128, 3, (4, 4, 8)),
        (128, 4, (2, 4, 4, 4)),
        (96, 3, (4, 4, 6)),
        (7, 3, (1, 1, 7)),
        (1, 2, (1, 1)),
    ],
)
def test_column_factors(embedding_dim: int, num_cores: int, col_factors: tuple[int, ...]) -> None:
    assert factorize_columns(embedding_dim, num_cores=num_cores) == col_factors


@settings(deadline=None)  # the machine may be busy
@given(
    embedding_dim=st.integers(min_value=1, max_value=400),
    num_cores=num_cores_strategy,
)
def test_column_factors_are_the_most_balanced_of_all(embedding_dim: int, num_cores: int) -> None:
    factors = factorize_columns(embedding_dim, num_cores=num_cores)
    every = _sorted_factorizations(embedding_dim, num_factors=num_cores)
    assert factors in every
    assert sum(factors) == min(map(sum, every))


@pytest.mark.parametrize("function", [factorize_rows, factorize_columns])
@pytest.mark.parametrize("value", [0, -5, 2.5, True])
def test_counts_that_are_not_positive_integers_are_refused(function, value) -> None:
    with pytest.raises(ValueError, match=f"must be a positive integer, got {value}"):
        function(value)


@pytest.mark.parametrize("function", [factorize_rows, factorize_columns])
@pytest.mark.parametrize("num_cores", [1, 5])
def test_one_or_five_cores_are_refused(function, num_cores: int) -> None:
    with pytest.raises(ValueError, match=f"num_cores must be 2 to 4, got {num_cores}"):
        function(100, num_cores=num_cores)


def test_make_shape_keeps_given_factors() -> None:
    shape = make_shape(1000, 16, tt_ranks=[2, 3], row_factors=[8, 12, 11], col_factors=[4, 2, 2])
    assert shape.row_factors == (8, 12, 11)
    assert shape.col_factors == (4, 2, 2)
    assert shape.tt_ranks == (2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tt_ranks": []}, r"tt_ranks must have 1 to 3 entries, got \(\)"),
        ({"tt_ranks": [2] * 4}, "tt_ranks must have 1 to 3 entries, got"),
        ({"tt_ranks": [2, 0]}, "tt_ranks must be positive integers"),
        ({"tt_ranks": [2, 2], "row_factors": [40, 40]}, "col_factors must have 2 entries"),
        ({"tt_ranks": [2, 2], "row_factors": [9, 10, 11]}, "row_factors must have a product"),
        ({"tt_ranks": [2, 2], "col_factors": [2, 2, 2]}, "col_factors must have the product"),
    ],
)
def test_make_shape_refuses_what_does_not_fit(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_shape(1000, 16, **arguments)


def test_a_table_larger_than_the_dense_one_warns_with_both_sizes() -> None:
    with pytest.warns(UserWarning, match="larger than the dense one") as record:
        shape = make_shape(100, 16, tt_ranks=(32, 32))
    message = str(record[0].message)
    assert core_bytes(shape) > dense_bytes(shape) == 6400
    assert f"{core_bytes(shape)} bytes" in message
    assert "against 6400" in message
    assert record[0].filename == __file__


def test_a_table_as_large_as_the_dense_one_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shape = make_shape(4, 4, tt_ranks=(2,), row_factors=(2, 2), col_factors=(2, 2))
    assert core_bytes(shape) == dense_bytes(shape)


def _fast(num_embeddings: int, *, embedding_dim: int, tt_ranks: tuple[int, ...]) -> TTShape:
    return make_shape(num_embeddings, embedding_dim, tt_ranks=tt_ranks, row_strategy="fast")


@pytest.mark.parametrize(
    ("num_embeddings", "embedding_dim", "tt_ranks", "row_factors"),
    [
        (1, 64, (32, 32), (1, 1, 1)),
        (10_131_227, 64, (32, 32), (206, 27, 1822)),
        (10_131_227, 16, (32, 32), (330, 89, 345)),
        (10_131_227, 64, (32, 32, 32), (64, 5, 14, 2262)),
        (10_131_227, 64, (32,), (3214, 3153)),  # no prefix products to save
    ],
)
@pytest.mark.filterwarnings("ignore:tt_ranks=.*larger than the dense one")
def test_fast_factors(
    num_embeddings: int, embedding_dim: int, tt_ranks: tuple, row_factors: tuple
) -> None:
    shape = _fast(num_embeddings, embedding_dim=embedding_dim, tt_ranks=tt_ranks)
    assert shape.row_factors == row_factors


@settings(deadline=None, max_examples=25)  # the machine may be busy
@given(
    num_embeddings=st.integers(min_value=1, max_value=2**34),
    embedding_dim=st.sampled_from((1, 7, 16, 64, 128)),
    tt_ranks=st.lists(st.sampled_from((1, 5, 16, 32, 64)), min_size=2, max_size=3),
)
@pytest.mark.filterwarnings("ignore:tt_ranks=.*larger than the dense one")
def test_fast_factors_keep_their_promises(
    num_embeddings: int, embedding_dim: int, tt_ranks: list[int]
) -> None:
    balanced = make_shape(num_embeddings, embedding_dim, tt_ranks=tt_ranks)
    fast = _fast(num_embeddings, embedding_dim=embedding_dim, tt_ranks=tuple(tt_ranks))
    num_rows = expected_unique(BATCH_ROWS, num_embeddings)
    assert core_bytes(fast) <= core_bytes(balanced)
    assert step_cost(fast, num_rows=num_rows) <= step_cost(balanced, num_rows=num_rows)
    assert chunk_sum_bytes(fast) <= max(MAX_CHUNK_SUM_BYTES, chunk_sum_bytes(balanced))
    padding_limit = max(MAX_PADDING_RATIO * num_embeddings, balanced.num_rows_padded)
    assert num_embeddings <= fast.num_rows_padded <= padding_limit


@pytest.mark.parametrize("num_embeddings", [500, 20_000, 10_131_227])
@pytest.mark.filterwarnings("ignore:tt_ranks=.*larger than the dense one")
@pytest.mark.parametrize(("embedding_dim", "rank"), [(64, 32), (16, 32), (64, 16)])
def test_fast_factors_are_within_5_percent_of_the_best_on_a_grid(
    num_embeddings: int, embedding_dim: int, rank: int
) -> None:
    fast = _fast(num_embeddings, embedding_dim=embedding_dim, tt_ranks=(rank, rank))
    balanced = make_shape(num_embeddings, embedding_dim, tt_ranks=(rank, rank))
    num_rows = expected_unique(BATCH_ROWS, num_embeddings)
    grid = sorted({round(1.25**k) for k in range(40)})
    every = [
        dataclasses.replace(fast, row_factors=(m0, m1, -(-num_embeddings // (m0 * m1))))
        for m0, m1 in itertools.product(grid, repeat=2)
        if m0 * m1 <= num_embeddings
    ]
    allowed = [
        step_cost(shape, num_rows=num_rows)
        for shape in every
        if core_bytes(shape) <= core_bytes(balanced)
        and chunk_sum_bytes(shape) <= max(MAX_CHUNK_SUM_BYTES, chunk_sum_bytes(balanced))
        and shape.num_rows_padded <= MAX_PADDING_RATIO * num_embeddings
    ]
    assert len(allowed) > 10
    assert step_cost(fast, num_rows=num_rows) <= 1.05 * min(allowed)


@pytest.mark.parametrize("num_cores", [2, 3, 4])
@pytest.mark.parametrize("num_embeddings", [10131227, 2**31 + 10])
def test_fast_factors_take_milliseconds(num_embeddings: int, num_cores: int) -> None:
    start = time.process_time()
    _fast(num_embeddings, embedding_dim=64, tt_ranks=(32,) * (num_cores - 1))
    assert time.process_time() - start < 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"row_strategy": "quick"}, r"row_strategy must be one of \('balanced', 'fast'\), got 'q"),
        ({"row_strategy": "fast"}, "col_factors and tt_ranks must be given for .*got None and No"),
        (
            {"row_strategy": "fast", "col_factors": (4, 4), "tt_ranks": (8, 8)},
            "col_factors must have 3 entries",
        ),
        (
            {"row_strategy": "fast", "col_factors": (4, 4, 4), "tt_ranks": (8,)},
            "tt_ranks must have 2 entries",
        ),
    ],
)
def test_a_strategy_that_cannot_be_followed_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        factorize_rows(1000, **arguments)


def test_given_row_factors_and_a_strategy_for_them_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="row_strategy must be left out where row_factors are giv"):
        make_shape(1000, 16, tt_ranks=(2, 2), row_factors=(10, 10, 10), row_strategy="fast")
