"""TTEmbedding: one TT table with the semantics of nn.Embedding."""

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from torchrec_tt.modules.cores import TTCores, as_fx_leaf
from torchrec_tt.ops.embedding_bag import embedding_bag
from torchrec_tt.ops.lookup import CheckMode, Lookup, Precision, TTTable
from torchrec_tt.tt.factorize import RowStrategy
from torchrec_tt.tt.init import TTInit


class TTEmbedding(TTCores):
    """Rows of an embedding table that is stored as Tensor-Train cores.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns of the table.
        tt_ranks: the inner ranks; their number plus one is the number of cores, 2 to 4.
        row_factors: one per core, product at least `num_embeddings`; None: by `row_strategy`.
        col_factors: one per core, product `embedding_dim`; None: balanced.
        row_strategy: "balanced" or "fast" row factors, see `factorize_rows`; leave it out where
            `row_factors` are given.
        tt_init: how `reset_parameters` draws the cores, see `torchrec_tt.tt.init`.
        check_mode: for ids outside `[0, num_embeddings)`: "fatal" raises, "warning" and "ignore"
            read row 0.
        precision: of products on CUDA: "highest", "high" (TF32) or "medium" (BF16); None follows
            `torch.set_float32_matmul_precision`. The CPU computes in float32 whatever it says.
        device: of the cores; "meta" is allowed.
        dtype: of the cores: float32, bfloat16, float16 or float64. Sums are float32 (float64 for
            float64 cores).
        output_dtype: of the output; None: that of the sums.

    Attributes:
        tt_cores: the parameters, core k `[m_k, r_k * n_k * r_{k+1}]`.
        shape: the TTShape.

    Raises:
        ValueError: for shapes that do not fit or an unknown choice.

    Example:
        >>> embedding = TTEmbedding(1_000_000, 64, tt_ranks=[16, 16])
        >>> embedding(torch.tensor([[1, 2], [2, 999_999]])).shape
        torch.Size([2, 2, 64])

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
        check_mode: CheckMode = "fatal",
        precision: Precision | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
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
        self._lookup = Lookup(
            [TTTable(name="weight", shape=self.shape)],
            pooling="none",
            check_mode=check_mode,
            precision=precision,
        )

    def forward(
        self,
        input: Tensor,  # [*] int32 or int64
    ) -> Tensor:  # [*, embedding_dim]
        """Returns the row of every id.

        Raises:
            ValueError: for ids out of range.
        """
        if isinstance(input, fx.Proxy):
            return as_fx_leaf(self, input)
        if not isinstance(input, Tensor):
            raise ValueError(f"input must be a tensor, got {type(input).__name__}")
        indices = input.reshape(-1)
        rows = self._rows(indices, torch.tensor([0, indices.numel()], device=input.device))
        if self._output_dtype is not None:
            rows = rows.to(self._output_dtype)
        return rows.view(*input.shape, self.embedding_dim)

    def _rows(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """The rows in the dtype of the sums."""
        return embedding_bag(indices, offsets, cores=list(self.tt_cores), lookup=self._lookup)
