import io
import sys

import log
import pytest
import torch.distributed as dist
from tqdm import tqdm


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_terminal_gets_a_bar(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    with log.Log(None).steps("epoch 0", first=3, total=5) as bar:
        assert isinstance(bar, tqdm)
        bar.update(2)
    assert "epoch 0: 100%" in terminal.getvalue()
    assert "| 5/5 [" in terminal.getvalue()


def test_tensorboard_is_refused_where_it_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="--tensorboard_dir needs the package tensorboard"):
        log.Log(str(tmp_path))


def test_a_folder_that_cannot_be_written_is_found_early(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        log.check_writable(tmp_path / "file" / "folder")


def test_a_disk_that_is_full_is_found_early(tmp_path, limit_files):
    limit_files(100)
    with pytest.raises(OSError, match=f"File too large: '{tmp_path}'"):
        log.check_writable(tmp_path)
    assert not list(tmp_path.iterdir())


def test_tensorboard_ends_with_a_warning_where_the_disk_becomes_full(tmp_path, limit_files, capfd):
    found = log.Log(str(tmp_path))
    limit_files(200)
    for step in range(20):
        found.scalars("train", {"loss": 1.0}, step=step)
    found.close()
    found.scalars("train", {"loss": 1.0}, step=20)
    (line,) = capfd.readouterr().err.splitlines()
    assert line == f"warning: --tensorboard_dir {tmp_path} ends here: [Errno 27] File too large"
