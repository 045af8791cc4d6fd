import math

import pytest
import torch

from torchrec_tt.quality import MeasuredQuality, measured_quality, prior_error, svd_error
from torchrec_tt.tt.cores import dense
from torchrec_tt.tt.shape import TTShape
from torchrec_tt.tt.traffic import Traffic


def shape(*tt_ranks: int, num_embeddings: int = 60) -> TTShape:
    return TTShape(
        num_embeddings=num_embeddings,
        embedding_dim=8,
        row_factors=(3, 4, 5),
        col_factors=(2, 2, 2),
        tt_ranks=tt_ranks,
    )


def test_a_table_of_these_ranks_loses_nothing() -> None:
    torch.manual_seed(0)
    exact = shape(2, 3)
    cores = [torch.randn(size, dtype=torch.float64) for size in exact.core_shapes]
    table = dense(cores, shape=exact)
    assert svd_error(table, exact) == pytest.approx(0, abs=1e-6)
    assert svd_error(table, shape(2, 2)) > 0.01


def test_the_error_is_the_root_of_what_every_unfolding_leaves_out() -> None:
    torch.manual_seed(0)
    weight = torch.randn(58, 8, dtype=torch.float64)
    small = shape(4, 5, num_embeddings=58)
    padded = torch.cat([weight, torch.zeros(2, 8, dtype=torch.float64)])
    digits = padded.reshape(3, 4, 5, 2, 2, 2).permute(0, 3, 1, 4, 2, 5)
    lost = 0.0
    for rows, rank in ((6, 4), (48, 5)):
        singular = torch.linalg.svdvals(digits.reshape(rows, -1))
        lost += float(singular[rank:].square().sum())
    assert svd_error(weight, small) == pytest.approx(math.sqrt(lost) / float(weight.norm()))


def test_no_bound_is_worse_than_the_table_of_zeros() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 64, dtype=torch.float64)
    small = TTShape(
        num_embeddings=64,
        embedding_dim=64,
        row_factors=(4, 4, 4),
        col_factors=(4, 4, 4),
        tt_ranks=(1, 1),
    )
    assert svd_error(weight, small) == 1.0  # what two unfoldings leave out is more
    assert svd_error(torch.zeros_like(weight), small) == 0.0


def test_a_weight_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight must be 60 x 8, got \[60, 4\]"):
        svd_error(torch.zeros(60, 4), shape(2, 3))


def test_the_prior_by_hand() -> None:
    """Uniform traffic uses all 60 rows: 480 numbers, of which the cores hold theirs."""
    uniform, tt = Traffic(zipf_exponent=0), shape(2, 3)
    lost = 480 / (480 + tt.num_parameters)
    assert prior_error(tt, traffic=uniform, num_embeddings=60) == pytest.approx(lost)
    assert prior_error(tt, traffic=uniform, num_embeddings=60, hit_ratio=0.25) == pytest.approx(
        0.75 * lost
    )
    assert prior_error(None, traffic=uniform, num_embeddings=60) == 0


def test_the_prior_falls_with_rank_and_skew() -> None:
    errors = [prior_error(shape(r, r), traffic=Traffic(), num_embeddings=60) for r in (1, 2, 3)]
    assert errors == sorted(errors, reverse=True)
    skewed = Traffic(zipf_exponent=2)
    assert prior_error(shape(2, 2), traffic=skewed, num_embeddings=60) < errors[1]


def test_measurements_scale_the_prior_of_their_rank_and_of_the_nearest() -> None:
    records = [
        {"tt_rank": 8, "tt_tables": 3, "logloss": 0.55, "dense_logloss": 0.5},
        {"tt_rank": 8, "tt_tables": 5, "logloss": 0.53, "dense_logloss": 0.5},
        {"tt_rank": 32, "tt_tables": 3, "logloss": 0.49, "dense_logloss": 0.5},  # no worse
        {"tt_rank": 64, "tt_tables": 3, "logloss": 0.6},  # nothing to compare with
    ]
    quality = measured_quality(records, prior={(8, 3): 0.5, (8, 5): 0.2, (32, 3): 0.3})
    assert quality.scale_of_rank == pytest.approx({8: (0.1 / 0.5 + 0.06 / 0.2) / 2, 32: 0.0})
    assert quality.scale(4) == quality.scale(12) == quality.scale(8)
    assert quality.scale(128) == quality.scale(32)
    assert MeasuredQuality().scale(16) == 1
