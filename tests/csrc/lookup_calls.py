"""Calls of the emulated CUDA kernels, on the plans and tensors of the CPU operators."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.csrc.emulation import HERE, ROOT, Emulation, EmulationError, build
from torchrec_tt.ops.lookup import Lookup

CUDA = ROOT / "csrc/cuda"
SHARED_BYTES = 99 << 10  # of a block on sm_120, the least of all
STORAGES = (torch.float32, torch.bfloat16, torch.float16)
POOLINGS = ("sum", "mean", "none")
PRECISIONS = ("fp32", "tf32", "bf16")
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")


class _LookupCall(ctypes.Structure):
    _fields_ = [
        ("tables", ctypes.c_void_p),
        ("num_integers", ctypes.c_int64),
        ("cores", ctypes.c_void_p),
        ("storage", ctypes.c_int64),
        ("plan", ctypes.c_void_p * 6),
        ("num_indices", ctypes.c_int64),
        ("feature_tables", ctypes.c_void_p),
        ("num_features", ctypes.c_int64),
        ("offsets", ctypes.c_void_p),
        ("num_offsets", ctypes.c_int64),
        ("has_long_offsets", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("pooling", ctypes.c_int64),
        ("precision", ctypes.c_int64),
        ("shared_bytes", ctypes.c_int64),
        ("num_multiprocessors", ctypes.c_int64),
    ]


class _CoreStep(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "grad", "moment1", "moment2", "step")),
        ("touched", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_slices", "slice_size", "rounding_seed")),
        ("storage", ctypes.c_int),
        ("is_stochastic", ctypes.c_int),
    ]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the kernels run: the device they think they have, and the choices of a caller."""

    precision: str = "fp32"
    shared_bytes: int = SHARED_BYTES  # 0: every table takes the general kernel
    num_multiprocessors: int = 1
    is_deterministic: bool = False
    rows_at_once: int = 0


def build_kernels() -> Emulation:
    sources = [path for path in sorted(CUDA.glob("*.cu")) if path.stem != "plan"]
    return build("lookup_kernels", [*sources, HERE / "lookup_calls.cpp"])


class Kernels:
    """The kernels of one emulation; every call raises EmulationError for what it found."""

    def __init__(self, emulation: Emulation) -> None:
        self.emulation = emulation
        for name in ("lookup_forward", "lookup_backward", "step_cores"):
            getattr(emulation.calls, name).restype = ctypes.c_char_p

    def _run(self, name: str, *arguments: object) -> None:
        error = getattr(self.emulation.calls, name)(*arguments)
        self.emulation.check()
        if error is not None and error.startswith(b"CUDA: "):  # the launcher took it
            raise EmulationError(self.emulation.with_lines(error.decode()))
        if error is not None:
            raise ValueError(error.decode())

    def forward(
        self,
        plan: Sequence[Tensor],
        cores: Sequence[Tensor],
        *,
        offsets: Tensor,
        lookup: Lookup,
        weights: Tensor | None,
        setting: Setting,
    ) -> Tensor:
        dims = [lookup.tables[t].shape.embedding_dim for t in lookup.feature_tables]
        batch_size = (len(offsets) - 1) // len(dims)
        size = (len(plan[0]), dims[0]) if lookup.pooling == "none" else (batch_size, sum(dims))
        output = torch.full(size, float("nan"))
        call, _alive = _call(plan, cores, offsets, lookup, weights, setting)
        self._run("lookup_forward", ctypes.byref(call), _pointer(output))
        return output

    def backward(
        self,
        grad_output: Tensor,
        plan: Sequence[Tensor],
        cores: Sequence[Tensor],
        *,
        offsets: Tensor,
        lookup: Lookup,
        weights: Tensor | None,
        setting: Setting,
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Returns the gradients of the cores and of the weights, and which slices were touched."""
        grads = [torch.full(core.shape, float("nan")) for core in cores]
        grad_weights = torch.full((len(plan[0]),), float("nan"))
        touched = torch.full((sum(len(core) for core in cores),), -1, dtype=torch.int32)
        call, _alive = _call(plan, cores, offsets, lookup, weights, setting)
        self._run(
            "lookup_backward",
            ctypes.byref(call),
            _pointer(grad_output),
            _pointers(grads),
            _pointer(grad_weights),
            _pointer(touched),
            ctypes.c_int64(setting.is_deterministic),
            ctypes.c_int64(setting.rows_at_once),
        )
        for grad, is_touched in zip(
            grads, touched.split([len(core) for core in cores]), strict=True
        ):
            grad[is_touched == 0] = 0  # may hold anything
        return grads, grad_weights, touched

    def step(
        self,
        cores: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],  # per core its moments and step
        *,
        optimizer: str,
        settings: Sequence[float],  # learning_rate, eps, beta1, beta2, weight_decay
        decoupled_weight_decay: bool,
        rounding_seeds: Sequence[int],
        touched: Sequence[Tensor] | None = None,
    ) -> None:
        steps = (_CoreStep * len(cores))()
        for i, core in enumerate(cores):
            moments = [s for s in states[i] if s.dtype == torch.float32]
            counter = [s for s in states[i] if s.dtype == torch.int64]
            pointers = [_pointer(m) for m in moments] + [None] * (2 - len(moments))
            steps[i] = _CoreStep(
                _pointer(core),
                _pointer(grads[i]),
                *pointers,
                _pointer(counter[0]) if counter else None,
                _pointer(touched[i]) if touched else None,
                *core.shape,
                rounding_seeds[i] if rounding_seeds else 0,
                STORAGES.index(core.dtype),
                bool(rounding_seeds),
            )
        self._run(
            "step_cores",
            steps,
            ctypes.c_int64(len(cores)),
            ctypes.c_int64(OPTIMIZERS.index(optimizer)),
            (ctypes.c_double * 5)(*settings),
            ctypes.c_int64(decoupled_weight_decay),
        )


def _call(
    plan: Sequence[Tensor],
    cores: Sequence[Tensor],
    offsets: Tensor,
    lookup: Lookup,
    weights: Tensor | None,
    setting: Setting,
) -> tuple[_LookupCall, object]:
    tables = (ctypes.c_int64 * len(lookup.encoded_tables))(*lookup.encoded_tables)
    features = (ctypes.c_int64 * len(lookup.feature_tables))(*lookup.feature_tables)
    core_pointers = _pointers(cores)
    call = _LookupCall(
        ctypes.cast(tables, ctypes.c_void_p),
        len(lookup.encoded_tables),
        ctypes.cast(core_pointers, ctypes.c_void_p),
        STORAGES.index(cores[0].dtype),
        (ctypes.c_void_p * 6)(*(t.data_ptr() for t in plan)),
        len(plan[0]),
        ctypes.cast(features, ctypes.c_void_p),
        len(lookup.feature_tables),
        _pointer(offsets),
        len(offsets),
        offsets.dtype == torch.int64,
        None if weights is None else _pointer(weights),
        POOLINGS.index(lookup.pooling),
        PRECISIONS.index(setting.precision),
        setting.shared_bytes,
        setting.num_multiprocessors,
    )
    return call, (tables, features, core_pointers)


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))


__all__ = ["EmulationError", "Kernels", "Setting", "build_kernels"]
