"""What the Criteo example measures: quality of predictions, bytes of tables, memory of a rank."""

import dataclasses
import math
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from data import CriteoDataset
from flags import Flags
from model import dense_bytes, table_bytes
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics.functional.classification import binary_auroc
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig

from torchrec_tt import ShardedTTEmbeddingBagCollection, TTEmbeddingBagConfig

_CACHE_SUMS = ("hits", "misses", "fills", "evictions", "bytes")
_Z_95 = 1.959964  # 97.5 % quantile of the normal distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """How good predictions are.

    Args:
        auroc: area under the ROC curve.
        auroc_interval: its 95 % confidence interval.
        logloss: mean cross-entropy in nats.
        normalized_entropy: logloss over that of always predicting the base rate; below 1 is
            better than not looking at the row.
        base_rate: ratio of positive labels.
    """

    auroc: float
    auroc_interval: tuple[float, float]
    logloss: float
    normalized_entropy: float
    base_rate: float

    def __str__(self) -> str:
        low, high = self.auroc_interval
        return (
            f"AUROC {self.auroc:.4f} ({low:.4f} to {high:.4f}), logloss {self.logloss:.4f}, "
            f"normalized entropy {self.normalized_entropy:.4f}, base rate {self.base_rate:.4f}"
        )


def measure(
    logits: Tensor,  # [N]
    labels: Tensor,  # [N] integer 0 or 1
) -> Quality:
    """Returns the quality of the predictions `sigmoid(logits)`.

    Where every label is the same, AUROC and normalized entropy are NaN: they are undefined.
    """
    logits = logits.double()
    logloss = binary_cross_entropy_with_logits(logits, labels.double()).item()
    base_rate = labels.double().mean().item()
    if base_rate in (0.0, 1.0):
        nan = math.nan
        return Quality(
            auroc=nan,
            auroc_interval=(nan, nan),
            logloss=logloss,
            normalized_entropy=nan,
            base_rate=base_rate,
        )
    entropy = -base_rate * math.log(base_rate) - (1 - base_rate) * math.log(1 - base_rate)
    auroc = binary_auroc(logits.sigmoid(), labels).item()
    error = _Z_95 * auroc_standard_error(logits, labels)
    return Quality(
        auroc=auroc,
        auroc_interval=(max(0.0, auroc - error), min(1.0, auroc + error)),
        logloss=logloss,
        normalized_entropy=logloss / entropy,
        base_rate=base_rate,
    )


def auroc_standard_error(
    scores: Tensor,  # [N]
    labels: Tensor,  # [N] integer 0 or 1, both present
) -> float:
    """Returns the standard error of the AUROC of `scores`.

    Its square is var(V10) / m + var(V01) / n over m positives and n negatives, where V10 is a
    positive's ratio of negatives below it and V01 a negative's ratio of positives above it (ties
    count half).

    Reference:
        DeLong, DeLong, Clarke-Pearson, "Comparing the areas under two or more correlated receiver
        operating characteristic curves", Biometrics 44 (1988).
    """
    positives = scores[labels == 1].sort().values  # [m]
    negatives = scores[labels == 0].sort().values  # [n]
    v10 = _ratio_below(negatives, positives)
    v01 = 1 - _ratio_below(positives, negatives)
    variance = sum((v - v.mean()).square().sum() / max(len(v) - 1, 1) / len(v) for v in (v10, v01))
    return math.sqrt(variance)


def embedding_report(
    configs: Sequence[EmbeddingBagConfig],
    sharding_types: Mapping[str, str],  # table name to sharding type
    *,
    dense_configs: Sequence[EmbeddingBagConfig] | None = None,
) -> dict[str, Any]:
    """Returns what the tables weigh, altogether and each.

    Args:
        configs: the tables as they are stored.
        sharding_types: of each.
        dense_configs: what they stand for; None is the same tables.
    """
    dense = sum(dense_bytes(config) for config in dense_configs or configs)
    actual = sum(table_bytes(config) for config in configs)
    return {
        "dense_embedding_bytes": dense,
        "embedding_bytes": actual,
        "compression_ratio": dense / actual,
        "tables": [
            {
                "name": config.name,
                "kind": _kind(config),
                "rows": config.num_embeddings,
                "dim": config.embedding_dim,
                "sharding_type": sharding_types[config.name],
                "bytes": table_bytes(config),
            }
            for config in configs
        ],
    }


def _kind(config: EmbeddingBagConfig) -> str:
    if isinstance(config, TTEmbeddingBagConfig):
        return "tt"
    return "int4" if config.data_type == DataType.INT4 else "dense"


def row_cache_report(model: nn.Module) -> dict[str, dict[str, float]]:
    """Returns what each table's row caches counted, over all ranks; a collective."""
    own = {
        table: counts
        for module in model.modules()
        if isinstance(module, ShardedTTEmbeddingBagCollection)
        for table, counts in module.row_cache_statistics().items()
    }
    ranks: list[dict[str, dict[str, float]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, own)
    report = {}
    for table in sorted({table for rank in ranks for table in rank}):
        total = {
            name: sum(rank[table][name] for rank in ranks if table in rank) for name in _CACHE_SUMS
        }
        lookups = total["hits"] + total["misses"]
        report[table] = {**total, "hit_rate": total["hits"] / lookups if lookups else 0.0}
    return report


def peak_memory_bytes() -> int:
    """Returns the largest resident memory that any rank has had so far; a collective."""
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)  # KiB on Linux
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return int(peak.item())


def run_line(flags: Flags, rows: CriteoDataset) -> str:
    """Returns one line that says what is trained on what, as a claim about AUROC needs it."""
    ranks = dist.get_world_size()
    optimizer = f"Adagrad, eps {flags.eps:g}" if flags.adagrad else "SGD"
    train, val, test = (rows.num_rows(split) for split in ("train", "val", "test"))
    return (
        f"global batch {flags.batch_size * ranks} ({flags.batch_size} on each of {ranks} ranks), "
        f"base learning rate {flags.learning_rate:g} ({optimizer}), {flags.epochs} x {train} "
        f"training rows; validation on {val} rows; the results are of the test split, {test} rows"
    )


def summary(metrics: Mapping[str, Any]) -> str:
    """Returns one line that says how good, and against what."""
    names = [field.name for field in dataclasses.fields(Quality)]
    parts = [str(Quality(**{name: metrics[name] for name in names}))]
    if "best_auroc" in metrics:
        parts.append(f"best reachable {metrics['best_auroc']:.4f}")
    if "dense_auroc" in metrics:
        parts.append(
            f"uncompressed model {metrics['dense_auroc']:.4f} and {metrics['dense_logloss']:.4f} "
            f"in {1 / metrics['time_ratio']:.2f} of the time"
        )
    parts.append(f"embeddings {metrics['compression_ratio']:.1f}x smaller")
    if "row_caches" in metrics:
        hits, misses = (
            sum(table[name] for table in metrics["row_caches"].values())
            for name in ("hits", "misses")
        )
        parts.append(f"{100 * hits / max(1, hits + misses):.1f} % of TT lookups cached")
    parts.append(f"{metrics['samples_per_second']:.0f} samples/s")
    parts.append(f"{100 * metrics['data_wait_ratio']:.1f} % of it waiting for rows")
    parts.append(f"{metrics['peak_memory_bytes'] / 1e6:.0f} MB a rank")
    return ", ".join(parts)


def without_nan(value: Any) -> Any:
    """Returns the value with None for each NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _ratio_below(
    sorted_values: Tensor,  # [m]
    queries: Tensor,  # [n]
) -> Tensor:  # [n]
    left = torch.searchsorted(sorted_values, queries)
    right = torch.searchsorted(sorted_values, queries, right=True)
    return (left + right).double() / (2 * len(sorted_values))
