"""Times the lookup beside its rivals in one run: forward, and forward + backward + SGD step.

Methods: ours (`tt`), a bmm per index in plain PyTorch (what TT-Rec's kernel does, chunked to bound
its memory), the same once per distinct id (`dedupe`), TensorLy-Torch's layer (`tltorch`, if it is
installed), nn.EmbeddingBag with a sparse gradient, and FBGEMM's TBE; the last two on the
uncompressed table. They take turns on the same batches, caches are flushed before every call, and
medians are printed, for `tt` with the share of the arithmetic peak of the threads' cores, which is
measured in the same run. `--json` writes a list of records: method, batch_size, pooling, dim, rank,
order, device, threads, isa, forward_ms, train_ms. On a GPU (`--device cuda`) the share is of
`--peak_tflops`, an H200's in float32 unless given.

    OMP_NUM_THREADS=1 python benchmarks/embedding_bag.py --json speed.json
"""

import argparse
import functools
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchrec_tt.modules.table_batched import TTTableBatchedEmbeddingBags
from torchrec_tt.ops.embedding_bag import cpu_isa, cpu_peak_gflops
from torchrec_tt.ops.lookup import TTTable
from torchrec_tt.optim import TTOptimizerConfig
from torchrec_tt.tt.cores import rows as tt_rows
from torchrec_tt.tt.cost import lookup_flops
from torchrec_tt.tt.factorize import make_shape
from torchrec_tt.tt.init import init_cores_
from torchrec_tt.tt.shape import TTShape

NUM_EMBEDDINGS = 10_131_227
LEARNING_RATE = 1e-4
ROWS_AT_ONCE = 8192  # of the bmm per index
Batch = tuple[Tensor, Tensor, Tensor]  # indices [N], offsets [B + 1], grad_output [B, D]
Step = Callable[..., None]


def tt_step(shape: TTShape) -> Step:
    module = TTTableBatchedEmbeddingBags(
        [TTTable(name="table", shape=shape)],
        optimizer=TTOptimizerConfig(learning_rate=LEARNING_RATE),
    )
    init_cores_(module.all_cores(), shape=shape)

    def step(indices: Tensor, offsets: Tensor, grad_output: Tensor, *, train: bool) -> None:
        if train:
            module(indices, offsets).backward(grad_output)
        else:
            with torch.no_grad():
                module(indices, offsets)

    return step


def bmm_step(shape: TTShape) -> Step:
    cores = [torch.empty(size).requires_grad_() for size in shape.core_shapes]
    init_cores_(cores, shape=shape)

    def step(indices: Tensor, offsets: Tensor, grad_output: Tensor, *, train: bool) -> None:
        bags = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
        output = torch.zeros_like(grad_output)
        for begin in range(0, len(indices), ROWS_AT_ONCE):
            part = slice(begin, begin + ROWS_AT_ONCE)
            with torch.set_grad_enabled(train):
                rows = tt_rows(cores, indices[part], shape=shape)
            output.index_add_(0, bags[part], rows.detach())
            if train:
                rows.backward(grad_output.index_select(0, bags[part]))
        if train:
            with torch.no_grad():
                for core in cores:
                    core.add_(core.grad, alpha=-LEARNING_RATE)
                    core.grad = None

    return step


def dedupe_step(shape: TTShape) -> Step:
    cores = [torch.empty(size).requires_grad_() for size in shape.core_shapes]
    init_cores_(cores, shape=shape)

    def step(indices: Tensor, offsets: Tensor, grad_output: Tensor, *, train: bool) -> None:
        with torch.set_grad_enabled(train):
            ids, inverse = torch.unique(indices, return_inverse=True)
            rows = tt_rows(cores, ids, shape=shape)
            output = nn.functional.embedding_bag(
                inverse, rows, offsets, mode="sum", include_last_offset=True
            )
        if train:
            output.backward(grad_output)
            with torch.no_grad():
                for core in cores:
                    core.add_(core.grad, alpha=-LEARNING_RATE)
                    core.grad = None

    return step


def tltorch_step(shape: TTShape) -> Step:
    import tltorch

    layer = tltorch.FactorizedEmbedding(
        shape.num_rows_padded,
        shape.embedding_dim,
        auto_tensorize=False,
        tensorized_num_embeddings=shape.row_factors,
        tensorized_embedding_dim=shape.col_factors,
        factorization="blocktt",
        rank=(1, *shape.tt_ranks, 1),
    )
    optimizer = torch.optim.SGD(layer.parameters(), lr=LEARNING_RATE)

    def step(indices: Tensor, offsets: Tensor, grad_output: Tensor, *, train: bool) -> None:
        with torch.set_grad_enabled(train):
            rows = layer(indices)
            bags = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
            output = torch.zeros_like(grad_output).index_add(0, bags, rows)
        if train:
            output.backward(grad_output)
            optimizer.step()
            optimizer.zero_grad()

    return step


def embedding_bag_step(shape: TTShape) -> Step:
    module = nn.EmbeddingBag(
        shape.num_embeddings,
        shape.embedding_dim,
        mode="sum",
        sparse=True,
        include_last_offset=True,
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)

    def step(indices: Tensor, offsets: Tensor, grad_output: Tensor, *, train: bool) -> None:
        with torch.set_grad_enabled(train):
            output = module(indices, offsets)
        if train:
            output.backward(grad_output)
            optimizer.step()
            optimizer.zero_grad()

    return step


def tbe_step(shape: TTShape) -> Step:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        EmbeddingLocation,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    device = torch.get_default_device()
    location, where = EmbeddingLocation.HOST, ComputeDevice.CPU
    if device.type == "cuda":
        location, where = EmbeddingLocation.DEVICE, ComputeDevice.CUDA
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(shape.num_embeddings, shape.embedding_dim, location, where)],
        optimizer=EmbOptimType.EXACT_SGD,
        learning_rate=LEARNING_RATE,
        device=device,
    )
    module.init_embedding_weights_uniform(-0.01, 0.01)

    def step(indices: Tensor, offsets: Tensor, grad_output: Tensor, *, train: bool) -> None:
        with torch.set_grad_enabled(train):
            output = module(indices, offsets)
        if train:
            output.backward(grad_output)

    return step


STEPS = {
    "tt": tt_step,
    "bmm": bmm_step,
    "dedupe": dedupe_step,
    "tltorch": tltorch_step,
    "embedding_bag": embedding_bag_step,
    "tbe": tbe_step,
}


@functools.cache
def popularity(exponent: float) -> tuple[Tensor, Tensor]:
    """Returns the cumulative Zipf law over the rows, and a scattering of ranks over ids."""
    law = torch.arange(1, NUM_EMBEDDINGS + 1, dtype=torch.float64).pow_(-exponent).cumsum_(0)
    scatter = torch.randperm(NUM_EMBEDDINGS, generator=torch.Generator().manual_seed(1))
    return law / law[-1], scatter


def make_batch(bags: int, pooling: int, *, order: str, exponent: float, dim: int) -> Batch:
    device = torch.get_default_device()
    with torch.device("cpu"):
        batch = _draw(bags, pooling, order=order, exponent=exponent, dim=dim)
    return tuple(tensor.to(device) for tensor in batch)


def _draw(bags: int, pooling: int, *, order: str, exponent: float, dim: int) -> Batch:
    law, scatter = popularity(exponent)
    lengths = torch.full((bags,), 1)
    if pooling > 1:
        lengths = torch.randint(pooling - pooling // 3, pooling + pooling // 3 + 1, (bags,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    uniform = torch.rand(int(offsets[-1]), dtype=torch.float64)
    rank = torch.searchsorted(law, uniform).clamp_(max=NUM_EMBEDDINGS - 1)
    indices = scatter[rank] if order == "scattered" else rank
    return indices, offsets, torch.randn(bags, dim) * 0.01


def measure(
    steps: dict[str, Step],
    batches: list[Batch],
    rounds: int,
    *,
    phases: tuple[str, ...] = ("forward", "train"),
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict]:
    """Returns the median milliseconds of each method in every phase.

    Methods take turns, each with all batches and one before them that does not count: it finds the
    caches as another method left them, which no training does. Between steps 48 MiB of other memory
    (256 MiB on a GPU) are written, as the rest of a model would.
    """
    flush = torch.ones(12 * 2**20 if torch.get_default_device().type == "cpu" else 64 * 2**20)
    times: dict = {name: {phase: [] for phase in phases} for name in steps}
    for turn in range(rounds + 1):  # the first one warms up
        for name, step in steps.items():
            for number, batch in enumerate([batches[-1], *batches]):
                for phase in phases:
                    flush.add_(0.0)
                    begin = clock()
                    step(*batch, train=phase == "train")
                    if turn and number:
                        times[name][phase].append(1e3 * (clock() - begin))
    return {
        name: {phase: statistics.median(values) for phase, values in phases.items()}
        for name, phases in times.items()
    }


def step_flops(shape: TTShape, indices: Tensor) -> float:
    """Returns what our kernels compute in a training step: distinct rows and prefixes once."""
    rows = indices.unique()
    prefixes = (rows // shape.row_factors[-1]).unique()
    heads = (prefixes // shape.row_factors[-2]).unique()
    flops = lookup_flops(
        shape, num_rows=len(rows), num_prefixes=len(prefixes), num_heads=len(heads)
    )
    return flops.forward + flops.backward


def _clock_of_gpu() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def run(args: argparse.Namespace, *, shape: TTShape, size: str) -> list[dict]:
    """Times every method at one shape and batch; prints a line each and returns the records."""
    bags, pooling = map(int, size.split("x"))
    steps = {name: STEPS[name](shape) for name in args.methods}
    batches = [
        make_batch(bags, pooling, order=args.order, exponent=args.zipf, dim=shape.embedding_dim)
        for _ in range(args.batches)
    ]
    on_cpu = args.device == "cpu"
    clock = time.perf_counter if on_cpu else _clock_of_gpu
    times = measure(steps, batches, args.rounds, clock=clock)
    gflop = 1e-9 * statistics.median(step_flops(shape, batch[0]) for batch in batches)
    peak_gflops = args.threads * cpu_peak_gflops() if on_cpu else 1e3 * args.peak_tflops
    peak_ms = 1e3 * gflop / peak_gflops
    records = []
    for name, t in times.items():
        ratio = t["train"] / times.get("tt", t)["train"]
        share = f"{100 * peak_ms / t['train']:>6.0f}" if name == "tt" else ""
        print(
            f"{size:>10} {shape.embedding_dim:>4} {shape.tt_ranks[0]:>4} {name:>14}"
            f" {t['forward']:>11.2f} {t['train']:>9.2f} {ratio:>10.2f} {share}",
            flush=True,
        )
        records.append(
            {
                "method": name,
                "batch_size": bags,
                "pooling": pooling,
                "dim": shape.embedding_dim,
                "rank": shape.tt_ranks[0],
                "order": args.order,
                "device": args.device,
                "threads": args.threads,
                "isa": cpu_isa(),
                "forward_ms": t["forward"],
                "train_ms": t["train"],
            }
        )
    return records


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--bags", default="16384x1", help="BAGSxPOOLING, comma separated")
    parser.add_argument("--dims", default="64", help="comma separated")
    parser.add_argument("--ranks", default="32", help="comma separated")
    parser.add_argument(
        "--row_factors",
        default="200,220,250",
        help="of the TT table, or fast: three of row_strategy='fast'",
    )
    parser.add_argument(
        "--order",
        choices=["scattered", "popular"],
        default="scattered",
        help="whether an id says nothing of its popularity, or is its rank",
    )
    parser.add_argument("--zipf", type=float, default=1.05, help="exponent of the popularity")
    parser.add_argument("--methods", default=",".join(STEPS), help="comma separated")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--peak_tflops", type=float, default=67, help="of the GPU, for % peak")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", choices=["generic", "avx2", "avx512"], help="of `tt`, for a test")
    parser.add_argument("--batches", type=int, default=4, help="different ones")
    parser.add_argument("--rounds", type=int, default=3, help="through the batches, counted")
    parser.add_argument("--json", help="also write the records to this file")
    args = parser.parse_args()
    args.methods = args.methods.split(",")
    if "tltorch" in args.methods and importlib.util.find_spec("tltorch") is None:
        print("tltorch is left out: it is not installed (pip install tensorly-torch)")
        args.methods.remove("tltorch")
    return args


def main() -> None:
    args = parse_arguments()
    if args.isa:
        os.environ["TORCHREC_TT_ISA"] = args.isa  # read at the first use of an operator
    torch.set_num_threads(args.threads)
    torch.set_default_device(args.device)
    torch.manual_seed(0)
    if args.row_factors == "fast":
        factors, num_cores = {"row_strategy": "fast"}, 3
    else:
        row_factors = [int(m) for m in args.row_factors.split(",")]
        factors, num_cores = {"row_factors": row_factors}, len(row_factors)
    where = f"{cpu_isa()}, {args.threads} threads, {platform.machine()}"
    if args.device == "cuda":
        where = torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {where}, ids {args.order}")
    print(
        f"{'bags':>10} {'dim':>4} {'rank':>4} {'method':>14} {'forward ms':>11} {'train ms':>9}"
        f" {'train / tt':>10} {'% peak':>6}"
    )
    records = []
    for dim in args.dims.split(","):
        for rank in args.ranks.split(","):
            shape = make_shape(
                NUM_EMBEDDINGS, int(dim), tt_ranks=[int(rank)] * (num_cores - 1), **factors
            )
            for size in args.bags.split(","):
                records += run(args, shape=shape, size=size)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(records, file, indent=2)


if __name__ == "__main__":
    main()
