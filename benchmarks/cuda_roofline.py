"""Prints what a training step on CUDA must move and compute, stage by stage, and what bounds it.

Arithmetic, no measurement: rows and prefixes are counted in drawn batches, bytes and flops follow
from what the kernels of csrc/cuda do, and times from the limits of an H200. A kernel is taken to
reach `--efficiency` of a limit, and slices of cores to come from memory each time, though most lie
in the L2 cache. TBE is FBGEMM's on the uncompressed tables, bound by memory.

    python benchmarks/cuda_roofline.py
"""

import argparse
import json
import math
from dataclasses import dataclass

import torch
from embedding_bag import NUM_EMBEDDINGS, popularity

from torchrec_tt.tt.shape import TTShape

MEMORY = 4.8e12  # bytes/s of an H200's HBM3e, from its data sheet, as the next two
FLOAT32 = 67e12  # flop/s of FFMA
TF32 = 494e12  # flop/s of dense tensor cores
FLOAT = 4  # bytes
WINDOW = 32  # prefixes of a block, as csrc/cuda/call_memory.cu has it for large batches
STEP_SHAPE = TTShape(
    num_embeddings=NUM_EMBEDDINGS,
    embedding_dim=64,
    row_factors=(200, 220, 250),
    col_factors=(4, 4, 4),
    tt_ranks=(32, 32),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Of one table's part of a batch: indices, unique rows and prefixes of the cores, windows."""

    indices: int
    rows: int
    prefixes: int
    groups_of_windows: int


def draw(shape: TTShape, *, batch_size: int, cached_ratio: float) -> Counts:
    """Ids by Zipf's law 1.05, scattered; the most popular ones are cached."""
    law, scatter = popularity(1.05)
    rank = torch.searchsorted(law, torch.rand(batch_size, dtype=torch.float64))
    rank = rank[rank >= int(cached_ratio * NUM_EMBEDDINGS)].clamp(max=NUM_EMBEDDINGS - 1)
    rows = scatter[rank].unique()
    prefixes = (rows // shape.row_factors[2]).unique()
    mids = (prefixes % shape.row_factors[1]).sort().values
    cuts = (torch.arange(1, len(mids)) % WINDOW == 0) | (mids[1:] != mids[:-1])
    return Counts(
        indices=batch_size,
        rows=len(rows),
        prefixes=len(prefixes),
        groups_of_windows=int(cuts.sum()) + 1,
    )


def stages(shape: TTShape, n: Counts) -> dict[str, tuple[float, float, float]]:
    """Returns by stage: bytes, flops of products with a mid slice, other flops; of one table."""
    (n0, n1, n2), (r1, r2) = shape.col_factors, shape.tt_ranks
    dim, head, mid, last = shape.embedding_dim, n0 * r1, r1 * n1 * r2, r2 * n2
    m0, m1, m2 = shape.row_factors
    parameters = m0 * head + m1 * mid + m2 * last
    slices = (n.rows * last + n.prefixes * head + n.groups_of_windows * mid) * FLOAT
    product, row = 2.0 * n0 * mid, 2.0 * dim * r2
    passes = math.ceil(math.log2(26 * NUM_EMBEDDINGS) / 8)
    return {
        "plan": (n.indices * (24 * passes + 96.0), 0, 0),
        "rows": (slices + n.rows * dim * FLOAT, n.prefixes * product, n.rows * row),
        "pool": ((n.rows + n.indices) * dim * FLOAT + 4.0 * n.indices, 0, n.indices * dim),
        "gradients": (  # slices are read, and added to: read and written
            3.0 * slices + n.indices * (dim * FLOAT + 16),
            3 * n.prefixes * product,
            2 * n.rows * row + n.indices * dim,
        ),
        "step (SGD)": (4.0 * parameters * FLOAT, 0, 2.0 * parameters),
    }


def tbe_bytes(shape: TTShape, *, indices: int, rows: int) -> float:
    """Forward: rows and output; backward: plan, gradients, rows read and written."""
    row = shape.embedding_dim * FLOAT
    return indices * (2 * row + 100.0) + indices * row + rows * 2.0 * row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=65536)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--efficiency", type=float, default=0.6, help="share of a limit reached")
    parser.add_argument("--json", help="write the records to this file")
    args = parser.parse_args()
    torch.manual_seed(0)
    records = []
    for cached_ratio in (0.0, 0.01):
        counts = draw(STEP_SHAPE, batch_size=args.batch_size, cached_ratio=cached_ratio)
        everything = draw(STEP_SHAPE, batch_size=args.batch_size, cached_ratio=0.0)
        print(
            f"\n{args.tables} tables, batch {args.batch_size}, cache {cached_ratio:.0%}: {counts}"
        )
        print(
            f"{'stage':<12}{'MB':>8}{'GFLOP':>8}{'fp32 us':>9}{'TF32 us':>9}"
            f"{'GB/s':>7}{'TFLOP/s':>9}  bound by"  # at the float32 time
        )
        totals = {"fp32": 0.0, "tf32": 0.0}
        for stage, (num_bytes, mid_flops, flops) in stages(STEP_SHAPE, counts).items():
            scale = 1e6 * args.tables / args.efficiency
            moved = num_bytes / MEMORY * scale
            fp32 = (mid_flops + flops) / FLOAT32 * scale
            tf32 = (mid_flops / TF32 + flops / FLOAT32) * scale
            bound = {True: "memory", False: "FFMA"}[moved > fp32]
            times = {"fp32": max(moved, fp32), "tf32": max(moved, tf32)}
            totals = {name: totals[name] + time for name, time in times.items()}
            megabytes, gflop = (
                args.tables * x for x in (num_bytes / 1e6, (mid_flops + flops) / 1e9)
            )
            print(
                f"{stage:<12}{megabytes:>8.0f}{gflop:>8.1f}{times['fp32']:>9.0f}"
                f"{times['tf32']:>9.0f}{1e3 * megabytes / times['fp32']:>7.0f}"
                f"{1e3 * gflop / times['fp32']:>9.1f}  {bound}"
            )
            records.append(
                {"cached_ratio": cached_ratio, "stage": stage, "bytes": num_bytes, **times}
            )
        tbe = args.tables * tbe_bytes(STEP_SHAPE, indices=args.batch_size, rows=everything.rows)
        tbe_us = 1e6 * tbe / MEMORY / args.efficiency
        print(f"{'sum':<12}{'':>16}{totals['fp32']:>9.0f}{totals['tf32']:>9.0f}")
        print(
            f"TBE: {tbe / 1e6:.0f} MB, {tbe_us:.0f} us; "
            f"over it: fp32 {totals['fp32'] / tbe_us:.1f}, TF32 {totals['tf32'] / tbe_us:.1f}"
        )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(records, file, indent=1)


if __name__ == "__main__":
    main()
