import subprocess
import sys

import pytest

SCRIPT = """
import math, resource, sys, warnings
import torch
from torchrec_tt.tt import row_blocks, unfolding
from torchrec_tt.tt.svd import tt_svd, tt_svd_bytes
from torchrec_tt.tt.shape import TTShape

unfolding.MAX_KEPT = 2**16
unfolding.MAX_GRAM_SIDE = int(sys.argv[1])
row_blocks.BLOCK_BYTES = unfolding.BLOCK_BYTES = 2**20

class Rows:
    def __init__(self, num_rows):
        self.num_rows, self.dim = num_rows, 64

    def rows(self, begin, end):
        i = torch.arange(begin, end)[:, None] / self.num_rows
        return torch.sin(7 * i * torch.arange(1, 65))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def compress(rows, factors):
    tt_svd(Rows(rows), tt_ranks=[8, 8], row_factors=factors, col_factors=[4, 4, 4])

compress(3000, [10, 10, 30])  # loads the libraries
before = peak()
factors = [80, 80, 100]
compress(635_000, factors)
shape = TTShape(num_embeddings=635_000, embedding_dim=64, row_factors=factors,
                col_factors=(4, 4, 4), tt_ranks=(8, 8))
print(peak() - before, tt_svd_bytes(shape))
"""


@pytest.mark.slow
@pytest.mark.parametrize("max_gram_side", [2048, 0], ids=["gram", "sketch"])
def test_memory_stays_within_the_formula_and_far_below_the_table(max_gram_side: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(max_gram_side)],
        capture_output=True,
        text=True,
        check=True,
    )
    used, formula = map(int, done.stdout.split())
    assert used < formula + 2**23  # what the allocator keeps
    assert formula < 635_000 * 64 * 4 / 3
