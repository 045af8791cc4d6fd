import math
import random

import pytest
import torch

from tests.ops.reference import Batch, dense_lookup, make_cores
from torchrec_tt.ops.embedding_bag import embedding_bag
from torchrec_tt.ops.lookup import Lookup, TTTable
from torchrec_tt.tt.shape import TTShape


def random_table(rng: random.Random, name: str) -> TTTable:
    """2 to 4 cores of any shape, at times a block of rows and several features."""
    d = rng.choice((2, 3, 3, 4))
    row_factors = tuple(rng.randint(1, 9) for _ in range(d))
    col_factors = tuple(rng.choice((1, 1, 2, 3, 4, 5, 8)) for _ in range(d))
    padded = math.prod(row_factors)
    shape = TTShape(
        num_embeddings=rng.randint(max(1, padded - padded // 4), padded),
        embedding_dim=math.prod(col_factors),
        row_factors=row_factors,
        col_factors=col_factors,
        tt_ranks=tuple(rng.choice((1, 2, 3, 4, 7, 8, 15, 16, 17, 32, 33)) for _ in range(d - 1)),
    )
    offset = rng.choice((0, rng.randint(0, shape.num_embeddings - 1)))
    return TTTable(name=name, shape=shape, num_features=rng.choice((1, 1, 2)), row_offset=offset)


def check_one(seed: int) -> None:
    rng = random.Random(seed)
    tables = [random_table(rng, f"t{i}") for i in range(rng.choice((1, 1, 1, 2, 5)))]
    lookup = Lookup(tables, pooling=rng.choice(("sum", "mean")))
    dtype = rng.choice((torch.float32, torch.float64))
    cores = make_cores(lookup, dtype=dtype)
    batch = Batch.draw(lookup, batch_size=rng.choice((1, 2, 17, 64)), dtype=dtype)
    if rng.random() < 0.3:
        batch.indices, batch.offsets = batch.indices.int(), batch.offsets.int()
    weights = batch.weights if rng.random() < 0.5 else None
    output = embedding_bag(
        batch.indices, batch.offsets, cores=cores, lookup=lookup, per_sample_weights=weights
    )
    expected = dense_lookup(cores, batch, lookup=lookup, weights=weights)
    leaves = cores if weights is None else [*cores, weights]
    cotangent = torch.randn_like(expected)
    grads = torch.autograd.grad(output, leaves, cotangent)
    wanted = torch.autograd.grad(expected, leaves, cotangent)
    for name, a, b in zip(
        ["output", *(f"gradient {i}" for i in range(len(leaves)))],
        [output, *grads],
        [expected, *wanted],
        strict=True,
    ):
        largest = float(b.detach().abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(
            a,
            b,
            rtol=0,
            atol=64 * torch.finfo(dtype).eps * largest,
            msg=lambda text, name=name: f"seed {seed}, {name}, {tables}: {text}",
        )


@pytest.mark.slow
@pytest.mark.parametrize(("threads", "count"), [(1, 500), (2, 100)])
def test_random_lookups_equal_the_dense_tables(threads, count):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed in range(count):
            check_one(1000 * threads + seed)
    finally:
        torch.set_num_threads(before)
