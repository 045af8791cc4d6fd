"""INT8 slices and their scales."""

import pytest
import torch
from torch.testing import assert_close

from torchrec_tt.tt.cores import rows
from torchrec_tt.tt.factorize import make_shape
from torchrec_tt.tt.init import init_cores_
from torchrec_tt.tt.quantization import dequantize_core, quantize_core


def test_a_slice_worked_by_hand() -> None:
    core = quantize_core(torch.tensor([[1.27, -0.5, 0.004, 0.006]]))
    assert core.dtype == torch.int8
    assert core[0, :4].tolist() == [127, -50, 0, 1]
    assert core[0, 4:].clone().view(torch.float32).tolist() == pytest.approx([0.01])
    assert_close(dequantize_core(core), torch.tensor([[1.27, -0.5, 0.0, 0.01]]))


def test_a_slice_of_zeros_stays_zero() -> None:
    core = torch.tensor([[0.0, 0.0], [2.0, -1.0]])
    assert_close(dequantize_core(quantize_core(core))[0], torch.zeros(2), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_an_element_is_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    core = torch.randn(7, 45).to(dtype)
    step = core.float().abs().amax(dim=1, keepdim=True) / 127
    error = (dequantize_core(quantize_core(core)) - core.float()).abs() / step
    assert error.max() <= 0.5 + 1e-3


def test_rows_are_off_by_a_hundredth_in_int8_and_less_in_bfloat16() -> None:
    """What docs/serving.md says, as root mean squares relative to those of the rows."""
    shape = make_shape(100_000, 64, tt_ranks=[32, 32])
    for method, most in (("sampled_gaussian", 0.008), ("gaussian", 0.014), ("uniform", 0.008)):
        cores = [torch.empty(size) for size in shape.core_shapes]
        init_cores_(cores, shape=shape, method=method, generator=torch.Generator().manual_seed(0))
        ids = torch.arange(0, shape.num_embeddings, 17)
        exact = rows(cores, ids, shape=shape)
        errors = {}
        for name, read in (
            ("int8", [dequantize_core(quantize_core(core)) for core in cores]),
            ("bfloat16", [core.bfloat16().float() for core in cores]),
        ):
            errors[name] = float((rows(read, ids, shape=shape) - exact).norm() / exact.norm())
        assert 0.004 < errors["int8"] < most
        assert 0.002 < errors["bfloat16"] < 0.004
