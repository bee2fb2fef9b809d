"""What Hugging Face's libraries do to wrapped models, on two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c import (
    FSDP,
    FullStateDictConfig,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from fsdp_c.integrations.huggingface import IntegrationWarning, installed
from fsdp_c.integrations.huggingface._accelerate_optimizer import (
    load_sharded,
    make_state,
)
from fsdp_c.integrations.huggingface._accelerate_state import _wrap_init
from helpers.distributed import TEST_DEVICE, distributed
from helpers.models import DIM, MLP, Block


def _fsdp(model: nn.Module, **arguments: Any) -> FSDP:
    return FSDP(
        model,
        auto_wrap_policy=arguments.pop("policy", ModuleWrapPolicy({Block})),
        device_id=torch.device(TEST_DEVICE, 0),  # as accelerate passes it
        **arguments,
    )


# Models loaded in 16 bits, trained in 32 --------------------------------------


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_upcast_of_a_model_in_bf16(use_orig_params: bool) -> None:
    """What Accelerator.prepare_model does, word by word, has an effect."""
    torch.manual_seed(0)
    model = MLP(2).bfloat16()
    model.blocks[0].requires_grad_(False)
    expected = {name: value.float() for name, value in model.state_dict().items()}
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    wrapped = _fsdp(model, mixed_precision=precision, use_orig_params=use_orig_params)
    before = [id(param) for param in wrapped.parameters()]
    for module in FSDP.fsdp_modules(wrapped):
        assert module._has_params
        param = module._flat_param
        if param.dtype != torch.float32 and param.requires_grad:
            assert param.device.type == TEST_DEVICE
            assert len(param._fqns) > 0
            param.data = param.data.to(torch.float32)
            module._handle._orig_param_dtype = torch.float32
            assert module._handle._orig_param_dtype == torch.float32
    assert [id(param) for param in wrapped.parameters()] == before
    dtypes = {param.requires_grad: param.dtype for param in wrapped.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    state = wrapped.state_dict()
    assert {name: value.float() for name, value in state.items()}.keys() == (
        expected.keys()
    )
    for name, value in state.items():
        assert torch.equal(value.float(), expected[name]), name
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    wrapped(torch.randn(4, DIM)).float().sum().backward()
    optimizer.step()
    assert all(
        value["exp_avg"].dtype == torch.float32 for value in optimizer.state.values()
    )


@distributed(world_size=2)
def test_upcast_of_a_mixed_unit() -> None:
    """Frozen parameters come first, and do not hide the trainable ones."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    model[0].requires_grad_(False)
    wrapped = FSDP(model, use_orig_params=True)
    assert wrapped._flat_param.requires_grad
    wrapped._handle._orig_param_dtype = torch.float32
    assert {param.dtype for param in wrapped.parameters()} == {torch.float32}


# The state of an optimizer in a sharded checkpoint ------------------------------


def _optimizers(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.AdamW(params, lr=0.1, weight_decay=0.5, amsgrad=True),
        torch.optim.SGD(params, lr=torch.tensor(0.1), momentum=0.9),
        torch.optim.Rprop(params, lr=0.1),  # steps without a learning rate as well
    ]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_making_state_changes_nothing_else(index: int) -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    optimizer = _optimizers(list(model.parameters()))[index]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    rate = optimizer.param_groups[0]["lr"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    make_state(optimizer)
    assert model.weight in optimizer.state
    assert model.bias not in optimizer.state
    assert optimizer.param_groups[0]["lr"] is rate
    assert not getattr(optimizer, "_opt_called", False)
    assert scheduler.last_epoch == 0
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert model.weight.grad is None
    state = optimizer.state[model.weight]
    make_state(optimizer)  # it has state: left alone
    assert optimizer.state[model.weight] is state


def test_an_optimizer_that_needs_a_loss() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="LBFGS cannot be made before it is loaded"):
        make_state(torch.optim.LBFGS(model.parameters()))
    assert model.weight.grad is None


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, timeout_s=240)
def test_sharded_optimizer_state(
    rank: int, use_orig_params: bool, tmp_path: Path
) -> None:
    """A new optimizer gets everything that was saved, and one more step is equal."""

    def make(**options: bool) -> tuple[FSDP, torch.optim.Optimizer]:
        torch.manual_seed(0)
        # The last weight has one row: a ShardedTensor has nothing of it on rank 1.
        whole = nn.Sequential(MLP(2), nn.Linear(3, 1))
        model = _fsdp(whole, use_orig_params=use_orig_params)
        FSDP.set_state_dict_type(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=True),
            ShardedOptimStateDictConfig(offload_to_cpu=True),
        )
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, **options)

    def step(model: FSDP, optimizer: torch.optim.Optimizer, number: int) -> None:
        torch.manual_seed(10 * number + rank)
        model(torch.randn(4, DIM)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make(amsgrad=True)
    for number in range(2):
        step(model, optimizer, number)
    state = {"optimizer": FSDP.optim_state_dict(model, optimizer)}
    save(state, storage_writer=FileSystemWriter(tmp_path))

    other, fresh = make(amsgrad=True)
    with torch.no_grad():
        for mine, value in zip(other.parameters(), model.parameters(), strict=True):
            mine.copy_(value)
    load_sharded(other, fresh, tmp_path)
    for mine, value in zip(other.parameters(), model.parameters(), strict=True):
        # Without state: this rank's part is empty.
        then = optimizer.state.get(value, {})
        assert then or value.numel() == 0
        for key in then:
            assert torch.equal(fresh.state[mine][key].cpu(), then[key].cpu()), key
    step(model, optimizer, 2)
    step(other, fresh, 2)
    for mine, value in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, value)

    # State that the new optimizer does not have is named.
    third, plain = make()
    with pytest.warns(IntegrationWarning, match=r"as '.*max_exp_avg_sq'"):
        load_sharded(third, plain, tmp_path)


# Adapters -----------------------------------------------------------------------


def _with_adapter() -> nn.Module:
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(
        r=2,
        target_modules=["fc1"],
        modules_to_save=["inp"],
        init_lora_weights=False,
    )
    return get_peft_model(MLP(2), config)


@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
@pytest.mark.parametrize("is_flat", [False, True])
@distributed(world_size=2, timeout_s=300)
def test_adapters_are_saved_and_loaded(rank: int, kind: str, is_flat: bool) -> None:
    """Of layers that are units, as peft wraps them; or behind flat parameters."""
    with installed():
        plain = _with_adapter()
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        expected = get_peft_model_state_dict(plain)
        assert len(expected) == 6
        model = _fsdp(
            plain,
            policy=ModuleWrapPolicy({Block} if is_flat else {Block, nn.Linear}),
            use_orig_params=not is_flat,
        )
        config: Any = ShardedStateDictConfig()
        if kind == "FULL":
            config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        FSDP.set_state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"], config)
        saved = get_peft_model_state_dict(model)
        if kind == "FULL" and rank > 0:
            assert saved == {}
            saved = {name: value.clone() for name, value in expected.items()}
        whole = model.state_dict()
        if kind == "FULL" and rank == 0:  # as the Trainer saves
            alone = get_peft_model_state_dict(model, state_dict=whole)
            assert alone.keys() == saved.keys()
        assert saved.keys() == expected.keys()
        if kind == "FULL":
            for name, value in saved.items():
                assert torch.equal(value, expected[name]), name
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        result = set_peft_model_state_dict(model, saved)
        assert result.unexpected_keys == []
        with FSDP.summon_full_params(model):
            state = {name: value.clone() for name, value in model.named_parameters()}
        for name, value in state.items():
            if "lora_" in name or "modules_to_save" in name:
                key = name.replace(".modules_to_save", "").replace(".default", "")
                assert torch.equal(value, expected[key]), name
            else:
                assert not value.any(), name


@distributed(world_size=2, timeout_s=300)
def test_adapters_under_activation_checkpointing() -> None:
    """As accelerate wraps layers before fully_shard(): their names change."""
    with installed():
        model = _with_adapter()
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(model)
        expected = {name: value.clone() for name, value in state.items()}
        apply_activation_checkpointing(
            model, check_fn=lambda module: isinstance(module, Block)
        )
        fully_shard(model)
        saved = get_peft_model_state_dict(model)
        assert saved.keys() == expected.keys()
        for name, value in saved.items():
            assert torch.equal(value.full_tensor(), expected[name]), name


# torch's own users of the class by name -----------------------------------------


@distributed(world_size=2, timeout_s=240)
def test_state_dicts_of_torch_checkpoint() -> None:
    """torch.distributed.checkpoint.state_dict works as it does without install()."""
    torch.manual_seed(0)
    model = _fsdp(MLP(2), use_orig_params=True)
    expected = model.state_dict()
    torch.manual_seed(1)
    other = _fsdp(MLP(2), use_orig_params=True)
    with installed():
        options = StateDictOptions(full_state_dict=True)
        state = get_model_state_dict(model, options=options)
        assert state.keys() == expected.keys()
        set_model_state_dict(other, state, options=options)
    for name, value in other.state_dict().items():
        assert torch.equal(value, expected[name]), name


# accelerate's state on the CPU ----------------------------------------------------


class DistributedType:
    """In the place of accelerate's, for the function below."""

    class FSDP:
        value = "FSDP"


class PartialState:
    """The same."""

    _shared_state: dict[str, Any] = {}  # noqa: RUF012


class _Plugin:
    sync_module_states = True
    param_init_fn = None
    precision = None

    def set_mixed_precision(self, name: str) -> None:
        self.precision = name


class _State:
    mixed_precision = "bf16"

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.distributed_type: Any = None


def _accelerates_init(self: Any, fsdp_plugin: Any = None) -> None:
    self.distributed_type = type("Kind", (), {"value": self.kind})


def test_processes_on_the_cpu_become_fsdp() -> None:
    state, plugin = _State("MULTI_CPU"), _Plugin()
    _wrap_init(_accelerates_init)(state, fsdp_plugin=plugin)
    assert state.distributed_type is DistributedType.FSDP
    assert PartialState._shared_state == {"distributed_type": DistributedType.FSDP}
    assert vars(state)["fsdp_plugin"] is plugin
    assert plugin.precision == "bf16"
    assert plugin.param_init_fn is not None


@pytest.mark.parametrize("kind", ["MULTI_CPU", "MULTI_GPU", "NO"])
def test_without_a_plugin_nothing_changes(kind: str) -> None:
    state = _State(kind)
    _wrap_init(_accelerates_init)(state)
    assert state.distributed_type.value == kind
    assert "fsdp_plugin" not in vars(state)


def test_processes_without_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with pytest.raises(RuntimeError, match="each would train alone"):
        _wrap_init(_accelerates_init)(_State("NO"), fsdp_plugin=_Plugin())


@pytest.mark.parametrize("uses_fsdp", ["true", "false"])
def test_accelerate_launch_on_the_cpu_makes_a_group(
    uses_fsdp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PartialState asks for a backend without knowing that it is on the CPU."""
    pytest.importorskip("accelerate")
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", uses_fsdp)
    from accelerate.state import PartialState as TheirState

    with installed():
        state = TheirState.__new__(TheirState)
        backend, kind = state._prepare_backend(False)
    expected = ("gloo", "MULTI_CPU") if uses_fsdp == "true" else (None, "NO")
    assert (backend, kind.value) == expected


def test_one_process_is_told() -> None:
    state = _State("NO")
    with pytest.warns(IntegrationWarning, match="only one process"):
        _wrap_init(_accelerates_init)(state, fsdp_plugin=_Plugin())
    assert state.distributed_type.value == "NO"
