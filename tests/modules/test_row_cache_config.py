import math

import pytest
import torch

from torchrec_tt import RowCacheConfig
from torchrec_tt.optim import TTOptimizerConfig


@pytest.mark.parametrize(
    ("config", "block_size", "slots"),
    [
        (RowCacheConfig(num_rows=8), 1000, 8),
        (RowCacheConfig(num_rows=9), 1000, 16),
        (RowCacheConfig(num_rows=100), 20, 24),  # the shard has no more rows
        (RowCacheConfig(num_rows=100), 0, 0),
        (RowCacheConfig(load_factor=0.001), 10_131_227, 10_136),  # 10,131.2 rows
        (RowCacheConfig(load_factor=0.5), 10, 8),
        (RowCacheConfig(load_factor=0.5), 0, 0),
    ],
)
def test_slots_are_whole_sets_that_hold_the_rows_asked_for(config, block_size, slots):
    assert config.num_slots(block_size) == slots


def test_intervals_grow_to_their_limit():
    config = RowCacheConfig(
        num_rows=8, first_refresh=50, refresh_growth=2, max_refresh_interval=300
    )
    intervals = [config.first_refresh]
    for _ in range(4):
        intervals.append(config.next_interval(intervals[-1], num_embeddings=1000))
    assert intervals == [50, 100, 200, 300, 300]
    fixed = RowCacheConfig(num_rows=8, first_refresh=700, refresh_growth=1)
    assert fixed.next_interval(700, num_embeddings=1000) == 700


@pytest.mark.parametrize(
    ("config", "num_embeddings", "steps"),
    [
        (RowCacheConfig(num_rows=8), 10**6, 100),
        (RowCacheConfig(num_rows=3000), 10**6, 300),
        (RowCacheConfig(num_rows=3000), 2000, 200),
        (RowCacheConfig(load_factor=0.001), 3_000_000, 300),
        (RowCacheConfig(load_factor=0.01), 10**6, 1000),
        (RowCacheConfig(load_factor=0.01), 10**7, 1000),
        (RowCacheConfig(num_rows=8, first_refresh=200), 10**6, 200),
        (RowCacheConfig(num_rows=8, first_refresh=200, max_refresh_interval=7), 10**6, 7),
    ],
)
def test_the_greatest_interval_follows_the_slots_unless_it_is_given(config, num_embeddings, steps):
    assert config.greatest_interval(num_embeddings) == steps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of num_rows and load_factor must be given, got num_rows=None"),
        ({"num_rows": 8, "load_factor": 0.1}, "exactly one of num_rows and load_factor"),
        ({"num_rows": 0}, "num_rows must be a positive integer, got 0"),
        ({"num_rows": 1.5}, "num_rows must be a positive integer, got 1.5"),
        ({"num_rows": True}, "num_rows must be a positive integer, got True"),
        # U11
        ({"load_factor": 0}, r"load_factor must be in \(0, 1\), got 0"),
        ({"load_factor": 1.5}, r"load_factor must be in \(0, 1\), got 1.5"),
        ({"load_factor": math.nan}, r"load_factor must be in \(0, 1\), got nan"),
        ({"load_factor": "0.1"}, r"load_factor must be in \(0, 1\), got '0.1'"),
        ({"num_rows": 8, "policy": "fifo"}, "policy must be one of .*, got 'fifo'"),
        ({"num_rows": 8, "on_evict": "keep"}, "on_evict must be one of .*, got 'keep'"),
        ({"num_rows": 8, "decay": 1.1}, r"decay must be in \[0, 1\], got 1.1"),
        ({"num_rows": 8, "first_refresh": 0}, "first_refresh must be a positive integer, got 0"),
        ({"num_rows": 8, "max_refresh_interval": 2.5}, "max_refresh_interval must be a positive"),
        ({"num_rows": 8, "refresh_growth": 0.5}, "refresh_growth must be at least 1 and finite"),
        ({"num_rows": 8, "refresh_growth": math.inf}, "refresh_growth must be at least 1 and"),
        ({"num_rows": 8, "dtype": torch.int8}, "dtype must be None or one of .*, got torch.int8"),
        ({"num_rows": 8, "optimizer": "sgd"}, "optimizer must be a TTOptimizerConfig or None"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RowCacheConfig(**arguments)


def test_u11_a_load_factor_between_0_and_1_is_taken():
    assert RowCacheConfig(load_factor=0.2, optimizer=TTOptimizerConfig()).load_factor == 0.2
