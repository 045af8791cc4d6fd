"""Lookups in INT8 cores against the same lookups in what their integers and scales say."""

import random
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.ops.cached_rows import Caches
from tests.ops.reference import SHAPES, Batch, big_batch, make_cores, make_lookup
from torchrec_tt.ops.embedding_bag import (
    cpu_isa,
    embedding_bag_backward_dense,
    embedding_bag_forward,
    plan,
)
from torchrec_tt.ops.library import operators
from torchrec_tt.ops.lookup import Lookup
from torchrec_tt.tt.quantization import dequantize_core, quantize_core


def quantized(lookup: Lookup) -> list[Tensor]:
    return [quantize_core(core) for core in make_cores(lookup)]


def assert_equals_dequantized(
    lookup: Lookup, batch: Batch, *, weighted: bool = False, caches: Caches | None = None
) -> None:
    """Bit for bit: the kernels widen a slice, and go on as with float32 ones."""
    cores = quantized(lookup)
    ids, rows = (caches.ids, caches.rows) if caches else ((), ())
    batch_plan = plan(batch.indices, batch.offsets, lookup=lookup, cache_ids=ids)
    outputs = [
        embedding_bag_forward(
            batch_plan,
            each,
            offsets=batch.offsets,
            lookup=lookup,
            per_sample_weights=batch.weights.detach() if weighted else None,
            cached_rows=rows,
        )
        for each in (cores, [dequantize_core(core) for core in cores])
    ]
    assert outputs[0].dtype == torch.float32
    assert outputs[0].abs().max() > 0
    assert_close(outputs[0], outputs[1], rtol=0, atol=0)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_a_lookup_reads_integers_times_scales(name: str, pooling: str) -> None:
    lookup = make_lookup(name, num_features=2, pooling=pooling)
    batch = Batch.draw(lookup)
    assert_equals_dequantized(lookup, batch, weighted=pooling == "sum")


def test_tables_of_different_shapes_and_small_batches() -> None:
    lookup = make_lookup(*SHAPES)
    for batch_size in (1, 3):
        assert_equals_dequantized(lookup, Batch.draw(lookup, batch_size=batch_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hot_rows_are_read_instead(dtype: torch.dtype) -> None:
    lookup = make_lookup(*SHAPES)
    caches = Caches.draw(lookup, random.Random(5), dtype=dtype)
    assert_equals_dequantized(lookup, Batch.draw(lookup), caches=caches)


def test_a_big_batch_in_many_chunks() -> None:
    lookup, _, indices, offsets = big_batch()
    assert_equals_dequantized(lookup, Batch(indices, offsets, torch.ones(len(indices))))


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["generic", "avx2"])
def test_every_instruction_set(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order = ["generic", "avx2", "avx512"]
    if order.index(isa) > order.index(cpu_isa()):
        pytest.skip(f"this processor has no {isa}")
    monkeypatch.setenv("TORCHREC_TT_ISA", isa)
    code = (
        "from tests.ops.test_int8_cores import *\n"
        f"assert cpu_isa() == {isa!r}\n"
        "lookup = make_lookup(*SHAPES)\n"
        "assert_equals_dequantized(lookup, Batch.draw(lookup), weighted=True)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_opcheck() -> None:
    lookup = make_lookup("3 cores", "2 cores")
    batch = Batch.draw(lookup)
    batch_plan = plan(batch.indices, batch.offsets, lookup=lookup)
    torch.library.opcheck(
        operators().embedding_bag_forward.default,
        (
            batch_plan,
            quantized(lookup),
            [],
            batch.offsets,
            None,
            lookup.encoded_tables,
            lookup.feature_tables,
            "sum",
        ),
    )


def test_a_gradient_is_refused() -> None:
    lookup = make_lookup("3 cores")
    batch = Batch.draw(lookup)
    batch_plan = plan(batch.indices, batch.offsets, lookup=lookup)
    with pytest.raises(
        ValueError, match="cores must be float32, bfloat16, float16 or float64, got"
    ):
        embedding_bag_backward_dense(
            torch.ones(23, 16),
            batch_plan,
            quantized(lookup),
            offsets=batch.offsets,
            lookup=lookup,
        )


def test_cores_without_their_scales_are_refused() -> None:
    lookup = make_lookup("3 cores")
    batch = Batch.draw(lookup)
    batch_plan = plan(batch.indices, batch.offsets, lookup=lookup)
    cores = [core[:, :-4].contiguous() for core in quantized(lookup)]
    with pytest.raises(ValueError, match=r"r_\{k\+1\} \+ 4\], core 0 must be \[3, 10\]"):
        embedding_bag_forward(batch_plan, cores, offsets=batch.offsets, lookup=lookup)


def test_one_dtype_for_all() -> None:
    lookup = make_lookup("3 cores")
    batch = Batch.draw(lookup)
    batch_plan = plan(batch.indices, batch.offsets, lookup=lookup)
    cores = [*quantized(lookup)[:2], make_cores(lookup)[2]]
    with pytest.raises(ValueError, match="of one dtype, core 2 is not"):
        embedding_bag_forward(batch_plan, cores, offsets=batch.offsets, lookup=lookup)
