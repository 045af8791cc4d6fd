"""Lookups of a frozen table in bfloat16 and INT8 over the same in float32, in one process.

A table of 10,131,227 rows, dim 64, rank 32. Each round calls all three on the same batch, in an
order that changes; a figure is the median over the rounds of one call's time over float32's.
`cold`: other memory was read before each call, more than a core's own cache holds, as where a model
has layers.

Prints one table; `--json` writes its lines as records.

    OMP_NUM_THREADS=1 python benchmarks/inference.py
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch

from torchrec_tt import TTEmbeddingBag, freeze
from torchrec_tt.inference import FrozenDType
from torchrec_tt.ops.embedding_bag import cpu_isa

ROWS = 10_131_227
CASES = ((16384, 1), (2048, 15), (512, 1), (64, 1), (1, 1))  # bags, ids of each
DTYPES: tuple[FrozenDType, ...] = ("float32", "bfloat16", "int8")
OTHER_BYTES = 8 << 20


def measure(
    bags: dict[str, torch.nn.Module], *, num_bags: int, size: int, is_cold: bool, seconds: float
) -> dict[str, list[float]]:
    """Seconds of every call by dtype, round by round."""
    times: dict[str, list[float]] = {dtype: [] for dtype in bags}
    other = torch.zeros(OTHER_BYTES // 4)
    offsets = torch.arange(0, num_bags * size, size)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["int8"]) < 11:
        ids = torch.randint(0, ROWS, (num_bags * size,))
        order = random.sample(list(bags), len(bags))
        bags[order[0]](ids, offsets)  # the first to meet these ids pays for them
        for dtype in order:
            if is_cold:
                other.add_(1)
            begin = time.perf_counter()
            bags[dtype](ids, offsets)
            times[dtype].append(time.perf_counter() - begin)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="of every case")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    bag = TTEmbeddingBag(
        ROWS, 64, tt_ranks=[32, 32], row_factors=[200, 220, 250], col_factors=[4, 4, 4], mode="sum"
    )
    bags = {dtype: freeze(bag, dtype) for dtype in DTYPES}
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {cpu_isa()}, {threads} thread(s), {ROWS:,} rows, dim 64")
    print(f"{'bags x ids':>12} {'caches':>6} {'float32 us':>11} {'bfloat16':>9} {'int8':>7} rounds")
    records = []
    for num_bags, size in CASES:
        for is_cold in (False, True):
            times = measure(
                bags, num_bags=num_bags, size=size, is_cold=is_cold, seconds=args.seconds
            )
            ratios = {
                dtype: statistics.median(
                    a / b for a, b in zip(times[dtype], times["float32"], strict=True)
                )
                for dtype in DTYPES[1:]
            }
            base = 1e6 * statistics.median(times["float32"])
            title, caches = f"{num_bags}x{size}", "cold" if is_cold else "warm"
            print(
                f"{title:>12} {caches:>6} {base:11.1f} {ratios['bfloat16']:9.3f} "
                f"{ratios['int8']:7.3f} {len(times['int8'])}"
            )
            records.append(
                {"bags": num_bags, "ids": size, "caches": caches, "float32_us": base, **ratios}
            )
    if args.json:
        args.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
