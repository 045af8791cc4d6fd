"""Measures what an order of the rows does to the error of TT-SVD, on made tables with shuffled ids.

The error is that of TT-SVD itself, over the table's norm. "more rank" is the table as it is, at the
highest rank whose cores take no more bytes than those of `--rank` and an int32 order of the rows
together.

    OMP_NUM_THREADS=1 python benchmarks/row_order.py --rows 200000 --dim 64 --rank 32
"""

import argparse
import warnings

import torch
from torch import Tensor

from torchrec_tt.tt.cost import core_bytes, dense_bytes
from torchrec_tt.tt.factorize import make_shape
from torchrec_tt.tt.row_order import co_access_order, frequency_order, similarity_order
from torchrec_tt.tt.shape import TTShape
from torchrec_tt.tt.svd import tt_svd


def tables(rows: int, dim: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Tables with the counts of their ids, and groups: ids shuffled, Zipf 1.05 popularity.

    The ids of a bag are of one group: of rows that are alike, where the table has such.
    """
    popularity = torch.arange(1, rows + 1).double().pow(-1.05)
    counts = (popularity / popularity.max() * rows)[torch.randperm(rows)]
    noise = torch.randn(rows, dim)
    cluster = torch.randint(200, (rows,))
    clusters = torch.randn(200, dim)[cluster]
    hidden = torch.rand(rows, 2)
    latent = hidden @ (3 * torch.randn(2, dim))
    trained = noise * counts.clamp(min=1).log1p()[:, None].float()
    unlike = torch.randint(200, (rows,))
    near = (20 * hidden).long() @ torch.tensor([20, 1])
    return {
        "noise": (noise, counts, unlike),
        "trained": (trained, counts, unlike),
        "clusters": (clusters + 0.3 * noise, counts, cluster),
        "two factors": (torch.sin(latent) + 0.1 * noise, counts, near),
    }


def bags(counts: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Five bags a row of the table, each of 8 ids of one group, by their popularity."""
    ids = groups.argsort()
    ends = counts[ids].cumsum(0)
    last = groups[ids].diff(append=torch.tensor([-1])).nonzero().flatten()
    group_ends = ends[last]
    group_begins = torch.cat([torch.zeros(1, dtype=torch.double), group_ends[:-1]])
    num_bags = 5 * len(counts)
    group = torch.multinomial(group_ends - group_begins, num_bags, replacement=True)
    begin, end = group_begins[group, None], group_ends[group, None]
    drawn = begin + (end - begin) * torch.rand(num_bags, 8, dtype=torch.double)
    places = torch.searchsorted(ends, drawn.flatten()).clamp(max=len(ids) - 1)
    return ids[places], torch.arange(num_bags + 1) * 8


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
    columns = ["as is", "frequency", "co-access", "similarity", "more rank"]
    print(f"{'table':>12} " + " ".join(f"{column:>10}" for column in columns))
    group_size = shape.row_factors[-1]
    for name, (table, counts, groups) in tables(args.rows, args.dim).items():
        companions = co_access_order(
            *bags(counts, groups), num_embeddings=args.rows, group_size=group_size
        )
        orders = [frequency_order(counts), companions]
        orders.append(similarity_order(table, group_size=group_size))
        errors = [tt_svd_error(table, shape)]
        errors += [tt_svd_error(table[order], shape) for order in orders]
        errors.append(tt_svd_error(table, rich))
        print(f"{name:>12} " + " ".join(f"{error:>10.3f}" for error in errors), flush=True)


if __name__ == "__main__":
    main()
