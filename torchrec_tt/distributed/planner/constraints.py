"""What the planner may be told of the devices and the tables."""

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import CacheParams, ShardingType

from torchrec_tt.tt.traffic import Traffic


def check_topology(topology: object) -> None:
    """Raises ValueError for what is no Topology."""
    if not isinstance(topology, Topology):
        raise ValueError(f"topology must be a Topology, got {topology!r}")


def check_traffic(traffic: object) -> None:
    """Raises ValueError for what is no mapping from tables to Traffic."""
    _check_mapping("traffic", traffic, Traffic)


def check_constraints(constraints: object, *, device: str) -> None:
    """Raises ValueError for constraints that no table on the device can have.

    TorchRec fails on some of them far from here, and plans with others.
    """
    for name, given in _check_mapping("constraints", constraints, ParameterConstraints).items():
        for field, (rule, holds) in _RULES.items():
            value = getattr(given, field)
            if not holds(value):
                raise ValueError(f"{field} must be {rule}, got {value!r} for table {name!r}")
        for field in ("num_poolings", "batch_sizes"):
            value = getattr(given, field)
            if value and len(value) != len(given.pooling_factors):
                raise ValueError(
                    f"{field} must have one entry for each of pooling_factors="
                    f"{given.pooling_factors}, got {value} for table {name!r}"
                )
        if given.device_group not in (None, device):
            raise ValueError(
                f"device_group must be None or {device!r}, the topology's compute_device, "
                f"got {given.device_group!r} for table {name!r}"
            )


def _check_mapping(argument: str, value: object, kind: type) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{argument} must be a dict of {kind.__name__} by table, got {value!r}")
    for name, given in value.items():
        if not isinstance(name, str):
            raise ValueError(f"{argument} must have names of tables as keys, got {name!r}")
        if not isinstance(given, kind):
            raise ValueError(
                f"{argument} must have a {kind.__name__} for each table, "
                f"got {given!r} for table {name!r}"
            )
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) > 0


def _is_mean(value: object) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and 0 <= value < math.inf  # type: ignore[operator]


def _list_of(holds: Callable[[object], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(holds, value))


def _unset_or(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


_TYPES = tuple(kind.value for kind in ShardingType)
_KERNELS = tuple(kernel.value for kernel in EmbeddingComputeKernel)
_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "pooling_factors": (
        "a list of one or more finite numbers of at least 0",
        lambda value: _list_of(_is_mean)(value) and len(value) > 0,
    ),
    "num_poolings": (
        "None or a list of finite numbers of at least 0",
        _unset_or(_list_of(_is_mean)),
    ),
    "batch_sizes": ("None or a list of positive integers", _unset_or(_list_of(_is_count))),
    "sharding_types": (
        f"None or a list of strings of {list(_TYPES)}",
        _unset_or(_list_of(lambda kind: type(kind) is str and kind in _TYPES)),
    ),
    "compute_kernels": (
        f"None or a list of strings of {list(_KERNELS)}",
        _unset_or(_list_of(lambda kernel: type(kernel) is str and kernel in _KERNELS)),
    ),
    "min_partition": ("None or a positive integer", _unset_or(_is_count)),
    "cache_params": ("None or CacheParams", lambda v: v is None or isinstance(v, CacheParams)),
}
