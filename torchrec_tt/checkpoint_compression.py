"""Checkpoints of uncompressed models made into checkpoints of Tensor-Train ones, without the model.

A checkpoint is a folder of torch.distributed.checkpoint (sharded or not) or a file of torch.save.
`<collection>.<table>.weight` becomes `<collection>.<table>.tt_cores.<k>`; optimizer state of a
compressed table is left out, the new parameters have none; everything else is copied.
"""

import difflib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from rich.table import Table as RichTable
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchrec_tt.compression_config import CompressedTable, OnTable, TTConfig
from torchrec_tt.schema import read_yaml

_WEIGHT = re.compile(r"(?:^|\.)(?:embedding_bags|embeddings)\.(?P<table>[^.]+)\.weight$")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionFile:
    """What `torchrec-tt compress --config` reads.

    Attributes:
        tables: how each is compressed, by name; those not named stay as they are.
    """

    tables: dict[str, TTConfig]


def read_compression_file(path: str | Path) -> CompressionFile:
    """Returns what the file says.

    Raises:
        ValueError: for a file that breaks the schema or names no table.
        OSError: for a file that cannot be read.
    """
    file = read_yaml(path, CompressionFile)
    if not file.tables:
        raise ValueError(f"{path}: tables must name a table, got none")
    for name, config in file.tables.items():
        if config.cache is not None:
            raise ValueError(
                f"{path}: tables.{name}.cache must be left out: a checkpoint has cached rows only "
                "after training"
            )
    return file


def compress_checkpoint(
    source: str | Path,
    target: str | Path,
    tables: Mapping[str, TTConfig],
    *,
    on_table: OnTable | None = None,
) -> list[CompressedTable]:
    """Writes `target`, the checkpoint `source` with these tables in Tensor-Train form.

    One table's rows are read at a time, into a file that is mapped to memory where `source` is a
    folder. `target` is of the same kind as `source`, and whole or not there.

    Args:
        source: a folder of torch.distributed.checkpoint or a file of torch.save.
        target: which must not exist yet.
        tables: by name.
        on_table: called with each table as it is done.

    Raises:
        ValueError: for a source that is neither, a target that exists, tables that are not in it,
            factors or ranks that do not fit, or values that are not finite.
        OSError: for what cannot be read or written.
    """
    source, target = Path(source), Path(target)
    if target.exists():
        raise ValueError(f"target must not exist yet, got {str(target)!r}")
    if (source / ".metadata").is_file():
        return _compress_folder(source, target, tables, on_table)
    if not source.is_file():
        raise ValueError(
            "source must be a folder of torch.distributed.checkpoint or a file of torch.save, got "
            f"{str(source)!r}"
        )
    return _compress_file(source, target, tables, on_table)


def table_of_compressed(done: list[CompressedTable]) -> RichTable:
    """Returns the tables for a terminal."""
    result = RichTable()
    for name in ("table", "rows x columns", "ranks"):
        result.add_column(name, overflow="fold")
    for name in ("bytes", "of", "smaller", "relative error"):
        result.add_column(name, justify="right")
    for each in done:
        result.add_row(
            each.name,
            f"{each.shape.num_embeddings:,} x {each.shape.embedding_dim}",
            ",".join(map(str, each.shape.tt_ranks)),
            f"{each.num_bytes:,}",
            f"{each.dense_bytes:,}",
            f"{each.dense_bytes / each.num_bytes:.1f}x",
            f"{each.relative_error:.4f}",
        )
    return result


def _compress_folder(
    source: Path, target: Path, tables: Mapping[str, TTConfig], on_table: OnTable | None
) -> list[CompressedTable]:
    entries = FileSystemReader(source).read_metadata().state_dict_metadata
    sizes = {
        key: tuple(entry.size)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    weights = _find_weights(sizes, tables)
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in entries.items()
        if not _belongs_to(key, weights)
    }
    with _written_whole(target) as folder:
        dcp.load(state, checkpoint_id=source, no_dist=True)
        done: list[CompressedTable] = []
        for key, name in weights.items():
            dtype = entries[key].properties.dtype
            with _mapped(sizes[key], dtype, beside=target) as rows:
                dcp.load({key: rows}, checkpoint_id=source, no_dist=True)
                table, cores = tables[name].compress(name, rows)
            _put(state, key, cores, done, table, on_table)
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return done


def _compress_file(
    source: Path, target: Path, tables: Mapping[str, TTConfig], on_table: OnTable | None
) -> list[CompressedTable]:
    content = torch.load(source, map_location="cpu", mmap=True, weights_only=True)
    sizes = {key: tuple(t.shape) for key, t in _walk(content) if isinstance(t, Tensor)}
    weights = _find_weights(sizes, tables)
    done: list[CompressedTable] = []

    def rebuilt(value: Any, prefix: str) -> Any:
        if not isinstance(value, Mapping):
            return value
        result: dict[Any, Any] = {}
        for key, inner in value.items():
            path = f"{prefix}{key}"
            if path in weights:
                table, cores = tables[weights[path]].compress(weights[path], inner)
                _put(result, key, cores, done, table, on_table)
            elif not _belongs_to(path, weights):
                result[key] = rebuilt(inner, f"{path}.")
        return result

    with _written_whole(target) as path:
        torch.save(rebuilt(content, ""), path)
    return done


def _put(
    state: dict[str, Any],
    key: str,
    cores: list[Tensor],
    done: list[CompressedTable],
    table: CompressedTable,
    on_table: OnTable | None,
) -> None:
    for k, core in enumerate(cores):
        state[f"{key.removesuffix('weight')}tt_cores.{k}"] = core
    done.append(table)
    if on_table is not None:
        on_table(table)


def _find_weights(
    sizes: Mapping[str, tuple[int, ...]], tables: Mapping[str, TTConfig]
) -> dict[str, str]:
    """Key to table name of the weights to compress, all checked."""
    known = {
        key: match["table"]
        for key, size in sizes.items()
        if (match := _WEIGHT.search(key)) and len(size) == 2 and not _is_state(key)
    }
    names = sorted(set(known.values()))
    for name, config in tables.items():
        keys = [key for key, table in known.items() if table == name]
        if not keys:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
            nearest = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"tables must be of the checkpoint's {names}, got {name!r}{nearest}")
        for key in keys:
            try:
                config.shape(*sizes[key])
            except ValueError as error:
                size = " x ".join(map(str, sizes[key]))
                raise ValueError(f"table {name!r}, {size} as {key!r}: {error}") from None
    return {key: name for key, name in known.items() if name in tables}


def _is_state(key: str) -> bool:
    return key.startswith(("optimizer", "optim.")) or ".state." in key


def _belongs_to(key: str, weights: Mapping[str, str]) -> bool:
    """Whether a key is a compressed weight, or an optimizer's state of one."""
    inner = [re.search(r"(?:embedding_bags|embeddings)\..*$", weight) for weight in weights]
    return any(match is not None and match[0] in key for match in inner)


def _walk(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(content, Mapping):
        yield prefix.removesuffix("."), content
        return
    for key, value in content.items():
        yield from _walk(value, f"{prefix}{key}.")


@contextmanager
def _mapped(size: tuple[int, ...], dtype: torch.dtype, *, beside: Path) -> Iterator[Tensor]:
    """An empty tensor in a file that is gone afterwards: a table may be larger than memory."""
    numel = int(torch.Size(size).numel())
    with tempfile.NamedTemporaryFile(dir=beside.parent, suffix=".rows") as file:
        yield torch.from_file(file.name, shared=True, size=numel, dtype=dtype).view(size)


@contextmanager
def _written_whole(target: Path) -> Iterator[Path]:
    """A path to write to, which becomes `target` at the end, and is gone after an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        yield partial / target.name
        (partial / target.name).rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
