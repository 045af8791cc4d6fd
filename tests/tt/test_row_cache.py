import pytest

from torchrec_tt.tt.row_cache import num_slots, row_cache_bytes


def test_bytes_of_1000_rows_written_out():
    found = row_cache_bytes(1000, 64, optimizer="adagrad")
    assert found.rows == 256_000
    assert found.optimizer_state == 256_000
    assert found.tags == 8_000
    assert found.heats == 4_000
    assert found.counter == 24_000
    assert found.total == 548_000 + 88
    assert row_cache_bytes(1000, 64, optimizer="rowwise_adagrad").optimizer_state == 4_000
    adam = row_cache_bytes(1000, 64, optimizer="adam", element_size=2, has_step=True)
    assert (adam.rows, adam.optimizer_state, adam.bookkeeping) == (128_000, 512_000, 96)


def test_tags_and_counter_of_10_million_rows_take_under_15_percent_of_the_rows():
    found = row_cache_bytes(num_slots(10_000), 64, optimizer="sgd")
    assert found.tags + found.heats + found.counter < 0.15 * found.rows


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match="optimizer must be one of"):
        row_cache_bytes(8, 4, optimizer="lamb")
