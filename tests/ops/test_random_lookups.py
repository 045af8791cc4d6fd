import math
import random
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tests.ops.reference import Batch, dense_lookup, make_cores
from torchrec_tt.ops.embedding_bag import (
    cpu_isa,
    embedding_bag,
    embedding_bag_backward_dense,
    embedding_bag_backward_update,
    plan,
    sum_dtype,
)
from torchrec_tt.ops.lookup import Lookup, TTTable
from torchrec_tt.optim import CoreOptimizer, TTOptimizerConfig
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
    torch.manual_seed(seed)
    tables = [random_table(rng, f"t{i}") for i in range(rng.choice((1, 1, 1, 2, 5)))]
    one_dim = len({table.shape.embedding_dim for table in tables}) == 1
    lookup = Lookup(tables, pooling=rng.choice(("sum", "mean", "none" if one_dim else "sum")))
    dtype = rng.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16))
    torch.set_num_threads(rng.choice((1, 1, 2, 3)))
    cores = make_cores(lookup, dtype=dtype)
    wide = [core.detach().to(sum_dtype(core)).requires_grad_() for core in cores]
    batch = Batch.draw(lookup, batch_size=rng.choice((1, 2, 17, 64)), dtype=wide[0].dtype)
    if rng.random() < 0.3:
        batch.indices, batch.offsets = batch.indices.int(), batch.offsets.int()
    weights = batch.weights if rng.random() < 0.5 else None
    output = embedding_bag(
        batch.indices, batch.offsets, cores=cores, lookup=lookup, per_sample_weights=weights
    )
    expected = dense_lookup(wide, batch, lookup=lookup, weights=weights)
    weight_leaf = [] if weights is None else [weights]
    cotangent = torch.randn_like(expected)
    grads = torch.autograd.grad(output, [*cores, *weight_leaf], cotangent)
    wanted = torch.autograd.grad(expected, [*wide, *weight_leaf], cotangent)
    for name, a, b in zip(
        ["output", *(f"gradient {i}" for i in range(len(grads)))],
        [output, *grads],
        [expected, *wanted],
        strict=True,
    ):
        largest = float(b.detach().abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(
            a.to(b.dtype),
            b,
            rtol=torch.finfo(a.dtype).eps if a.dtype != b.dtype else 0,  # autograd rounds
            atol=64 * torch.finfo(b.dtype).eps * largest,
            msg=lambda text, name=name: f"seed {seed}, {name}, {tables}: {text}",
        )
    optimizer = rng.choice(("sgd", "adagrad", "rowwise_adagrad"))
    check_step(cores, batch, cotangent, lookup=lookup, weights=weights, optimizer=optimizer)


def check_step(
    cores: list[Tensor],
    batch: Batch,
    cotangent: Tensor,
    *,
    lookup: Lookup,
    weights: Tensor | None,
    optimizer: str,
) -> None:
    """A step in backward equals one on the dense gradients, which are those of the dense tables."""
    config = TTOptimizerConfig(optimizer=optimizer, learning_rate=0.1, eps=1e-3)
    fused = [core.detach().clone() for core in cores]
    plain = [core.clone() for core in fused]
    ours, theirs = CoreOptimizer(fused, config), CoreOptimizer(plain, config)
    the_plan = plan(batch.indices, batch.offsets, lookup=lookup)
    call = {
        "offsets": batch.offsets,
        "lookup": lookup,
        "per_sample_weights": None if weights is None else weights.detach(),
        "weights_grad": weights is not None,
    }
    ours_of_weights = embedding_bag_backward_update(
        cotangent,
        the_plan,
        fused,
        ours.states(),
        optimizer=optimizer,
        learning_rate=0.1,
        eps=1e-3,
        rounding_seeds=ours.rounding_seeds(),
        **call,
    )
    grads, theirs_of_weights = embedding_bag_backward_dense(cotangent, the_plan, plain, **call)
    theirs.step(plain, grads)
    assert torch.equal(ours_of_weights, theirs_of_weights)
    for core, other in zip([*fused, *ours.states()], [*plain, *theirs.states()], strict=True):
        torch.testing.assert_close(core, other)


def check_many(first: int, count: int) -> None:
    before = torch.get_num_threads()
    try:
        for seed in range(first, first + count):
            check_one(seed)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_500_random_lookups_equal_the_dense_tables():
    check_many(0, 500)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["generic", "avx2"])
def test_100_random_lookups_equal_the_dense_tables_on_lesser_instruction_sets(isa, monkeypatch):
    order = ["generic", "avx2", "avx512"]
    if order.index(isa) >= order.index(cpu_isa()):
        pytest.skip(f"{isa} is not less than this processor's {cpu_isa()}")
    monkeypatch.setenv("TORCHREC_TT_ISA", isa)
    code = "from tests.ops.test_random_lookups import check_many; check_many(1000, 100)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
