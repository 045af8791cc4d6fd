"""Measures the planner's coefficients of this machine, in about a minute."""

import logging
import math
import os
import pickle
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.estimator.estimator import compute_block_usage_penalty
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tt.distributed.planner.hardware import DENSE_UPDATE_PASSES, KNOWN, Hardware
from torchrec_tt.modules.table_batched import TTTableBatchedEmbeddingBags
from torchrec_tt.ops.lookup import TTTable
from torchrec_tt.optim import TTOptimizerConfig
from torchrec_tt.tt.cost import step_work
from torchrec_tt.tt.factorize import RowStrategy, make_shape
from torchrec_tt.tt.shape import TTShape
from torchrec_tt.tt.traffic import expected_prefixes


class _Case(NamedTuple):
    """A TT table of three cores and a batch."""

    num_rows: int
    dim: int
    rank: int
    bags: int
    pooling: int
    row_strategy: RowStrategy

    def shape(self) -> TTShape:
        tt_ranks = [self.rank, self.rank]
        return make_shape(
            self.num_rows, self.dim, tt_ranks=tt_ranks, row_strategy=self.row_strategy
        )


_CASES = (  # from small to large in every term
    _Case(10_000_000, 64, 32, 2048, 1, "balanced"),
    _Case(10_000_000, 64, 32, 2048, 8, "fast"),
    _Case(10_000_000, 16, 32, 4096, 1, "balanced"),
    _Case(10_000_000, 16, 32, 2048, 10, "fast"),
    _Case(1_000_000, 32, 16, 2048, 4, "balanced"),
    _Case(1_000_000, 128, 64, 1024, 1, "fast"),
    _Case(300_000, 16, 8, 8192, 1, "balanced"),
    _Case(5_000_000, 64, 16, 256, 1, "balanced"),
    _Case(5_000_000, 64, 16, 8192, 2, "balanced"),
    _Case(2_000_000, 32, 32, 4096, 5, "fast"),
    _Case(1_000_000, 32, 32, 64, 1, "balanced"),
    _Case(100_000, 16, 16, 16_384, 10, "balanced"),
)
_REPEATS = 9
_MAX_RANKS = 256  # processes, each with its own PyTorch
_SMALL_BYTES, _LARGE_BYTES = 2**18, 2**22  # of the collectives: the slope between them counts
_DENSE_ROWS = 2**16  # of the data-parallel table, of 32 columns
_COLLECTIVES = ("all_to_all", "reduce_scatter", "all_gather", "all_reduce")
_STEPS: dict[str, tuple[str, ...]] = {
    "table_wise": ("table_wise",),
    "row_wise": ("row_wise",),
    "both": ("table_wise", "row_wise"),
    "data_parallel": ("data_parallel",),
    "dense": ("dense",),  # one large data-parallel table
}

Measured = dict[str, list[float]]


def calibrate(*, ranks: int = 2, name: str = "this machine") -> Hardware:
    """Returns the coefficients of this machine's CPU, measured over `ranks` processes at once.

    Every rank has one thread, as `OMP_NUM_THREADS=1` gives, and all are busy at the same time: they
    share the memory and the cores as in training. What the measurements do not show (the network
    between nodes, a term that is lost in noise) is taken from the built-in "cpu".

    Args:
        ranks: processes, two or more: as many as train on a machine.
        name: of the result.

    Raises:
        ValueError: for fewer than 2 ranks or more than 256.
        RuntimeError: if the measurements make no sense, as on a machine that others keep busy.
    """
    if not 2 <= ranks <= _MAX_RANKS:
        raise ValueError(f"ranks must be in [2, {_MAX_RANKS}], got {ranks}")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "measured")
        mp.spawn(_run_rank, args=(ranks, port, path), nprocs=ranks)
        measured: Measured = pickle.loads(path.read_bytes())
    return _hardware(measured, ranks=ranks, name=name)


def _run_rank(rank: int, world_size: int, port: int, path: Path) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # TorchRec's, on every rank
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(rank)
    measured = {
        **{f"tt {i}": _tt_ms(case) for i, case in enumerate(_CASES)},
        "rows": [_row_bytes_per_ms(16, num_rows=2_000_000)],
        "long rows": [_row_bytes_per_ms(64, num_rows=500_000)],
        **{name: [_bytes_per_ms(name)] for name in _COLLECTIVES},
        **{f"step {name}": [_step_ms(kinds)] for name, kinds in _STEPS.items()},
    }
    everyone: list[Measured] = [{} for _ in range(world_size)]
    dist.all_gather_object(everyone, measured)
    if rank == 0:  # the mean over the ranks
        mean = {
            key: [
                statistics.fmean(values) for values in zip(*(m[key] for m in everyone), strict=True)
            ]
            for key in measured
        }
        path.write_bytes(pickle.dumps(mean))
    dist.barrier()
    dist.destroy_process_group()


def _milliseconds(call: Callable[[], object], *, repeats: int = _REPEATS) -> float:
    """Median time of a call that every rank makes."""
    call()
    dist.barrier()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def _ids(num_rows: int, count: int) -> Tensor:
    """Ids that follow Zipf's law of exponent 1, scattered over the rows."""
    popularity = torch.pow(float(num_rows + 1), torch.rand(count, dtype=torch.float64)).long() - 1
    return (popularity.clamp_(0, num_rows - 1) * 2_654_435_761) % num_rows


def _tt_ms(case: _Case) -> list[float]:
    """Milliseconds of a TT table's forward, of its backward with an SGD step; distinct rows."""
    module = TTTableBatchedEmbeddingBags(
        [TTTable(name="t", shape=case.shape())],
        optimizer=TTOptimizerConfig(optimizer="sgd", learning_rate=0.01),
    )
    for core in module.all_cores():
        nn.init.normal_(core, 0, 0.1)
    indices = _ids(case.num_rows, case.bags * case.pooling)
    offsets = torch.arange(case.bags + 1) * case.pooling
    grad = torch.randn(case.bags, case.dim)
    module(indices, offsets).backward(grad)
    dist.barrier()
    forward, backward = [], []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        output = module(indices, offsets)
        middle = time.perf_counter()
        output.backward(grad)
        forward.append(1e3 * (middle - begin))
        backward.append(1e3 * (time.perf_counter() - middle))
    return [
        statistics.median(forward),
        statistics.median(backward),
        float(len(indices.unique())),
    ]


def _row_bytes_per_ms(dim: int, *, num_rows: int, bags: int = 8192) -> float:
    """Speed of FBGEMM's TBE, its bytes counted as TorchRec counts those of a table-wise table."""
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(num_rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_SGD,
        learning_rate=0.01,
    )
    indices, offsets = _ids(num_rows, bags), torch.arange(bags + 1)
    grad = torch.randn(bags, dim)
    ms = _milliseconds(lambda: table(indices, offsets).backward(grad))
    counted = bags * (8 + 4 * max(dim, 32) + 4 * dim) * compute_block_usage_penalty(dim)
    return 3 * counted / ms  # backward counts twice


def _bytes_per_ms(collective: str) -> float:
    """Speed of a collective: of a rank's buffer, beyond the time of a small one."""
    small, large = (_collective_ms(collective, size) for size in (_SMALL_BYTES, _LARGE_BYTES))
    return (_LARGE_BYTES - _SMALL_BYTES) / max(large - small, 1e-2)


def _collective_ms(name: str, num_bytes: int) -> float:
    size = dist.get_world_size()
    whole = torch.zeros(num_bytes // 4 // size * size)
    other, part = torch.zeros_like(whole), torch.zeros(len(whole) // size)
    calls: dict[str, Callable[[], object]] = {
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "all_reduce": lambda: dist.all_reduce(whole),
    }
    return _milliseconds(calls[name], repeats=2 * _REPEATS)


def _step_ms(kinds: tuple[str, ...], *, num_tables: int = 4, batch_size: int = 32) -> float:
    """Milliseconds of a step of small tables, their sharding types taking turns."""
    rows = _DENSE_ROWS if kinds == ("dense",) else 64
    configs = [
        EmbeddingBagConfig(
            name=f"t{i}", num_embeddings=rows, embedding_dim=32, feature_names=[f"f{i}"]
        )
        for i in range(1 if kinds == ("dense",) else num_tables)
    ]
    world_size = dist.get_world_size()
    makers: dict[str, Callable[[int], ParameterShardingGenerator]] = {
        "table_wise": lambda i: table_wise(rank=i % world_size, compute_kernel="fused"),
        "row_wise": lambda i: row_wise(compute_kernel="fused"),
        "data_parallel": lambda i: data_parallel(),
        "dense": lambda i: data_parallel(),
    }
    collection = EmbeddingBagCollection(tables=configs, device=torch.device("cpu"))
    sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD})
    plan = construct_module_sharding_plan(
        collection,
        {c.name: makers[kinds[i % len(kinds)]](i) for i, c in enumerate(configs)},
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = sharder.shard(collection, plan, env, torch.device("cpu"))
    optimizer = torch.optim.SGD([p for p in sharded.parameters() if p.numel()], lr=0.01)
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=[f for config in configs for f in config.feature_names],
        values=torch.randint(rows, (len(configs) * batch_size,)),
        lengths=torch.ones(len(configs) * batch_size, dtype=torch.int64),
    )

    def step() -> None:
        optimizer.zero_grad()
        sharded(features).values().sum().backward()
        optimizer.step()

    return _milliseconds(step)


def _hardware(measured: Measured, *, ranks: int, name: str) -> Hardware:
    known = KNOWN["cpu"]
    speed = _fit(measured)
    if speed[0] is None or speed[2] is None:
        raise RuntimeError(
            "times must grow with the work, but those measured did not: calibrate again when "
            "nothing else keeps this machine busy"
        )
    steps = {kind: measured[f"step {kind}"][0] for kind in _STEPS}
    step_ms = max(0.0, steps["table_wise"] + steps["row_wise"] - steps["both"])
    fixed = {
        kind: max(0.0, steps[kind] - step_ms)
        for kind in ("table_wise", "row_wise", "data_parallel")
    }
    all_reduce = measured["all_reduce"][0] * 2 * (ranks - 1) / ranks
    dense_bytes = _DENSE_ROWS * 32 * 4
    sweep_ms = steps["dense"] - steps["data_parallel"] - dense_bytes / measured["all_reduce"][0]
    sweep = DENSE_UPDATE_PASSES * dense_bytes / sweep_ms if sweep_ms > 0 else math.inf
    return Hardware(
        name=name,
        device="cpu",
        is_estimate=False,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks,
        flops_per_ms=speed[0],
        core_bytes_per_ms=speed[1] or known.core_bytes_per_ms,
        pool_bytes_per_ms=speed[2],
        row_bytes_per_ms=math.sqrt(measured["rows"][0] * measured["long rows"][0]),
        sweep_bytes_per_ms=min(sweep, known.core_bytes_per_ms),
        all_to_all_bytes_per_ms=measured["all_to_all"][0],
        reduce_scatter_bytes_per_ms=measured["reduce_scatter"][0],
        all_gather_bytes_per_ms=measured["all_gather"][0],
        all_reduce_bytes_per_ms=all_reduce,
        inter_node_bytes_per_ms=known.inter_node_bytes_per_ms,
        table_ms=3 / speed[3] if speed[3] else known.table_ms,
        step_ms=step_ms,
        sharding_ms={**fixed, "table_row_wise": fixed["table_wise"] + fixed["row_wise"]},
    )


def _fit(measured: Measured) -> list[float | None]:
    """Flops, core bytes, pooled bytes and calls per ms that explain the TT cases; see `Hardware`.

    Least squares of the relative errors, outliers weighing less (as in a fit of absolute errors);
    None for a term without a positive coefficient.
    """
    terms, times = [], []
    for i, case in enumerate(_CASES):
        forward, backward, num_rows = measured[f"tt {i}"]
        shape = case.shape()
        prefixes = expected_prefixes(
            num_rows,
            num_values=case.num_rows,
            num_prefixes=math.prod(shape.row_factors[:-1]),
        )
        work = step_work(shape, num_rows=num_rows, num_prefixes=prefixes)
        indices, row = case.bags * case.pooling, 4 * case.dim
        pooled = indices * (row + 48) + case.bags * row
        summed = indices * row + 2 * num_rows * row
        terms.append([work.forward_flops, work.forward_bytes, pooled, 1.0])
        moved = work.backward_bytes + work.update_bytes
        terms.append([work.backward_flops, moved, summed, 2.0])
        times += [forward, backward]
    relative = torch.tensor(terms, dtype=torch.float64) / torch.tensor(times).double()[:, None]
    scale = relative.norm(dim=0)
    matrix, active = relative / scale, list(range(4))
    weights = torch.ones(len(times), dtype=torch.float64)
    for _ in range(12):
        a = matrix[:, active] * weights[:, None]
        solution = torch.linalg.lstsq(a, weights[:, None]).solution[:, 0]
        if bool((solution <= 0).any()):
            active.remove(active[int(solution.argmin())])
            continue
        residual = (matrix[:, active] @ solution - 1).abs()
        weights = 1 / residual.clamp(min=0.02).sqrt()
    result: list[float | None] = [None] * 4
    for place, value in zip(active, solution.tolist(), strict=True):
        result[place] = float(scale[place]) / value if value > 0 else None
    return result
