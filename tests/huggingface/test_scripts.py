"""Whole scripts on 2 processes: ours of examples/, and accelerate's, unchanged.

accelerate's wheel contains scripts that its authors run on GPUs with torch's FSDP1
(accelerate/test_utils/scripts). They know nothing of fsdp_c; `python -m fsdp_c launch`
starts them. What they would download comes from offline/ and from a model made here.
"""

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from helpers.distributed import distributed
from helpers.groups import groups_destroyed
from helpers.hf_process import launched
from helpers.hf_training import cases

REPOSITORY = Path(__file__).resolve().parent.parent.parent
EXAMPLES = REPOSITORY / "examples"
OFFLINE = Path(__file__).resolve().parent / "offline"
PROGRAMS = Path(__file__).resolve().parent / "programs"
YAML = EXAMPLES / "hf_accelerate.yaml"
# The wrapped class says where it comes from; torch's would say torch.distributed.
WRAPPED = "wrapped in: fsdp_c"

FSDP_C_LAUNCH = ("-m", "fsdp_c", "launch")
TIMEOUT_S = 300
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def _run(
    words: Sequence[str | Path], folder: Path, *paths: Path, **variables: str
) -> str:
    """Run Python with ``words`` in ``folder``; return its output.

    Args:
        words: The arguments of Python.
        folder: The working directory.
        paths: More folders to import from.
        variables: More of the environment.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE_", "FSDP_", "MASTER_"))
        and name not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
    }
    python_path = [str(REPOSITORY), *map(str, paths), env.get("PYTHONPATH", "")]
    env |= {
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]]),
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_FR_BUFFER_SIZE": "0",
        **variables,
    }
    result = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-6000:]
    return output


def _losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+ loss ([0-9.]+)", output)]


@pytest.mark.only_full
def test_trainer_example(tmp_path: Path) -> None:
    """As it is; then resumed by `python -m fsdp_c launch`, without its added line."""
    script, out = EXAMPLES / "hf_trainer.py", tmp_path / "out"
    words = ["--text", REPOSITORY / "README.md", "--out", out]
    assert WRAPPED in _run(["-m", *TORCHRUN, script, "--steps", "2", *words], tmp_path)
    assert (out / "checkpoint-2" / "optimizer_0").is_dir()
    assert (out / "model" / "model.safetensors").is_file()

    lines = script.read_text().splitlines(keepends=True)
    kept = [line for line in lines if "(the added line)" not in line]
    assert len(kept) == len(lines) - 1
    code = "".join(kept).partition('"""\n\nfrom __future__')[2]
    assert "fsdp_c." not in code
    plain = tmp_path / "plain.py"
    plain.write_text("".join(kept))
    launch = [*FSDP_C_LAUNCH, "torchrun", *TORCHRUN[1:], plain]
    assert WRAPPED in _run([*launch, "--steps", "4", "--resume", *words], tmp_path)
    state = out / "checkpoint-4" / "trainer_state.json"
    assert json.loads(state.read_text())["global_step"] == 4


def _accelerate_launch(*words: str | Path) -> list[str | Path]:
    return [*FSDP_C_LAUNCH, "accelerate", "launch", *words]


TELL = """
import json, os
with open(os.environ["RANK"], "w") as file:
    json.dump(dict(os.environ), file)
"""


@pytest.fixture
def told(tmp_path: Path) -> dict[str, str]:
    """What the launcher and the example's YAML make of the environment of rank 0."""
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    launch = _accelerate_launch("--config_file", YAML, "--main_process_port", "0")
    _run([*launch, script], tmp_path)
    first, second = (json.loads((tmp_path / rank).read_text()) for rank in "01")
    assert first["FSDP_C_INSTALL"] == second["FSDP_C_INSTALL"] == "1"
    assert first["WORLD_SIZE"] == second["WORLD_SIZE"] == "2"
    prefixes = ("ACCELERATE_", "FSDP_")
    ours = {name: first[name] for name in first if name.startswith(prefixes)}
    assert ours.items() <= second.items()
    del ours["FSDP_C_INSTALL"]  # `launched` installs
    return ours


@pytest.mark.only_full
@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_accelerate_example(rank: int, told: dict[str, str], tmp_path: Path) -> None:
    """Three steps, and one more after --resume, in processes that have transformers."""
    out = tmp_path / "whole"

    def run(*words: str) -> str:
        output = io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            groups_destroyed(),
            # The process group is the test worker's, and stays.
            launched(rank, 2, **told, FORK_LAUNCHED="1"),
            contextlib.redirect_stdout(output),
        ):
            patch.setattr(sys, "argv", ["example", *words, "--out", str(out)])
            runpy.run_path(str(EXAMPLES / "hf_accelerate.py"), run_name="__main__")
        return output.getvalue()

    whole = run("--steps", "3")
    resumed = run("--steps", "4", "--resume")
    assert (out / "model" / "model.safetensors").is_file()
    if rank == 0:
        assert WRAPPED in whole
        assert len(_losses(whole)) == 3
        assert len(_losses(resumed)) == 1
        assert "step 4 loss" in resumed


@pytest.mark.only_full
def test_cpu_ram_efficient_loading(tmp_path: Path) -> None:
    """Only rank 0 has the whole weights in memory: peaks, as Linux counts them."""
    launch = _accelerate_launch("--config_file", YAML, "--main_process_port", "0")
    words = [*launch, PROGRAMS / "load.py", tmp_path]
    _run(words, tmp_path, MALLOC_MMAP_THRESHOLD_="65536")
    first, second = (
        json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)
    )
    whole = first["whole"]
    assert first["wrapped"] >= whole, (first, second)  # files are read when used
    assert second["loaded"] <= 0.2 * whole, (first, second)
    # Half of it, and a block of the 8 that is whole, once more in the broadcast.
    assert second["wrapped"] <= 0.8 * whole, (first, second)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny BERT classifier and its tokenizer."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        BertTokenizerFast,
    )

    spec = importlib.util.spec_from_file_location("words", OFFLINE / "datasets.py")
    assert spec is not None
    assert spec.loader is not None
    words = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(words)
    folder = tmp_path_factory.mktemp("bert")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join([*special, *words.WORDS]) + "\n")
    BertTokenizerFast(vocab_file=str(vocabulary)).save_pretrained(folder)
    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=len(special) + len(words.WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def _yaml(folder: Path, **changes: str) -> Path:
    """Write the example's YAML with changed values of fsdp_config, for BERT."""
    text = YAML.read_text()
    changes.setdefault("fsdp_transformer_layer_cls_to_wrap", "BertLayer")
    for key, value in changes.items():
        text, count = re.subn(rf"(?m)^(\s*{key}:).*$", rf"\1 {value}", text)
        assert count == 1, key
    path = folder / "accelerate.yaml"
    path.write_text(text)
    return path


def _accelerate_script(name: str) -> Path:
    import accelerate.test_utils

    return Path(accelerate.test_utils.__file__).parent / "scripts" / name


def _launched(yaml: Path, name: str, *words: str | Path) -> list[str | Path]:
    return _accelerate_launch(
        "--config_file",
        yaml,
        "--main_process_port",
        "0",
        PROGRAMS / "run_and_tell.py",
        _accelerate_script(name),
        *words,
    )


_PERFORMANCE = [
    {},
    {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "mixed_precision": "bf16"},
    {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_offload_params": "true"},
    {"fsdp_version": "2", "fsdp_cpu_ram_efficient_loading": "false"},
]


@pytest.mark.parametrize("changes", cases(_PERFORMANCE, slow=_PERFORMANCE))
def test_accelerate_performance(
    tmp_path: Path, bert: Path, changes: dict[str, str]
) -> None:
    """test_performance.py of accelerate: classification, evaluation, save_model."""
    words = ["--model_name_or_path", bert, "--output_dir", tmp_path, "--num_epochs"]
    output = _run(
        _launched(
            _yaml(tmp_path, **changes), "external_deps/test_performance.py", *words, "1"
        ),
        tmp_path,
        OFFLINE,
    )
    assert WRAPPED in output, output[-3000:]
    results = json.loads((tmp_path / "all_results.json").read_text())
    assert 0.0 <= results["epoch-0"] <= 1.0


_KINDS = [
    ("SHARDED_STATE_DICT", "1"),
    ("FULL_STATE_DICT", "1"),
    ("SHARDED_STATE_DICT", "2"),
]


@pytest.mark.parametrize("case", cases(_KINDS, slow=_KINDS))
def test_accelerate_checkpointing(
    tmp_path: Path, bert: Path, case: tuple[str, str]
) -> None:
    """test_checkpointing.py of accelerate: it asserts what it resumes with itself."""
    kind, version = case
    yaml = _yaml(tmp_path, fsdp_state_dict_type=kind, fsdp_version=version)
    words = ["--model_name_or_path", bert, "--output_dir", tmp_path]
    launch = _launched(yaml, "external_deps/test_checkpointing.py", *words)
    output = _run([*launch, "--partial_train_epoch", "1"], tmp_path, OFFLINE)
    assert WRAPPED in output, output[-3000:]
    resume = [*launch, "--resume_from_checkpoint", tmp_path / "epoch_0"]
    assert "resumed checkpoint performance" in _run(resume, tmp_path, OFFLINE)


@pytest.mark.only_full
def test_accelerate_merge_weights(tmp_path: Path) -> None:
    """test_merge_weights.py of accelerate: sharded files become one, four times."""
    yaml = _yaml(tmp_path, fsdp_auto_wrap_policy="NO_WRAP")
    output = _run(_launched(yaml, "test_merge_weights.py"), tmp_path)
    assert WRAPPED in output, output[-3000:]
