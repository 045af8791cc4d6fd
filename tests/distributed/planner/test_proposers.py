from torchrec.distributed.planner.types import Topology

from tests.distributed.toy_model import ToyModel, tables
from torchrec_tt import TTEmbeddingBagCollection, TTEmbeddingBagCollectionSharder, tt_planner
from torchrec_tt.distributed.planner.proposers import TTUniformProposer


def proposals() -> list[dict[str, str]]:
    """The sharding type of each table, by proposal."""
    topology = Topology(world_size=2, compute_device="cpu")
    enumerator = tt_planner(topology, batch_size=8)._enumerator
    model = ToyModel(TTEmbeddingBagCollection(tables(), device="meta"))
    proposer = TTUniformProposer()
    proposer.load(enumerator.enumerate(model, [TTEmbeddingBagCollectionSharder()]))
    found = []
    while (proposal := proposer.propose()) is not None:
        found.append({option.name: option.sharding_type for option in proposal})
        proposer.feedback(partitionable=True)
    return found


def test_every_pair_of_a_type_for_tt_tables_and_one_for_others_is_proposed_once() -> None:
    found = proposals()
    pairs = [(proposal["t0"], proposal["r0"]) for proposal in found]
    assert len(set(pairs)) == len(pairs) == 3 * 4
    for proposal in found:
        assert proposal["t0"] == proposal["t1"]
        assert proposal["r0"] == proposal["r1"]
    assert ("table_wise", "table_wise") in pairs
    assert ("row_wise", "data_parallel") in pairs
