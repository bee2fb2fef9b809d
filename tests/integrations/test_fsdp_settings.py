"""How accelerate's plugin and the Trainer's fsdp_config are read while installed.

transformers is imported by the tests: every process that collects them would wait.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from fsdp_c.integrations import huggingface
from fsdp_c.integrations.huggingface import _trainer_arguments
from fsdp_c.integrations.huggingface._trainer_loss import ignores_count


@pytest.fixture(scope="module", autouse=True)
def _installed() -> Iterator[None]:
    with huggingface.installed():
        yield


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "FSDP_VERSION",
        "FSDP_SHARDING_STRATEGY",
        "FSDP_RESHARD_AFTER_FORWARD",
        "FSDP_CPU_RAM_EFFICIENT_LOADING",
        "ACCELERATE_USE_FSDP",
        "ACCELERATE_USE_CPU",
    ):
        # First set, so that what the libraries set is taken back as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def _launched(strategy: str, reshard: str) -> dict[str, str]:
    return {"FSDP_SHARDING_STRATEGY": strategy, "FSDP_RESHARD_AFTER_FORWARD": reshard}


@pytest.mark.parametrize(
    ("arguments", "env", "expected"),
    [
        ({}, {}, "FULL_SHARD"),
        ({"reshard_after_forward": "shard_grad_op"}, {}, "SHARD_GRAD_OP"),
        ({"reshard_after_forward": "hybrid_shard_zero2"}, {}, "_HYBRID_SHARD_ZERO2"),
        ({"sharding_strategy": "NO_SHARD"}, {}, "NO_SHARD"),
        ({"sharding_strategy": 2}, {}, "SHARD_GRAD_OP"),
        ({"sharding_strategy": ShardingStrategy.NO_SHARD}, {}, "NO_SHARD"),
        (
            {"sharding_strategy": "4", "reshard_after_forward": "HYBRID_SHARD"},
            {},
            "HYBRID_SHARD",
        ),
        ({}, {"FSDP_SHARDING_STRATEGY": "3"}, "NO_SHARD"),
        # What accelerate launch sets: the defaults, and one of them changed.
        ({}, _launched("FULL_SHARD", "true"), "FULL_SHARD"),
        ({}, _launched("NO_SHARD", "true"), "NO_SHARD"),
        ({}, _launched("FULL_SHARD", "shard_grad_op"), "SHARD_GRAD_OP"),
        # An argument is preferred to the environment.
        (
            {"reshard_after_forward": "full_shard"},
            {"FSDP_SHARDING_STRATEGY": "NO_SHARD"},
            "FULL_SHARD",
        ),
    ],
)
def test_strategy(
    arguments: dict[str, Any],
    env: dict[str, str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, **arguments)
    used = plugin.sharding_strategy or plugin.reshard_after_forward
    assert used is ShardingStrategy[expected]


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (
            {"sharding_strategy": "NO_SHARD", "reshard_after_forward": "full_shard"},
            {},
            "NO_SHARD and reshard_after_forward for FULL_SHARD",
        ),
        ({"reshard_after_forward": "half"}, {}, "reshard_after_forward is 'half'"),
        ({"reshard_after_forward": False}, {}, "one of FULL_SHARD"),
        ({}, {"FSDP_RESHARD_AFTER_FORWARD": "false"}, "is 'false'"),
        ({}, _launched("NO_SHARD", "shard_grad_op"), "set only one"),
    ],
)
def test_refused(
    arguments: dict[str, Any],
    env: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        FullyShardedDataParallelPlugin(**{"fsdp_version": 1, **arguments})


def test_version_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is accelerate's own: a strategy has no meaning in it."""
    monkeypatch.setenv("FSDP_VERSION", "2")
    for name, value in _launched("FULL_SHARD", "false").items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, False)
    assert plugin.sharding_strategy is None


@pytest.mark.parametrize("key", ["sync_module_states", "cpu_ram_efficient_loading"])
def test_broadcast_on_the_cpu(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, **{key: True})
    assert plugin.sync_module_states is True
    with torch.device("meta"):
        layer = nn.Linear(2, 3)
    assert plugin.param_init_fn(layer).weight.device.type == "cpu"


def test_other_errors_of_the_plugin_come_through() -> None:
    with pytest.raises(ValueError, match="Invalid auto wrap policy"):
        FullyShardedDataParallelPlugin(fsdp_version=1, auto_wrap_policy="SOME")


# fsdp_config -----------------------------------------------------------------


def _arguments(tmp_path: Path, **options: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        str(tmp_path), **{"fsdp": True, "use_cpu": True, "report_to": [], **options}
    )


def _plugin(tmp_path: Path, **config: Any) -> FullyShardedDataParallelPlugin:
    fsdp = config.pop("fsdp", True)
    config = {"version": 1, **config}
    arguments = _arguments(tmp_path, fsdp=fsdp, fsdp_config=config)
    return FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "FULL_SHARD"),
        ({"reshard_after_forward": "shard_grad_op"}, "SHARD_GRAD_OP"),
        ({"sharding_strategy": "NO_SHARD"}, "NO_SHARD"),
        ({"fsdp_sharding_strategy": 5}, "_HYBRID_SHARD_ZERO2"),
        ({"fsdp": "shard_grad_op auto_wrap"}, "SHARD_GRAD_OP"),
        ({"fsdp": ["hybrid_shard", "auto_wrap"]}, "HYBRID_SHARD"),
    ],
)
def test_strategy_of_the_trainer(
    config: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    plugin = _plugin(tmp_path, **config)
    assert plugin.sharding_strategy is ShardingStrategy[expected]


def test_what_nobody_asked_for_leaves_it_to_accelerate_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP")
    assert _plugin(tmp_path).sharding_strategy is ShardingStrategy.SHARD_GRAD_OP


def test_offload_params(tmp_path: Path) -> None:
    assert _plugin(tmp_path, offload_params=True).cpu_offload.offload_params
    assert _plugin(tmp_path, fsdp_offload_params="true").cpu_offload.offload_params
    assert _plugin(tmp_path, cpu_offload=True).cpu_offload.offload_params
    assert not _plugin(tmp_path, offload_params="false").cpu_offload.offload_params


def test_min_num_params(tmp_path: Path) -> None:
    plugin = _plugin(tmp_path, min_num_params=100)
    assert plugin.auto_wrap_policy is size_based_auto_wrap_policy
    assert plugin.min_num_params == 100
    plugin = _plugin(tmp_path, min_num_params=9, auto_wrap_policy="NO_WRAP")
    assert plugin.auto_wrap_policy is None
    with pytest.raises(ValueError, match="set one of them"):
        _plugin(tmp_path, min_num_params=9, transformer_layer_cls_to_wrap="Block")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, True),
        ({"version": 2, "reshard_after_forward": "false"}, False),
        ({"sharding_strategy": "FULL_SHARD"}, True),
        ({"fsdp": "shard_grad_op auto_wrap"}, False),
        ({"sharding_strategy": 2, "reshard_after_forward": False}, False),
        ({"sharding_strategy": "NO_SHARD"}, "it is FULL_SHARD or SHARD_GRAD_OP"),
        ({"sharding_strategy": 1, "reshard_after_forward": False}, "set only one"),
    ],
)
def test_version_2_of_the_trainer(
    config: dict[str, Any], expected: bool | str, tmp_path: Path
) -> None:
    config = {"version": 2, **config}
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected)):
            _plugin(tmp_path, **config)
        return
    plugin = _plugin(tmp_path, offload_params="true", min_num_params=9, **config)
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, expected)
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    assert plugin.auto_wrap_policy is size_based_auto_wrap_policy


def test_version_2_is_the_default(tmp_path: Path) -> None:
    assert _arguments(tmp_path).fsdp_plugin_args["fsdp_version"] == 2


def test_xla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"xla": True, "xla_fsdp_settings": {}}
    with pytest.raises(ImportError, match="torch_xla, whose own class then wraps"):
        _arguments(tmp_path, fsdp_config=config)
    # With torch_xla, the Trainer wraps with its class; nothing is for accelerate.
    monkeypatch.setattr(_trainer_arguments, "find_spec", lambda name: name)
    assert _arguments(tmp_path, fsdp_config=config).fsdp_plugin_args is None


def test_processes_without_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_trainer_arguments, "are_on_cpu", lambda: True)
    with pytest.raises(ValueError, match="Pass use_cpu=True to TrainingArguments"):
        _plugin(tmp_path)


def test_models_that_ignore_the_count() -> None:
    import transformers

    size = {"hidden_size": 8, "num_hidden_layers": 0, "num_attention_heads": 1}
    llama = {**size, "intermediate_size": 8, "vocab_size": 8}
    dinov2 = {**size, "image_size": 4, "patch_size": 2}

    def ignores(name: str, config: str, **values: Any) -> bool:
        settings = getattr(transformers, config)(**values)
        return ignores_count(getattr(transformers, name)(settings))

    t5 = {"d_model": 8, "d_kv": 8, "d_ff": 8, "num_layers": 0, "vocab_size": 8}
    assert ignores("T5ForConditionalGeneration", "T5Config", **t5)
    assert not ignores("LlamaForCausalLM", "LlamaConfig", **llama)
    assert not ignores("GPT2LMHeadModel", "GPT2Config", n_layer=0, n_embd=8, n_head=1)
    # Their loss functions could use it, but do not get it.
    assert ignores("LlamaForSequenceClassification", "LlamaConfig", **llama)
    assert ignores("LlamaForTokenClassification", "LlamaConfig", **llama)
    assert not ignores("LlamaForQuestionAnswering", "LlamaConfig", **llama)
    # Of one function, the loss of classes uses it, and that of regression does not.
    classes = "Dinov2ForImageClassification"
    assert not ignores(classes, "Dinov2Config", num_labels=2, **dinov2)
    assert ignores(classes, "Dinov2Config", num_labels=1, **dinov2)
    assert not ignores_count(nn.Identity())
