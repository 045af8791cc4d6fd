"""Finding the newest checkpoint, and reading FBTT-Embedding's state dicts."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torchrec_tt import TTEmbeddingBagCollection, TTEmbeddingBagConfig
from torchrec_tt.checkpoint import from_fbtt, latest
from torchrec_tt.tt.cores import dense
from torchrec_tt.tt.shape import TTShape

SHAPES = [
    TTShape(
        num_embeddings=22,
        embedding_dim=6,
        row_factors=(4, 6),
        col_factors=(2, 3),
        tt_ranks=(5,),
    ),
    TTShape(
        num_embeddings=110,
        embedding_dim=16,
        row_factors=(4, 5, 6),
        col_factors=(2, 2, 4),
        tt_ranks=(3, 5),
    ),
    TTShape(
        num_embeddings=47,
        embedding_dim=24,
        row_factors=(2, 3, 2, 4),
        col_factors=(1, 2, 3, 4),
        tt_ranks=(2, 3, 4),
    ),
]


def fbtt_state_dict(shape: TTShape, *, num_tables: int) -> dict[str, Any]:
    """What the state dict of its TableBatchedTTEmbeddingBag has, without a cache."""
    torch.manual_seed(0)
    state: dict[str, Any] = {"L": torch.ones(shape.num_cores, dtype=torch.int64)}
    for k, (m, width) in enumerate(shape.core_shapes):
        state[f"tt_cores.{k}"] = torch.randn(num_tables, m, width)
        state[f"optimizer_state.optimizer_state{k}"] = torch.zeros(0)
    state["hashtbl"] = torch.empty(0, dtype=torch.int64)
    state["cache_state"] = torch.empty(0, dtype=torch.int64)
    return state


def fbtt_row(state: dict[str, Any], *, table: int, row: int, shape: TTShape) -> Tensor:  # [D]
    """A row as its CUDA kernels compute it.

    `L[k]` is the product of the row factors after k; the digit of core k is the id over `L[k]`, and
    the id goes on as the remainder. The row is the product of the cores' slices, each a row-major
    matrix `[r_k, n_k * r_{k+1}]` to which the result so far is `[columns so far, r_k]`.
    """
    result, rest = torch.ones(1, 1), row
    for k, (r_in, n, r_out) in enumerate(shape.slice_shapes):
        place = math.prod(shape.row_factors[k + 1 :])
        digit, rest = divmod(rest, place)
        piece = state[f"tt_cores.{k}"][table, digit].view(r_in, n * r_out)
        result = (result.view(-1, r_in) @ piece).view(-1, r_out)
    return result.view(shape.embedding_dim)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.num_cores} cores")
def test_a_row_of_an_fbtt_checkpoint_stays_that_row(shape: TTShape) -> None:
    state = fbtt_state_dict(shape, num_tables=2)
    cores = from_fbtt(state, tables={"a": shape, "b": shape})
    for t, name in enumerate("ab"):
        own = [cores[f"embedding_bags.{name}.tt_cores.{k}"] for k in range(shape.num_cores)]
        rows = [fbtt_row(state, table=t, row=i, shape=shape) for i in range(shape.num_embeddings)]
        torch.testing.assert_close(dense(own, shape=shape), torch.stack(rows))


def test_a_collection_loads_an_fbtt_checkpoint() -> None:
    shape = SHAPES[1]
    config = TTEmbeddingBagConfig(
        name="t",
        num_embeddings=110,
        embedding_dim=16,
        feature_names=["f"],
        tt_ranks=[3, 5],
        row_factors=[4, 5, 6],
        col_factors=[2, 2, 4],
    )
    ebc = TTEmbeddingBagCollection([config])
    state = fbtt_state_dict(shape, num_tables=1)
    ebc.load_state_dict(from_fbtt(state, tables=ebc.tt_shapes))
    row = ebc.embedding_bags["t"](torch.tensor([109]), torch.tensor([0, 1]))
    torch.testing.assert_close(row[0], fbtt_row(state, table=0, row=109, shape=shape))


def test_an_fbtt_checkpoint_of_another_shape_is_refused() -> None:
    state = fbtt_state_dict(SHAPES[1], num_tables=1)
    with pytest.raises(ValueError, match=r"tt_cores.0 must have the shape \(2, 4, 6\) for table"):
        from_fbtt(state, tables={"a": SHAPES[1], "b": SHAPES[1]})
    with pytest.raises(ValueError, match=r"tt_cores.0 must have the shape \(1, 4, 10\)"):
        from_fbtt(state, tables={"a": SHAPES[0]})
    with pytest.raises(ValueError, match="one number of cores"):
        from_fbtt(state, tables={})
    extra = {**state, "tt_cores.3": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"must not have 'tt_cores.3'"):
        from_fbtt(extra, tables={"a": SHAPES[1]})
    with pytest.raises(ValueError, match=r"must have 'tt_cores.0', got \['emb_l.0.tt_cores.0'\]"):
        from_fbtt({"emb_l.0.tt_cores.0": torch.zeros(1)}, tables={"a": SHAPES[1]})


def test_cached_rows_of_an_fbtt_checkpoint_are_left_behind_with_a_warning() -> None:
    state = fbtt_state_dict(SHAPES[0], num_tables=1)
    state["cache_state"] = torch.tensor([-1, 0, -1], dtype=torch.int32)
    with pytest.warns(UserWarning, match="cached rows"):
        from_fbtt(state, tables={"a": SHAPES[0]})


def test_latest_is_the_complete_checkpoint_of_the_greatest_step(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") is None
    for name in ("step_9", "step_10", "step_11", "notes"):
        (tmp_path / name).mkdir()
    assert latest(tmp_path) is None
    for name in ("step_9", "step_10", "notes"):
        (tmp_path / name / ".metadata").touch()
    assert latest(str(tmp_path)) == tmp_path / "step_10"
