"""Times tt_planner on TT tables and TorchRec's planner on as many regular ones of the same sizes.

Tables differ in rows and columns; the cluster is 16 GPUs on two nodes, of which
none is needed. Times are of this process's CPU, the enumeration of the options included. Exits
with 1 where tt_planner takes more than 1.2 times TorchRec's.

    python benchmarks/planning_time.py
    python benchmarks/planning_time.py --tables 20
"""

import argparse
import logging
import sys
import time
import warnings

from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_tt import (
    TTEmbeddingBagCollection,
    TTEmbeddingBagCollectionSharder,
    TTEmbeddingBagConfig,
    tt_planner,
)

ROWS, COLUMNS, RANK = (1_000_000, 3_000_000, 10_000_000), (64, 128), 16
BATCH_SIZE, BOUND = 512, 1.2


def model(num_tables: int, *, is_tt: bool) -> nn.Module:
    configs = []
    for i in range(num_tables):
        size = {"num_embeddings": ROWS[i % 3], "embedding_dim": COLUMNS[i % 2]}
        common = {"name": f"t{i}", "feature_names": [f"f{i}"], **size}
        configs.append(
            TTEmbeddingBagConfig(**common, tt_ranks=[RANK, RANK])
            if is_tt
            else EmbeddingBagConfig(**common)
        )
    collection = TTEmbeddingBagCollection if is_tt else EmbeddingBagCollection
    return nn.Sequential(collection(configs, device="meta"))


def seconds_of(
    planner: EmbeddingShardingPlanner, module: nn.Module, sharder: ModuleSharder[nn.Module]
) -> float:
    begin = time.process_time()
    planner.plan(module, [sharder])
    return time.process_time() - begin


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--tables", type=int, default=200, help="of the model")
    parser.add_argument("--ranks", type=int, default=16, help="of the cluster, 8 a node")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # TorchRec's, on every topology and estimator
    warnings.simplefilter("ignore")
    topology = Topology(
        world_size=args.ranks, local_world_size=min(8, args.ranks), compute_device="cuda"
    )
    ours = seconds_of(
        tt_planner(topology, batch_size=BATCH_SIZE),
        model(args.tables, is_tt=True),
        TTEmbeddingBagCollectionSharder(),
    )
    print(f"{args.tables} tables on {args.ranks} ranks")
    print(f"tt_planner, TT tables              {ours:8.1f} s", flush=True)
    stock = seconds_of(
        EmbeddingShardingPlanner(topology=topology, batch_size=BATCH_SIZE, debug=False),
        model(args.tables, is_tt=False),
        EmbeddingBagCollectionSharder(),
    )
    print(f"TorchRec's planner, regular tables {stock:8.1f} s")
    print(f"ratio {ours / stock:.2f}, at most {BOUND}{'' if ours <= BOUND * stock else '  MISSED'}")
    return int(ours > BOUND * stock)


if __name__ == "__main__":
    sys.exit(main())
