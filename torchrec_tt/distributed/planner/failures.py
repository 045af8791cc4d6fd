"""Says of a model that does not fit which table is too large, and what would fit."""

import warnings
from collections.abc import Sequence

from torchrec.distributed.planner.types import ShardingOption, Topology

from torchrec_tt.distributed.planner.lookups import tt_shape_of
from torchrec_tt.tt.cost import core_bytes
from torchrec_tt.tt.factorize import make_shape
from torchrec_tt.tt.shape import TTShape

_RANKS = (256, 128, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)


def explain_failure(options: Sequence[ShardingOption], topology: Topology) -> str:
    """Returns which table does not fit a rank of `topology`, or that all together do not.

    Args:
        options: every option of every table, with storage.
        topology: the devices, less what is reserved.
    """
    memory = "ddr" if topology.compute_device == "cpu" else "hbm"
    cap = min(getattr(device.storage, memory) for device in topology.devices)
    smallest: dict[str, tuple[int, ShardingOption]] = {}
    for option in options:
        # A table on another memory, as CUDA's UVM kernels have it, fits the device's.
        need = max(getattr(shard.storage, memory) for shard in option.shards)
        if option.fqn not in smallest or need < smallest[option.fqn][0]:
            smallest[option.fqn] = (need, option)
    too_large = {fqn: need for fqn, need in smallest.items() if need[0] > cap}
    lines = []
    for need, option in sorted(too_large.values(), key=lambda entry: -entry[0])[:5]:
        lines.append(
            f"table {option.name!r} needs at least {need:,} bytes of {memory} on a rank "
            f"({option.sharding_type}), a rank has {cap:,}; {what_fits(option, cap=cap)}"
        )
    if not lines:
        total = sum(need * len(option.shards) for need, option in smallest.values())
        need, option = max(smallest.values(), key=lambda entry: entry[0] * len(entry[1].shards))
        room = max(0, cap * len(topology.devices) - (total - need * len(option.shards)))
        lines.append(
            f"all tables need at least {total:,} bytes of {memory}, {len(topology.devices)} ranks "
            f"have {cap:,} each; the largest table is {option.name!r} with {need:,} on a rank "
            f"({option.sharding_type}); {what_fits(option, cap=room)}"
        )
    return "\n".join(lines)


def what_fits(option: ShardingOption, *, cap: int) -> str:
    """Returns the highest TT rank whose cores and what comes with them fit `cap` bytes, in words.

    Optimizer state, gradients, inputs and outputs are taken to be as large beside the cores as they
    are for the option; a regular table's as for SGD.
    """
    num_embeddings, embedding_dim = option.tensor.shape
    shape = tt_shape_of(option)
    num_cores = 3 if shape is None else shape.num_cores
    beside = 0
    if shape is not None:
        storage = option.shards[0].storage
        beside = max(storage.hbm, storage.ddr) - core_bytes(shape)
    for rank in _RANKS:
        if shape is not None and rank >= max(shape.tt_ranks):
            continue
        candidate = _shape(num_embeddings, embedding_dim, [rank] * (num_cores - 1))
        if candidate is None:
            continue
        need = core_bytes(candidate) + beside
        if need <= cap:
            return f"as a TT table of rank {rank} it would need {need:,} bytes"
    return "no TT rank fits; take a smaller batch or more ranks"


def _shape(num_embeddings: int, embedding_dim: int, tt_ranks: list[int]) -> TTShape | None:
    """A balanced shape; None where the table cannot have one that is smaller than its rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return make_shape(num_embeddings, embedding_dim, tt_ranks=tt_ranks)
        except (ValueError, UserWarning):
            return None
