"""python -m fsdp_c launch: scripts that know nothing of fsdp_c run with it."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fsdp_c.integrations import _launch
from helpers.frameworks import MLP_TASK, STEPS, Unsharded, litgpt_task, require
from helpers.reference import assert_same_tensors

ROOT = Path(__file__).resolve().parents[2]


def _launch_words(
    *words: str, path: str = "", **env: str
) -> "subprocess.CompletedProcess[str]":
    paths = os.pathsep.join(filter(None, [path, str(ROOT)]))
    return subprocess.run(
        [sys.executable, "-m", "fsdp_c", "launch", *words],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_python_without_torch_stays_without_it(tmp_path: Path) -> None:
    """And the sitecustomize that was there before still runs, also in children."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.was_customized = True\n"
    )
    program = (
        "import importlib.util, json, os, subprocess, sys\n"
        "assert sys.was_customized\n"
        "assert sys.modules['sitecustomize'].__file__.startswith(sys.argv[1])\n"
        "assert os.environ['FSDP_C_INSTALL'] == '1'\n"
        "importlib.util.find_spec('accelerate')  # whether it is there\n"
        "assert 'torch' not in sys.modules and 'fsdp_c' not in sys.modules\n"
        "assert not any(path.endswith('_startup') for path in sys.path)\n"
        "if len(sys.argv) == 2:\n"
        "    again = [sys.executable, *sys.orig_argv[1:], 'child']\n"
        "    subprocess.run(again, check=True)\n"
        "    print('done')\n"
    )
    done = _launch_words("python", "-c", program, str(tmp_path), path=str(tmp_path))
    assert done.stdout == "done\n", done.stderr


SCRIPT = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict  # imports torch's FSDP in its middle
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

assert torch.distributed.checkpoint.state_dict.FSDP is FSDP
from torch.distributed.fsdp import fully_shard

assert fully_shard.__module__.startswith("fsdp_c.")
kwargs = {}
if len(sys.argv) > 1:
    kwargs = {"init_method": f"file://{sys.argv[1]}", "rank": 0, "world_size": 1}
dist.init_process_group("gloo", **kwargs)
torch.manual_seed(0)
model = FSDP(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
model(torch.ones(2, 4)).sum().backward()
print(f"{type(model).__module__} rank {dist.get_rank()}")
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "runs", ["alone", pytest.param("torchrun", marks=pytest.mark.only_full)]
)
def test_a_script_of_torch(tmp_path: Path, runs: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = [str(script), str(tmp_path / "store")]
    if runs == "torchrun":
        words = ["torchrun", "--standalone", "--nproc-per-node=1", str(script)]
    done = _launch_words(*words, GLOO_SOCKET_IFNAME="lo")
    assert done.stdout == "fsdp_c._fsdp1.sharded_module rank 0\n", done.stderr


@pytest.mark.only_full
def test_a_script_of_lightning(tmp_path: Path) -> None:
    """Its class is ours, also in the process that Lightning starts."""
    require("lightning")
    tasks = {"fabric": MLP_TASK, "trainer": MLP_TASK}
    if find_spec("litgpt") is not None:
        tasks["litgpt"] = litgpt_task()
    script = str(Path(__file__).parent / "lightning_script.py")
    done = _launch_words(
        script,
        *(str(tmp_path), *tasks),
        path=os.pathsep.join(sys.path),
        TORCH_FR_BUFFER_SIZE="0",
    )
    assert done.returncode == 0, done.stderr
    for name, task in tasks.items():
        reference = Unsharded(2, task)
        reference.train(range(2 * STEPS))
        results = list(tmp_path.glob(f"{name}-*/rank-*"))
        assert len(results) == 4  # ranks, forms of checkpoints
        for result in results:
            of_class, weights = torch.load(result)
            assert of_class == "fsdp_c._fsdp1.sharded_module"
            assert_same_tensors(name, weights, reference.model.state_dict())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent.py"], "there is no file 'absent.py'"),
        (["fsdp-c-no-such-program"], "there is no program 'fsdp-c-no-such-program'"),
        (["python", "-I", "x.py"], "leave -I out"),
    ],
)
def test_what_cannot_run(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _launch.main(words) == 2
    assert message in capsys.readouterr().err


def test_without_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "find_spec", lambda name: None)
    with pytest.raises(_launch.LaunchError, match="accelerate is not installed"):
        _launch.command("accelerate", ["launch", "x.py"])


def test_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "find_spec", lambda name: name)
    script = tmp_path / "x.py"
    script.write_text("")
    python = sys.executable
    run = "torch.distributed.run"
    assert _launch.command("torchrun", ["x"]) == [python, "-m", run, "x"]
    assert _launch.command(str(script), ["--a"]) == [python, str(script), "--a"]
    assert _launch.command("python", ["-m", "x"]) == [python, "-m", "x"]
    assert _launch.command("sh", ["-c", "x"])[0].endswith("/sh")
    accelerate = _launch.command("accelerate", ["launch", "x.py"])
    assert accelerate[1:] == [
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "x.py",
    ]


def test_environment() -> None:
    env = _launch.environment({"A": "1", "PYTHONPATH": "/x:/y"})
    assert env == {
        "A": "1",
        "FSDP_C_INSTALL": "1",
        "PYTHONPATH": f"{_launch.STARTUP}:/x:/y",
    }
    assert _launch.environment({})["PYTHONPATH"] == str(_launch.STARTUP)
