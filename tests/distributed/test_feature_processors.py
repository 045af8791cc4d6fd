"""TT tables behind feature processors: position weights are learned through the TT lookup."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ShardingType
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import (
    BATCH_SIZE,
    KEYS,
    LR,
    batches,
    full_state,
    kjt,
    sharder,
    tables,
)
from torchrec_tt import TTEmbeddingBagCollection
from torchrec_tt.distributed.planner.planners import TTEmbeddingShardingPlanner, tt_planner
from torchrec_tt.distributed.sharding_plan import TT_COMPUTE_KERNEL

TW, RW, DP = (
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.DATA_PARALLEL.value,
)


class Processed(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.ebc = FeatureProcessedEmbeddingBagCollection(
            TTEmbeddingBagCollection(tables(), is_weighted=True, device=device),
            {key: PositionWeightedModule(max_feature_length=4) for key in KEYS},
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:  # [B, sum of D]
        pooled = self.ebc(features)
        return torch.cat([pooled[key] for key in sorted(pooled.keys())], dim=1)


def planner(types: dict[str, str]) -> TTEmbeddingShardingPlanner:
    constraints = {
        name: ParameterConstraints(sharding_types=[kind]) for name, kind in types.items()
    }
    topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
    return tt_planner(topology, batch_size=BATCH_SIZE, constraints=constraints)


def train_both(rank: int, types: dict[str, str]) -> None:
    """Three SGD steps, sharded and unsharded: outputs, tables and position weights agree."""
    reference = Processed()
    meta = Processed("meta")
    sharders = [FeatureProcessedEmbeddingBagCollectionSharder(ebc_sharder=sharder())]
    plan = planner(types).collective_plan(meta, sharders)
    model = DistributedModelParallel(meta, device=torch.device("cpu"), plan=plan, sharders=sharders)
    model.load_state_dict(copy.deepcopy(reference.state_dict()))
    dense = [p for p in model.parameters() if not hasattr(p, "_in_backward_optimizers")]
    optimizers = [torch.optim.SGD(m, lr=LR) for m in (dense, reference.parameters())]
    start, stop = rank * BATCH_SIZE, (rank + 1) * BATCH_SIZE
    for batch in batches(3, size=2 * BATCH_SIZE):
        output = model(kjt(batch, start=start, stop=stop))
        expected = reference(kjt(batch, start=0, stop=2 * BATCH_SIZE))
        torch.testing.assert_close(output, expected[start:stop], rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.zero_grad()
        output.square().sum().backward()
        (expected.square().sum() / 2).backward()  # gradients are averaged over ranks
        for optimizer in optimizers:
            optimizer.step()
    trained = full_state(model.state_dict())
    assert sum("position_weight" in key for key in trained) == len(KEYS)
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(trained[key], value, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", itertools.product([TW, RW, DP], repeat=2))
def test_position_weights_train_as_unsharded(two_ranks: Ranks, kinds: tuple[str, str]) -> None:
    two_ranks.run(train_both, {"t0": kinds[0], "t1": kinds[1]})


def test_the_planner_refuses_feature_processors_whose_sharder_shards_no_tt_tables() -> None:
    wanted = r"FeatureProcessedEmbeddingBagCollectionSharder\(ebc_sharder=TTEmbeddingBag.*'ebc'"
    with pytest.raises(ValueError, match=wanted):
        planner({}).plan(Processed("meta"), get_default_sharders())


def test_the_planner_knows_tt_tables_behind_feature_processors() -> None:
    sharders = [FeatureProcessedEmbeddingBagCollectionSharder(ebc_sharder=sharder())]
    plan = planner({"r0": TW}).plan(Processed("meta"), sharders).plan
    assert list(plan) == ["ebc"]
    assert plan["ebc"]["t0"].compute_kernel == TT_COMPUTE_KERNEL != plan["ebc"]["r0"].compute_kernel


@pytest.mark.slow
def test_position_weights_train_beside_row_wise_regular_tables(two_ranks: Ranks) -> None:
    # Not r0 too: TorchRec mixes up the weights of f0, which then has two row-wise tables.
    two_ranks.run(train_both, {"t0": RW, "t1": TW, "r0": TW, "r1": RW})
