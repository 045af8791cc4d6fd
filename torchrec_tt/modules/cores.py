"""TTCores: the cores of one table as parameters; what every module of a single TT table is."""

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor, fx, nn

from torchrec_tt.modules.table_batched import check_dtypes
from torchrec_tt.tt import cores as tt_cores
from torchrec_tt.tt.factorize import RowStrategy, make_shape
from torchrec_tt.tt.init import TTInit, init_cores_


class TTCores(nn.Module):
    """Holds and initialises a table's cores; subclasses look rows up.

    The table is `table[i] = G_0[i_0] @ ... @ G_{d-1}[i_{d-1}]` (see `TTShape`); it is never made.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns of the table.
        tt_ranks: the inner ranks; their number plus one is the number of cores, 2 to 4.
        row_factors: one per core, product at least `num_embeddings`; None: by `row_strategy`.
        col_factors: one per core, product `embedding_dim`; None: balanced.
        row_strategy: "balanced" or "fast" row factors, see `factorize_rows`; leave it out where
            `row_factors` are given.
        tt_init: how `reset_parameters` draws the cores, see `torchrec_tt.tt.init`.
        device: of the cores; "meta" is allowed.
        dtype: of the cores: float32, bfloat16, float16 or float64. Sums are float32 (float64 for
            float64 cores).
        output_dtype: of the output; None: that of the sums.

    Attributes:
        tt_cores: the parameters, core k `[m_k, r_k * n_k * r_{k+1}]`.
        shape: the TTShape.

    Raises:
        ValueError: for shapes that do not fit or an unknown choice.
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if tt_init not in get_args(TTInit):
            raise ValueError(f"tt_init must be one of {get_args(TTInit)}, got {tt_init!r}")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        check_dtypes(dtype, output_dtype=output_dtype)
        self.shape = make_shape(
            num_embeddings,
            embedding_dim,
            tt_ranks=tt_ranks,
            row_factors=row_factors,
            col_factors=col_factors,
            row_strategy=row_strategy,
        )
        self.num_embeddings = self.shape.num_embeddings
        self.embedding_dim = self.shape.embedding_dim
        self.tt_init = tt_init
        self._output_dtype = output_dtype
        self.tt_cores = nn.ParameterList(
            nn.Parameter(torch.empty(size, device=device, dtype=dtype))
            for size in self.shape.core_shapes
        )
        self.reset_parameters()

    def reset_parameters(self, *, generator: torch.Generator | None = None) -> None:
        """Draws the cores anew; a module on "meta" is left as it is."""
        if not self.tt_cores[0].is_meta:
            init_cores_(
                list(self.tt_cores), shape=self.shape, method=self.tt_init, generator=generator
            )

    def to_dense(self) -> Tensor:  # [num_embeddings, embedding_dim]
        """Returns the whole table, differentiable in the cores."""
        return tt_cores.dense(list(self.tt_cores), shape=self.shape)

    def extra_repr(self) -> str:
        shape = self.shape
        return (
            f"{shape.num_embeddings}, {shape.embedding_dim}, tt_ranks={shape.tt_ranks}, "
            f"row_factors={shape.row_factors}, col_factors={shape.col_factors}"
        )


def as_fx_leaf(module: nn.Module, *args: fx.Proxy | None) -> fx.Proxy:
    """Returns the call of `module` in the graph being traced, as torch.fx treats torch.nn's own.

    A tracer follows other modules inside, where what they check of a tensor has no answer yet.
    """
    tracer = next(arg.tracer for arg in args if isinstance(arg, fx.Proxy))
    if module is tracer.root:
        raise NotImplementedError(
            "the root of torch.fx's trace must be a module that holds the "
            f"{type(module).__name__}, such as nn.Sequential(table), got the table itself: it is "
            "a leaf of the graph"
        )
    return tracer.create_proxy("call_module", tracer.path_of_module(module), args, {})
