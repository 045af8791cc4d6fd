import ast
import importlib.metadata
import inspect
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torchx.components import dist
from torchx.components.component_test_base import ComponentTestCase
from torchx.specs.file_linter import validate

from torchx_components import train

ROOT = Path(__file__).parents[2]
COMPONENTS = ["criteo", "ddp"]


def command(app):
    (role,) = app.roles
    assert role.entrypoint == "bash"
    shell_flag, text = role.args
    assert shell_flag == "-c"
    return shlex.split(text)


def isolated(code):
    """Runs Python in a process that has imported nothing, and returns what it prints."""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return run.stdout.split()


# U78; `make test-torchx-nightly` runs it on torchx after 0.7
@pytest.mark.parametrize("name", COMPONENTS)
def test_torchx_accepts_the_component(name):
    assert validate(train.__file__, name) == []
    ComponentTestCase().validate(train, name)


# U78
@pytest.mark.parametrize("name", COMPONENTS)
def test_annotations_are_what_every_torchx_reads(name):
    (function,) = [
        node
        for node in ast.parse(Path(train.__file__).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    arguments = function.args
    assert arguments.kwarg is None
    annotations = {
        ast.unparse(arg.annotation) for arg in (*arguments.args, *arguments.kwonlyargs)
    } | {ast.unparse(arguments.vararg.annotation)}
    assert annotations <= {
        *("str", "int", "bool", "Optional[str]", "Optional[Dict[str, str]]", "Optional[List[str]]")
    }
    assert ast.unparse(function.returns) == "specs.AppDef"


@pytest.mark.parametrize("name", COMPONENTS)
def test_every_argument_is_described(name):
    component = getattr(train, name)
    described = inspect.getdoc(component).partition("Args:")[2]
    for parameter in inspect.signature(component).parameters:
        assert f"\n    {parameter}: " in described


def test_names_and_meanings_are_those_of_dist_ddp():
    theirs = inspect.signature(dist.ddp).parameters
    ours = inspect.signature(train.ddp).parameters
    assert set(theirs) - set(ours) <= {"tee", "metadata", "rdzv_conf"}  # 0.7 has only tee
    assert set(ours) - set(theirs) == {"max_restarts", "python"}
    both = set(ours) & set(theirs) - {"env", "mounts"}  # not Dict and List after 0.7
    assert all(ours[name].annotation == theirs[name].annotation for name in both)


def test_a_script_runs_under_torchrun_on_every_node():
    app = train.ddp("--lr", "a b", script="mine.py", j="2x4", max_restarts=3, name="run")
    (role,) = app.roles
    words = command(app)
    assert (app.name, role.name, role.num_replicas) == ("run", "mine", 2)
    assert words[:5] == [sys.executable, "-m", "torch.distributed.run", "--max_restarts", "3"]
    assert words[words.index("--nproc_per_node") + 1] == "4"
    assert words[-3:] == ["mine.py", "--lr", "a b"]


def test_a_module_runs_in_place_of_a_script():
    assert command(train.ddp("-x", m="my.trainer"))[-3:] == ["-m", "my.trainer", "-x"]


def test_criteo_runs_the_examples_script():
    words = command(train.criteo("--epochs", "2"))
    assert words[-3:] == ["examples/criteo/train.py", "--epochs", "2"]
    assert (ROOT / "examples/criteo/train.py").exists()


@pytest.mark.parametrize("component", [train.criteo, lambda **k: train.ddp(script="x.py", **k)])
def test_what_is_asked_for_reaches_the_job(component):
    app = component(
        cpu=3,
        gpu=1,
        memMB=5000,
        image="mine:1",
        name="night",
        env={"A": "1"},
        max_retries=4,
        rdzv_port=29511,
        mounts=["type=bind", "src=/rows", "dst=/data", "readonly"],
        debug=True,
        j="2x2",
    )
    (role,) = app.roles
    assert (app.name, role.image, role.max_retries) == ("night", "mine:1", 4)
    assert (role.resource.cpu, role.resource.gpu, role.resource.memMB) == (3, 1, 5000)
    assert role.port_map == {"c10d": 29511}
    assert role.env["A"] == "1"
    assert role.env["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    (mount,) = role.mounts
    assert (mount.src_path, mount.dst_path, mount.read_only) == ("/rows", "/data", True)


def test_a_named_resource_replaces_cpu_gpu_and_memory():
    (role,) = train.criteo(h="aws_t3.medium", cpu=64).roles
    assert role.resource.cpu == 2


def test_threads_are_one_a_rank_unless_the_shell_or_env_says_more(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert train.criteo().roles[0].env["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert train.criteo().roles[0].env["OMP_NUM_THREADS"] == "2"
    assert train.criteo(env={"OMP_NUM_THREADS": "4"}).roles[0].env["OMP_NUM_THREADS"] == "4"


def test_restarts_do_not_share_a_store():
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in train.criteo().roles[0].env
    (role,) = train.criteo(max_restarts=1).roles
    assert role.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_an_image_runs_its_own_torchrun_or_the_python_that_is_named():
    assert command(train.criteo(image="mine:1"))[0] == "torchrun"
    words = command(train.criteo(image="mine:1", python="/opt/my env/python"))
    assert words[:3] == ["/opt/my env/python", "-m", "torch.distributed.run"]


def test_a_torchx_without_torch_is_told_what_to_do(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="torch must be installed beside torchx, or --python"):
        train.criteo()
    assert command(train.criteo(python="python3"))[0] == "python3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"j": "2x"}, "2x"),
        ({"j": "2x2x2"}, "2x2x2"),
        ({"j": "0x2"}, "j must be a node and a rank or more, got 0x2"),
        ({"j": "2x0"}, "j must be a node and a rank or more, got 2x0"),
        ({"cpu": 0}, "cpu must be at least 1, got 0"),
        ({"gpu": -1}, "gpu must be at least 0, got -1"),
        ({"memMB": 0}, "memMB must be at least 1, got 0"),
        ({"max_restarts": -1}, "max_restarts must be at least 0, got -1"),
        ({"max_retries": -1}, "max_retries must be at least 0, got -1"),
        ({"rdzv_port": 65536}, "rdzv_port must be in 1 to 65535, got 65536"),
        ({"python": ""}, "python must be an interpreter, got ''"),
    ],
)
def test_numbers_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        train.criteo(**arguments)


def test_ddp_wants_a_script_or_a_module():
    with pytest.raises(ValueError, match="exactly one of --script and -m"):
        train.ddp()


def test_the_module_imports_neither_torch_nor_torchrec():
    loaded = isolated("import sys, torchx_components.train; print(*sys.modules)")
    assert "torchx.components.dist" in loaded
    assert {"torch", "torchrec", "torchrec_tt"}.isdisjoint(loaded)


@pytest.mark.slow
def test_torchxs_own_components_stay_listed():
    run = subprocess.run(
        [sys.executable, "-m", "torchx.cli.main", "builtins"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {"dist.ddp", "dist.spmd", "utils.echo"} <= set(run.stdout.split())
    points = importlib.metadata.entry_points(group="torchx.components")
    assert not [point for point in points if point.value.startswith("torchrec_tt")]


# U76
def test_the_extra_asks_for_plain_torchx_which_pins_no_torch():
    ours = [text for text in importlib.metadata.requires("torchrec_tt") if "torchx" in text]
    assert [text.replace('"', "'") for text in ours] == ["torchx>=0.7; extra == 'torchx'"]
    theirs = [text for text in importlib.metadata.requires("torchx") if "extra ==" not in text]
    assert not [text for text in theirs if text.startswith("torch")]


# U77
@pytest.mark.slow
def test_the_package_needs_no_torchx_and_so_takes_any_urllib3():
    needed = [text for text in importlib.metadata.requires("torchrec_tt") if "extra" not in text]
    assert not [text for text in needed if text.startswith(("torchx", "urllib3"))]
    loaded = isolated(
        "import sys, torchrec_tt, torchrec_tt.cli\n"
        "[getattr(torchrec_tt, name) for name in torchrec_tt.__all__]\n"
        "print(*sys.modules)"
    )
    assert "torchrec" in loaded
    assert {"torchx", "urllib3"}.isdisjoint(loaded)
