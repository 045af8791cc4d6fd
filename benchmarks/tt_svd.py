"""Compresses a file of planted rows by TT-SVD: seconds, peak memory, error and what is to be lost.

The rows are those of random cores plus Gaussian noise of `--noise` times their size, so the error
of the best cores is just below noise / sqrt(1 + noise^2). A file holds the
factors and ranks it was first written for: `--rows` x `--dim` float32 (2.6 GB for the default),
taken as it is if it is there.

    OMP_NUM_THREADS=2 python benchmarks/tt_svd.py /tmp/rows.bin
"""

import argparse
import dataclasses
import math
import os
import resource
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchrec_tt.tt.factorize import make_shape
from torchrec_tt.tt.init import init_cores_
from torchrec_tt.tt.row_blocks import dense_rows
from torchrec_tt.tt.shape import TTShape
from torchrec_tt.tt.svd import tt_svd, tt_svd_bytes


@dataclasses.dataclass(frozen=True)
class FileRows:
    """Rows of a plain float32 file, read as they are needed."""

    path: Path
    num_rows: int
    dim: int

    def rows(self, begin: int, end: int) -> Tensor:
        count = (end - begin) * self.dim
        values = np.fromfile(self.path, np.float32, count=count, offset=4 * begin * self.dim)
        return torch.from_numpy(values).view(-1, self.dim)


def write(path: Path, shape: TTShape, *, noise: float) -> None:
    generator = torch.Generator().manual_seed(0)
    cores = [torch.empty(s) for s in shape.core_shapes]
    init_cores_(cores, shape=shape, method="gaussian", generator=generator)
    deviation = noise / math.sqrt(3 * shape.num_embeddings)
    step = shape.row_factors[-1] * 64
    with path.open("wb") as file:
        for begin in range(0, shape.num_embeddings, step):
            end = min(begin + step, shape.num_embeddings)
            block = dense_rows(cores, begin=begin, end=end, shape=shape)
            block += deviation * torch.randn(block.shape, generator=generator)
            file.write(block.numpy().tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--row-strategy", choices=["balanced", "fast"], default="balanced")
    parser.add_argument("--num-cores", type=int, default=3)
    arguments = parser.parse_args()
    ranks = [arguments.rank] * (arguments.num_cores - 1)
    shape = make_shape(
        arguments.rows, arguments.dim, tt_ranks=ranks, row_strategy=arguments.row_strategy
    )
    size = 4 * arguments.rows * arguments.dim
    if not arguments.path.exists() or arguments.path.stat().st_size != size:
        write(arguments.path, shape, noise=arguments.noise)
    tt_svd(torch.randn(20_000, 64), tt_ranks=[8, 8])  # loads libraries
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    start, used = time.perf_counter(), sum(os.times()[:2])
    found = tt_svd(
        FileRows(arguments.path, arguments.rows, arguments.dim),
        tt_ranks=ranks,
        row_factors=shape.row_factors,
        col_factors=shape.col_factors,
    )
    seconds, used = time.perf_counter() - start, sum(os.times()[:2]) - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    ratio = arguments.rows * arguments.dim / found.shape.num_parameters
    print(f"{found.shape.row_factors} ranks {found.shape.tt_ranks}: {ratio:.0f} times smaller")
    print(f"relative error {found.relative_error:.5f}", end=", ")
    print(f"noise {arguments.noise / math.hypot(1, arguments.noise):.5f}")
    print(f"{seconds:.0f} s, {used:.0f} s of CPU time, {torch.get_num_threads()} threads")
    formula = tt_svd_bytes(shape) / 2**30
    print(f"peak {peak:.2f} GiB, {before:.2f} GiB before; formula {formula:.2f} GiB")


if __name__ == "__main__":
    main()
