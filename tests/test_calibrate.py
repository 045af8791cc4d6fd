import pytest

from torchrec_tt.calibrate import _CASES, _fit, calibrate
from torchrec_tt.tt.cost import step_work
from torchrec_tt.tt.traffic import expected_prefixes


def test_the_fit_finds_the_coefficients_that_made_the_times() -> None:
    flops, core, pool, calls = 5e7, 1e7, 3e6, 8.0  # per ms
    measured = {}
    for i, case in enumerate(_CASES):
        shape, rows = case.shape(), 0.4 * case.bags * case.pooling
        prefixes = expected_prefixes(
            rows,
            num_values=case.num_rows,
            num_prefixes=shape.row_factors[0] * shape.row_factors[1],
        )
        work = step_work(shape, num_rows=rows, num_prefixes=prefixes)
        indices, row = case.bags * case.pooling, 4 * case.dim
        forward = work.forward_flops / flops + work.forward_bytes / core + 1 / calls
        forward += (indices * (row + 48) + case.bags * row) / pool
        backward = work.backward_flops / flops + 2 / calls
        backward += (work.backward_bytes + work.update_bytes) / core
        backward += (indices * row + 2 * rows * row) / pool
        measured[f"tt {i}"] = [forward, backward, rows]
    measured["tt 3"][0] *= 5  # a neighbour disturbed one
    assert _fit(measured) == pytest.approx([flops, core, pool, calls], rel=0.05)


def test_one_rank_has_no_collectives_to_measure() -> None:
    with pytest.raises(ValueError, match=r"ranks must be in \[2, 256\], got 1"):
        calibrate(ranks=1)


@pytest.mark.slow
def test_this_machine_is_measured() -> None:
    hardware = calibrate(name="here")
    assert (hardware.name, hardware.device, hardware.is_estimate) == ("here", "cpu", False)
    assert set(hardware.sharding_ms) == {
        "table_wise",
        "row_wise",
        "data_parallel",
        "table_row_wise",
    }
