"""Prints what a training step on CUDA must move and compute, stage by stage, and what bounds it.

Estimates, no measurement: rows and prefixes are counted in drawn batches, bytes and flops follow
from what the kernels of csrc/cuda do, and times from the limits of an H200. A kernel is taken to
reach `--efficiency` of a limit, and whatever it reads to come from memory each time, though much
lies in the L2 cache. Beside it, counted alike: FBGEMM's TBE on the uncompressed tables, and
TT-Rec's way in the place of rows and gradients, a batched product (bmm) per index and core. Row
factors are (200, 220, 250), and those of `row_strategy="fast"`.

    python benchmarks/cuda_roofline.py
"""

import argparse
import itertools
import json
import math
from dataclasses import dataclass

import torch
from embedding_bag import NUM_EMBEDDINGS, popularity

from torchrec_tt.tt.factorize import make_shape
from torchrec_tt.tt.shape import TTShape

MEMORY = 4.8e12  # bytes/s of an H200's HBM3e, from its data sheet, as the next two
FLOAT32 = 67e12  # flop/s of FFMA
TF32 = 494e12  # flop/s of dense tensor cores
MULTIPROCESSORS = 132
FLOAT = 4  # bytes
SHAPES = {
    "balanced": make_shape(NUM_EMBEDDINGS, 64, tt_ranks=[32, 32], row_factors=[200, 220, 250]),
    "fast": make_shape(NUM_EMBEDDINGS, 64, tt_ranks=[32, 32], row_strategy="fast"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Of one table's part of a batch."""

    indices: int
    misses: int  # indices that go through the cores, as the next three
    rows: int
    prefixes: int
    groups: int  # whole ones, or those of every window
    takes_groups: bool
    cached_rows: int  # unique ones


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """What one table's part moves and computes."""

    num_bytes: float
    mid_flops: float = 0  # of products with a mid slice, on tensor cores in TF32
    flops: float = 0  # the others


def draw(shape: TTShape, *, batch_size: int, num_tables: int, cached_ratio: float) -> Counts:
    """Ids by Zipf's law 1.05, scattered; the most popular ones are cached."""
    law, scatter = popularity(1.05)
    rank = torch.searchsorted(law, torch.rand(batch_size, dtype=torch.float64))
    is_miss = rank >= int(cached_ratio * NUM_EMBEDDINGS)
    rows = scatter[rank[is_miss].clamp(max=NUM_EMBEDDINGS - 1)].unique()
    prefixes = (rows // shape.row_factors[2]).unique()
    mids = (prefixes % shape.row_factors[1]).sort().values
    # as csrc/cuda/prefix_batch.cuh cuts the prefixes of all tables
    window = min(max(num_tables * len(prefixes) // (8 * MULTIPROCESSORS), 8), 128)
    takes_groups = shape.row_factors[0] <= 2 * window
    cuts = mids[1:] != mids[:-1]
    if not takes_groups:
        cuts |= torch.arange(1, len(mids)) % window == 0
    return Counts(
        indices=batch_size,
        misses=int(is_miss.sum()),
        rows=len(rows),
        prefixes=len(prefixes),
        groups=int(cuts.sum()) + 1,
        takes_groups=takes_groups,
        cached_rows=len(rank[~is_miss].unique()),
    )


def sort_bytes(num_keys: int, *, key: int, value: int = 4) -> int:
    """Per element, of CUB's radix sort: keys are read once, both read and written per 8 bits."""
    passes = math.ceil(math.log2(num_keys) / 8)
    return key + 2 * passes * (key + value)


def plan_bytes(shape: TTShape, *, num_tables: int) -> int:
    """Per index, of csrc/cuda/plan.cu without tags, a bag an index; ids of 8 bytes."""
    num_keys = num_tables * math.prod(shape.row_factors)
    key = 4 if num_keys < 2**32 else 8
    offsets, write_keys, mark_rows, scan, write_rows = 8, 12 + key, 8 + key, 16, 32 + key
    return offsets + write_keys + sort_bytes(num_keys, key=key) + mark_rows + scan + write_rows


def stages(shape: TTShape, n: Counts, *, num_tables: int) -> dict[str, Stage]:
    """What our kernels do, with SGD."""
    (n0, n1, n2), (r1, r2) = shape.col_factors, shape.tt_ranks
    dim, head, mid, last = shape.embedding_dim, n0 * r1, r1 * n1 * r2, r2 * n2
    mids = n.groups * mid * FLOAT
    slices = (n.rows * last + n.prefixes * head) * FLOAT + mids
    product, of_row, row = 2.0 * n0 * mid, 2.0 * dim * r2, dim * FLOAT
    hits = n.indices - n.misses
    tags = 128.0 if n.cached_rows else 0.0  # two sets a look-up
    parameters = sum(m * size for m, size in zip(shape.row_factors, (head, mid, last), strict=True))
    cleared = parameters - (shape.row_factors[1] * mid if n.takes_groups else 0)
    bags = 24 * n.indices  # where each index's gradient lies: cleared, made of an offset
    summed = row + 12  # per index: its gradient, its place in order, where that lies
    made = {
        "plan": Stage(num_bytes=n.indices * (plan_bytes(shape, num_tables=num_tables) + tags)),
        "rows": Stage(
            num_bytes=slices + n.rows * row,
            mid_flops=n.prefixes * product,
            flops=n.rows * of_row,
        ),
        "pool": Stage(  # an offset, a row's number, for a cached one its key
            num_bytes=n.indices * (2.0 * row + 12) + hits * 8, flops=n.indices * dim
        ),
        "gradients": Stage(  # slices are read, and added to: read and written, or just written
            num_bytes=3.0 * slices - (mids if n.takes_groups else 0) + bags + n.misses * summed,
            mid_flops=3 * n.prefixes * product,
            flops=2 * n.rows * of_row + n.misses * dim,
        ),
        "step": Stage(num_bytes=(3.0 * parameters + cleared) * FLOAT, flops=2.0 * parameters),
    }
    if n.cached_rows:
        made["cached rows"] = Stage(
            num_bytes=bags + hits * summed + n.cached_rows * (2.0 * row + 20), flops=hits * dim
        )
        made["counter"] = Stage(num_bytes=counter_bytes(n, num_tables=num_tables))
    return made


def counter_bytes(n: Counts, *, num_tables: int) -> float:
    """Of csrc/cuda/row_counter.cu, with 2 cells a slot in buckets of 8."""
    num_buckets = num_tables * int(0.01 * NUM_EMBEDDINGS) // 4
    buckets = 8 + sort_bytes(num_buckets, key=4) + 4  # per index: written, sorted, read
    hit, miss = 12 + 8, 12 + 16 + 160  # a row's key and count; its slot's heat, or its bucket
    return n.indices * buckets + n.cached_rows * hit + n.rows * miss


def tbe(shape: TTShape, n: Counts, *, num_tables: int) -> Stage:
    """FBGEMM's of tables that lie on the device, with SGD; int64 ids, a bag an index.

    As in its sources of 2026: bounds_check_indices, the forward; linearize_index_kernel, SortPairs,
    RunLengthEncode on cleared lengths and their scan (fbgemm_gpu/src/split_embeddings_utils/
    transpose_embedding_input.cu, 0579a8f); find_long_segments and kernel_warp_per_row
    (fbgemm_gpu/codegen/training/backward/embedding_backward_split_*, 0172dcc).
    """
    row = shape.embedding_dim * FLOAT
    check, forward, linearize, lengths = 16, 16 + 2 * row, 28, 4 + 8 + 8
    sort = sort_bytes(num_tables * NUM_EMBEDDINGS, key=8)
    an_index = check + forward + linearize + sort + lengths + 4 + row
    a_row = 12 + 4 + 12 + 2 * row  # written, looked at for its length, stepped
    return Stage(num_bytes=float(n.indices * an_index + (n.rows + n.cached_rows) * a_row))


def bmm(shape: TTShape, num_indices: int) -> Stage:
    """TT-Rec's: forward, the same again, gradients of each index's slices, which are then added.

    A slice is read forward and backward (head and mid also to make P again), its gradient written
    and read, and its sum read and written; P and its gradient are written twice and once, read four
    times; the row's are written and read five times in all.
    """
    (n0, n1, n2), (r1, r2) = shape.col_factors, shape.tt_ranks
    dim, head, mid, last = shape.embedding_dim, n0 * r1, r1 * n1 * r2, r2 * n2
    floats = 7.0 * (head + mid) + 6.0 * last + 7.0 * n0 * n1 * r2 + 5.0 * dim
    flops = 4 * 2.0 * n0 * mid + 3 * 2.0 * dim * r2
    return Stage(num_bytes=num_indices * floats * FLOAT, flops=num_indices * flops)


def times_us(stage: Stage, *, efficiency: float) -> dict[str, float]:
    """By precision: the time of what bounds it."""
    moved = stage.num_bytes / MEMORY
    of_mid = {"fp32": stage.mid_flops / FLOAT32, "tf32": stage.mid_flops / TF32}
    return {
        name: 1e6 * max(moved, seconds + stage.flops / FLOAT32) / efficiency
        for name, seconds in of_mid.items()
    }


def print_stage(name: str, stage: Stage, *, num_tables: int, efficiency: float) -> dict:
    """A row of the table; returns it as a record of all tables."""
    us = {k: num_tables * v for k, v in times_us(stage, efficiency=efficiency).items()}
    num_bytes = num_tables * stage.num_bytes
    flops = num_tables * (stage.mid_flops + stage.flops)
    line = f"{name:<12}{num_bytes / 1e6:>8.0f}{flops / 1e9:>7.0f}"
    for time in us.values():
        line += f"{time:>10.0f}{num_bytes / time / 1e3:>7.0f}{flops / time / 1e6:>8.1f}"
    bound = [
        "memory" if num_bytes / MEMORY * 1e6 / efficiency >= 0.999 * time else "flops"
        for time in us.values()
    ]
    print(f"{line}  {', '.join(dict.fromkeys(bound))}")
    return {"stage": name, "bytes": num_bytes, "flops": flops, **us}


def print_step(shape: TTShape, n: Counts, *, num_tables: int, efficiency: float) -> list[dict]:
    """A table of the step's stages and its ratios; returns the stages' records."""
    setting = {"num_tables": num_tables}
    columns = "".join(f"{name + ' us':>10}{'GB/s':>7}{'TFLOP/s':>8}" for name in ("fp32", "TF32"))
    print(f"{'stage':<12}{'MB':>8}{'GFLOP':>7}{columns}  bound by")
    own = stages(shape, n, **setting)
    others = {
        "TBE": tbe(shape, n, **setting),
        "bmm": bmm(shape, n.indices),
        **({"bmm, misses": bmm(shape, n.misses)} if n.cached_rows else {}),
    }
    rows = {
        name: print_stage(name, stage, efficiency=efficiency, **setting)
        for name, stage in (own | others).items()
    }
    for precision in ("fp32", "tf32"):
        us, num_bytes = (sum(rows[name][key] for name in own) for key in (precision, "bytes"))
        rest = us - rows["rows"][precision] - rows["gradients"][precision]
        slower = [f"{(rows[name][precision] + rest) / us:.1f}" for name in others if name != "TBE"]
        print(
            f"{precision}: {us:.0f} us, {num_bytes / us / 1e3:.0f} GB/s; over TBE "
            f"{us / rows['TBE'][precision]:.2f}; with a bmm {' or '.join(slower)} times"
        )
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=65536)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--efficiency", type=float, default=0.6, help="share of a limit reached")
    parser.add_argument("--json", help="write the records to this file")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(
        f"Estimates for an H200, which moves {MEMORY / 1e9:.0f} GB/s and computes "
        f"{FLOAT32 / 1e12:.0f} TFLOP/s in float32, {TF32 / 1e12:.0f} in TF32"
    )
    records = []
    for (name, shape), cached_ratio in itertools.product(SHAPES.items(), (0.0, 0.01)):
        n = draw(
            shape, batch_size=args.batch_size, num_tables=args.tables, cached_ratio=cached_ratio
        )
        print(
            f"\n{name} row factors {shape.row_factors}, {args.tables} tables, "
            f"batch {args.batch_size}, cache {cached_ratio:.0%}: {n}"
        )
        rows = print_step(shape, n, num_tables=args.tables, efficiency=args.efficiency)
        records += [{"row_factors": name, "cached_ratio": cached_ratio, **row} for row in rows]
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(records, file, indent=1)


if __name__ == "__main__":
    main()
