"""A sharded uncompressed model's checkpoint, compressed, in a sharded TT model."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import BATCH_SIZE, batches, kjt, sharded, unsharded
from torchrec_tt import TTConfig, compress, materialize
from torchrec_tt.checkpoint_compression import compress_checkpoint

pytestmark = pytest.mark.slow


def save_dense(rank: int, folder: str) -> None:
    model = DistributedModelParallel(materialize(unsharded()), device=torch.device("cpu"))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


def load_compressed(rank: int, folder: str) -> Tensor:
    model, _ = sharded(unsharded(seed=3), {"t0": "row_wise", "t1": "table_wise"})
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    model.eval()
    (batch,) = batches(1, size=2 * BATCH_SIZE)
    part = kjt(batch, start=rank * BATCH_SIZE, stop=(rank + 1) * BATCH_SIZE)
    return model(part).detach()


def test_a_sharded_checkpoint_becomes_one_of_tt_tables(two_ranks: Ranks, tmp_path: Path) -> None:
    dense, tt = str(tmp_path / "dense"), str(tmp_path / "tt")
    two_ranks.run(save_dense, dense)
    tables = {
        name: TTConfig(
            tt_ranks=list(shape.tt_ranks),
            row_factors=list(shape.row_factors),
            col_factors=list(shape.col_factors),
        )
        for name, shape in unsharded().ebc.tt_shapes.items()
    }
    done = compress_checkpoint(dense, tt, tables)
    assert [table.name for table in done] == list(tables)
    assert all(table.relative_error < 1 for table in done)
    (batch,) = batches(1, size=2 * BATCH_SIZE)
    model = materialize(unsharded())
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=dense)
    model.load_state_dict(state["model"])
    expected = compress(model, tables)(kjt(batch, start=0, stop=2 * BATCH_SIZE))
    outputs = torch.cat(two_ranks.run(load_compressed, tt))
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
