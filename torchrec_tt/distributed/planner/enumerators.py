"""The sharding options of a model with Tensor-Train tables."""

import difflib
from collections.abc import Iterable
from typing import Any

from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    ShardEstimator,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig

from torchrec_tt.distributed.planner.constraints import check_constraints, check_topology
from torchrec_tt.distributed.planner.shard_estimators import TTPerfEstimator, TTStorageEstimator
from torchrec_tt.distributed.row_cache import row_cache_config
from torchrec_tt.distributed.sharding_plan import (
    ROW_SPLITTING_TYPES,
    TT_COMPUTE_KERNEL,
    check_sharding_type,
    sharding_types_of,
    tt_collection,
)
from torchrec_tt.modules.embedding_configs import TTTableConfig


def check_table_names(argument: str, names: Iterable[str], options: list[ShardingOption]) -> None:
    """Raises ValueError for a name that is none of the options' tables."""
    known = {option.name for option in options}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"{argument} must name tables that are sharded, got {name!r}{hint}")


class TTEmbeddingEnumerator(EmbeddingEnumerator):
    """EmbeddingEnumerator that gives every table the options it really has.

    TT tables get the TT kernel with the TT sharding types, whatever the sharder lists for the
    regular tables of the collection; regular tables never get the TT kernel. Only where a
    constraint asks for them do regular tables get, on the CPU, the types that split rows (pooled
    tables; TorchRec does not offer them) or data-parallel (sequence tables; FBGEMM cannot look
    them up).

    Args:
        topology: the devices.
        batch_size: samples per rank and step.
        constraints: by table.
        estimator: of time and storage; None is a TTPerfEstimator and a TTStorageEstimator.
        kwargs: further arguments of EmbeddingEnumerator.

    Raises:
        ValueError: for constraints that no table can have, or an estimator of TorchRec, none of
            which knows TT tables.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        **kwargs: Any,
    ) -> None:
        check_topology(topology)
        check_constraints(constraints, device=topology.compute_device)
        if estimator is None:
            perf = TTPerfEstimator(topology, constraints)
            estimator = [perf, TTStorageEstimator(topology, constraints)]
        for one in estimator if isinstance(estimator, list) else [estimator]:
            if type(one).__module__.startswith("torchrec."):
                raise ValueError(
                    "estimator must know Tensor-Train tables, as TTPerfEstimator(stock=...) and "
                    f"TTStorageEstimator(stock=...) make one do, got {type(one).__name__}"
                )
        super().__init__(topology, batch_size, constraints, estimator, **kwargs)

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[ShardingOption]:
        """Returns the options of all tables, with estimates.

        Raises:
            ValueError: if a constraint asks of a table what it cannot have, or names a table that
                no sharder shards.
        """
        collections = [c for m in module.modules() if (c := tt_collection(m)) is not None]
        for table in (table for c in collections for table in c.table_configs()):
            self._check_constraints(table)
        try:
            options = super().enumerate(module, sharders)
        except RuntimeError as error:
            if not str(error).startswith("No available sharding type and compute kernel"):
                raise
            raise ValueError(self._nothing_left()) from error
        check_table_names("constraints", self._constraints or {}, options)
        return options

    def _check_constraints(self, table: BaseEmbeddingConfig) -> None:
        constraints, name = (self._constraints or {}).get(table.name), table.name
        if constraints is None:
            return
        given, features = constraints.pooling_factors, table.feature_names
        if len(given) not in (1, len(features)):
            raise ValueError(
                f"pooling_factors must have one entry, or one for each of the features {features}, "
                f"got {given} for table {name!r}"
            )
        cache_params, kernels = constraints.cache_params, constraints.compute_kernels or []
        if not isinstance(table, TTTableConfig):
            load_factor = cache_params.load_factor if cache_params is not None else None
            if load_factor is not None and not 0 < load_factor <= 1:
                raise ValueError(
                    "cache_params.load_factor must be in (0, 1], got "
                    f"{load_factor} for table {name!r}"
                )
            if kernels and not set(kernels) - {TT_COMPUTE_KERNEL}:
                raise ValueError(
                    f"compute_kernels must have another than {TT_COMPUTE_KERNEL!r}, the one of "
                    f"Tensor-Train tables, got {kernels} for the regular table {name!r}"
                )
            return
        row_cache_config(table, cache_params)
        for sharding_type in constraints.sharding_types or []:
            check_sharding_type(table, sharding_type, cache_params=cache_params)
        if kernels and TT_COMPUTE_KERNEL not in kernels:
            raise ValueError(
                f"compute_kernels must have {TT_COMPUTE_KERNEL!r} or be unset for a "
                f"Tensor-Train table, got {kernels} for table {name!r}"
            )

    def _nothing_left(self) -> str:
        constraints = (self._constraints or {})[self._name]
        return (
            "sharding_types and compute_kernels must leave one of the (sharding type, kernel) "
            f"{self._offered} of {self._compute_device!r}, got {constraints.sharding_types} and "
            f"{constraints.compute_kernels} for table {self._name!r}"
        )

    def _get_num_buckets(self, parameter: str, module: nn.Module) -> int | None:
        """Notes whose options come next: the filters below are told the table's name alone.

        Tables of different collections may have the same name.
        """
        collection = tt_collection(module)
        configs = collection.table_configs() if collection is not None else []
        self._name, self._offered = parameter, list[tuple[str, str]]()
        self._config = next((c for c in configs if c.name == parameter), None)  # None: stock module
        return super()._get_num_buckets(parameter, module)

    def _filter_sharding_types(
        self, name: str, allowed_sharding_types: list[str], *args: Any, **kwargs: Any
    ) -> list[str]:
        constraints = (self._constraints or {}).get(name)
        asked = (constraints and constraints.sharding_types) or []
        if isinstance(self._config, TTTableConfig):
            allowed = sharding_types_of(
                self._config, cache_params=constraints and constraints.cache_params
            )
            types = [t for t in allowed if not asked or t in asked]
            if not asked and self._local_world_size in (1, self._world_size):
                # On one node the same as row-wise, on nodes of one rank as table-wise.
                types = [t for t in types if t != ShardingType.TABLE_ROW_WISE.value]
        else:
            types = super()._filter_sharding_types(name, allowed_sharding_types, *args, **kwargs)
            if not types:
                raise ValueError(
                    f"sharding_types must have one of {allowed_sharding_types}, which "
                    f"{self._compute_device!r} has, got {asked} for table {name!r}"
                )
        if asked or self._config is None:
            return types
        if isinstance(self._config, TTTableConfig) or self._compute_device != "cpu":
            return types
        is_pooled = isinstance(self._config, EmbeddingBagConfig)
        left_out = ROW_SPLITTING_TYPES if is_pooled else (ShardingType.DATA_PARALLEL.value,)
        return [t for t in types if t not in left_out]

    def _filter_compute_kernels(
        self, name: str, allowed_compute_kernels: list[str], sharding_type: str
    ) -> list[str]:
        if isinstance(self._config, TTTableConfig):
            return [TT_COMPUTE_KERNEL]
        self._offered += [(sharding_type, kernel) for kernel in allowed_compute_kernels]
        return super()._filter_compute_kernels(name, allowed_compute_kernels, sharding_type)
