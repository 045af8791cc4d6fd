import torch

import torchrec_tt
from torchrec_tt import cli


def test_u86_doctor_prints_versions_and_that_the_operators_are_ready(capsys):
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert torchrec_tt.__version__ in printed
    assert torch.__version__ in printed
    assert "ready" in printed


def test_u86_doctor_says_what_is_wrong_and_what_is_supported(capsys, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "found 2.9.1" in printed
    assert "supported: torch 2.11 to 2.15" in printed
