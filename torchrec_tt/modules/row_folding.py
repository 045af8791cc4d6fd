"""Folds rows into cores: moves the cores, by least squares, towards the values of given rows."""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchrec_tt.ops.embedding_bag import (
    embedding_bag_backward_dense,
    embedding_bag_forward,
    plan,
    sum_dtype,
)
from torchrec_tt.ops.lookup import Lookup, TTTable

Reduce = Callable[[list[Tensor]], list[Tensor]]
ITERATIONS = 2  # more fit the rows better and move all others more: the loss does not gain
_PARTS = (0.5, 1.0)  # of the step that the linear model asks for; or none of it


class CoreRows:
    """Some rows of a table as its cores give them, and derivatives of these.

    Args:
        table: the block of rows that the ids belong to.
        ids: [E] rows of the table, `row_offset` included.
    """

    def __init__(self, table: TTTable, ids: Tensor) -> None:
        self._lookup = Lookup([dataclasses.replace(table, num_features=1)], pooling="none")
        self._offsets = torch.tensor([0, len(ids)], device=ids.device)
        self._plan = plan(ids - table.row_offset, self._offsets, lookup=self._lookup)

    @property
    def order(self) -> Tensor:  # [E] int64
        """Places of the ids, so that those that share products of cores stand together."""
        return self._plan[0].long()

    def values(self, cores: Sequence[Tensor]) -> Tensor:  # [E, D]
        return embedding_bag_forward(self._plan, cores, offsets=self._offsets, lookup=self._lookup)

    def derivative(self, cores: Sequence[Tensor], direction: Sequence[Tensor]) -> Tensor:  # [E, D]
        """J direction: rows are linear in each core, so it is a lookup per core."""
        total, *others = (
            self.values([*cores[:k], moved, *cores[k + 1 :]]) for k, moved in enumerate(direction)
        )
        for changes in others:
            total += changes
        return total

    def gradient(self, cores: Sequence[Tensor], grad_rows: Tensor) -> list[Tensor]:
        """J^T grad_rows."""
        return embedding_bag_backward_dense(
            grad_rows, self._plan, cores, offsets=self._offsets, lookup=self._lookup
        )[0]


class RowFold:
    """Rows of one table, and the cores that are to give their values.

    Args:
        table: the block of rows that the ids belong to.
        cores: core k `[m_k, r_k * n_k * r_{k+1}]`; `fold_rows` moves them.
        ids: [E] rows of the table, `row_offset` included.
        values: [E, D] that these rows are to get.
        weights: [E] of these rows, not negative.
        kept_ids: [K] rows that are to keep what the cores give.
        kept_weights: [K] of these rows.
    """

    def __init__(
        self,
        table: TTTable,
        cores: Sequence[Tensor],
        *,
        ids: Tensor,
        values: Tensor,
        weights: Tensor,
        kept_ids: Tensor,
        kept_weights: Tensor,
    ) -> None:
        self.cores = cores
        self.num_folded = len(ids)
        self.wide = [core.detach().to(sum_dtype(core)) for core in cores]
        self.rows = CoreRows(table, torch.cat([ids, kept_ids]))
        self.wanted = self.rows.values(self.wide)  # [E + K, D]
        first = self.wanted[: len(ids)].clone()
        self.wanted[: len(ids)] = values
        self.weights = torch.cat([weights, kept_weights]).to(self.wanted.dtype)  # [E + K]
        self.residual = torch.zeros_like(self.wanted)
        self.residual[: len(ids)] = values.to(first.dtype) - first
        self.before = self.squares(self.residual)
        self.delta = [torch.zeros_like(core) for core in self.wide]

    def gradient(self) -> list[Tensor]:
        """J^T W residual."""
        return self.rows.gradient(self.wide, self.residual * self.weights.unsqueeze(1))

    def squares(self, difference: Tensor) -> Tensor:  # [E + K, D] -> float64 [2]
        """Returns the weighted sum of squares of all rows, and that of the folded ones."""
        norms = torch.linalg.vector_norm(difference, dim=1).double()
        squares = norms.square_() * self.weights
        return torch.stack([squares.sum(), squares[: self.num_folded].sum()])

    def move(self, changes: Tensor, directions: Sequence[Tensor], step: float) -> None:
        self.residual -= step * changes
        for delta, direction in zip(self.delta, directions, strict=True):
            delta.add_(direction, alpha=step)

    def moved(self, part: float) -> list[Tensor]:
        """The cores after this part of the way, rounded as they are kept."""
        pairs = zip(self.wide, self.delta, self.cores, strict=True)
        return [torch.add(w, delta, alpha=part).to(core.dtype) for w, delta, core in pairs]


@torch.no_grad()
def fold_rows(
    folds: Sequence[RowFold], *, reduce: Reduce | None = None, iterations: int = ITERATIONS
) -> Tensor:  # [tables, 2] float64
    """Moves the cores of several tables towards rows; returns what they missed them by.

    With row `e` of the cores `x_e(G)`, wanted value `v_e` and weight `w_e`, less is made of
    `sum_e w_e |x_e(G) - v_e|^2` over the cores `G`: a few steps of conjugate gradients on its
    linear model, from where the cores are, of which they take the part that serves best.

    Args:
        folds: one per table, at least one.
        reduce: for cores that are replicated: returns the sums of tensors over the replicas, which
            then take the same steps. It is called `2 * iterations + 1` times on every rank, with
            zeros where a rank has no rows.
        iterations: of conjugate gradients, at least one.

    Returns:
        Per table the weighted sum of squares of this rank's rows, before and after.

    Reference:
        Bjorck, "Numerical Methods for Least Squares Problems", 1996, algorithm 7.4.1 (CGLS).
    """
    total = reduce or (lambda tensors: tensors)
    squares = [0.0] * len(folds)
    directions: list[list[Tensor]] = [[]] * len(folds)
    for iteration in range(iterations):
        flat = iter(total([grad for fold in folds for grad in fold.gradient()]))
        for i, fold in enumerate(folds):
            grads = [next(flat) for _ in fold.cores]
            before, squares[i] = squares[i], sum(_sum_of_squares(grad) for grad in grads)
            if iteration and before > 0:
                for grad, direction in zip(grads, directions[i], strict=True):
                    grad.add_(direction, alpha=squares[i] / before)
            directions[i] = grads
        changes = [
            fold.rows.derivative(fold.wide, direction)
            for fold, direction in zip(folds, directions, strict=True)
        ]
        curvatures = total(
            [torch.stack([f.squares(c)[0] for f, c in zip(folds, changes, strict=True)])]
        )[0].tolist()
        for i, fold in enumerate(folds):
            if curvatures[i] > 0:
                fold.move(changes[i], directions[i], squares[i] / curvatures[i])
    return _take_best_parts(folds, total)


def _sum_of_squares(core: Tensor) -> float:
    return float(torch.linalg.vector_norm(core, dim=1).double().square_().sum())


def _take_best_parts(folds: Sequence[RowFold], total: Reduce) -> Tensor:
    """The linear model is not the table: takes the part of its step that truly comes closest."""
    missed = []
    moved = [[list(fold.cores), *map(fold.moved, _PARTS)] for fold in folds]
    for fold, (_, *parts) in zip(folds, moved, strict=True):
        missed.append(fold.before)
        for part in parts:
            wide = [core.to(fold.wanted.dtype) for core in part]
            missed.append(fold.squares(fold.wanted - fold.rows.values(wide)))
    own = torch.stack(missed).view(len(folds), 1 + len(_PARTS), 2)
    best = total([own[..., 0].clone()])[0].argmin(1).tolist()
    for fold, parts, at in zip(folds, moved, best, strict=True):
        if at > 0:
            for core, new in zip(fold.cores, parts[at], strict=True):
                core.copy_(new)
    return torch.stack([own[i, [0, at], 1] for i, at in enumerate(best)])
