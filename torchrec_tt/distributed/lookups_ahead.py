"""Pipelines that look a batch up before the one before it has stepped the cores are refused.

A core's gradient depends on the other cores as they were looked up, and these are gone by then.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import nn
from torchrec.distributed.train_pipeline.runtime_forwards import (
    CPUEmbeddingPipelinedForward,
    EmbeddingPipelinedForward,
    InSyncEmbeddingPipelinedForward,
)


def check_input_dist(module: nn.Module, *, tables: Sequence[str]) -> None:
    """Raises NotImplementedError where TrainPipelineSemiSync trains TT tables."""
    pipelined = module.forward
    is_semi_sync = isinstance(pipelined, EmbeddingPipelinedForward) and not isinstance(
        pipelined, (InSyncEmbeddingPipelinedForward, CPUEmbeddingPipelinedForward)
    )
    if is_semi_sync and module.training and tables:
        _refuse("TrainPipelineSemiSync", tables=tables)


def check_lookup(module: nn.Module, ctx: Any, *, tables: Sequence[str]) -> None:
    """Raises NotImplementedError where a stage of StagedTrainPipeline looks TT tables up.

    That stage has another batch's context than the forward pass, whose lookup is in step.
    """
    pipelined = module.forward
    if not isinstance(pipelined, InSyncEmbeddingPipelinedForward):
        return
    is_ahead = pipelined._context.module_contexts.get(pipelined.name) is not ctx
    if is_ahead and module.training and tables:
        _refuse("StagedTrainPipeline with an embedding_lookup_stream", tables=tables)


def _refuse(pipeline: str, *, tables: Sequence[str]) -> NoReturn:
    raise NotImplementedError(
        f"{pipeline} is not supported for Tensor-Train tables: it looks a batch up before the "
        "backward of the one before it steps the cores, and a core's gradient depends on the "
        "other cores as they were looked up; supported are TrainPipelineSparseDist and those that "
        f"look up in step, got tables {list(tables)}"
    )
