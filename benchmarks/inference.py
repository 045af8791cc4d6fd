"""Lookups of frozen tables in bfloat16 and INT8 over the same in float32, and what they lose.

speed: a table of 10,131,227 rows, dim 64, rank 32. Each round calls all three on the same batch, in
an order that changes; a figure is the median over the rounds of one call's time over float32's.
`cold`: other memory was read before each call, more than a core's own cache holds, as where a model
has layers.

tables: a TTEmbeddingBagCollection of 26 tables (1,000,000 rows, dim 64, rank 32), one id of each a
sample: as it was trained, in the mode of evaluation, and frozen; medians.

error: of rows, root mean square over that of the rows, with cores as tables draw them; and a model
of 4 tables (100,000 rows, dim 16, rank 16) trained on a planted signal: the error of its rows, and
its logloss on held-out samples.

Prints tables; `--json` writes their lines as records.

    OMP_NUM_THREADS=1 python benchmarks/inference.py
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tt import TTEmbeddingBag, TTEmbeddingBagCollection, TTEmbeddingBagConfig, freeze
from torchrec_tt.inference import FrozenDType
from torchrec_tt.ops.embedding_bag import cpu_isa

ROWS = 10_131_227
CASES = ((16384, 1), (2048, 15), (512, 1), (64, 1), (1, 1))  # bags, ids of each
DTYPES: tuple[FrozenDType, ...] = ("float32", "bfloat16", "int8")
SECTIONS = ("speed", "tables", "error")
OTHER_BYTES = 8 << 20
TRAINED_ROWS, STEPS = 100_000, 600
DIGITS = (1, 50, 2500)  # places of the ids' digits


def measure(
    bags: dict[str, nn.Module], *, num_bags: int, size: int, is_cold: bool, seconds: float
) -> dict[str, list[float]]:
    """Seconds of every call by dtype, round by round."""
    times: dict[str, list[float]] = {dtype: [] for dtype in bags}
    other = torch.zeros(OTHER_BYTES // 4)
    offsets = torch.arange(0, num_bags * size, size)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["int8"]) < 11:
        ids = torch.randint(0, ROWS, (num_bags * size,))
        order = random.sample(list(bags), len(bags))
        bags[order[0]](ids, offsets)  # the first to meet these ids pays for them
        for dtype in order:
            if is_cold:
                other.add_(1)
            begin = time.perf_counter()
            bags[dtype](ids, offsets)
            times[dtype].append(time.perf_counter() - begin)
    return times


def speed(seconds: float) -> list[dict]:
    bag = TTEmbeddingBag(
        ROWS, 64, tt_ranks=[32, 32], row_factors=[200, 220, 250], col_factors=[4, 4, 4], mode="sum"
    )
    bags = {dtype: freeze(bag, dtype) for dtype in DTYPES}
    print(f"{'bags x ids':>12} {'caches':>6} {'float32 us':>11} {'bfloat16':>9} {'int8':>7} rounds")
    records = []
    for num_bags, size in CASES:
        for is_cold in (False, True):
            times = measure(bags, num_bags=num_bags, size=size, is_cold=is_cold, seconds=seconds)
            ratios = {
                dtype: statistics.median(
                    a / b for a, b in zip(times[dtype], times["float32"], strict=True)
                )
                for dtype in DTYPES[1:]
            }
            base = 1e6 * statistics.median(times["float32"])
            title, caches = f"{num_bags}x{size}", "cold" if is_cold else "warm"
            print(
                f"{title:>12} {caches:>6} {base:11.1f} {ratios['bfloat16']:9.3f} "
                f"{ratios['int8']:7.3f} {len(times['int8'])}"
            )
            records.append(
                {"bags": num_bags, "ids": size, "caches": caches, "float32_us": base, **ratios}
            )
    return records


@torch.no_grad()
def tables() -> list[dict]:
    names = [f"t{t}" for t in range(26)]
    collection = TTEmbeddingBagCollection(
        [
            TTEmbeddingBagConfig(
                name=name,
                num_embeddings=1_000_000,
                embedding_dim=64,
                feature_names=[name],
                tt_ranks=[32, 32],
            )
            for name in names
        ]
    ).eval()
    models = {"trained": collection, **{dtype: freeze(collection, dtype) for dtype in DTYPES}}
    print(f"{'samples':>12}" + "".join(f"{name + ' ms':>13}" for name in models))
    records = []
    for samples in (1, 64, 1024):
        ids = torch.randint(0, 1_000_000, (samples * len(names),))
        features = KeyedJaggedTensor(names, ids, lengths=torch.ones_like(ids))
        times: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(50 if samples > 64 else 200):
            for name, model in models.items():
                begin = time.perf_counter()
                model(features)
                times[name].append(1e3 * (time.perf_counter() - begin))
        medians = {name: statistics.median(taken[1:]) for name, taken in times.items()}
        print(f"{samples:12}" + "".join(f"{ms:13.2f}" for ms in medians.values()))
        records.append({"samples": samples, **medians})
    return records


class Model(nn.Module):
    """A sample has one id of each table."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            TTEmbeddingBag(TRAINED_ROWS, 16, tt_ranks=[16, 16], mode="sum") for _ in range(4)
        )
        self.over = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: Tensor) -> Tensor:  # [B, 4] -> [B]
        rows = [bag(ids[:, t : t + 1]) for t, bag in enumerate(self.bags)]
        return self.over(torch.cat(rows, dim=1)).squeeze(1)


def samples(count: int) -> tuple[Tensor, Tensor]:  # [count, 4] and [count]
    """Ids and labels: a sum over the tables of waves over the ids' digits."""
    ids = torch.randint(0, TRAINED_ROWS, (count, 4))
    waves = torch.stack([(ids // place % 50 * 0.37).sin() for place in DIGITS])  # [3, count, 4]
    return ids, torch.bernoulli(waves.sum(dim=(0, 2)).sigmoid())


def trained() -> Model:
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        ids, labels = samples(2048)
        loss = F.binary_cross_entropy_with_logits(model(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def row_error(bag: TTEmbeddingBag, dtype: FrozenDType) -> float:
    ids = torch.arange(0, bag.num_embeddings, 7).unsqueeze(1)
    with torch.no_grad():
        exact = bag(ids)
        return float((freeze(bag, dtype)(ids) - exact).norm() / exact.norm())


@torch.no_grad()
def logloss(model: nn.Module, ids: Tensor, labels: Tensor) -> float:
    return float(F.binary_cross_entropy_with_logits(model(ids), labels))


def error() -> list[dict]:
    records = []
    print(f"{'error of rows':>20} {'bfloat16':>9} {'int8':>9}")
    bags: dict[str, TTEmbeddingBag] = {
        init: TTEmbeddingBag(TRAINED_ROWS, 64, tt_ranks=[32, 32], mode="sum", tt_init=init)
        for init in ("sampled_gaussian", "gaussian", "uniform")
    }
    model = trained()
    bags |= {f"trained {t}": bag for t, bag in enumerate(model.bags)}
    for title, bag in bags.items():
        errors = {dtype: row_error(bag, dtype) for dtype in DTYPES[1:]}
        print(f"{title:>20} {errors['bfloat16']:9.4f} {errors['int8']:9.4f}")
        records.append({"rows": title, **errors})
    ids, labels = samples(100_000)
    losses: dict[str, float] = {
        dtype: logloss(freeze(model, dtype), ids, labels) for dtype in DTYPES
    }
    share = labels.mean()
    losses["constant"] = float(F.binary_cross_entropy(share.expand(len(labels)), labels))
    print("logloss: " + ", ".join(f"{dtype} {loss:.5f}" for dtype, loss in losses.items()))
    return [*records, {"logloss": losses}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", help="speed, tables, error; all if none is given")
    parser.add_argument("--seconds", type=float, default=3.0, help="of every case of speed")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"sections must be of {SECTIONS}, got {sorted(unknown)}")
    torch.manual_seed(0)
    random.seed(0)
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {cpu_isa()}, {threads} thread(s)")
    wanted = args.sections or SECTIONS
    records = speed(args.seconds) if "speed" in wanted else []
    records += tables() if "tables" in wanted else []
    records += error() if "error" in wanted else []
    if args.json:
        args.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
