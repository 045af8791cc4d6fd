"""How fast a machine is, in the planner's terms: known devices, and YAML files of measured ones."""

import copy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import (
    DDR_MEM_BW,
    DP_ELEMENTWISE_KERNELS_PERF_FACTOR,
    HBM_MEM_BW,
)
from torchrec.distributed.planner.estimator.config import EmbeddingPerfEstimatorConfig
from torchrec.distributed.planner.estimator.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.types import (
    BasicCommsBandwidths,
    CollectiveType,
    GeneralizedCommsBandwidth,
    ParameterConstraints,
    ShardEstimator,
    Topology,
)

from torchrec_tt.schema import read_yaml

DENSE_UPDATE_PASSES = 4  # over a parameter with a dense gradient: cleared, read, parameter stepped
_MAX_SPEED = 1e15  # in units per ms: 10^5 of today's GPUs; more is a wrong unit
_MAX_FIXED_MS = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """The coefficients that turn bytes and flops into milliseconds.

    Attributes:
        name: of the machine.
        device: "cpu" or "cuda".
        is_estimate: whether they follow from specifications; else they were measured.
        memory_bytes: of a device.
        flops_per_ms: of a TT lookup's small float32 products.
        core_bytes_per_ms: cores and their gradients, inside the products.
        pool_bytes_per_ms: ids sorted, TT rows pooled, their gradients summed.
        row_bytes_per_ms: rows of regular tables gathered and stepped, as TorchRec counts them.
        sweep_bytes_per_ms: parameters with dense gradients, passed over from end to end.
        all_to_all_bytes_per_ms: of a rank's buffer, within a node.
        reduce_scatter_bytes_per_ms: of a rank's whole input, within a node.
        all_gather_bytes_per_ms: of a rank's whole output, within a node.
        all_reduce_bytes_per_ms: what a link carries of a ring all-reduce, within a node.
        inter_node_bytes_per_ms: of a rank, any collective.
        table_ms: of a step, for each TT table, whatever the batch.
        step_ms: of a step, whatever the tables.
        sharding_ms: by sharding type, of a step, for having any table of that type (column-wise
            types cost as table-wise, grid as table-row-wise).

    Raises:
        ValueError: for a speed or memory outside [1, 10^15], or a fixed cost outside [0, 10^6] ms.
    """

    name: str
    device: Literal["cpu", "cuda"]
    is_estimate: bool
    memory_bytes: int
    flops_per_ms: float
    core_bytes_per_ms: float
    pool_bytes_per_ms: float
    row_bytes_per_ms: float
    sweep_bytes_per_ms: float
    all_to_all_bytes_per_ms: float
    reduce_scatter_bytes_per_ms: float
    all_gather_bytes_per_ms: float
    all_reduce_bytes_per_ms: float
    inter_node_bytes_per_ms: float
    table_ms: float = 0.0
    step_ms: float = 0.0
    sharding_ms: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            is_speed = entry.name.endswith(("_bytes", "_per_ms"))
            if is_speed and not 1 <= value <= _MAX_SPEED:
                raise ValueError(f"{entry.name} must be positive, in [1, 10^15], got {value}")
        for name, value in {
            "table_ms": self.table_ms,
            "step_ms": self.step_ms,
            **{f"sharding_ms.{kind}": ms for kind, ms in self.sharding_ms.items()},
        }.items():
            if not 0 <= value <= _MAX_FIXED_MS:
                raise ValueError(f"{name} must not be negative, in [0, 10^6], got {value}")


def _gpu(name: str, *, gib: int, tflops: float, hbm: float, nvlink: float, nic: float) -> Hardware:
    """A GPU by its specifications: float32 TFLOP/s, and GB/s of memory, NVLink (one way) and NIC.

    Small products are taken to reach a fifth of the peak, streams 0.8, scattered rows 0.5 of the
    memory's bandwidth, collectives 0.7 of a link's.
    """
    link = 0.7 * nvlink * 1e6
    return Hardware(
        name=name,
        device="cuda",
        is_estimate=True,
        memory_bytes=gib * 2**30,
        flops_per_ms=0.2 * tflops * 1e9,
        core_bytes_per_ms=0.8 * hbm * 1e6,
        pool_bytes_per_ms=0.5 * hbm * 1e6,
        row_bytes_per_ms=0.5 * hbm * 1e6,
        sweep_bytes_per_ms=0.8 * hbm * 1e6,
        all_to_all_bytes_per_ms=link,
        reduce_scatter_bytes_per_ms=link,
        all_gather_bytes_per_ms=link,
        all_reduce_bytes_per_ms=link,
        inter_node_bytes_per_ms=0.7 * nic * 1e6,
        table_ms=0.02,
        step_ms=1.0,
        sharding_ms={
            "table_wise": 0.5,
            "row_wise": 0.6,
            "table_row_wise": 0.8,
            "data_parallel": 0.2,
        },
    )


KNOWN = {
    # By `calibrate`: 2 ranks of one thread over gloo, on 2 shared x86_64 cores with AVX2.
    "cpu": Hardware(
        name="cpu",
        device="cpu",
        is_estimate=False,
        memory_bytes=128 * 2**30,
        flops_per_ms=9e7,
        core_bytes_per_ms=2e7,
        pool_bytes_per_ms=2.7e6,
        row_bytes_per_ms=8.5e6,
        sweep_bytes_per_ms=3.6e6,
        all_to_all_bytes_per_ms=2e6,
        reduce_scatter_bytes_per_ms=5e5,
        all_gather_bytes_per_ms=9e5,
        all_reduce_bytes_per_ms=1e6,
        inter_node_bytes_per_ms=5e5,
        table_ms=0.4,
        step_ms=5.0,
        sharding_ms={
            "table_wise": 4.0,
            "row_wise": 3.5,
            "table_row_wise": 7.5,
            "data_parallel": 1.0,
        },
    ),
    "a100": _gpu("a100", gib=80, tflops=19.5, hbm=2039, nvlink=300, nic=25),
    "h100": _gpu("h100", gib=80, tflops=67, hbm=3350, nvlink=450, nic=50),
    "h200": _gpu("h200", gib=141, tflops=67, hbm=4800, nvlink=450, nic=50),
    "b200": _gpu("b200", gib=180, tflops=75, hbm=7700, nvlink=900, nic=50),
}
DEFAULT = {"cpu": "cpu", "cuda": "h100", "mtia": "h100"}


def find_hardware(hardware: "Hardware | str | Path | None", *, device: str) -> Hardware:
    """Returns a known device by name, or what a YAML file says; None is the device's default.

    Raises:
        ValueError: for an unknown name, a file that breaks the schema, or another device.
        OSError: for a file that cannot be read.
    """
    if hardware is None:
        return KNOWN[DEFAULT[device]]
    if isinstance(hardware, str) and hardware in KNOWN:
        hardware = KNOWN[hardware]
    elif not isinstance(hardware, Hardware):
        if not str(hardware).endswith((".yaml", ".yml")):
            raise ValueError(
                f"hardware must be one of {sorted(KNOWN)}, a Hardware or a .yaml file, "
                f"got {str(hardware)!r}"
            )
        hardware = read_yaml(hardware, Hardware)
    if hardware.device != device:
        raise ValueError(
            f"hardware must be of the topology's compute device {device!r}, "
            f"got {hardware.name!r} of {hardware.device!r}"
        )
    return hardware


class HardwareBandwidths(GeneralizedCommsBandwidth):
    """The bandwidths of a Hardware's collectives, as TorchRec asks for them."""

    def __init__(self, hardware: Hardware) -> None:
        self._inter = hardware.inter_node_bytes_per_ms
        self._intra = {
            CollectiveType.ALL_TO_ALL: hardware.all_to_all_bytes_per_ms,
            CollectiveType.REDUCE_SCATTER: hardware.reduce_scatter_bytes_per_ms,
            CollectiveType.ALL_GATHER: hardware.all_gather_bytes_per_ms,
            CollectiveType.ALL_REDUCE: hardware.all_reduce_bytes_per_ms,
        }

    @property
    def inter_host_bw(self) -> float:
        return self._inter

    @property
    def intra_host_bw(self) -> float:
        return self._intra[CollectiveType.ALL_TO_ALL]

    def get_bw(
        self, local_world_size: int, world_size: int, collective_type: CollectiveType
    ) -> float:
        """Bytes per ms; an all-reduce over nodes uses every rank's link to the others."""
        intra = self._intra[collective_type]
        if world_size <= local_world_size:
            return intra
        if collective_type == CollectiveType.ALL_REDUCE:
            return min(intra, self._inter * local_world_size)
        return min(intra, self._inter)


def with_speeds(topology: Topology, hardware: Hardware) -> Topology:
    """Returns the topology with the hardware's speeds where it has TorchRec's default ones.

    TorchRec's defaults for the network and the memory are those of one GPU, whatever the device. A
    speed that the topology's maker set stays.
    """
    result = copy.copy(topology)  # a Topology has no setters, and its capacities may be per device
    comms = topology.comms_bandwidths
    if isinstance(comms, BasicCommsBandwidths) and comms == BasicCommsBandwidths():
        result._comms_bandwidths = HardwareBandwidths(hardware)
    if hardware.device == "cpu" and topology.ddr_mem_bw == DDR_MEM_BW:
        result._ddr_mem_bw = hardware.row_bytes_per_ms
    if hardware.device != "cpu" and topology.hbm_mem_bw == HBM_MEM_BW:
        result._hbm_mem_bw = hardware.row_bytes_per_ms
    return result


def stock_perf_estimator(
    topology: Topology, constraints: dict[str, ParameterConstraints] | None, hardware: Hardware
) -> ShardEstimator:
    """Returns TorchRec's estimator at the hardware's speeds.

    TorchRec counts `DP_ELEMENTWISE_KERNELS_PERF_FACTOR` bytes for each byte of a data-parallel
    table, at the speed of the dense kernel; on a CPU that is made to take as long as
    `DENSE_UPDATE_PASSES` over the table.
    """
    config = EmbeddingPerfEstimatorConfig()
    if hardware.device == "cpu":
        passes = DP_ELEMENTWISE_KERNELS_PERF_FACTOR / DENSE_UPDATE_PASSES
        config.kernel_device_bandwidths = {
            ("cpu", EmbeddingComputeKernel.DENSE.value): hardware.sweep_bytes_per_ms * passes
        }
    return EmbeddingPerfEstimatorFactory.create_with_config(
        config, topology=with_speeds(topology, hardware), constraints=constraints
    )
