import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.test_compression import RANKS, batch, dlrm
from torchrec_tt import TTConfig, compress
from torchrec_tt.checkpoint_compression import compress_checkpoint
from torchrec_tt.cli import main
from torchrec_tt.tt.row_order import similarity_order

ORDERED = "tables: {{large: {{tt_ranks: [2, 2]}}}}\nrow_orders: {{{}}}"
KEY = "sparse_arch.embedding_bag_collection.embedding_bags.large"


def tt_model() -> nn.Module:
    torch.manual_seed(5)
    model = dlrm()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return compress(model, {"large": TTConfig(tt_ranks=RANKS)})


def save(path: Path, state: dict[str, Any], *, is_folder: bool) -> None:
    dcp.save(state, checkpoint_id=path) if is_folder else torch.save(state, path)


def load(path: Path, state: dict[str, Any], *, is_folder: bool) -> dict[str, Any]:
    if not is_folder:
        return torch.load(path, weights_only=True)
    dcp.load(state, checkpoint_id=path)
    return state


@pytest.mark.parametrize("is_folder", [True, False], ids=["dcp", "torch.save"])
def test_a_checkpoint_loads_into_the_compressed_model(tmp_path: Path, is_folder: bool) -> None:
    source = dlrm()
    inputs = torch.randn(2, 3)
    optimizer = torch.optim.Adagrad(source.parameters())
    source(inputs, batch()).sum().backward()
    expected = source(inputs, batch())
    state = {"model": source.state_dict(), "step": 7}
    save(tmp_path / "dense", state | {"optimizer": optimizer.state_dict()}, is_folder=is_folder)
    config = tmp_path / "tt.yaml"
    config.write_text(f"tables:\n  large: {{tt_ranks: {RANKS}}}\n")
    paths = [str(tmp_path / name) for name in ("dense", "tt")]
    assert main(["compress", *paths, "--config", str(config), "--json"]) == 0
    model = tt_model()
    loaded = load(tmp_path / "tt", {"model": model.state_dict(), "step": 0}, is_folder=is_folder)
    assert loaded["step"] == 7
    model.load_state_dict(loaded["model"])
    torch.testing.assert_close(model(inputs, batch()), expected, rtol=1e-4, atol=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "tt", "tt.yaml"]


@pytest.mark.parametrize("order", ["similarity", "order.pt"])
@pytest.mark.parametrize("is_folder", [True, False], ids=["dcp", "torch.save"])
def test_rows_in_another_order_load_into_the_model_that_keeps_it(
    tmp_path: Path, is_folder: bool, order: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = dlrm()
    inputs = torch.randn(2, 3)
    source(inputs, batch()).sum().backward()
    source_state = source.state_dict()
    momentum = {f"state.{KEY.replace('large', 'small')}.weight.momentum": torch.ones(30, 8)}
    state = {"model": source_state, "optimizer": momentum}
    save(tmp_path / "dense", state, is_folder=is_folder)
    by_hand = torch.randperm(120)
    torch.save(by_hand, tmp_path / "order.pt")
    named = order if order == "similarity" else str(tmp_path / order)
    config = tmp_path / "tt.yaml"
    tables = "tables: {large: {tt_ranks: [2, 2]}}"
    config.write_text(f"{tables}\nrow_orders: {{large: {named}}}\n")
    paths = [str(tmp_path / name) for name in ("dense", "tt")]
    assert main(["compress", *paths, "--config", str(config), "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert table["order_bytes"] == 4 * 120

    weight = source_state[f"{KEY}.weight"]
    expected_order = similarity_order(weight, group_size=5) if order == "similarity" else by_hand
    expected = compress(
        source, {"large": TTConfig(tt_ranks=[2, 2])}, row_orders={"large": expected_order}
    )
    torch.manual_seed(5)
    fresh = dlrm()
    for parameter in fresh.parameters():
        nn.init.normal_(parameter)
    model = compress(
        fresh, {"large": TTConfig(tt_ranks=[2, 2])}, row_orders={"large": torch.arange(120)}
    )
    inside = KEY.replace("embedding_bag_collection.", "embedding_bag_collection.collection.")
    moved = {f"state.{inside.replace('large', 'small')}.weight.momentum": torch.zeros(30, 8)}
    loaded = load(
        tmp_path / "tt", {"model": model.state_dict(), "optimizer": moved}, is_folder=is_folder
    )
    model.load_state_dict(loaded["model"])
    assert loaded["optimizer"][next(iter(moved))].sum() == 30 * 8
    torch.testing.assert_close(model(inputs, batch()), expected(inputs, batch()))


def test_a_row_order_of_a_table_in_a_mapping_of_its_own_is_refused(tmp_path: Path) -> None:
    torch.save({"embedding_bags": {"large": {"weight": torch.randn(60, 4)}}}, tmp_path / "dense")
    tables, orders = {"large": TTConfig(tt_ranks=[2, 2])}, {"large": torch.arange(60)}
    with pytest.raises(ValueError, match=r"row_orders\['large'\] must be .* in one key.*'weight'"):
        compress_checkpoint(tmp_path / "dense", tmp_path / "tt", tables, row_orders=orders)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]
    compress_checkpoint(tmp_path / "dense", tmp_path / "tt", tables)


def test_the_command_says_bytes_and_error_of_each_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(dlrm().state_dict(), tmp_path / "dense.pt")
    config = tmp_path / "tt.yaml"
    config.write_text("tables:\n  large: {tt_ranks: [2, 3], data_type: bf16}\n")
    arguments = [str(tmp_path / "dense.pt"), str(tmp_path / "tt.pt"), "--config", str(config)]
    assert main(["compress", *arguments, "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    cores = [torch.load(tmp_path / "tt.pt")[f"{KEY}.tt_cores.{k}"] for k in range(3)]
    assert table["num_bytes"] == sum(core.nbytes for core in cores)
    assert table["dense_bytes"] == 120 * 8 * 4
    assert 0.01 < table["relative_error"] < 0.9
    assert cores[0].dtype == torch.bfloat16
    assert main(["compress", *arguments]) == 1
    assert "target must not exist yet" in capsys.readouterr().err


def test_state_of_a_compressed_table_is_left_out_and_the_rest_kept(tmp_path: Path) -> None:
    state = {
        "model": {"embedding_bags.a.weight": torch.randn(60, 4), "over.weight": torch.ones(2)},
        "optimizer": {
            "state.embedding_bags.a.weight.momentum": torch.ones(60, 4),
            "state.over.weight.momentum": torch.ones(2),
        },
    }
    dcp.save(state, checkpoint_id=tmp_path / "dense")
    compress_checkpoint(tmp_path / "dense", tmp_path / "tt", {"a": TTConfig(tt_ranks=[3, 3])})
    keys = dcp.FileSystemReader(tmp_path / "tt").read_metadata().state_dict_metadata
    cores = {f"model.embedding_bags.a.tt_cores.{k}" for k in range(3)}
    assert set(keys) == {"model.over.weight", "optimizer.state.over.weight.momentum", *cores}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tables: {larg: {tt_ranks: [2, 2]}}", "got 'larg'; the nearest is 'large'"),
        ("tables: {large: {tt_rank: [2, 2]}}", "nearest is 'tt_ranks'"),
        ("tables: {large: {}}", "'large'.*exactly one of tt_ranks and max_error"),
        ("tables: {}", "must name a table"),
        ("tables: {large: {tt_ranks: [2, 2], row_factors: [2, 3, 4]}}", "120 x 8.*row_factors"),
        ("tables: {large: {tt_ranks: [2, 2], cache: {num_rows: 4}}}", "cache must be left out"),
        ("tables: {nan: {tt_ranks: [2, 2]}}", "'nan'.*finite"),
        (ORDERED.format("small: similarity"), "row_orders must be of .*'large'.*got 'small'"),
        (ORDERED.format("large: 3"), "row_orders.large must be str"),
        (ORDERED.format("large: nowhere.pt"), "nowhere.pt"),
        (ORDERED.format("large: ORDER"), r"row_orders.'large'. must have shape .120.*got .30."),
    ],
)
def test_bad_input_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    state = dlrm().state_dict()
    state["embedding_bags.nan.weight"] = torch.full((30, 4), torch.nan)
    dcp.save(state, checkpoint_id=tmp_path / "dense")
    config = tmp_path / "tt.yaml"
    order = tmp_path.with_name(f"{tmp_path.name}.pt")
    torch.save(torch.arange(30), order)
    config.write_text(text.replace("ORDER", str(order)))
    paths = [str(tmp_path / name) for name in ("dense", "tt")]
    assert main(["compress", *paths, "--config", str(config)]) == 1
    assert pytest.RaisesExc(match=words).matches(ValueError(capsys.readouterr().err))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "tt.yaml"]


def test_a_source_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="source must be a folder"):
        compress_checkpoint(tmp_path, tmp_path / "tt", {"a": TTConfig(tt_ranks=[2, 2])})
