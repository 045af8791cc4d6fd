"""FrozenTTEmbeddingBag, FrozenTTEmbedding: TT tables that are only looked up."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_tt.modules.cores import TTCores
from torchrec_tt.modules.embedding import TTEmbedding
from torchrec_tt.modules.embedding_bag import TTEmbeddingBag
from torchrec_tt.ops.embedding_bag import embedding_bag_forward, plan, sum_dtype
from torchrec_tt.ops.lookup import Lookup
from torchrec_tt.tt import cores as tt_cores
from torchrec_tt.tt.quantization import dequantize_core


class FrozenCores(nn.Module):
    """A table's cores as buffers, under the state dict keys that trained ones have.

    Args:
        cores: core k `[m_k, r_k * n_k * r_{k+1}]`, in int8 with a slice's scale behind it, see
            `torchrec_tt.tt.quantization`.
    """

    def __init__(self, cores: Sequence[Tensor]) -> None:
        super().__init__()
        for k, core in enumerate(cores):
            self.register_buffer(str(k), core)

    def __len__(self) -> int:
        return len(self._buffers)

    def __getitem__(self, k: int) -> Tensor:
        return getattr(self, str(k))

    def __iter__(self) -> Iterator[Tensor]:
        return (self[k] for k in range(len(self)))

    def wide(self) -> list[Tensor]:
        """Returns the cores in the dtype of the sums, as lookups read them."""
        return [
            dequantize_core(core) if core.dtype == torch.int8 else core.to(sum_dtype(core))
            for core in self
        ]


class FrozenTable(TTCores):
    """What tables that are only looked up have in common: buffers instead of parameters.

    Args:
        table: that it takes its settings from; it shares nothing that is trained.
        cores: as of `FrozenCores`.
        hot_ids: [C] int64, rows of the table, each in a slot where it may lie (csrc/row_tags.h),
            and -1 in free slots; C = 0: no hot rows.
        hot_rows: [C, D], their values; they are read instead of the cores.
    """

    tt_cores: FrozenCores
    hot_ids: Tensor
    hot_rows: Tensor

    def __init__(
        self, table: TTCores, *, cores: Sequence[Tensor], hot_ids: Tensor, hot_rows: Tensor
    ) -> None:
        nn.Module.__init__(self)
        settings = nn.Module().__dict__.keys()
        self.__dict__.update({k: v for k, v in table.__dict__.items() if k not in settings})
        self.tt_cores = FrozenCores(cores)
        self.register_buffer("hot_ids", hot_ids)
        self.register_buffer("hot_rows", hot_rows)
        self.eval()

    def reset_parameters(self, *, generator: torch.Generator | None = None) -> None:
        """Raises NotImplementedError: there are no parameters."""
        raise NotImplementedError(
            "a frozen table has no parameters to reset: freeze the model that was reset"
        )

    def train(self, mode: bool = True) -> "FrozenTable":
        refuse_training(mode)
        return super().train(mode)

    def to_dense(self) -> Tensor:  # [num_embeddings, embedding_dim]
        """Returns the whole table as it is looked up, hot rows included."""
        dense = tt_cores.dense(self.tt_cores.wide(), shape=self.shape)
        slots = (self.hot_ids >= 0).nonzero()[:, 0]
        return dense.index_copy(0, self.hot_ids[slots], self.hot_rows[slots].to(dense.dtype))

    def extra_repr(self) -> str:
        num_hot = int((self.hot_ids >= 0).sum())
        return f"{super().extra_repr()}, dtype={self.tt_cores[0].dtype}, hot_rows={num_hot}"

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Refuses what would be rounded, or read as if it had scales, without a word."""
        for name, own in self.state_dict().items():
            saved = state_dict.get(prefix + name)
            if saved is not None and (saved.dtype, saved.shape) != (own.dtype, own.shape):
                args[-1].append(
                    f"{prefix}{name} must be {own.dtype} of {tuple(own.shape)} as the frozen model "
                    f"has it, got {saved.dtype} of {tuple(saved.shape)}: load into the model that "
                    "was trained, and freeze it"
                )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class FrozenTTEmbeddingBag(FrozenTable, TTEmbeddingBag):
    """A TTEmbeddingBag that is only looked up; made by `torchrec_tt.freeze`."""

    def __init__(self, table: TTEmbeddingBag, **state: Any) -> None:
        super().__init__(table, **state)
        self.row_cache, self._caches = None, None  # its rows are hot ones

    def _pooled(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None
    ) -> Tensor:
        return look_up(
            indices, offsets, tables=[self], lookup=self._lookup, weights=per_sample_weights
        )


class FrozenTTEmbedding(FrozenTable, TTEmbedding):
    """A TTEmbedding that is only looked up; made by `torchrec_tt.freeze`."""

    def _rows(self, indices: Tensor, offsets: Tensor) -> Tensor:
        return look_up(indices, offsets, tables=[self], lookup=self._lookup)


def look_up(
    indices: Tensor,  # [N] int32 or int64
    offsets: Tensor,  # [F * B + 1] int32 or int64
    *,
    tables: Sequence[FrozenTable],
    lookup: Lookup,
    weights: Tensor | None = None,  # [N] float32
) -> Tensor:  # [B, sum over features of D]; without pooling [N, D]
    """Returns what `embedding_bag` does, of tables that have no gradient.

    Raises:
        ValueError: as `embedding_bag`, or if the weights ask for a gradient.
    """
    if weights is not None and weights.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "per_sample_weights must not require a gradient in a frozen model, which has none: "
            "call it under torch.no_grad()"
        )
    batch_plan = plan(indices, offsets, lookup=lookup, cache_ids=[t.hot_ids for t in tables])
    return embedding_bag_forward(
        batch_plan,
        [core for table in tables for core in table.tt_cores],
        offsets=offsets.contiguous(),
        lookup=lookup,
        per_sample_weights=None if weights is None else weights.contiguous(),
        cached_rows=[t.hot_rows for t in tables],
    )


def refuse_training(mode: bool) -> None:
    """Raises ValueError for the mode of training."""
    if mode:
        raise ValueError(
            "mode must be False for a frozen model, got True: train the model that it was "
            "frozen from, and freeze it again"
        )
