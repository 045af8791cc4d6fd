import pytest
import torch
from torch.nn.functional import embedding

from torchrec_tt import TTEmbedding


def make(**arguments: object) -> TTEmbedding:
    torch.manual_seed(0)
    result = TTEmbedding(
        110, 8, tt_ranks=[3, 4], row_factors=[4, 5, 6], col_factors=[2, 2, 2], **arguments
    )
    with torch.no_grad():
        for core in result.tt_cores:
            core.normal_()
    return result


@pytest.mark.parametrize("shape", [(7,), (2, 3), (0,), (2, 0, 3), ()])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_output_and_gradients_are_those_of_the_dense_table(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    module = make()
    ids = torch.randint(0, 110, shape, dtype=dtype)
    rows, expected = module(ids), embedding(ids, module.to_dense())
    assert rows.shape == (*shape, 8)
    torch.testing.assert_close(rows, expected)
    cotangent = torch.randn(rows.shape)
    cores = list(module.tt_cores)
    for gradient, dense in zip(
        torch.autograd.grad(rows, cores, cotangent),
        torch.autograd.grad(expected, cores, cotangent),
        strict=True,
    ):
        torch.testing.assert_close(gradient, dense)


def test_rows_come_in_the_order_of_the_ids_however_often_these_repeat() -> None:
    module = make()
    ids = torch.tensor([109, 3, 109, 0, 3, 3])
    torch.testing.assert_close(module(ids), module.to_dense()[ids])


def test_an_id_past_the_table_raises_though_the_cores_hold_it() -> None:
    with pytest.raises(ValueError, match="110"):
        make()(torch.tensor([0, 110]))


def test_check_mode_ignore_reads_row_0() -> None:
    module = make(check_mode="ignore")
    torch.testing.assert_close(module(torch.tensor([110])), module.to_dense()[:1])


def test_an_input_that_is_no_tensor_raises() -> None:
    with pytest.raises(ValueError, match="input must be a tensor, got list"):
        make()([1, 2])
