import pytest
import torch
import torch.distributed as dist
from profiling import profiled


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path, limit_files, capsys):
    path = tmp_path / "trace.json"
    path.write_text("of an earlier run")
    limit_files(100)
    with profiled(path) as profiler:
        for _ in range(20):
            torch.ones(3).sum()
            profiler.step()
    out, err = capsys.readouterr()
    assert "Self CPU %" in out
    assert err == f"warning: {path} cannot be written\n"
    assert not path.exists()
