"""The row caches of a sharded collection in its state dict."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo

from torchrec_tt.distributed.embedding_kernel import TTBatchedDenseEmbeddingBag
from torchrec_tt.distributed.fused_optimizer import (
    core_optimizer_config,
    one_owner_tensor,
    owned_part,
    whole_size,
)
from torchrec_tt.modules.row_cache import RowCache
from torchrec_tt.ops.lookup import TTTable
from torchrec_tt.tt.shape import TTShape


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedBlock:
    """The row cache of a block of a table, on this rank or on another.

    Attributes:
        prefix: of its keys, within the table.
        sizes: its state dict with tensors on "meta", on every rank.
        placement: where it is.
        cache: itself, None on other ranks.
    """

    prefix: str
    sizes: Mapping[str, Tensor]
    placement: Any
    cache: RowCache | None


def block_prefix(row_offset: int, num_rows: int, *, shape: TTShape) -> str:
    """Returns what the keys of a block's cache begin with.

    That of a whole table is the same as unsharded. One of a block says which: under another plan
    its keys are missing, and nobody takes one block's rows for another's.
    """
    is_whole = num_rows == shape.num_embeddings
    return "row_cache." if is_whole else f"row_cache.{row_offset}_{row_offset + num_rows}."


def cached_blocks(
    infos: Iterable[EmbeddingShardingInfo], kernels: Iterable[TTBatchedDenseEmbeddingBag]
) -> dict[str, list[CachedBlock]]:
    """Returns the caches of every table that has some, the same on every rank but for `cache`."""
    caches = {
        table.name: kernel.row_cache(table.name)
        for kernel in kernels
        for table in kernel.config.embedding_tables
    }
    return {
        info.embedding_config.name: list(_blocks(info, caches.get(info.embedding_config.name)))
        for info in infos
        if getattr(info.param, "_row_cache", None) is not None
    }


def _blocks(info: EmbeddingShardingInfo, own: RowCache | None) -> Iterator[CachedBlock]:
    shape = info.param._tt_shape
    optimizer = core_optimizer_config(info.fused_params)
    for shard in info.param_sharding.sharding_spec.shards:
        offset, rows = shard.shard_offsets[0], shard.shard_sizes[0]
        if rows == 0:
            continue
        table = TTTable(
            name=info.embedding_config.name, shape=shape, row_offset=offset, num_rows=rows
        )
        sizes = RowCache(table, info.param._row_cache, optimizer=optimizer, device="meta")
        yield CachedBlock(
            prefix=block_prefix(offset, rows, shape=shape),
            sizes=sizes.state_dict(),
            placement=shard.placement,
            cache=own if shard.placement.rank() == dist.get_rank() else None,
        )


def put_row_caches(
    blocks: Sequence[CachedBlock],
    destination: dict[str, Any],
    *,
    prefix: str,  # of the table
    pg: dist.ProcessGroup | None,
    mesh: DeviceMesh | None,
) -> None:
    """Puts what the caches hold into a state dict, every tensor as one with a single owner."""
    for block in blocks:
        own = {} if block.cache is None else block.cache.state_dict()
        for name, like in block.sizes.items():
            destination[f"{prefix}{block.prefix}{name}"] = one_owner_tensor(
                own.get(name),
                size=like.shape,
                dtype=like.dtype,
                placement=block.placement,
                pg=pg,
                mesh=mesh,
            )


def take_row_caches(
    blocks: Sequence[CachedBlock],
    state_dict: dict[str, Any],
    *,
    prefix: str,  # of the table
    missing_keys: list[str],
) -> None:
    """Loads the caches from a state dict, and takes their keys out of it.

    Raises:
        ValueError: for a tensor of another size, on every rank, or one that is elsewhere.
    """
    for block in blocks:
        found: dict[str, Tensor] = {}
        _check_capacity(state_dict, key=f"{prefix}{block.prefix}ids", ids=block.sizes["ids"])
        for name, like in block.sizes.items():
            key = f"{prefix}{block.prefix}{name}"
            if key not in state_dict:
                missing_keys.append(key)
                continue
            part = owned_part(
                state_dict.pop(key), key=key, size=like.shape, is_owner=block.cache is not None
            )
            if part is not None:
                found[name] = part
        if block.cache is not None and found:
            block.cache.load_state_dict(found, strict=False)


def _check_capacity(state_dict: Mapping[str, Any], *, key: str, ids: Tensor) -> None:
    saved = state_dict.get(key)
    if saved is not None and tuple(whole_size(saved)) != tuple(ids.shape):
        raise ValueError(
            f"{key} must have the capacity of the row cache, {len(ids)} slots, got "
            f"{whole_size(saved)[0]}: torchrec_tt.checkpoint.load moves rows to another capacity"
        )
