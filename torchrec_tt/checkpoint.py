"""What torch.distributed.checkpoint leaves open: row caches, the newest, FBTT-Embedding's."""

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, StorageReader

from torchrec_tt.distributed.row_cache_checkpoint import (
    SavedCaches,
    move_row_caches,
    moving_tables,
)
from torchrec_tt.tt.shape import TTShape


def load(
    state: dict[str, Any],
    *,
    model: nn.Module,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, int]:
    """Does what `torch.distributed.checkpoint.load` does, and moves row caches to other plans.

    A cache is saved under the block of rows that it is for. Where the model has the same caches as
    the checkpoint, all is loaded as by `dcp.load`. Where a table is cut otherwise, or the capacity
    differs, or one of the two has no cache, rows go to the blocks that they belong to, with their
    optimizer state and their heat, the hottest first; those that find no slot are folded into the
    cores and counted as evicted (with `on_evict="drop"`: dropped). All ranks must call.

    Args:
        state: what was saved; "model" is `model.state_dict()`. Loaded in place, as by `dcp.load`.
        model: loaded too; afterwards "model" of `state` is its state dict.
        checkpoint_id: the checkpoint's folder.
        storage_reader: instead of `checkpoint_id`.
        process_group: see `dcp.load`.

    Returns:
        Rows of this rank's blocks that found no slot, by table; no entry where nothing moved.

    Raises:
        ValueError: if `state` has no "model", or not one of `checkpoint_id` and `storage_reader`
            is given.
        CheckpointException: as `dcp.load`, for what else does not fit.

    Example:
        >>> state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        >>> checkpoint.load(state, model=model, checkpoint_id="checkpoints/1000")
        >>> optimizer.load_state_dict(state["optimizer"])
    """
    if not isinstance(state.get("model"), Mapping):
        raise ValueError(f"state must have 'model', the model's state dict, got {list(state)}")
    if (checkpoint_id is None) == (storage_reader is None):
        raise ValueError(
            "exactly one of checkpoint_id and storage_reader must be given, got "
            f"{checkpoint_id!r} and {storage_reader!r}"
        )
    reader = storage_reader or FileSystemReader(cast(str, checkpoint_id))
    saved = SavedCaches(reader, prefix="model.")
    tables = moving_tables(state["model"], saved)
    moved = tuple(f"{table}row_cache." for table in tables)
    rest = {key: value for key, value in state["model"].items() if not key.startswith(moved)}
    part = {**state, "model": rest}
    dcp.load(part, storage_reader=reader, process_group=process_group)
    model.load_state_dict(part["model"], strict=False)
    left_over = move_row_caches(model, saved, tables=tables)
    state.update(part, model=model.state_dict())
    return left_over


def latest(folder: str | os.PathLike[str], *, pg: dist.ProcessGroup | None = None) -> Path | None:
    """Returns the newest complete checkpoint in `folder`, the same on every rank, or None.

    Save each checkpoint to a sub-folder of its own, named by its step (`1000`, `step_1000`): the
    greatest number is the newest. torch.distributed.checkpoint writes a checkpoint's `.metadata`
    last, so what a crash left behind has none and is passed over.

    Args:
        folder: where the sub-folders are; it need not exist yet.
        pg: the ranks that ask, all of them; None is all ranks, or this process alone where there
            is no process group. Their rank 0 looks, so that no two see another state of a shared
            file system.

    Example:
        >>> if (checkpoint := latest("checkpoints")) is not None:
        ...     dcp.load(state, checkpoint_id=checkpoint)
    """
    if not dist.is_initialized():
        return _newest(Path(folder))
    found = [_newest(Path(folder)) if dist.get_rank(pg) == 0 else None]
    group = dist.group.WORLD if pg is None else pg
    dist.broadcast_object_list(found, src=dist.get_global_rank(group, 0), group=group)
    return found[0]


def from_fbtt(state_dict: Mapping[str, Any], *, tables: Mapping[str, TTShape]) -> dict[str, Tensor]:
    """Returns the cores of an FBTT-Embedding module under the keys of a TTEmbeddingBagCollection.

    Both keep core k as `[m_k, r_k * n_k * r_{k+1}]` and read a row's digits in the same order, so
    values move as they are: row i stays row i. Load the result with `strict=False` where the
    collection has other tables too; as whole tensors it loads under any plan.

    Args:
        state_dict: of a `TTEmbeddingBag` or `TableBatchedTTEmbeddingBag`, whose core k is
            `[T, m_k, r_k * n_k * r_{k+1}]`; cut a prefix such as `emb_l.2.` off its keys first.
        tables: the T tables in the module's order, by the name that they are to have; their
            `row_factors`, `col_factors` and `tt_ranks` are the module's `tt_p_shapes`,
            `tt_q_shapes` and `tt_ranks`. `TTEmbeddingBagCollection.tt_shapes` is such a mapping.

    Returns:
        `embedding_bags.<table>.tt_cores.<k>` to the core, sharing memory with `state_dict`.

    Raises:
        ValueError: if a core is missing, or has another shape than `tables` say.

    Warns:
        UserWarning: if rows were cached. What they learned is not in the cores, and
            FBTT-Embedding's own restore loses it too.

    Reference:
        Yin, Acun, Liu, Wu, "TT-Rec: Tensor Train Compression for Deep Learning Recommendation
        Models", MLSys 2021; facebookresearch/FBTT-Embedding.
    """
    num_cores = {shape.num_cores for shape in tables.values()}
    if len(num_cores) != 1:
        raise ValueError(f"tables must be some of one number of cores, got {dict(tables)}")
    cores: dict[str, Tensor] = {}
    for k in range(num_cores.pop()):
        core = state_dict.get(f"tt_cores.{k}")
        if core is None:
            raise ValueError(f"state_dict must have 'tt_cores.{k}', got {list(state_dict)}")
        for t, (table, shape) in enumerate(tables.items()):
            expected = (len(tables), *shape.core_shapes[k])
            if tuple(core.shape) != expected:
                raise ValueError(
                    f"tt_cores.{k} must have the shape {expected} for table {table!r} of "
                    f"{len(tables)}, got {tuple(core.shape)}"
                )
            cores[f"embedding_bags.{table}.tt_cores.{k}"] = core[t]
    extra = f"tt_cores.{len(cores) // len(tables)}"
    if extra in state_dict:
        raise ValueError(f"state_dict must not have {extra!r} for the shapes {dict(tables)}")
    cached = state_dict.get("cache_state")
    if cached is not None and bool((cached >= 0).any()):
        warnings.warn(
            "state_dict has cached rows; what they learned is not in the cores and is left behind",
            stacklevel=2,
        )
    return cores


def _newest(folder: Path) -> Path | None:
    complete = [path.parent for path in folder.glob("*/.metadata")]
    numbered = [(int(m[0]), path) for path in complete if (m := re.search(r"\d+$", path.name))]
    return max(numbered, default=(0, None))[1]
