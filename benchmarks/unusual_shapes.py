"""Times shapes that no vector fits beside their padded neighbours, in one run.

A training step (forward + backward + SGD) of 2048 bags of 15 on one thread, in processor time; the
two take turns on the same batches. A neighbour has the ranks or column factors rounded up to what a
vector holds. Exits with 1 where a shape takes more than twice its neighbour's time.

    OMP_NUM_THREADS=1 python benchmarks/unusual_shapes.py
"""

import argparse
import sys
import time

import embedding_bag as bench
import torch

from torchrec_tt.ops.embedding_bag import cpu_isa
from torchrec_tt.tt.factorize import make_shape

MOST = 2.0
ROWS = {2: (3200, 3200), 3: (200, 220, 250), 4: (52, 55, 60, 62)}
Side = tuple[tuple[int, ...], tuple[int, ...]]  # col_factors, tt_ranks
PAIRS: list[tuple[Side, Side]] = [
    (((4, 4, 4), (31, 31)), ((4, 4, 4), (32, 32))),
    (((4, 4, 4), (27, 29)), ((4, 4, 4), (32, 32))),
    (((4, 4, 4), (17, 33)), ((4, 4, 4), (32, 48))),
    (((4, 4, 4), (5, 7)), ((4, 4, 4), (16, 16))),
    (((4, 4, 4), (1, 1)), ((4, 4, 4), (16, 16))),
    (((3, 4, 5), (32, 32)), ((4, 4, 8), (32, 32))),
    (((5, 3, 7), (30, 30)), ((8, 4, 8), (32, 32))),
    (((1, 7, 9), (32, 32)), ((1, 8, 16), (32, 32))),
    (((3, 1, 13), (20, 24)), ((4, 1, 16), (32, 32))),
    (((7, 9), (31,)), ((8, 16), (32,))),
    (((1, 50), (13,)), ((1, 64), (16,))),
    (((2, 3, 3, 3), (9, 31, 21)), ((2, 4, 4, 4), (16, 32, 32))),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bags", default="2048x15", help="BAGSxPOOLING")
    bags, pooling = map(int, parser.parse_args().bags.split("x"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {cpu_isa()}, {bags} bags of {pooling}")
    worst = 0.0
    for pair in PAIRS:
        shapes = [
            make_shape(
                bench.NUM_EMBEDDINGS,
                torch.Size(cols).numel(),
                tt_ranks=ranks,
                row_factors=ROWS[len(cols)],
                col_factors=cols,
            )
            for cols, ranks in pair
        ]
        batches = [
            bench.make_batch(bags, pooling, order="scattered", exponent=1.05, dim=1)
            for _ in range(2)
        ]
        steps = {}
        for name, shape in zip(("unusual", "neighbour"), shapes, strict=True):
            steps[name] = _on_columns(bench.tt_step(shape), bags, shape.embedding_dim)
        times = bench.measure(steps, batches, rounds=3, phases=("train",), clock=time.process_time)
        unusual, neighbour = (times[name]["train"] for name in steps)
        worst = max(worst, unusual / neighbour)
        sides = " over ".join(f"{cols} ranks {ranks}" for cols, ranks in pair)
        print(f"{sides:<70} {unusual:>7.2f} ms {neighbour:>7.2f} ms {unusual / neighbour:>6.2f}")
    print(f"worst {worst:.2f}, at most {MOST}")
    sys.exit(0 if worst <= MOST else 1)


def _on_columns(step: bench.Step, bags: int, columns: int) -> bench.Step:
    """The step with a gradient of its own table's width."""
    grad_output = torch.randn(bags, columns) * 0.01
    return lambda indices, offsets, _, *, train: step(indices, offsets, grad_output, train=train)


if __name__ == "__main__":
    main()
