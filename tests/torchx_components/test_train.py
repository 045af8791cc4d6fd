from pathlib import Path

import pytest
from torchx.components.component_test_base import ComponentTestCase

from torchx_components import train


def test_torchx_accepts_the_component():
    ComponentTestCase().validate(train, "criteo")


def test_the_component_runs_the_script_under_torchrun():
    app = train.criteo("--epochs", "2", j="2x4", env={"LOGLEVEL": "INFO"})
    (role,) = app.roles
    command = " ".join(role.args)
    assert role.num_replicas == 2
    assert "--nproc_per_node 4" in command
    assert "examples/criteo/train.py --epochs 2" in command
    assert role.env["OMP_NUM_THREADS"] == "1"
    assert role.env["LOGLEVEL"] == "INFO"
    assert (Path(__file__).parents[2] / "examples/criteo/train.py").exists()


def test_a_bad_number_of_nodes_is_refused():
    with pytest.raises(ValueError, match="2x"):
        train.criteo(j="2x")
