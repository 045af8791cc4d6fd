import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "examples" / "criteo" / "README.md"


def commands(section):
    text = README.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    return text.split("```")[1].strip().splitlines()


@pytest.mark.slow
def test_u72_commands_for_getting_the_data_run_as_written(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    lines = commands("Getting the data")
    assert len(lines) == 4
    for line in lines:
        program, *args = shlex.split(line)
        assert program == "python"
        run = subprocess.run(
            [sys.executable, *args],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert run.returncode == 0, (line, run.stderr)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("examples", "train.txt", "criteo_npy", "runs"),
    }
