"""torch.library.opcheck on the CUDA operators, emulated, with the fakes of the package."""

import re

import pytest
import torch

from tests.csrc.emulation import ROOT
from tests.csrc.test_cached_rows import CachedCall
from torchrec_tt.ops import row_cache, row_counter, step_cores  # noqa: F401  registers their fakes


@pytest.fixture(scope="module")
def emulated(cuda_operators):
    """The operators with the fakes that those of the package have."""
    cuda_operators.set_schedule(0)
    for name in cuda_names():
        fake = torch._library.simple_registry.singleton.find(f"torchrec_tt::{name}").fake_impl
        torch.library.register_fake(f"torchrec_tt_emulated::{name}", fake.kernel.func)
    yield torch.ops.torchrec_tt_emulated
    cuda_operators.check()


def cuda_names() -> list[str]:
    """The operators that csrc/cuda implements."""
    glue = "".join(path.read_text() for path in sorted((ROOT / "csrc/cuda").glob("*.cpp")))
    of_tensors = re.findall(r"TT_CUDA_KEY, m\) \{(.*?)^\}", glue, re.DOTALL | re.MULTILINE)
    return re.findall(r'm\.impl\("(\w+)"', "".join(of_tensors))


def arguments_of(name: str, operators) -> tuple:
    """Of a call with weights, through tables with and without a row cache."""
    call = CachedCall.of("3 cores", "4 cores", "2 cores", batch_size=5)
    lookup, caches, plan = call.lookup, call.caches, call.plan(operators)
    tables = (lookup.encoded_tables, lookup.feature_tables)
    states, grads = ([torch.ones_like(core) for core in call.cores] for _ in range(2))
    step = ("adagrad", 0.1, 1e-8)
    choices = ("highest", True)  # deterministic: nothing else repeats itself bit for bit
    no_decay = (0.9, 0.999, 0.0, False, [])
    row_states = [torch.ones_like(rows) for rows in caches.rows if rows.numel()]
    counters = [row_counter_of(ids) for ids in caches.ids]
    return {
        "plan": (call.indices, call.offsets, *tables, "fatal", caches.ids),
        "embedding_bag_forward": (plan, call.cores, *call.tail(), "highest"),
        "embedding_bag_backward_dense": (call.grad, plan, call.cores, *call.tail(), True, *choices),
        "embedding_bag_backward_update": (
            *(call.grad, plan, call.cores, states, *call.tail(), True),
            *(*step, [], *choices),
        ),
        "step_cores": (call.cores, grads, states, *step, *no_decay),
        "step_cached_rows": (
            *(call.grad, plan, caches.ids, caches.rows, row_states, *call.tail()[1:]),
            *(*step, *no_decay),
        ),
        "count_rows": (
            plan,
            tables[0],
            *map(list, zip(*counters, strict=True)),
            [0] * len(counters),
        ),
    }[name]


def row_counter_of(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Heats, the sketch's ids and heats, and statistics of a cache with these tags."""
    return (
        torch.zeros(len(ids)),
        torch.full((len(ids),), -1),
        torch.zeros(len(ids)),
        torch.zeros(3, dtype=torch.int64),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", cuda_names())
def test_opcheck(name, emulated):
    operator = getattr(emulated, name).default
    torch.library.opcheck(operator, arguments_of(name, emulated))
