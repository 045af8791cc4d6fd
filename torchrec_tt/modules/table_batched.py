"""TTTableBatchedEmbeddingBags: many TT tables in one call, trained as parameters or in backward."""

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchrec_tt.modules.row_cache import RowCache
from torchrec_tt.modules.row_cache_config import RowCacheConfig
from torchrec_tt.modules.row_caches import (
    PlannedLookup,
    RowCaches,
    RowUse,
    cached_embedding_bag,
    versions_of,
)
from torchrec_tt.ops.embedding_bag import (
    check_tensors,
    embedding_bag,
    embedding_bag_backward_dense,
    embedding_bag_backward_update,
    embedding_bag_forward,
    plan,
    sum_dtype,
)
from torchrec_tt.ops.lookup import CheckMode, Lookup, Pooling, Precision, TTTable
from torchrec_tt.optim import CoreOptimizer, TTOptimizerConfig

ReduceGradients = Callable[[list[Tensor]], list[Tensor]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class TTTableBatchedEmbeddingBags(nn.Module):
    """Pooled lookup in TT tables of any shapes; FBGEMM's SplitTableBatchedEmbeddingBags for TT.

    Args:
        tables: in the order of the features that read them; names are unique.
        pooling: of every table; "none" returns a row per index, see `Lookup`.
        check_mode: what to do with ids outside `[0, num_rows)`, see `Lookup`.
        optimizer: steps the cores inside backward, which then leaves `.grad` None; None gives
            ordinary gradients.
        reduce_gradients: for cores that are replicated: called once in each backward, before the
            step, with the gradients of all cores; returns their sums over the replicas. It is
            called on every rank, with zeros where a rank had no ids. A refresh of row caches calls
            it too, as `fold_rows` does.
        caches: by table name, for tables that keep their hottest rows uncompressed: see
            `RowCacheConfig`. Cached rows are stepped in backward, whatever steps the cores.
        precision: of products on CUDA, see `Lookup`.
        device: of the cores; "meta" is allowed.
        dtype: of the cores: float32, bfloat16, float16 or float64. Sums are float32 (float64 for
            float64 cores), and so are the optimizer's moments.
        output_dtype: of the output; None: that of the sums.

    Attributes:
        cores: table name to its list of cores, core k `[m_k, r_k * n_k * r_{k+1}]`. They are not
            initialised: see `torchrec_tt.tt.init`.
        optimizer: the CoreOptimizer, or None.
        row_caches: table name to its RowCache, for tables that have one.

    Raises:
        ValueError: for repeated names, an unknown choice, `reduce_gradients` without an
            optimizer, or a cache of no table.
    """

    def __init__(
        self,
        tables: Sequence[TTTable],
        *,
        pooling: Pooling = "sum",
        check_mode: CheckMode = "fatal",
        precision: Precision | None = None,
        optimizer: TTOptimizerConfig | None = None,
        reduce_gradients: ReduceGradients | None = None,
        caches: Mapping[str, RowCacheConfig] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        names = [table.name for table in tables]
        if len(set(names)) != len(names):
            raise ValueError(f"tables must have different names, got {names}")
        check_dtypes(dtype, output_dtype=output_dtype)
        if reduce_gradients is not None and optimizer is None:
            raise ValueError("reduce_gradients must come with an optimizer, got optimizer=None")
        self.lookup = Lookup(tables, pooling=pooling, check_mode=check_mode, precision=precision)
        self.cores = nn.ModuleDict(
            {
                table.name: nn.ParameterList(
                    nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                    for shape in table.shape.core_shapes
                )
                for table in tables
            }
        )
        self.optimizer = None
        if optimizer is not None:
            self.optimizer = CoreOptimizer(
                self.all_cores(), optimizer, rounding_seeds=_rounding_seeds(tables)
            )
        self._reduce_gradients = reduce_gradients
        self._output_dtype = output_dtype
        caches = caches or {}
        if unknown := [name for name in caches if name not in names]:
            raise ValueError(f"caches must be of the tables {names}, got {unknown}")
        self.row_caches = nn.ModuleDict(
            {
                table.name: RowCache(
                    table,
                    caches[table.name],
                    optimizer=optimizer,
                    core_dtype=dtype,
                    device=device,
                )
                for table in tables
                if table.name in caches
            }
        )
        self._caches = None
        if caches:
            of_tables = [cast(RowCache, self.row_caches._modules.get(name)) for name in names]
            self._caches = RowCaches(self.lookup, of_tables, reduce=reduce_gradients)

    @property
    def tables(self) -> tuple[TTTable, ...]:
        return self.lookup.tables

    def all_cores(self) -> list[nn.Parameter]:
        """Returns the cores of every table in turn."""
        # Iterating over a ParameterList looks each entry up by name: 2 us a core, every step.
        return [
            core
            for cores in self.cores._modules.values()
            for core in cast(nn.Module, cores)._parameters.values()
            if core is not None
        ]

    def forward(
        self,
        indices: Tensor,  # [N] int32 or int64
        offsets: Tensor,  # [F * B + 1] int32 or int64, feature-major
        *,
        per_sample_weights: Tensor | None = None,  # [N] floating
    ) -> Tensor:  # [B, sum over features of D]; without pooling [N, D]
        """Returns the pooled rows, feature after feature; without pooling, the row of every index.

        Raises:
            ValueError: for invalid ids, offsets or weights; the message names the table.
        """
        output = self._pooled(indices, offsets, per_sample_weights)
        return output if self._output_dtype is None else output.to(self._output_dtype)

    def prefetch(
        self,
        indices: Tensor,  # [N] int32 or int64
        offsets: Tensor,  # [F * B + 1] int32 or int64, feature-major
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Looks a batch's tags up ahead of its step: FBGEMM's `prefetch`, without its queue.

        `forward` with the same indices and offsets, unchanged, takes what was found, whatever came
        in between; if the caches were renewed meanwhile it looks again. Nothing else depends on
        it. Does nothing where no table has a cache.

        Args:
            indices: as in `forward`.
            offsets: as in `forward`.
            forward_stream: that of `forward`, where it is not the current one. It must wait for
                this one.

        Raises:
            ValueError: for invalid ids or offsets.
        """
        if self._caches is not None:
            self._caches.plan_ahead(indices, offsets, forward_stream=forward_stream)

    def _pooled(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None
    ) -> Tensor:
        """The output in the dtype of the sums."""
        cores = self.all_cores()
        if per_sample_weights is not None:
            check_tensors(per_sample_weights=per_sample_weights)
            per_sample_weights = per_sample_weights.to(sum_dtype(cores[0]))
        trained = next((core for core in cores if core.requires_grad), None)
        caches = self._caches
        is_training = self.training and torch.is_grad_enabled() and trained is not None
        if self.optimizer is None or trained is None:
            call: dict[str, Any] = {"cores": cores, "lookup": self.lookup}
            call["per_sample_weights"] = per_sample_weights
            if caches is None:
                return embedding_bag(indices, offsets, **call)
            return cached_embedding_bag(
                indices, offsets, caches=caches, is_training=is_training, **call
            )
        _check_trainable(trained)
        if caches is None:
            planned, batch_plan = None, plan(indices, offsets, lookup=self.lookup)
        else:
            planned, batch_plan = caches.plan(
                indices, offsets, cores=cores, is_training=is_training
            )
        weights = None if per_sample_weights is None else per_sample_weights.contiguous()
        return _StepInBackward.apply(
            self, batch_plan, offsets.contiguous(), weights, cores, trained, planned
        )

    def _step(
        self, grad_output: Tensor, batch_plan: list[Tensor], cores: list, call: dict[str, Any]
    ) -> Tensor:
        """Steps the cores that require a gradient and returns the gradient of the weights."""
        optimizer = self.optimizer
        assert optimizer is not None
        assert optimizer.config.eps is not None
        limit = optimizer.config.max_gradient
        if limit is not None:
            grad_output = grad_output.clamp(-limit, limit)
        is_trained = [core.requires_grad for core in cores]
        if self._reduce_gradients is None and optimizer.is_fusable and all(is_trained):
            return embedding_bag_backward_update(
                grad_output,
                batch_plan,
                cores,
                optimizer.states(),
                optimizer=optimizer.config.optimizer,
                learning_rate=optimizer.learning_rate,
                eps=optimizer.config.eps,
                rounding_seeds=optimizer.rounding_seeds(),
                **call,
            )
        grads, grad_weights = embedding_bag_backward_dense(grad_output, batch_plan, cores, **call)
        if self._reduce_gradients is not None:
            grads = self._reduce_gradients(grads)
        optimizer.step(itertools.compress(cores, is_trained), itertools.compress(grads, is_trained))
        return grad_weights


def check_dtypes(dtype: torch.dtype, *, output_dtype: torch.dtype | None) -> None:
    """Raises ValueError for a dtype that cores or outputs cannot have."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {dtype}")
    if output_dtype not in (None, *DTYPES):
        raise ValueError(f"output_dtype must be None or one of {DTYPES}, got {output_dtype}")


def _check_trainable(core: Tensor) -> None:
    """Raises RuntimeError for an inference tensor that a lookup with gradients would train."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # dynamo cannot ask
        return
    if core.is_inference():
        raise RuntimeError(
            "cores must be made outside torch.inference_mode() to be trained, got some made "
            "inside: without gradients they can be looked up"
        )


def _rounding_seeds(tables: Sequence[TTTable]) -> list[int]:
    """One seed per core, from its table's name and its place, the same in every process."""
    return [
        int.from_bytes(hashlib.sha256(f"{table.name}:{k}".encode()).digest()[:7], "little")
        for table in tables
        for k in range(table.shape.num_cores)
    ]


class _StepInBackward(torch.autograd.Function):
    """The lookup whose backward steps the cores instead of returning their gradients.

    One core stands for all of them in the graph, so that backward runs; the others need no edge.
    """

    @staticmethod
    def forward(
        ctx: Any,
        module: TTTableBatchedEmbeddingBags,
        batch_plan: list[Tensor],
        offsets: Tensor,
        weights: Tensor | None,
        cores: list[nn.Parameter],
        trained: nn.Parameter,
        planned: PlannedLookup | None,
    ) -> Tensor:
        ctx.module, ctx.plan, ctx.offsets, ctx.cores = module, batch_plan, offsets, cores
        ctx.versions = versions_of(cores) if ctx.needs_input_grad[5] else None
        if weights is not None:
            ctx.save_for_backward(weights)
        caches = module._caches
        if caches is not None:
            ctx.use = RowUse(caches, planned, needs_values=ctx.needs_input_grad[3])
        return embedding_bag_forward(
            batch_plan,
            cores,
            offsets=offsets,
            lookup=module.lookup,
            per_sample_weights=weights,
            cached_rows=[] if caches is None else caches.rows,
        )

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph must be False where cores are stepped in backward, got True"
            )
        weights = next(iter(ctx.saved_tensors), None)
        cores, module = ctx.cores, ctx.module
        if ctx.versions != versions_of(cores):
            raise RuntimeError(
                "cores must be those of the forward pass in its backward, but they were modified "
                "in between: their gradient depends on them, so let every lookup's backward run "
                "before the next lookup"
            )
        caches = module._caches
        if caches is not None:
            ctx.use.check()
        batch = {"offsets": ctx.offsets, "per_sample_weights": weights}
        call = {
            **batch,
            "lookup": module.lookup,
            "weights_grad": ctx.needs_input_grad[3],
            "cached_rows": [] if caches is None else caches.rows,
        }
        rate = module.optimizer.learning_rate
        grad_weights = module._step(grad_output, ctx.plan, cores, call)
        if caches is not None:
            ctx.use.step(grad_output, ctx.plan, learning_rate=rate, **batch)
        # Another lookup that still waits for its backward must not use the stepped cores.
        torch.autograd.graph.increment_version(cores)
        return None, None, None, grad_weights if call["weights_grad"] else None, None, None, None
