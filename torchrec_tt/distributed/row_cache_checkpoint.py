"""Row caches from a checkpoint, moved to the blocks of rows that a model's plan has."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchrec_tt.distributed.embedding_kernel import sum_over
from torchrec_tt.distributed.fused_optimizer import whole_size
from torchrec_tt.distributed.sharded_collection import ShardedTTCollection
from torchrec_tt.modules.embedding_bag import TTEmbeddingBag
from torchrec_tt.modules.row_cache import RowCache
from torchrec_tt.modules.row_folding import Reduce, fold_rows
from torchrec_tt.modules.saved_rows import SavedRows, fold_of, saved_rows, take_over
from torchrec_tt.ops.lookup import TTTable


@dataclass(frozen=True, kw_only=True, slots=True)
class TableOnRank:
    """A TT table, or a block of one, on this rank.

    Attributes:
        key: what the table's keys in the model's state dict begin with.
        table: the block.
        cores: whole.
        cache: None where it has none.
        gives: whether its rows are folded from here, and not from another replica alone.
    """

    key: str
    table: TTTable
    cores: list[nn.Parameter]
    cache: RowCache | None
    gives: bool = True


class SavedCaches:
    """The row caches that a checkpoint has.

    Args:
        reader: of the checkpoint.
        prefix: of the model's keys in it.
    """

    def __init__(self, reader: StorageReader, *, prefix: str) -> None:
        self._reader, self._prefix = reader, prefix
        self._metadata = {
            key.removeprefix(prefix): metadata
            for key, metadata in reader.read_metadata().state_dict_metadata.items()
            if key.startswith(prefix) and isinstance(metadata, TensorStorageMetadata)
        }

    def sizes(self, table: str) -> dict[str, torch.Size]:
        """Returns the sizes of all that a table's caches had, by key."""
        start = f"{table}row_cache."
        return {key: meta.size for key, meta in self._metadata.items() if key.startswith(start)}

    def read(self, table: str, block: TTTable) -> SavedRows:
        """Returns what the caches of a table, which it must have, knew of the rows of a block."""
        blocks: dict[str, dict[str, Tensor]] = {}
        for key, size in self.sizes(table).items():
            prefix, _, name = key.rpartition(".")
            dtype = self._metadata[key].properties.dtype
            blocks.setdefault(prefix, {})[name] = torch.empty(size, dtype=dtype)
        tensors = {
            f"{self._prefix}{prefix}.{name}": tensor
            for prefix, block_state in blocks.items()
            for name, tensor in block_state.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this process reads for itself, as is meant
            dcp.load(tensors, storage_reader=self._reader, no_dist=True)
        return saved_rows(list(blocks.values())).within(block)


def moving_tables(model_state: Mapping[str, Any], saved: SavedCaches) -> list[str]:
    """Returns the tables whose caches are cut otherwise than they were saved, by key prefix."""
    tables = [key.removesuffix("tt_cores.0") for key in model_state if key.endswith(".tt_cores.0")]
    return [table for table in tables if saved.sizes(table) != _sizes_of(model_state, table)]


def move_row_caches(model: nn.Module, saved: SavedCaches, *, tables: list[str]) -> dict[str, int]:
    """Gives the caches of `tables` the saved rows of their blocks; all ranks must call.

    Rows that find no slot are folded into the cores, the same on all replicas, unless the cache
    drops what it evicts. The cores must have been loaded.

    Returns:
        How many rows of this rank's blocks found no slot, by table.
    """
    left_over = {}
    for reduce, on_rank in _groups(model):
        folds, caches = [], []
        for each in on_rank:
            if each.key not in tables:
                continue
            if not saved.sizes(each.key):
                assert each.cache is not None
                each.cache.clear()
                continue
            left, policy = _take(each, saved)
            left_over[each.key.removesuffix(".")] = len(left.ids)
            if each.cache is None or each.cache.config.on_evict == "fold":
                folds.append(fold_of(left, each.table, each.cores, is_lfu=policy == "lfu"))
                caches.append(each.cache)
        if folds:
            for cache, squares in zip(caches, fold_rows(folds, reduce=reduce), strict=True):
                if cache is not None:
                    cache.fold_squares += squares
    return left_over


def _take(each: TableOnRank, saved: SavedCaches) -> tuple[SavedRows, str]:
    rows = saved.read(each.key, each.table)
    if each.cache is not None:
        is_first = each.table.row_offset == 0
        return take_over(each.cache, rows, is_first=is_first), each.cache.config.policy
    return rows if each.gives else rows.none(), "lfu"


def _groups(model: nn.Module) -> Iterator[tuple[Reduce | None, list[TableOnRank]]]:
    """What is folded together, on all ranks that share it in the same order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def on_rank(table: TTTable, cores: nn.ParameterList, cache: Any, **kwargs: Any) -> TableOnRank:
        key = names[id(cores[0])].removesuffix("tt_cores.0")
        return TableOnRank(key=key, table=table, cores=list(cores), cache=cache, **kwargs)

    for module in model.modules():
        if isinstance(module, TTEmbeddingBag):
            table = TTTable(name="weight", shape=module.shape)
            yield None, [on_rank(table, module.tt_cores, module.row_cache)]
        if isinstance(module, ShardedTTCollection):
            for kernel in module._tt_kernels():
                pg = kernel.replicas_without_reduction()
                yield (
                    kernel.reduce_gradients if pg is None else sum_over(pg),
                    [
                        on_rank(
                            table,
                            kernel.cores(table.name),
                            kernel.row_cache(table.name),
                            gives=pg is None or dist.get_rank(pg) == 0,
                        )
                        for table in kernel.emb_module.tables
                    ],
                )


def _sizes_of(model_state: Mapping[str, Any], table: str) -> dict[str, torch.Size]:
    """As `SavedCaches.sizes`, of the caches that the model has, here or on other ranks."""
    start = f"{table}row_cache."
    return {key: whole_size(value) for key, value in model_state.items() if key.startswith(start)}
