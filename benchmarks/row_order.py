"""Measures what an order of the rows does to the error of TT-SVD, on made tables with shuffled ids.

The error is that of TT-SVD itself, over the table's norm. "more rank" is the table as it is, at the
highest rank whose cores take no more bytes than those of `--rank` and an int32 order of the rows
together.

    OMP_NUM_THREADS=1 python benchmarks/row_order.py --rows 200000 --dim 64 --rank 32
"""

import argparse
import time
import warnings

import torch
from torch import Tensor

from torchrec_tt.tt.cost import core_bytes, dense_bytes
from torchrec_tt.tt.factorize import make_shape
from torchrec_tt.tt.row_order import frequency_order, similarity_order
from torchrec_tt.tt.shape import TTShape
from torchrec_tt.tt.svd import tt_svd


def tables(rows: int, dim: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Tables with the counts of their ids: ids shuffled, Zipf 1.05 popularity."""
    popularity = torch.arange(1, rows + 1).double().pow(-1.05)
    counts = (popularity / popularity.max() * rows)[torch.randperm(rows)]
    noise = torch.randn(rows, dim)
    clusters = torch.randn(200, dim)[torch.randint(200, (rows,))]
    latent = torch.rand(rows, 2) @ (3 * torch.randn(2, dim))
    return {
        "noise": (noise, counts),
        "trained": (noise * counts.clamp(min=1).log1p()[:, None].float(), counts),
        "clusters": (clusters + 0.3 * noise, counts),
        "two factors": (torch.sin(latent) + 0.1 * noise, counts),
    }


def tt_svd_error(table: Tensor, shape: TTShape) -> float:
    return tt_svd(
        table,
        tt_ranks=shape.tt_ranks,
        row_factors=shape.row_factors,
        col_factors=shape.col_factors,
    ).relative_error


def same_bytes_shape(shape: TTShape, max_bytes: int) -> TTShape:
    rank = shape.tt_ranks[0]
    while core_bytes(larger := _of_rank(shape, rank + 1)) <= max_bytes:
        shape, rank = larger, rank + 1
    return shape


def _of_rank(shape: TTShape, rank: int) -> TTShape:
    return make_shape(shape.num_embeddings, shape.embedding_dim, tt_ranks=[rank, rank])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    warnings.filterwarnings("ignore", message="tt_ranks=.* larger than the dense one")

    shape = make_shape(args.rows, args.dim, tt_ranks=[args.rank, args.rank])
    order_bytes = 4 * args.rows
    rich = same_bytes_shape(shape, core_bytes(shape) + order_bytes)
    print(f"{args.rows} x {args.dim}, factors {shape.row_factors}, rank {args.rank}")
    print(f"dense {dense_bytes(shape)}, cores {core_bytes(shape)}, int32 order {order_bytes} bytes")
    print(f"more rank: {rich.tt_ranks[0]}, cores {core_bytes(rich)} bytes")
    print(
        f"{'table':>12} {'as is':>6} {'frequency':>9} {'similarity':>10} {'more rank':>9} {'s':>5}"
    )
    for name, (table, counts) in tables(args.rows, args.dim).items():
        start = time.process_time()
        by_similarity = similarity_order(table, group_size=shape.row_factors[-1])
        seconds = time.process_time() - start
        print(
            f"{name:>12} {tt_svd_error(table, shape):>6.3f} "
            f"{tt_svd_error(table[frequency_order(counts)], shape):>9.3f} "
            f"{tt_svd_error(table[by_similarity], shape):>10.3f} "
            f"{tt_svd_error(table, rich):>9.3f} {seconds:>5.1f}"
        )


if __name__ == "__main__":
    main()
