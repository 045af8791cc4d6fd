"""Starts large collections in a process of its own and prints what that took, as JSON."""

import json
import os
import resource
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tt import TTEmbeddingBagCollection, TTEmbeddingBagCollectionSharder
from torchrec_tt.distributed.planner.planners import tt_planner
from torchrec_tt.modules.embedding_configs import TTEmbeddingBagConfig

BILLION = 1_000_000_000


def a_billion_rows() -> dict[str, Any]:
    """Plans, shards and steps a table of a billion rows; CPU seconds and bytes beyond the imports.

    CPU seconds, as the machine may have other work.
    """
    after_imports = peak_bytes()
    begin = time.process_time()
    table = TTEmbeddingBagConfig(
        name="t", num_embeddings=BILLION, embedding_dim=64, feature_names=["f"], tt_ranks=[32, 32]
    )
    model = nn.Sequential(TTEmbeddingBagCollection([table], device="meta"))
    sharders = [TTEmbeddingBagCollectionSharder()]
    topology = Topology(world_size=1, compute_device="cpu")
    plan = tt_planner(topology, batch_size=8).collective_plan(model, sharders)
    model = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    features = KeyedJaggedTensor(
        keys=["f"], values=torch.tensor([0, BILLION - 1]), lengths=torch.tensor([1, 1])
    )
    model(features).values().sum().backward()
    return {"seconds": time.process_time() - begin, "bytes": peak_bytes() - after_imports}


def a_hundred_tables_on_16_ranks(rank: int) -> dict[str, Any]:
    """Plans 20 TT and 80 regular tables for 2 nodes of 8 ranks, and makes the shards of a rank."""
    kinds = ["table_wise", "row_wise", "data_parallel", "table_row_wise"]
    configs: list[EmbeddingBagConfig] = []
    for k in range(100):
        size: dict[str, Any] = {"name": f"t{k}", "feature_names": [f"f{k}"], "embedding_dim": 16}
        configs.append(
            TTEmbeddingBagConfig(**size, num_embeddings=10**7 + k, tt_ranks=[16, 16])
            if k % 5 == 0
            else EmbeddingBagConfig(**size, num_embeddings=1000 + k)
        )
    constraints = {
        f"t{k}": ParameterConstraints(sharding_types=[kinds[k // 5 % len(kinds)]])
        for k in range(100)
    }
    collection = TTEmbeddingBagCollection(configs, device="meta")
    sharder = TTEmbeddingBagCollectionSharder()
    topology = Topology(world_size=16, local_world_size=8, compute_device="cpu")
    planner = tt_planner(topology, batch_size=8, constraints=constraints)
    plan = planner.plan(nn.ModuleDict({"ebc": collection}), [sharder]).plan["ebc"]
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = sharder.shard(collection, plan, env, torch.device("cpu"))
    here = [kernel.config.embedding_tables for kernel in sharded._tt_kernels()]
    expected = [
        name
        for name in collection.tt_shapes
        if not plan[name].ranks or rank in plan[name].ranks  # data-parallel: everywhere
    ]
    return {"tables": sorted(t.name for ts in here for t in ts), "expected": sorted(expected)}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        found = {"a_billion_rows": a_billion_rows()}
        dist.destroy_process_group()
    os.environ["LOCAL_WORLD_SIZE"] = "8"
    dist.init_process_group("fake", store=FakeStore(), rank=9, world_size=16)
    found["a_hundred_tables"] = a_hundred_tables_on_16_ranks(9)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
