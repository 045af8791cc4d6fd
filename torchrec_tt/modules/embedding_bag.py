"""TTEmbeddingBag: one TT table with the arguments and semantics of nn.EmbeddingBag."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, fx
from torch.nn.parallel import DistributedDataParallel

from torchrec_tt.modules.cores import TTCores, as_fx_leaf
from torchrec_tt.modules.row_cache import RowCache
from torchrec_tt.modules.row_cache_config import RowCacheConfig
from torchrec_tt.modules.row_caches import RowCaches, cached_embedding_bag
from torchrec_tt.ops.embedding_bag import check_tensors, embedding_bag, sum_dtype
from torchrec_tt.ops.lookup import CheckMode, Lookup, Precision, TTTable
from torchrec_tt.tt.factorize import RowStrategy
from torchrec_tt.tt.init import TTInit


class TTEmbeddingBag(TTCores):
    """Sums or means of rows of an embedding table that is stored as Tensor-Train cores.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns of the table.
        tt_ranks: the inner ranks; their number plus one is the number of cores, 2 to 4.
        row_factors: one per core, product at least `num_embeddings`; None: by `row_strategy`.
        col_factors: one per core, product `embedding_dim`; None: balanced.
        row_strategy: "balanced" or "fast" row factors, see `factorize_rows`; leave it out where
            `row_factors` are given.
        tt_init: how `reset_parameters` draws the cores, see `torchrec_tt.tt.init`.
        mode: "sum" or "mean"; nn.EmbeddingBag's default is "mean".
        include_last_offset: whether `offsets` ends with the number of indices.
        padding_idx: rows with this id count for nothing; negative ones count from the end.
        check_mode: for ids outside `[0, num_embeddings)`: "fatal" raises, "warning" and "ignore"
            read row 0.
        cache: which rows are kept uncompressed, see `RowCacheConfig`. They are stepped in backward
            by `cache.optimizer`, the cores by whatever optimizer has `parameters()`.
        table_name: in messages about the cache, and what the rounding of its 16-bit rows depends
            on.
        precision: of products on CUDA: "highest", "high" (TF32) or "medium" (BF16); None follows
            `torch.set_float32_matmul_precision`. The CPU computes in float32 whatever it says.
        device: of the cores; "meta" is allowed.
        dtype: of the cores: float32, bfloat16, float16 or float64. Sums are float32 (float64 for
            float64 cores).
        output_dtype: of the output; None: that of the sums.

    Attributes:
        tt_cores: the parameters, core k `[m_k, r_k * n_k * r_{k+1}]`.
        row_cache: the RowCache, or None.
        shape: the TTShape.

    Raises:
        ValueError: for shapes that do not fit or an unknown choice.
        NotImplementedError: for mode "max", which a product of cores cannot give without its rows.

    Example:
        >>> bag = TTEmbeddingBag(1_000_000, 64, tt_ranks=[16, 16], mode="sum")
        >>> bag(torch.tensor([1, 2, 999_999]), torch.tensor([0, 2])).shape
        torch.Size([2, 64])

    Reference:
        Yin, Acun, Liu, Wu, "TT-Rec: Tensor Train Compression for Deep Learning Recommendation
        Models", MLSys 2021, section 3.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        tt_ranks: Sequence[int],
        row_factors: Sequence[int] | None = None,
        col_factors: Sequence[int] | None = None,
        row_strategy: RowStrategy = "balanced",
        tt_init: TTInit = "sampled_gaussian",
        mode: Literal["sum", "mean"] = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        check_mode: CheckMode = "fatal",
        precision: Precision | None = None,
        cache: RowCacheConfig | None = None,
        table_name: str = "weight",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        if mode == "max":
            raise NotImplementedError("mode 'max' is not supported, use 'sum' or 'mean'")
        if mode not in ("sum", "mean"):
            raise ValueError(f"mode must be 'sum' or 'mean', got {mode!r}")
        super().__init__(
            num_embeddings,
            embedding_dim,
            tt_ranks=tt_ranks,
            row_factors=row_factors,
            col_factors=col_factors,
            row_strategy=row_strategy,
            tt_init=tt_init,
            device=device,
            dtype=dtype,
            output_dtype=output_dtype,
        )
        self.mode, self.include_last_offset = mode, include_last_offset
        self.padding_idx = _checked_padding_idx(padding_idx, self.num_embeddings)
        self._lookup = Lookup(
            [TTTable(name="weight", shape=self.shape)],
            pooling=mode,
            check_mode=check_mode,
            precision=precision,
        )
        self.row_cache, self._caches = None, None
        if cache is not None:
            self.row_cache = RowCache(
                TTTable(name=table_name, shape=self.shape),
                cache,
                optimizer=None,
                core_dtype=self.tt_cores[0].dtype,
                device=device,
            )
            self._caches = RowCaches(self._lookup, [self.row_cache])

    def reset_parameters(self, *, generator: torch.Generator | None = None) -> None:
        """Draws the cores anew and empties the cache; a module on "meta" is left as it is."""
        super().reset_parameters(generator=generator)
        cache = getattr(self, "row_cache", None)  # there is none yet where the cores are made
        if cache is not None:
            cache.clear()

    def to_dense(self) -> Tensor:  # [num_embeddings, embedding_dim]
        """Returns the whole table, cached rows included, differentiable in the cores."""
        dense = super().to_dense()
        return dense if self.row_cache is None else self.row_cache.write_into(dense)

    def forward(
        self,
        input: Tensor,  # [N], or [B, bag size] without offsets; int32 or int64
        offsets: Tensor | None = None,  # [B], or [B + 1] with include_last_offset
        per_sample_weights: Tensor | None = None,  # like input; mode "sum" only
    ) -> Tensor:  # [B, embedding_dim]
        """Returns one pooled row per bag; an empty bag gives zeros.

        Raises:
            ValueError: for ids out of range, offsets that do not fit, or weights of another shape.
            NotImplementedError: for weights with mode "mean", as in nn.EmbeddingBag; for training
                with a cache inside DistributedDataParallel.
        """
        if isinstance(input, fx.Proxy):
            return as_fx_leaf(self, input, offsets, per_sample_weights)
        indices, offsets = self._flat(input, offsets)
        if per_sample_weights is not None:
            check_tensors(per_sample_weights=per_sample_weights)
            if self.mode != "sum":
                raise NotImplementedError(
                    f"per_sample_weights must come with mode 'sum', got mode {self.mode!r}"
                )
            if per_sample_weights.shape != input.shape:
                raise ValueError(
                    f"per_sample_weights must have the shape of input, {tuple(input.shape)}, "
                    f"got {tuple(per_sample_weights.shape)}"
                )
            per_sample_weights = per_sample_weights.reshape(-1).to(sum_dtype(self.tt_cores[0]))
        if self.padding_idx is not None:
            _check_offsets(offsets, indices.numel())
            is_kept = indices != self.padding_idx
            kept = torch.cat([offsets.new_zeros(1), is_kept.cumsum(0, dtype=offsets.dtype)])
            indices, offsets = indices[is_kept], kept[offsets.long()]
            if per_sample_weights is not None:
                per_sample_weights = per_sample_weights[is_kept]
        output = self._pooled(indices, offsets, per_sample_weights)
        return output if self._output_dtype is None else output.to(self._output_dtype)

    def _pooled(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None
    ) -> Tensor:
        """The output in the dtype of the sums."""
        cores = list(self.tt_cores)
        if self._caches is None:
            return embedding_bag(
                indices,
                offsets,
                cores=cores,
                lookup=self._lookup,
                per_sample_weights=per_sample_weights,
            )
        is_trained = any(core.requires_grad for core in cores)
        is_training = self.training and torch.is_grad_enabled() and is_trained
        if is_training and DistributedDataParallel._get_active_ddp_module() is not None:
            raise NotImplementedError(
                "a row cache cannot be trained inside DistributedDataParallel, where every replica "
                "would keep and train rows of its own: leave cache None, or shard the table"
            )
        return cached_embedding_bag(
            indices,
            offsets,
            cores=cores,
            lookup=self._lookup,
            caches=self._caches,
            is_training=is_training,
            per_sample_weights=per_sample_weights,
        )

    def _flat(self, input: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns indices [N] and offsets [B + 1]."""
        if not isinstance(input, Tensor):
            raise ValueError(f"input must be a tensor, got {type(input).__name__}")
        if input.dim() == 2:
            if offsets is not None:
                raise ValueError(
                    f"offsets must be None for a 2-D input, got shape {tuple(offsets.shape)}"
                )
            bags, size = input.shape
            ends = torch.arange(bags + 1, device=input.device, dtype=torch.int64) * size
            return input.reshape(-1), ends
        if input.dim() != 1:
            raise ValueError(f"input must have 1 or 2 dimensions, got {input.dim()}")
        if not isinstance(offsets, Tensor) or offsets.dim() != 1:
            raise ValueError(
                f"offsets must be a tensor of 1 dimension for a 1-D input, got {offsets!r}"
            )
        if self.include_last_offset:
            if offsets.numel() == 0:
                raise ValueError("offsets must hold the last offset, got no entry")
            return input, offsets
        last = torch.tensor([input.numel()], dtype=offsets.dtype, device=offsets.device)
        return input, torch.cat([offsets, last])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"


def _checked_padding_idx(padding_idx: int | None, num_embeddings: int) -> int | None:
    if padding_idx is None:
        return None
    if not (isinstance(padding_idx, int) and -num_embeddings <= padding_idx < num_embeddings):
        raise ValueError(
            f"padding_idx must be in [-{num_embeddings}, {num_embeddings}), got {padding_idx!r}"
        )
    return padding_idx % num_embeddings


def _check_offsets(offsets: Tensor, num_indices: int) -> None:
    """What the operator checks, for where the offsets given do not reach it."""
    is_right = offsets[0] == 0 and offsets[-1] == num_indices and bool((offsets.diff() >= 0).all())
    if not is_right:
        raise ValueError(
            f"offsets must start at 0, not decrease and end by the number of indices, "
            f"{num_indices}, got {offsets.tolist()}"
        )
