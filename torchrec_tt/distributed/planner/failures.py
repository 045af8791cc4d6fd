"""Says of a model that does not fit which table is too large, and what would fit."""

import copy
import dataclasses
import warnings
from collections.abc import Callable, Sequence

from torchrec.distributed.planner.types import ShardingOption, Topology
from torchrec.distributed.types import CacheParams

from torchrec_tt.distributed.planner.lookups import tt_shape_of
from torchrec_tt.distributed.planner.row_cache import row_cache_of
from torchrec_tt.distributed.planner.shard_estimators import TTStorage
from torchrec_tt.tt.cost import core_bytes
from torchrec_tt.tt.factorize import make_shape
from torchrec_tt.tt.shape import TTShape

_RANKS = (256, 128, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
_LOAD_FACTORS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001, 0.0001)

TableBytes = Callable[[ShardingOption], TTStorage]


def explain_failure(
    options: Sequence[ShardingOption], topology: Topology, *, table_bytes: TableBytes
) -> str:
    """Returns in one line which table does not fit a rank of `topology`, or that all do not.

    Args:
        options: every option of every table, with storage.
        topology: the devices, less what is reserved.
        table_bytes: of a TT option, on a rank.
    """
    memory, cap = _memory_and_cap(topology)
    smallest = _smallest(options, memory)
    too_large = sorted((entry for entry in smallest.values() if entry[0] > cap), key=_need)[::-1]
    if too_large:
        need, option = too_large[0]
        others = f" (and {len(too_large) - 1} more do not fit)" if len(too_large) > 1 else ""
        return (
            f"table {option.name!r} needs at least {need:,} bytes of {memory} on a rank "
            f"({option.sharding_type}), a rank has {cap:,}{others}; "
            f"{what_fits(option, need=need, cap=cap, table_bytes=table_bytes)}"
        )
    num_ranks = len(topology.devices)
    total = sum(need * len(option.shards) for need, option in smallest.values())
    need, option = max(smallest.values(), key=lambda entry: entry[0] * len(entry[1].shards))
    room = max(0, cap * num_ranks - (total - need * len(option.shards))) // len(option.shards)
    return (
        f"all tables need at least {total:,} bytes of {memory}, {num_ranks} ranks "
        f"have {cap:,} each; the largest table is {option.name!r} with {need:,} on a rank "
        f"({option.sharding_type}); "
        f"{what_fits(option, need=need, cap=min(room, cap), table_bytes=table_bytes)}"
    )


def surely_lacks_storage(options: Sequence[ShardingOption], topology: Topology) -> bool:
    """Returns whether no plan can fit: a table is too large for a rank, or all for all ranks."""
    memory, cap = _memory_and_cap(topology)
    needs = list(_smallest(options, memory).values())
    total = sum(need * len(option.shards) for need, option in needs)
    return any(need > cap for need, _ in needs) or total > cap * len(topology.devices)


def what_fits(option: ShardingOption, *, need: int, cap: int, table_bytes: TableBytes) -> str:
    """Returns the largest row cache, else the highest TT rank, that fits `cap` bytes, in words.

    For a rank, all that a table has beside cores and cache is taken to be as large as it is for the
    option; a regular table's as for SGD.

    Args:
        option: of the table.
        need: its bytes on a rank.
        cap: those there are.
        table_bytes: of a TT option, on a rank.
    """
    num_embeddings, embedding_dim = option.tensor.shape
    shape, beside, without = tt_shape_of(option), 0, ""
    num_cores = 3 if shape is None else shape.num_cores
    if shape is not None:
        table = table_bytes(option)
        found = _cache_that_fits(option, cap - (need - table.total), table_bytes)
        if found is not None:
            load_factor, fitting = found
            return (
                f"its row cache takes {table.cache:,} of them; with a cache of load_factor "
                f"{load_factor:g} it would need {need - table.total + fitting:,} bytes"
            )
        beside = need - table.cache - core_bytes(shape)
        without = " without a row cache" if table.cache else ""
    for rank in _RANKS:
        if shape is not None and rank >= max(shape.tt_ranks):
            continue
        candidate = _shape(num_embeddings, embedding_dim, [rank] * (num_cores - 1))
        if candidate is None:
            continue
        fitting = core_bytes(candidate) + beside
        if fitting <= cap:
            return f"as a TT table of rank {rank}{without} it would need {fitting:,} bytes"
    return "no TT rank fits; take a smaller batch or more ranks"


def _memory_and_cap(topology: Topology) -> tuple[str, int]:
    """The name of the devices' memory, and the least bytes of it that one has left."""
    memory = "ddr" if topology.compute_device == "cpu" else "hbm"
    # Reserved may be more than there is.
    return memory, max(0, min(getattr(device.storage, memory) for device in topology.devices))


def _smallest(
    options: Sequence[ShardingOption], memory: str
) -> dict[str, tuple[int, ShardingOption]]:
    """By table, its option that takes the least of a rank, and those bytes."""
    smallest: dict[str, tuple[int, ShardingOption]] = {}
    for option in options:
        # A table on another memory, as CUDA's UVM kernels have it, fits the device's.
        need = max(getattr(shard.storage, memory) for shard in option.shards)
        if option.fqn not in smallest or need < smallest[option.fqn][0]:
            smallest[option.fqn] = (need, option)
    return smallest


def _need(entry: tuple[int, ShardingOption]) -> int:
    return entry[0]


def _cache_that_fits(
    option: ShardingOption, room: int, table_bytes: TableBytes
) -> tuple[float, int] | None:
    """The highest load factor below the option's for which the table fits, and its bytes then."""
    cache = row_cache_of(option)
    if cache is None:
        return None
    rows = option.shards[0].size[0]
    for load_factor in _LOAD_FACTORS:
        smaller = copy.copy(option)
        smaller.cache_params = dataclasses.replace(
            option.cache_params or CacheParams(), load_factor=load_factor
        )
        total = table_bytes(smaller).total
        if load_factor * rows < cache.num_slots(rows) and total <= room:
            return load_factor, total
    return None


def _shape(num_embeddings: int, embedding_dim: int, tt_ranks: list[int]) -> TTShape | None:
    """A balanced shape; None where the table cannot have one that is smaller than its rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return make_shape(num_embeddings, embedding_dim, tt_ranks=tt_ranks)
        except (ValueError, UserWarning):
            return None
