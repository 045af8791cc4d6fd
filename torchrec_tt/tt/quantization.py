"""INT8 cores: slices of 8-bit integers, each with a scale of its own; for lookups only."""

import torch
from torch import Tensor

SCALE_BYTES = 4  # of the float32 behind each slice: kScaleBytes in csrc/cpu/kernels.h
_LARGEST = 127


def quantize_core(core: Tensor) -> Tensor:  # [m_k, S] floating -> [m_k, S + 4] int8
    """Returns `core` in 8 bits: `round(x / scale)` of every element, and the slice's scale.

    A slice is a row of the core, all that one index `i_k` reads. Its scale is the largest magnitude
    in it over 127, a float32 in the row's last four bytes, as FBGEMM keeps quantised rows. There is
    no offset: the values of a slice lie about zero, where one gains less than a tenth of the error.

    Args:
        core: finite.

    Example:
        >>> quantize_core(torch.tensor([[1.0, -0.5, 0.0]]))[:, :3]
        tensor([[127, -64,   0]], dtype=torch.int8)
    """
    wide = core.detach().float()
    scales = wide.abs().amax(dim=1, keepdim=True) / _LARGEST  # [m_k, 1]
    steps = torch.where(scales > 0, scales, 1.0)
    values = (wide / steps).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    return torch.cat([values, scales.view(torch.int8)], dim=1)


def dequantize_core(core: Tensor) -> Tensor:  # [m_k, S + 4] int8 -> [m_k, S] float32
    """Returns what lookups read: the integers times their slice's scale."""
    values, scales = core.split([core.shape[1] - SCALE_BYTES, SCALE_BYTES], dim=1)
    return values.float() * scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
