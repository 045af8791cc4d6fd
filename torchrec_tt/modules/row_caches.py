"""RowCaches: what the caches of a call's tables do in a training step."""

import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchrec_tt.modules.row_cache import FOLDED_WEIGHT, RowCache
from torchrec_tt.modules.row_folding import Reduce, fold_rows
from torchrec_tt.ops.embedding_bag import (
    embedding_bag_backward_dense,
    embedding_bag_forward,
    plan,
)
from torchrec_tt.ops.lookup import Lookup
from torchrec_tt.ops.row_cache import step_cached_rows
from torchrec_tt.ops.row_counter import count_rows
from torchrec_tt.optim import TTOptimizerConfig

_MOST_AHEAD = 4  # batches; one that is never looked up makes way
_OF_THIS_PROCESS = ("_in_flight", "_ahead")


class PlannedLookup:
    """A lookup in training, from before its plan to the end of its backward.

    While it lives no row that it may use is evicted.

    Args:
        trained: the places of the tables that train; cached rows of frozen ones stay as they are.
    """

    def __init__(self, trained: Sequence[int]) -> None:
        self.trained = tuple(trained)


class PlannedAhead:
    """A batch that was planned before its step, and the slots' state by then."""

    def __init__(
        self, indices: Tensor, offsets: Tensor, *, plan: list[Tensor], versions: list[int]
    ) -> None:
        self._tensors = indices, offsets  # they live on, so that no others take their memory
        self._values = [_value_of(indices), _value_of(offsets)]
        self.plan, self.versions = plan, versions

    def is_of(self, indices: Tensor, offsets: Tensor) -> bool:
        """Whether it is this batch; where offsets on CUDA were made anew they are taken to be the
        same for the same indices, to wait for nothing.
        """
        at = self._tensors[1]
        if self._values != [_value_of(indices), _value_of(at)] or at.shape != offsets.shape:
            return False
        return not at.is_cpu or torch.equal(at, offsets)


def _value_of(tensor: Tensor) -> tuple:
    """What a tensor's elements cannot change without."""
    return tensor.data_ptr(), tensor.shape, tensor.dtype, *versions_of([tensor])


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """What counts writes; tensors made in torch.inference_mode() have none, and are not trained."""
    if torch.compiler.is_compiling():  # dynamo cannot ask
        return [tensor._version for tensor in tensors]
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


class RowUse:
    """How a lookup's forward left the caches, for its backward.

    Args:
        caches: that the lookup read.
        planned: of a lookup in training, whose backward steps rows; None: it does not.
        needs_values: whether backward reads the rows, as the gradient of weights does.
    """

    def __init__(
        self, caches: "RowCaches", planned: PlannedLookup | None, *, needs_values: bool
    ) -> None:
        self._caches, self._planned = caches, planned
        self._names = ["ids", "rows"] if needs_values else ["ids"]
        self._versions = [caches.versions(name) for name in self._names]

    def check(self) -> None:
        """Raises RuntimeError where the plan no longer fits the caches."""
        if self._versions != [self._caches.versions(name) for name in self._names]:
            raise RuntimeError(
                "row caches must be those of the forward pass in its backward, but they were "
                "refreshed, loaded or stepped in between: let every lookup's backward run, once, "
                "before the next lookup"
            )

    def step(self, grad_output: Tensor, plan: list[Tensor], **call: Any) -> None:
        """Steps the rows in training, see `RowCaches.step`, and ends their use."""
        if self._planned is not None:
            self._caches.step(grad_output, plan, planned=self._planned, **call)
            self._caches.end_step(self._planned)


class RowCaches:
    """The caches of the tables of one lookup; it owns no tensor.

    Args:
        lookup: whose tables these are.
        caches: of every table in turn; None: it has none.
        reduce: for cores that are replicated, see `fold_rows`; called on every rank when a refresh
            is due.
    """

    def __init__(
        self, lookup: Lookup, caches: Sequence[RowCache | None], *, reduce: Reduce | None = None
    ) -> None:
        self._lookup, self._caches, self._reduce = lookup, list(caches), reduce
        ends = list(itertools.accumulate(table.shape.num_cores for table in lookup.tables))
        self._cores_of = [slice(*ends) for ends in itertools.pairwise([0, *ends])]
        self._in_flight: weakref.WeakSet[PlannedLookup] = weakref.WeakSet()
        self._ahead: deque[PlannedAhead] = deque(maxlen=_MOST_AHEAD)

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in self.__dict__.items() if name not in _OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # a copy's lookups are its own
        self._in_flight, self._ahead = weakref.WeakSet(), deque(maxlen=_MOST_AHEAD)

    @property
    def ids(self) -> list[Tensor]:
        """Tags of every table, [C]; C = 0 where it has no cache."""
        return self._all("ids")

    @property
    def rows(self) -> list[Tensor]:
        """Rows of every table, [C, D]; [0] where it has no cache."""
        return self._all("rows")

    def versions(self, name: str = "ids") -> list[int]:
        """Returns what changes with what the slots hold, or the rows' values."""
        return versions_of(self._all(name))

    def _all(self, name: str) -> list[Tensor]:
        buffers = [None if c is None else c._buffers[name] for c in self._caches]
        present = [buffer for buffer in buffers if buffer is not None]
        if len(present) == len(buffers):
            return present
        none = present[0].new_empty(0)
        return [none if buffer is None else buffer for buffer in buffers]

    def plan(
        self,
        indices: Tensor,  # [N] int32 or int64
        offsets: Tensor,  # [F * B + 1] int32 or int64
        *,
        cores: Sequence[Tensor],
        is_training: bool,
    ) -> tuple[PlannedLookup | None, list[Tensor]]:
        """Plans a batch with its cached rows; in training, renews the caches before and counts it.

        Returns:
            What `start_step` returned, or None; and the plan.
        """
        planned = self.start_step(cores) if is_training else None
        batch_plan = self._take_ahead(indices, offsets) if self._ahead else None
        if batch_plan is None:
            batch_plan = plan(indices, offsets, lookup=self._lookup, cache_ids=self.ids)
        if planned is not None:
            self.count(batch_plan)
        return planned, batch_plan

    def plan_ahead(
        self, indices: Tensor, offsets: Tensor, *, forward_stream: torch.cuda.Stream | None
    ) -> None:
        """Plans a batch, its tags looked up, for a later `plan` with the same tensors.

        It keeps no row in its slot: after a refresh `plan` looks the tags up once more, so that
        nothing else comes out of it.
        """
        batch_plan = plan(indices, offsets, lookup=self._lookup, cache_ids=self.ids)
        if forward_stream is not None:
            for tensor in batch_plan:
                tensor.record_stream(forward_stream)
        ahead = PlannedAhead(indices, offsets, plan=batch_plan, versions=self.versions())
        self._ahead.append(ahead)

    @torch.compiler.disable
    def _take_ahead(self, indices: Tensor, offsets: Tensor) -> list[Tensor] | None:
        """The plan made ahead of a batch, which is then forgotten; None where the slots changed."""
        for ahead in self._ahead:
            if ahead.is_of(indices, offsets):
                self._ahead = deque(
                    (other for other in self._ahead if other is not ahead), maxlen=_MOST_AHEAD
                )
                return ahead.plan if ahead.versions == self.versions() else None
        return None

    @torch.compiler.disable
    def start_step(self, cores: Sequence[Tensor]) -> PlannedLookup:
        """Refreshes the caches that are due, and begins a lookup in training.

        A refresh is put off while the rows of another lookup are in use.

        Args:
            cores: of every table in turn.

        Returns:
            What must live, or be given to `end_step`, until the lookup's rows are stepped.

        Raises:
            ValueError: if a cache has no optimizer.
        """
        is_trained = [core.requires_grad for core in cores]
        trained = [
            t
            for t, cache in enumerate(self._caches)
            if cache is not None and any(is_trained[self._cores_of[t]])
        ]
        due = [t for t in trained if self._cache(t).is_due]
        if due and not self._any_in_flight():
            self._refresh(due, [cores[of_table] for of_table in self._cores_of])
        for t in trained:
            self._cache(t).begin_step()
        planned = PlannedLookup(trained)
        self._in_flight.add(planned)
        return planned

    def end_step(self, planned: PlannedLookup) -> None:
        self._in_flight.discard(planned)

    def _any_in_flight(self) -> bool:
        is_busy = len(self._in_flight) > 0
        if self._reduce is None:
            return is_busy
        device = next(c for c in self._caches if c is not None).ids.device
        return bool(self._reduce([torch.tensor([float(is_busy)], device=device)])[0])

    @torch.no_grad()
    def _refresh(self, due: Sequence[int], cores: Sequence[Sequence[Tensor]]) -> None:
        placed = [self._cache(t).place() for t in due]
        missed = [self._cache(t).missed(p, cores[t]) for t, p in zip(due, placed, strict=True)]
        squares = [torch.stack([each.sum()] * 2) for each in missed]
        folded = [
            i
            for i, t in enumerate(due)
            if self._cache(t).config.on_evict == "fold"
            and (self._reduce or len(placed[i].evicted_ids))  # others may have some
        ]
        if folded:
            folds = [self._cache(due[i]).fold(placed[i], missed[i], cores[due[i]]) for i in folded]
            for i, (before, after) in zip(
                folded, fold_rows(folds, reduce=self._reduce), strict=True
            ):
                squares[i][1] -= (before - after) / FOLDED_WEIGHT
        for t, placement, lost in zip(due, placed, squares, strict=True):
            self._cache(t).fill(placement, cores[t], squares=lost)
        device = self._cache(due[0]).ids.device
        if device.type == "cuda":  # another stream may look tags up next
            torch.cuda.current_stream(device).synchronize()

    def _cache(self, t: int) -> RowCache:
        cache = self._caches[t]
        assert cache is not None
        return cache

    @torch.compiler.disable
    def count(self, plan: list[Tensor]) -> None:
        """Counts a batch that was planned with these caches' ids."""
        count_rows(
            plan,
            self._all("heats"),
            self._all("counter_ids"),
            self._all("counter_heats"),
            self._all("statistics"),
            lookup=self._lookup,
            clocks=[0 if cache is None else cache.clock for cache in self._caches],
        )

    @torch.no_grad()
    def step(
        self,
        grad_output: Tensor,  # [B, sum over features of D]
        plan: list[Tensor],
        *,
        planned: PlannedLookup,
        learning_rate: float | None,
        **call: Any,
    ) -> None:
        """Steps the rows of a batch; `learning_rate` is that of the cores, for caches without one.

        `call` holds offsets and per_sample_weights.
        """
        ids, rows = self.ids, self.rows
        for config, own_rate, tables in self._groups(planned.trained):
            rate = learning_rate if own_rate is None else own_rate
            assert rate is not None
            assert config.eps is not None
            caches = [self._cache(t) for t in tables]
            limit = config.max_gradient
            step_cached_rows(
                grad_output if limit is None else grad_output.clamp(-limit, limit),
                plan,
                cache_ids=ids,
                cached_rows=[x if t in tables else x.new_empty(0) for t, x in enumerate(rows)],
                states=[state for cache in caches for state in cache.optimizer_states()],
                lookup=self._lookup,
                optimizer=config.optimizer,
                learning_rate=rate,
                eps=config.eps,
                betas=config.betas,
                weight_decay=config.weight_decay,
                decoupled_weight_decay=config.decoupled_weight_decay,
                rounding_seeds=[c.rounding_seed for c in caches if c.rounding_seed is not None],
                **call,
            )
        torch.autograd.graph.increment_version([x for x in rows if x.numel()])

    def _groups(
        self, trained: Iterable[int]
    ) -> list[tuple[TTOptimizerConfig, float | None, list[int]]]:
        """Tables whose rows are stepped alike: settings, own learning rate, tables."""
        groups: dict[tuple, list[int]] = {}
        for t in trained:
            cache = self._cache(t)
            assert cache.optimizer is not None
            key = (cache.optimizer, cache.learning_rate, cache.rows.dtype)
            groups.setdefault(key, []).append(t)
        return [(config, rate, tables) for (config, rate, _), tables in groups.items()]


def cached_embedding_bag(
    indices: Tensor,  # [N] int32 or int64
    offsets: Tensor,  # [F * B + 1] int32 or int64
    *,
    cores: Sequence[Tensor],  # of every table in turn, core k [m_k, r_k * n_k * r_{k+1}]
    lookup: Lookup,
    caches: RowCaches,
    is_training: bool,
    per_sample_weights: Tensor | None = None,  # [N], of the output's dtype
) -> Tensor:  # [B, sum over features of D]; without pooling [N, D]
    """Returns what `embedding_bag` does, with the cached rows in place of the cores'.

    Differentiable in cores and weights. In training lookups are counted, caches refreshed when they
    are due, and cached rows stepped in backward, by their own optimizer.

    Raises:
        ValueError: as `embedding_bag`.
        RuntimeError: in backward, if the slots hold other rows by then.
    """
    planned, batch_plan = caches.plan(indices, offsets, cores=cores, is_training=is_training)
    weights = None if per_sample_weights is None else per_sample_weights.contiguous()
    return _CachedLookup.apply(
        caches, planned, lookup, batch_plan, offsets.contiguous(), weights, *cores
    )


class _CachedLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        caches: RowCaches,
        planned: PlannedLookup | None,
        lookup: Lookup,
        batch_plan: list[Tensor],
        offsets: Tensor,
        weights: Tensor | None,
        *cores: Tensor,
    ) -> Tensor:
        ctx.caches, ctx.lookup, ctx.plan = caches, lookup, batch_plan
        ctx.use = RowUse(caches, planned, needs_values=ctx.needs_input_grad[5])
        ctx.save_for_backward(offsets, weights, *cores)
        return embedding_bag_forward(
            batch_plan,
            cores,
            offsets=offsets,
            lookup=lookup,
            per_sample_weights=weights,
            cached_rows=caches.rows,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple:
        offsets, weights, *cores = ctx.saved_tensors
        weights_grad = ctx.needs_input_grad[5]
        ctx.use.check()
        call = {"offsets": offsets, "per_sample_weights": weights}
        grad_cores, grad_weights = embedding_bag_backward_dense(
            grad_output,
            ctx.plan,
            cores,
            lookup=ctx.lookup,
            weights_grad=weights_grad,
            cached_rows=ctx.caches.rows,
            **call,
        )
        ctx.use.step(grad_output, ctx.plan, learning_rate=None, **call)
        grad_weights = grad_weights if weights_grad else None
        return None, None, None, None, None, grad_weights, *grad_cores
