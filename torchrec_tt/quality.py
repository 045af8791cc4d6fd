"""What a compressed table loses: of trained weights, by a prior without them, or as measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchrec_tt.tt.shape import TTShape
from torchrec_tt.tt.traffic import Traffic

_MAX_SIDE = 8192  # of the smaller side of an unfolding, whose Gram matrix is made


def svd_error(weight: Tensor, shape: TTShape) -> float:  # weight [num_embeddings, D]
    """Returns a bound of TT-SVD's relative error, `||table - TT|| / ||table||` (Frobenius).

    The squared singular values that rank `r_k` leaves out of the k-th unfolding, summed over the
    unfoldings: TT-SVD's error is at most the root of the sum, and no TT of these ranks does better
    than the root of its largest term. The sum counts twice what two unfoldings leave out, and may
    pass 1; a TT of 0 loses just 1, so the bound is 1 at most. Rows that pad the factors are 0.

    Args:
        weight: the trained rows.
        shape: whose factors and ranks are meant.

    Raises:
        ValueError: if the weight has not the shape's rows and columns.
        NotImplementedError: if both sides of an unfolding are longer than 8192.

    Reference:
        Oseledets, "Tensor-Train Decomposition", SIAM J. Sci. Comput. 33 (2011), theorem 2.2.
    """
    if weight.shape != (shape.num_embeddings, shape.embedding_dim):
        raise ValueError(
            f"weight must be {shape.num_embeddings} x {shape.embedding_dim}, "
            f"got {list(weight.shape)}"
        )
    padded = weight.new_zeros(shape.num_rows_padded, shape.embedding_dim, dtype=torch.float64)
    padded[: len(weight)] = weight
    d = shape.num_cores
    digits = padded.reshape(*shape.row_factors, *shape.col_factors)
    tensor = digits.permute([axis for k in range(d) for axis in (k, d + k)])
    lost = 0.0
    for k, rank in enumerate(shape.tt_ranks, start=1):
        rows = math.prod(shape.row_factors[:k]) * math.prod(shape.col_factors[:k])
        unfolding = tensor.reshape(rows, -1)
        if min(unfolding.shape) > _MAX_SIDE:
            raise NotImplementedError(
                f"unfoldings must have a side of at most {_MAX_SIDE}, got {list(unfolding.shape)}"
            )
        if rows > unfolding.shape[1]:
            unfolding = unfolding.T
        squares = torch.linalg.eigvalsh(unfolding @ unfolding.T).clamp(min=0)  # rising
        lost += float(squares[: max(0, len(squares) - rank)].sum())
    return min(1.0, math.sqrt(lost / max(float(padded.square().sum()), 1e-300)))


def prior_error(
    shape: TTShape | None, *, traffic: Traffic, num_embeddings: int, hit_ratio: float = 0.0
) -> float:
    """Returns what a table is taken to lose where nothing was measured, between 0 and 1.

    The share of its lookups that go through the cores, times their strain: the table is used as if
    it had `n` equally popular rows (`Traffic.effective_ids`), of `D` numbers each, and cores of `P`
    numbers can hold `P` of them, so `n D / (n D + P)` are lost. More rows in use lose more, higher
    ranks and a cache lose less; 0 for an uncompressed table. It orders choices; it is no logloss.

    Args:
        shape: of the table; None for an uncompressed one.
        traffic: which rows are asked for.
        num_embeddings: rows of the table.
        hit_ratio: of the row cache.
    """
    if shape is None:
        return 0.0
    numbers = traffic.effective_ids(num_embeddings) * shape.embedding_dim
    return (1.0 - hit_ratio) * numbers / (numbers + shape.num_parameters)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredQuality:
    """How a sweep's losses correct the prior.

    Attributes:
        scale_of_rank: relative increase of the logloss over the prior, by TT rank.
    """

    scale_of_rank: Mapping[int, float] = field(default_factory=dict)

    def scale(self, rank: int) -> float:
        """Returns the factor of the nearest measured rank (by ratio); 1 without measurements."""
        if not self.scale_of_rank:
            return 1.0
        nearest = min(self.scale_of_rank, key=lambda r: abs(math.log(r / rank)))
        return self.scale_of_rank[nearest]


def measured_quality(
    records: Sequence[Mapping[str, Any]], *, prior: Mapping[tuple[int, int], float]
) -> MeasuredQuality:
    """Returns what the runs of a sweep say, the mean over seeds and numbers of TT tables.

    Args:
        records: each with `tt_rank`, `tt_tables`, `logloss` and `dense_logloss` (of the
            uncompressed model); those without the last are left out.
        prior: the model's prior error by (tt_rank, tt_tables).

    Raises:
        ValueError: if all are left out.
    """
    if not any("dense_logloss" in record for record in records):
        raise ValueError(
            "records must have dense_logloss (of a sweep with compare_dense: true) to correct the "
            f"error, got {len(records)} without"
        )
    ratios: dict[int, list[float]] = {}
    for record in records:
        expected = prior.get((record["tt_rank"], record["tt_tables"]), 0.0)
        is_tt = record.get("compression", "tt") == "tt"
        if is_tt and expected > 0 and "dense_logloss" in record:
            loss = max(0.0, record["logloss"] / record["dense_logloss"] - 1)
            ratios.setdefault(record["tt_rank"], []).append(loss / expected)
    return MeasuredQuality(
        scale_of_rank={rank: sum(found) / len(found) for rank, found in ratios.items()}
    )
