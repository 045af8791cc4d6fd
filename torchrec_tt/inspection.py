"""What tables are made of: those of a model file, and those whose cores a checkpoint has."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table as RichTable

from torchrec_tt.model_file import read_model_file
from torchrec_tt.modules.embedding_configs import TTEmbeddingBagConfig
from torchrec_tt.tt.cost import core_bytes, dense_bytes
from torchrec_tt.tt.shape import MAX_CORES, MIN_CORES
from torchrec_tt.tuner import TunedPlan

_CORE = re.compile(r"(?:^|\.)(?:embedding_bags|embeddings)\.(?P<table>.+)\.tt_cores\.(?P<k>\d+)$")
_WEIGHT = re.compile(r"(?:^|\.)(?:embedding_bags|embeddings)\.(?P<table>.+)\.weight$")
_METADATA = ".metadata"  # torch.distributed.checkpoint writes it last


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspected:
    """A table.

    Attributes:
        table: its name.
        kind: "tt" or "dense".
        shape: rows and columns; of a checkpoint's TT table None: cores do not tell them.
        cores: shapes of the cores, `[m_k, r_k * n_k * r_{k+1}]`.
        tt_ranks: of a model file's TT table.
        num_parameters: of the cores or rows.
        num_bytes: of these.
        dense_bytes: of the rows in float32; of a checkpoint's TT table None.
    """

    table: str
    kind: str
    shape: tuple[int, int] | None
    cores: list[tuple[int, ...]]
    tt_ranks: tuple[int, ...] | None
    num_parameters: int
    num_bytes: int
    dense_bytes: int | None


def inspect_model(path: Path) -> list[Inspected]:
    """Returns the tables of a model file.

    Raises:
        ValueError: for a file that breaks the schema.
    """
    found = []
    for table in read_model_file(path).tables:
        config = table.config()
        rows, columns = table.num_embeddings, table.embedding_dim
        element_size = 4 if table.data_type == "fp32" else 2
        if isinstance(config, TTEmbeddingBagConfig):
            shape = config.tt_shape
            found.append(
                Inspected(
                    table=table.name,
                    kind="tt",
                    shape=(rows, columns),
                    cores=[tuple(core) for core in shape.core_shapes],
                    tt_ranks=shape.tt_ranks,
                    num_parameters=shape.num_parameters,
                    num_bytes=core_bytes(shape, element_size=element_size),
                    dense_bytes=dense_bytes(shape),
                )
            )
        else:
            found.append(_dense(table.name, (rows, columns), element_size))
    return found


def inspect_checkpoint(path: Path) -> list[Inspected]:
    """Returns the tables of a torch.distributed.checkpoint folder or a file of torch.save.

    Raises:
        ValueError: if the path is neither, has no tables, or cores that do not form one.
    """
    sizes = _sizes(path)
    cores: dict[str, dict[int, tuple[tuple[int, ...], int]]] = {}
    found = []
    for key, (size, element_size) in sizes.items():
        if core := _CORE.search(key):
            cores.setdefault(core["table"], {})[int(core["k"])] = (size, element_size)
        elif (weight := _WEIGHT.search(key)) and len(size) == 2:
            found.append(_dense(weight["table"], (size[0], size[1]), element_size))
    for table, by_number in cores.items():
        _check_cores(table, {k: size for k, (size, _) in by_number.items()})
        shapes = [by_number[k][0] for k in sorted(by_number)]
        num_parameters = sum(math.prod(shape) for shape in shapes)
        found.append(
            Inspected(
                table=table,
                kind="tt",
                shape=None,
                cores=shapes,
                tt_ranks=None,
                num_parameters=num_parameters,
                num_bytes=num_parameters * by_number[min(by_number)][1],
                dense_bytes=None,
            )
        )
    if not found:
        raise ValueError(
            f"the checkpoint must have embedding_bags or embeddings, got {list(sizes)[:5]}"
        )
    return found


def table_of(entries: Sequence[Inspected]) -> RichTable:
    """Returns the entries for a terminal."""
    result = RichTable()
    for name in ("table", "kind", "rows x columns", "cores", "ranks"):
        result.add_column(name, overflow="fold")
    for name in ("parameters", "bytes", "smaller"):
        result.add_column(name, justify="right")
    for entry in entries:
        result.add_row(
            entry.table,
            entry.kind,
            f"{entry.shape[0]:,} x {entry.shape[1]}" if entry.shape else "",
            " ".join("x".join(map(str, core)) for core in entry.cores),
            ",".join(map(str, entry.tt_ranks or ())),
            f"{entry.num_parameters:,}",
            f"{entry.num_bytes:,}",
            f"{entry.dense_bytes / entry.num_bytes:.1f}x" if entry.dense_bytes else "",
        )
    total, dense = sum(e.num_bytes for e in entries), [e.dense_bytes for e in entries]
    known = [size for size in dense if size is not None]
    ratio = f"{sum(known) / total:.1f}x" if len(known) == len(dense) else ""
    parameters = sum(entry.num_parameters for entry in entries)
    result.add_row("all", "", "", "", "", f"{parameters:,}", f"{total:,}", ratio, style="bold")
    return result


def table_of_plans(plans: Sequence[TunedPlan]) -> RichTable:
    """Returns the trade-offs for a terminal."""
    result = RichTable()
    for name in ("MB a rank", "ms a step", "error", "smaller"):
        result.add_column(name, justify="right")
    result.add_column("TT tables: rank, row strategy, cache", overflow="fold")
    for plan in plans:
        chosen = [
            f"{t.name}: {t.tt_ranks[0]} {t.row_strategy}"
            + (f" {t.cache_load_factor:.2%}" if t.cache_load_factor else "")
            for t in plan.model.tables
            if t.tt_ranks
        ]
        result.add_row(
            f"{plan.rank_bytes / 1e6:.2f}",
            f"{plan.step_ms:.2f}",
            f"{plan.error:.4f}",
            f"{plan.compression:.0f}x",
            ", ".join(chosen) or "none",
        )
    return result


def _dense(table: str, shape: tuple[int, int], element_size: int) -> Inspected:
    return Inspected(
        table=table,
        kind="dense",
        shape=shape,
        cores=[],
        tt_ranks=None,
        num_parameters=shape[0] * shape[1],
        num_bytes=shape[0] * shape[1] * element_size,
        dense_bytes=shape[0] * shape[1] * 4,
    )


def _sizes(path: Path) -> dict[str, tuple[tuple[int, ...], int]]:
    """Size and element size of every tensor, by its key; values are read of .pt files only."""
    if (path / _METADATA).is_file():
        from torch.distributed.checkpoint import FileSystemReader

        try:
            entries = FileSystemReader(path).read_metadata().state_dict_metadata
        except Exception as error:  # unpickling raises what it meets
            rule = "a folder of torch.distributed.checkpoint"
            raise ValueError(_unreadable(path, rule, error)) from None
        return {
            key: (tuple(entry.size), entry.properties.dtype.itemsize)
            for key, entry in entries.items()
            if hasattr(entry, "size")
        }
    if not path.is_file():
        raise ValueError(
            f"file must be a model file (.yaml), a folder of torch.distributed.checkpoint or a "
            f"file of torch.save, got {str(path)!r}"
        )
    try:
        content = torch.load(path, map_location="meta", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # unpickling raises what it meets
        rule = "a file of torch.save with tensors only"
        raise ValueError(_unreadable(path, rule, error)) from None
    return {key: (tuple(t.shape), t.element_size()) for key, t in _tensors(content)}


def _unreadable(path: Path, rule: str, error: Exception) -> str:
    what = " ".join(str(error).split()).split(". ")[0]
    return f"{path} must be {rule}, got {type(error).__name__}: {what[:120]}"


def _check_cores(table: str, sizes: Mapping[int, tuple[int, ...]]) -> None:
    if sorted(sizes) != list(range(len(sizes))) or not MIN_CORES <= len(sizes) <= MAX_CORES:
        raise ValueError(
            f"cores of table {table!r} must be numbered from 0, {MIN_CORES} to {MAX_CORES} of "
            f"them, got {sorted(sizes)}"
        )
    for k, size in sizes.items():
        if len(size) != 2:
            raise ValueError(f"core {k} of table {table!r} must be a matrix, got {list(size)}")


def _tensors(content: Any, prefix: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(content, torch.Tensor):
        return [(prefix, content)]
    if not isinstance(content, Mapping):
        return []
    dot = f"{prefix}." if prefix else ""
    return [pair for key, value in content.items() for pair in _tensors(value, f"{dot}{key}")]
