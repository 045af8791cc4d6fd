"""Times row factors of one table beside each other in one run: balanced, fast and given ones.

The processor time of forward, and of forward + backward + SGD step, on the batches and with the
flushed caches of `embedding_bag.py`: medians, the methods taking turns.

    OMP_NUM_THREADS=1 python benchmarks/row_factors.py --bags 16384x1 200,50,1016 200,16,3168
"""

import argparse
import time

import embedding_bag
import torch

from torchrec_tt.tt.cost import core_bytes, expected_unique, step_cost
from torchrec_tt.tt.factorize import BATCH_ROWS, make_shape


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("row_factors", nargs="*", help="more factors, each like 200,220,250")
    parser.add_argument("--bags", default="16384x1", help="BAGSxPOOLING")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ranks", default="32,32", help="one fewer than there are cores")
    parser.add_argument("--order", choices=["scattered", "popular"], default="scattered")
    parser.add_argument("--zipf", type=float, default=1.05, help="exponent of the popularity")
    parser.add_argument("--tbe", action="store_true", help="also FBGEMM's TBE, uncompressed")
    parser.add_argument("--batches", type=int, default=3, help="different ones")
    parser.add_argument("--rounds", type=int, default=3, help="through the batches, counted")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    table = (embedding_bag.NUM_EMBEDDINGS, args.dim)
    tt_ranks = [int(rank) for rank in args.ranks.split(",")]
    shapes = {
        "balanced": make_shape(*table, tt_ranks=tt_ranks),
        "fast": make_shape(*table, tt_ranks=tt_ranks, row_strategy="fast"),
    }
    for text in args.row_factors:
        factors = [int(m) for m in text.split(",")]
        shapes[text] = make_shape(*table, tt_ranks=tt_ranks, row_factors=factors)
    steps = {name: embedding_bag.tt_step(shape) for name, shape in shapes.items()}
    if args.tbe:
        steps["tbe"] = embedding_bag.tbe_step(shapes["balanced"])
    bags, pooling = map(int, args.bags.split("x"))
    batches = [
        embedding_bag.make_batch(bags, pooling, order=args.order, exponent=args.zipf, dim=args.dim)
        for _ in range(args.batches)
    ]
    # A busy machine disturbs the processor time less.
    times = embedding_bag.measure(steps, batches, args.rounds, clock=time.process_time)

    num_rows = expected_unique(BATCH_ROWS, table[0])
    print(f"{args.bags} bags, dim {args.dim}, ranks {args.ranks}, ids {args.order}")
    print(f"{'':>10} {'row factors':>20} {'MB':>5} {'model':>6} {'forward ms':>11} {'train ms':>9}")
    for name, t in times.items():
        columns = f"{'':>20} {'':>5} {'':>6}"
        if name in shapes:
            shape = shapes[name]
            factors = ",".join(map(str, shape.row_factors))
            cost = step_cost(shape, num_rows=num_rows)
            ratio = cost / step_cost(shapes["balanced"], num_rows=num_rows)
            columns = f"{factors:>20} {core_bytes(shape) / 1e6:>5.2f} {ratio:>6.2f}"
        title = name if name in ("balanced", "fast", "tbe") else ""
        print(f"{title:>10} {columns} {t['forward']:>11.2f} {t['train']:>9.2f}")


if __name__ == "__main__":
    main()
