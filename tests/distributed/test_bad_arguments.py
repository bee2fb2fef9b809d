"""Bad input: an exception of the right type that names the cause; nothing breaks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.distributed import distributed
from helpers.impl import FSDP, MixedPrecision, ShardingStrategy, StateDictType, fsdp
from helpers.models import Block

pytestmark = pytest.mark.bookkeeping

# Each is refused by a TypeError that names the argument.
WRONG_TYPES: list[dict[str, Any]] = [
    {"process_group": "world"},
    {"process_group": 3},
    {"sharding_strategy": "FULL_SHARD"},
    {"sharding_strategy": 1},
    {"auto_wrap_policy": 3},
    {"auto_wrap_policy": nn.Linear},
    {"auto_wrap_policy": {nn.Linear}},
    {"backward_prefetch": "BACKWARD_PRE"},
    {"forward_prefetch": "yes"},
    {"limit_all_gathers": "no"},
    {"use_orig_params": "no"},
    {"sync_module_states": 1.5},
    {"mixed_precision": torch.bfloat16},
    {"mixed_precision": {"param_dtype": torch.bfloat16}},
    {"device_id": 1.5},
    {"ignored_modules": 3},
    {"shard_strategy": None},  # there is no such argument
]
# (keyword arguments, part of the message)
WRONG_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"mixed_precision": MixedPrecision(param_dtype=torch.int32)}, "param_dtype"),
    ({"mixed_precision": MixedPrecision(reduce_dtype=torch.int64)}, "reduce_dtype"),
    ({"device_id": "nowhere"}, "nowhere"),
    ({"ignored_modules": [3]}, "ignored_modules"),
    (
        {"param_init_fn": 3},
        "^Expected 3 to be callable but got <class 'int'>: param_init_fn",
    ),
]


@distributed(world_size=2)
def test_bad_argument() -> None:
    """The module is left as it was, and can be wrapped rightly then."""
    module = Block()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    for kwargs in WRONG_TYPES:
        with pytest.raises(TypeError, match=next(iter(kwargs))):
            FSDP(module, **kwargs)
    for kwargs, part in WRONG_VALUES:
        with pytest.raises((ValueError, RuntimeError), match=part):
            FSDP(module, **kwargs)
    for name, param in module.named_parameters():
        assert torch.equal(param, before[name]), name
    fsdp(module)(torch.randn(4, 6)).sum().backward()


@pytest.mark.parametrize("module", ["None", "3", "class", "tensor"])
@distributed(world_size=2)
def test_module_is_no_module(module: str) -> None:
    """What is not a module cannot be wrapped."""
    objects: dict[str, Any] = {
        "None": None,
        "3": 3,
        "class": nn.Linear,
        "tensor": torch.zeros(3),
    }
    with pytest.raises(TypeError, match=r"module.*nn\.Module|nn\.Module.*module"):
        FSDP(objects[module])


@distributed(world_size=2)
def test_wrapped_twice() -> None:
    """A unit around a unit has nothing to shard: fine, and trains."""
    model = fsdp(fsdp(Block(), use_orig_params=True), use_orig_params=True)
    model(torch.randn(4, 6)).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.numel())


@distributed(world_size=2)
def test_policy_on_a_wrapped_model() -> None:
    """A policy refuses modules that already hold units."""
    model = nn.Sequential(fsdp(Block()), Block())
    with pytest.raises(ValueError, match=r"(?i)fully ?sharded"):
        fsdp(model, auto_wrap_policy=lambda *args, **kwargs: True)


@distributed(world_size=2)
def test_meta_parameters() -> None:
    """A parameter without data, in a module that cannot initialise it, is named."""
    module = Block()  # has no reset_parameters
    module.extra = nn.Parameter(torch.empty(6, 10, device="meta"))
    with pytest.raises((ValueError, RuntimeError, TypeError), match="meta"):
        fsdp(module)


@distributed(world_size=2)
def test_parameter_that_is_no_leaf() -> None:
    """A computed tensor in a parameter's place is named."""
    module = Block()
    computed = module.fc1.weight * 2
    module.fc1._parameters["weight"] = computed  # type: ignore[assignment]
    with pytest.raises((ValueError, TypeError), match=r"fc1\.weight"):
        fsdp(module)


@distributed(world_size=2)
def test_clip_arguments() -> None:
    """Norms that make no sense."""
    model = fsdp(Block(), use_orig_params=True)
    model(torch.randn(4, 6)).square().mean().backward()
    rows: list[tuple[Any, Any, str]] = [
        (("x",), (TypeError, ValueError), "max_norm"),
        ((1.0, 0.0), ValueError, "norm_type"),
        ((1.0, -1.0), ValueError, "norm_type"),
        ((1.0, float("nan")), ValueError, "norm_type"),
        ((1.0, "two"), (TypeError, ValueError), "norm_type"),
        ((1.0, None), TypeError, "norm_type"),
    ]
    for args, exception, part in rows:
        with pytest.raises(exception, match=part):
            model.clip_grad_norm_(*args)
    assert model.clip_grad_norm_(1.0).item() > 0


@distributed(world_size=2)
def test_no_sync_on_a_nested_unit() -> None:
    """no_sync belongs to the root: a nested unit says so, or does as it says."""
    model = fsdp(
        nn.Sequential(fsdp(Block(), use_orig_params=True)), use_orig_params=True
    )
    model(torch.randn(4, 6)).sum().backward()
    with pytest.raises(RuntimeError, match="root"), model.module[0].no_sync():
        pass
    model(torch.randn(4, 6)).sum().backward()


@distributed(world_size=2)
def test_state_dict_type_on_the_wrong_things() -> None:
    """A word for a type is refused; the model's own setting stays."""
    model = fsdp(Block(), use_orig_params=True)
    with (
        pytest.raises((TypeError, ValueError), match="state_dict_type"),
        FSDP.state_dict_type(model, "FULL_STATE_DICT"),
    ):
        pass
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        assert len(model.state_dict()) == 4


_DURING = "^Cannot manually unshard parameters during forward/backward"


@distributed(world_size=2)
def test_summon_inside_backward() -> None:
    """FSDP1's words and class; a RuntimeError as well, as all of ours."""
    model = fsdp(Block(), use_orig_params=True)
    out = model(torch.randn(2, 6))

    def summon(_: torch.Tensor) -> None:
        with FSDP.summon_full_params(model):
            pass

    out.register_hook(summon)
    with pytest.raises(AssertionError, match=_DURING) as caught:
        out.sum().backward()
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@distributed(world_size=2)
def test_one_group_for_two(strategy: str) -> None:
    """The error of a hybrid strategy begins with FSDP1's words."""
    words = r"^Expected process_group to be passed in as either None or Tuple\["
    with pytest.raises(ValueError, match=words):
        fsdp(
            Block(),
            sharding_strategy=getattr(ShardingStrategy, strategy),
            process_group=dist.group.WORLD,
        )


@distributed(world_size=2)
def test_summon_inside_forward() -> None:
    """Whole parameters cannot be summoned in the middle of a forward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)
            self.summons = True

        def forward(self, x: torch.Tensor) -> Any:
            if self.summons:
                with FSDP.summon_full_params(outer[0]):
                    pass
            return self.fc(x)

    outer: list[Any] = []
    outer.append(fsdp(Net(), use_orig_params=True))
    model = outer[0]
    with pytest.raises(AssertionError, match=_DURING):
        model(torch.randn(2, 6))
    model.module.summons = False
    model(torch.randn(2, 6)).sum().backward()
    outer.clear()


def test_no_process_group() -> None:
    """Wrapping before init_process_group says what to call."""
    with pytest.raises((ValueError, RuntimeError), match="init_process_group"):
        fsdp(nn.Linear(3, 3))
