"""Checkpoints of uncompressed models made into checkpoints of Tensor-Train ones, without the model.

A checkpoint is a folder of torch.distributed.checkpoint (sharded or not) or a file of torch.save.
`<collection>.<table>.weight` becomes `<collection>.<table>.tt_cores.<k>`; optimizer state of a
compressed table is left out, the new parameters have none; everything else is copied. Where rows
get another order, names are those of a RowOrderedCollection.
"""

import difflib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed.checkpoint as dcp
from rich.table import Table as RichTable
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchrec_tt.compression_config import CompressedTable, OnTable, TTConfig, naming
from torchrec_tt.modules.row_ordered import kept_order
from torchrec_tt.schema import read_yaml
from torchrec_tt.tt.row_order import similarity_order

RowOrder: TypeAlias = Tensor | Literal["similarity"]

_WEIGHT = re.compile(r"(?:^|\.)(?P<kind>embedding_bags|embeddings)\.(?P<table>[^.]+)\.weight$")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionFile:
    """What `torchrec-tt compress --config` reads.

    Attributes:
        tables: how each is compressed, by name; those not named stay as they are.
        row_orders: by table: "similarity", or a file of torch.save that holds the order of its
            rows, int [num_embeddings], as of `torchrec_tt.tt.row_order`.
    """

    tables: dict[str, TTConfig]
    row_orders: dict[str, str] = field(default_factory=dict)

    def orders(self) -> dict[str, RowOrder]:
        """Returns `row_orders`, the files read.

        Raises:
            ValueError: for a file that holds no tensor.
            OSError: for one that cannot be read.
        """
        return {
            name: "similarity" if order == "similarity" else _read_order(order)
            for name, order in self.row_orders.items()
        }


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
    row_orders: Mapping[str, RowOrder] | None = None,
    on_table: OnTable | None = None,
) -> list[CompressedTable]:
    """Writes `target`, the checkpoint `source` with these tables in Tensor-Train form.

    One table's rows are read at a time, into a file that is mapped to memory where `source` is a
    folder. `target` is of the same kind as `source`, and whole or not there.

    Args:
        source: a folder of torch.distributed.checkpoint or a file of torch.save.
        target: which must not exist yet.
        tables: by name.
        row_orders: by table, another order of its rows, int [num_embeddings], or "similarity" for
            `similarity_order`; a copy of the table's rows is taken then. See RowOrderedCollection,
            whose names the checkpoint gets.
        on_table: called with each table as it is done.

    Raises:
        ValueError: for a source that is neither, a target that exists, tables that are not in it,
            factors or ranks that do not fit, or values that are not finite.
        OSError: for what cannot be read or written.
    """
    source, target = Path(source), Path(target)
    if target.exists():
        raise ValueError(f"target must not exist yet, got {str(target)!r}")
    work = _Work(tables=tables, row_orders=row_orders or {}, on_table=on_table)
    if (source / ".metadata").is_file():
        _compress_folder(source, target, work)
    elif source.is_file():
        _compress_file(source, target, work)
    else:
        raise ValueError(
            "source must be a folder of torch.distributed.checkpoint or a file of torch.save, got "
            f"{str(source)!r}"
        )
    return work.done


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
            f"{each.num_bytes + each.order_bytes:,}",
            f"{each.dense_bytes:,}",
            f"{each.dense_bytes / (each.num_bytes + each.order_bytes):.1f}x",
            f"{each.relative_error:.4f}",
        )
    return result


class _Work:
    """What is to be done, and what was done of it."""

    def __init__(
        self,
        *,
        tables: Mapping[str, TTConfig],
        row_orders: Mapping[str, RowOrder],
        on_table: OnTable | None,
    ) -> None:
        self._tables, self._row_orders, self._on_table = tables, row_orders, on_table
        self._ordered: re.Pattern[str] | None = None
        self._compressed: list[str] = []  # keys from `embedding_bags` on
        self.weights: dict[str, str] = {}  # key to table
        self.done: list[CompressedTable] = []

    def find(self, sizes: Mapping[str, tuple[int, ...]]) -> None:
        """Finds the weights among the source's tensors; raises ValueError for what does not fit."""
        known = _known_weights(sizes)
        self.weights = _find_weights(known, sizes, self._tables)
        self._compressed = [key.removeprefix(_collection(key)) for key in self.weights]
        _check_orders(self._row_orders, self.weights, sizes)
        collections = {_collection(key) for key in known if known[key] in self._row_orders}
        names = {re.escape(known[key]) for key in known if _collection(key) in collections}
        if names:
            inside = rf"(^|\.)(embedding_bags|embeddings)\.({'|'.join(sorted(names))})\."
            self._ordered = re.compile(inside)

    def renamed(self, key: str) -> str:
        """The key in the target: in a collection with row orders, tables lie one deeper."""
        return self._ordered.sub(r"\1collection.\2.\3.", key) if self._ordered else key

    def belongs_to_compressed(self, key: str) -> bool:
        """Whether a key is a compressed weight, or an optimizer's state of one."""
        return any(compressed in key for compressed in self._compressed)

    def compress(self, state: dict[str, Any], key: str, name: str, rows: Tensor) -> None:
        """Puts into `state` what becomes of a table under `key`, the last part of its whole key."""
        config, order = self._tables[name], self._row_orders.get(name)
        if isinstance(order, str):
            with naming(name):
                group_size = config.shape(*rows.shape).row_factors[-1]
                order = similarity_order(rows, group_size=group_size)
        if order is not None and not _WEIGHT.search(key):
            raise ValueError(
                f"row_orders[{name!r}] must be of a table whose collection and name are in one key "
                f"of the source, as in a state dict, got {key!r} in a mapping of its own"
            )
        table, cores = config.compress(name, rows, row_order=order)
        start = self.renamed(key).removesuffix("weight")
        state.update({f"{start}tt_cores.{k}": core for k, core in enumerate(cores)})
        if order is not None:
            state[f"{_collection(key)}row_orders.{name}"] = kept_order(order)
        self.done.append(table)
        if self._on_table is not None:
            self._on_table(table)


def _compress_folder(source: Path, target: Path, work: _Work) -> None:
    entries = FileSystemReader(source).read_metadata().state_dict_metadata
    sizes = {
        key: tuple(entry.size)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    work.find(sizes)
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in entries.items()
        if not work.belongs_to_compressed(key)
    }
    with _written_whole(target) as folder:
        dcp.load(state, checkpoint_id=source, no_dist=True)
        state = {work.renamed(key): value for key, value in state.items()}
        for key, name in work.weights.items():
            dtype = entries[key].properties.dtype
            with _mapped(sizes[key], dtype, beside=target) as rows:
                dcp.load({key: rows}, checkpoint_id=source, no_dist=True)
                work.compress(state, key, name, rows)
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def _compress_file(source: Path, target: Path, work: _Work) -> None:
    content = torch.load(source, map_location="cpu", mmap=True, weights_only=True)
    work.find({key: tuple(t.shape) for key, t in _walk(content) if isinstance(t, Tensor)})

    def rebuilt(value: Any, prefix: str) -> Any:
        if not isinstance(value, Mapping):
            return value
        result: dict[Any, Any] = {}
        for key, inner in value.items():
            path = f"{prefix}{key}"
            if path in work.weights:
                work.compress(result, key, work.weights[path], inner)
            elif not work.belongs_to_compressed(path):
                new_key = work.renamed(key) if isinstance(key, str) else key
                result[new_key] = rebuilt(inner, f"{path}.")
        return result

    with _written_whole(target) as path:
        torch.save(rebuilt(content, ""), path)


def _known_weights(sizes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Key to table name of all weights of tables."""
    return {
        key: match["table"]
        for key, size in sizes.items()
        if (match := _WEIGHT.search(key)) and len(size) == 2 and not _is_state(key)
    }


def _collection(key: str) -> str:
    """What stands before `embedding_bags` in a weight's key, with its dot."""
    match = _WEIGHT.search(key)
    return key[: match.start("kind")] if match else ""


def _find_weights(
    known: Mapping[str, str],
    sizes: Mapping[str, tuple[int, ...]],
    tables: Mapping[str, TTConfig],
) -> dict[str, str]:
    """Key to table name of the weights to compress, all checked."""
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


def _check_orders(
    row_orders: Mapping[str, RowOrder],
    weights: Mapping[str, str],
    sizes: Mapping[str, tuple[int, ...]],
) -> None:
    names = sorted(set(weights.values()))
    for name, order in row_orders.items():
        if name not in names:
            raise ValueError(f"row_orders must be of the compressed tables {names}, got {name!r}")
        if isinstance(order, str):
            if order != "similarity":
                raise ValueError(
                    f"row_orders[{name!r}] must be a tensor or 'similarity', got {order!r}"
                )
            continue
        for key in (key for key, table in weights.items() if table == name):
            if order.shape != sizes[key][:1]:
                raise ValueError(
                    f"row_orders[{name!r}] must have shape [{sizes[key][0]}], as {key!r} has "
                    f"rows, got {list(order.shape)}"
                )
        with naming(name):
            kept_order(order)


def _read_order(path: str) -> Tensor:
    order = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(order, Tensor):
        raise ValueError(f"{path} must hold a tensor, got {type(order).__name__}")
    return order


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
