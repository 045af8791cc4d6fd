"""The checks that need a GPU, in one script under 10 minutes (`make gpu-check`).

It needs torch and the library built with its CUDA operators, nothing else; what more is installed
(compute-sanitizer, TorchRec, FBGEMM) is used. Every check runs in a process of its own, within its
own time and what is left of `--seconds`, in order of worth; the report is a JSON file, written
after each. Without a GPU it says so and exits with 2, and with 1 if a check failed.

    python tests/gpu_check.py --json runs/gpu_check.json
    python tests/gpu_check.py --quick  # without sanitizers, NCCL and the larger benchmark
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import time

import torch
from torch import Tensor

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.ops.reference import SHAPES, Batch, make_cores, make_lookup  # noqa: E402
from torchrec_tt.modules.row_cache_config import RowCacheConfig  # noqa: E402
from torchrec_tt.modules.table_batched import TTTableBatchedEmbeddingBags  # noqa: E402
from torchrec_tt.ops.embedding_bag import (  # noqa: E402
    check_errors,
    cuda_architectures,
    embedding_bag,
    embedding_bag_forward,
    plan,
)
from torchrec_tt.ops.lookup import Lookup  # noqa: E402
from torchrec_tt.optim import TTOptimizerConfig  # noqa: E402

MIXED = ("2 cores, wide", "3 cores", "4 cores", "3 cores, aligned")
DEVICE = "cuda"
BENCHMARK = "benchmarks/embedding_bag.py"


def close(actual: Tensor, expected: Tensor, *, rtol: float = 4e-6) -> None:
    """Checks closeness relative to the largest entry."""
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    step = torch.finfo(expected.dtype).eps if expected.dtype.itemsize == 2 else 0
    torch.testing.assert_close(actual.cpu(), expected, rtol=step, atol=rtol * largest)


def both(lookup: Lookup, *, device: str, dtype: torch.dtype, weighted: bool) -> list[Tensor]:
    """The output and all gradients of one batch."""
    batch = Batch.draw(lookup, batch_size=60)
    cores = [c.detach().to(device).requires_grad_() for c in make_cores(lookup, dtype=dtype)]
    weights = batch.weights.detach().to(device).requires_grad_() if weighted else None
    output = embedding_bag(
        batch.indices.to(device),
        batch.offsets.to(device),
        cores=cores,
        lookup=lookup,
        per_sample_weights=weights,
    )
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(device)
    leaves = [*cores, weights] if weighted else cores
    return [output.detach(), *torch.autograd.grad(output, leaves, cotangent)]


def lookups() -> str:
    """Every shape, pooling and dtype against the CPU."""
    count = 0
    for names in [*((name,) for name in SHAPES), MIXED]:
        for pooling in ("sum", "mean"):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for weighted in (False, True):
                    lookup = make_lookup(*names, pooling=pooling, precision="highest")
                    kind = {"dtype": dtype, "weighted": weighted}
                    expected = both(lookup, device="cpu", **kind)
                    for a, b in zip(both(lookup, device=DEVICE, **kind), expected, strict=True):
                        close(a, b)
                    count += 1
    check_errors()
    return f"{count} lookups and their gradients equal the CPU's"


def plans() -> str:
    """Plans bit for bit, of small batches and of a large one."""
    for size in (23, 40_000):
        for index_type in (torch.int32, torch.int64):
            lookup = make_lookup(*SHAPES)
            batch = Batch.draw(lookup, batch_size=size)
            ids = batch.indices.to(index_type)
            ours = plan(ids.to(DEVICE), batch.offsets.to(DEVICE), lookup=lookup)
            for a, b in zip(ours, plan(ids, batch.offsets, lookup=lookup), strict=True):
                assert torch.equal(a.cpu(), b)
    check_errors()
    return "plans equal the CPU's bit for bit"


def module_of(
    lookup: Lookup, optimizer: str, device: str, cache: RowCacheConfig | None = None
) -> TTTableBatchedEmbeddingBags:
    config = TTOptimizerConfig(optimizer=optimizer, learning_rate=0.05)
    caches = {} if cache is None else {table.name: cache for table in lookup.tables}
    module = TTTableBatchedEmbeddingBags(
        lookup.tables, optimizer=config, caches=caches, device=device
    )
    with torch.no_grad():
        for core, value in zip(module.all_cores(), make_cores(lookup), strict=True):
            core.copy_(0.3 * value.detach())
    return module


def steps() -> str:
    """Three training steps of every optimizer against the CPU."""
    lookup = make_lookup(*MIXED)
    for optimizer in ("sgd", "adagrad", "rowwise_adagrad", "adam"):
        after = []
        for device in ("cpu", DEVICE):
            module = module_of(lookup, optimizer, device)
            batch = Batch.draw(lookup, batch_size=60)
            for _ in range(3):
                output = module(batch.indices.to(device), batch.offsets.to(device))
                (output * output).mean().backward()
            after.append([core.detach().cpu() for core in module.all_cores()])
        for a, b in zip(*after, strict=True):
            close(a, b, rtol=1e-3)  # adam divides by roots of small sums
    check_errors()
    return "3 steps of sgd, adagrad, rowwise_adagrad and adam equal the CPU's"


def caches() -> str:
    """Row caches fill, train and are renewed as on the CPU."""
    lookup = make_lookup(*MIXED)
    dtypes = (torch.float32, torch.bfloat16, None, None)
    optimizers = ("sgd", "adagrad", "rowwise_adagrad", "adam")
    for optimizer, dtype in zip(optimizers, dtypes, strict=True):
        config = RowCacheConfig(num_rows=16, first_refresh=2, refresh_growth=1, dtype=dtype)
        after = []
        for device in ("cpu", DEVICE):
            module = module_of(lookup, optimizer, device, config)
            batch = Batch.draw(lookup, batch_size=60)
            for step in range(7):
                ids = (batch.indices // (1 + step % 3)).to(device)
                output = module(ids, batch.offsets.to(device))
                (output * output).mean().backward()
            after.append({name: value.cpu() for name, value in module.state_dict().items()})
        for name, expected in after[0].items():
            if expected.is_floating_point():
                close(after[1][name].float(), expected.float(), rtol=1e-2)
            else:
                assert torch.equal(after[1][name], expected), name
    check_errors()
    return "7 steps through caches of 4 optimizers equal the CPU's"


def determinism() -> str:
    """Bitwise equal results under torch.use_deterministic_algorithms."""
    torch.use_deterministic_algorithms(True)
    lookup = make_lookup(*MIXED)
    kind = {"device": DEVICE, "dtype": torch.float32, "weighted": True}
    first = both(lookup, **kind)
    for _ in range(20):
        assert all(map(torch.equal, both(lookup, **kind), first))
    return "21 runs are equal bit for bit"


def no_waiting() -> str:
    """A training step waits for the device nowhere."""
    lookup = make_lookup(*MIXED, check_mode="warning")
    module = module_of(lookup, "adagrad", DEVICE, RowCacheConfig(num_rows=16))
    batch = Batch.draw(lookup)
    ids, offsets = batch.indices.to(DEVICE), batch.offsets.to(DEVICE)
    module(ids, offsets).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(3):
        module(ids, offsets).sum().backward()
    torch.cuda.set_sync_debug_mode("default")
    return "a training step does not wait"


def streams() -> str:
    """Lookups on two streams at once give what one alone gives."""
    lookup = make_lookup(*MIXED)
    kind = {"device": DEVICE, "dtype": torch.float32, "weighted": True}
    expected = both(lookup, **kind)
    torch.cuda.synchronize()
    for _ in range(10):
        results = []
        for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                results.append(both(lookup, **kind))
        torch.cuda.synchronize()
        for result in results:
            for a, b in zip(result, expected, strict=True):
                close(a, b.cpu())
    return "lookups on two streams agree"


def graph() -> str:
    """A captured lookup reads the ids that lie there when it is replayed."""
    lookup = make_lookup(*MIXED)
    cores = [core.detach().to(DEVICE) for core in make_cores(lookup)]
    batch = Batch.draw(lookup)
    ids, offsets = batch.indices.to(DEVICE), batch.offsets.to(DEVICE)

    def look_up() -> Tensor:
        made = plan(ids, offsets, lookup=lookup)
        return embedding_bag_forward(made, cores, offsets=offsets, lookup=lookup)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        look_up()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        output = look_up()
    for _ in range(5):
        ids.copy_(ids.flip(0) % 13)  # rows that every table has
        captured.replay()
        torch.cuda.synchronize()
        assert torch.equal(output, look_up())
    check_errors()
    return "a captured lookup is replayed on other ids"


def faults() -> str:
    """Ids and offsets that are wrong are raised by the next operator, and fault no memory."""
    lookup = make_lookup("2 cores", "3 cores")
    cores = [core.detach().to(DEVICE) for core in make_cores(lookup)]
    good = torch.tensor([0, 1]).to(DEVICE), torch.tensor([0, 1, 2]).to(DEVICE)
    for ids, offsets in (([99, 1], [0, 1, 2]), ([0, -1], [0, 1, 2]), ([0, 1], [0, 2**40, 2])):
        for _ in range(2):
            bad = torch.tensor(ids).to(DEVICE), torch.tensor(offsets).to(DEVICE)
            made = plan(*bad, lookup=lookup)
            torch.cuda.synchronize()
            raised = ""
            try:
                embedding_bag_forward(made, cores, offsets=bad[1], lookup=lookup)
            except ValueError as error:
                raised = str(error)
            assert "must" in raised, (ids, offsets)
            embedding_bag_forward(plan(*good, lookup=lookup), cores, offsets=good[1], lookup=lookup)
            check_errors()
    return "wrong ids and offsets raise at the next operator"


def dmp() -> str:
    """One NCCL rank trains a small model with DistributedModelParallel."""
    import os

    import torch.distributed as dist
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import ParameterConstraints, Topology
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    import torchrec_tt

    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    table = torchrec_tt.TTEmbeddingBagConfig(
        name="t",
        num_embeddings=10_000,
        embedding_dim=64,
        feature_names=["f"],
        tt_ranks=[32, 32],
    )
    model = torchrec_tt.TTEmbeddingBagCollection(tables=[table], device=torch.device("meta"))
    sharder = torchrec_tt.TTEmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
    topology = Topology(world_size=1, compute_device=DEVICE)
    constraints = {"t": ParameterConstraints(sharding_types=["table_wise"])}
    planner = torchrec_tt.tt_planner(topology, batch_size=128, constraints=constraints)
    sharding = planner.collective_plan(model, [sharder], dist.group.WORLD)
    trained = DistributedModelParallel(
        model, device=torch.device(DEVICE), plan=sharding, sharders=[sharder]
    )
    features = KeyedJaggedTensor(
        keys=["f"], values=torch.randint(10_000, (128,)), lengths=torch.ones(128).int()
    ).to(torch.device(DEVICE))
    losses = []
    for _ in range(5):
        loss = (trained(features).values() - 1).square().sum(1).mean()
        loss.backward()
        losses.append(float(loss.detach()))
    check_errors()
    dist.destroy_process_group()
    assert losses[-1] < losses[0]
    return f"losses {losses[0]:.4f} to {losses[-1]:.4f}"


CHECKS = {
    check.__name__: check
    for check in (
        lookups,
        plans,
        steps,
        caches,
        faults,
        determinism,
        no_waiting,
        streams,
        graph,
        dmp,
    )
}


def run(command: list[str], *, timeout: float) -> dict:
    """Runs a command from the root; returns what came of it."""
    begin = time.monotonic()
    try:
        result = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired as late:
        said = b"".join(filter(None, (late.stdout, late.stderr))).decode(errors="replace")[-3000:]
        return {"ok": False, "said": f"took more than {timeout:.0f} s\n{said}", "seconds": timeout}
    said = (result.stdout if result.returncode == 0 else result.stdout + result.stderr)[-3000:]
    seconds = round(time.monotonic() - begin, 1)
    return {"ok": result.returncode == 0, "said": said.strip(), "seconds": seconds}


def commands(folder: pathlib.Path, *, is_quick: bool) -> dict[str, tuple[list[str], float]]:
    """Every check as a command, and its seconds at most."""
    own = [sys.executable, str(pathlib.Path(__file__).resolve()), "--only"]
    chosen = {name: ([*own, name], 45.0) for name in CHECKS if name != "dmp"}
    methods = ["tt", "bmm", "embedding_bag", *(["tbe"] if can_import("fbgemm_gpu") else [])]
    for name, factors in {"embedding_bag": "200,220,250", "embedding_bag_fast": "fast"}.items():
        chosen[name] = (
            [
                *(sys.executable, BENCHMARK, "--device", "cuda", "--methods", ",".join(methods)),
                *("--bags", "16384x1" if is_quick else "16384x1,65536x1"),
                *("--row_factors", factors, "--json", str(folder / f"{name}.json")),
            ],
            90,
        )
    if is_quick:
        return chosen
    if can_import("torchrec"):
        chosen["dmp"] = ([*own, "dmp"], 60)
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer:
        for tool in ("memcheck", "racecheck"):
            chosen[tool] = ([sanitizer, "--tool", tool, "--error-exitcode", "1", *own, "steps"], 60)
    return chosen


def can_import(module: str) -> bool:
    """Whether another process can import it: this one stays as it is."""
    command = [sys.executable, "-c", f"import {module}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", default="runs/gpu_check.json", help="where the report goes")
    parser.add_argument("--only", choices=CHECKS, help="one check, in this process")
    parser.add_argument("--quick", action="store_true", help="without sanitizers and NCCL")
    parser.add_argument("--seconds", type=float, default=570, help="for all checks together")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu-check needs a GPU and a CUDA build of torch, and found none: nothing was run")
        return 2
    if args.only:
        torch.manual_seed(0)
        print(CHECKS[args.only]())
        return 0
    if not cuda_architectures():
        print("gpu-check needs the operators built with TORCHREC_TT_WITH_CUDA=ON: nothing was run")
        return 2
    path = pathlib.Path(args.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "architectures": cuda_architectures(),
        "checks": {},
    }
    end = time.monotonic() + args.seconds
    for name, (command, seconds) in commands(path.parent.resolve(), is_quick=args.quick).items():
        left = end - time.monotonic()
        if left < 5:
            result = {"ok": False, "said": "not run: no time was left", "seconds": 0}
        else:
            result = run(command, timeout=min(seconds, left))
        report["checks"][name] = result
        print(f"{name:<18} {'ok' if result['ok'] else 'FAILED':<7} {result['seconds']:>6} s")
        print("    " + result["said"].replace("\n", "\n    "), flush=True)
        path.write_text(json.dumps(report, indent=2))
    return 0 if all(result["ok"] for result in report["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
