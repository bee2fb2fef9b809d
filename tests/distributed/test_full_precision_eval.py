"""FSDP_USE_FULL_PREC_IN_EVAL=1: eval mode computes in the master dtype."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.distributed import STRATEGIES, distributed
from helpers.groups import hybrid_groups
from helpers.impl import FSDP, MixedPrecision, assert_idle, fsdp
from helpers.models import BATCH, DIM, MLP, Block, vectors
from helpers.reference import Differential, assert_same, full_state_dict
from helpers.seeds import seeded


class Net(MLP):
    """With a buffer; notes the dtype of what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.7, 1.3, DIM))
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen |= {x.dtype, self.scale.dtype}
        return super().forward(x * self.scale)


@contextlib.contextmanager
def _setting(value: str | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if value is None:
            patch.delenv("FSDP_USE_FULL_PREC_IN_EVAL", raising=False)
        else:
            patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", value)
        yield


def _make(
    strategy: str = "FULL_SHARD",
    *,
    use_orig_params: bool = True,
    value: str | None = "1",
    groups: Any = None,
    reduce_dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> Differential:
    def wrap(module: nn.Module) -> Any:
        with _setting(value):
            return fsdp(
                module,
                process_group=groups,
                strategy=strategy,
                units={Block},
                mixed_precision=MixedPrecision(
                    param_dtype=torch.bfloat16,
                    reduce_dtype=reduce_dtype,
                    buffer_dtype=torch.bfloat16,
                ),
                use_orig_params=use_orig_params,
                **kwargs,
            )

    differential = Differential(
        Net, wrap, vectors, use_orig_params=use_orig_params, param_dtype=torch.bfloat16
    )
    differential.reference.get_buffer("scale").data = differential.reference.get_buffer(
        "scale"
    ).data.bfloat16()
    return differential


def _train(differential: Differential, num_steps: int) -> None:
    """Train in bf16, and see that it is."""
    seen = differential.model.module.seen
    seen.clear()
    differential.train(num_steps)
    assert seen == {torch.bfloat16}


def _unsharded(differential: Differential) -> nn.Module:
    """Return an unsharded fp32 model with the sharded one's weights."""
    net = Net()
    net.load_state_dict(full_state_dict(differential.model))
    return net


def _compare_eval(differential: Differential) -> None:
    """Evaluate in full precision, against the unsharded model in fp32."""
    expected = _unsharded(differential)
    model = differential.model
    model.module.seen.clear()
    model.eval()
    with torch.no_grad():
        for index in range(3):
            generator = seeded(10 * index + differential.rank)
            (x,) = vectors(generator)
            output = model(x)
            assert output.dtype == torch.float32
            assert_same("output", output, expected(x), 1e-6)
    assert model.module.seen == {torch.float32}
    model.train()


@pytest.mark.trap(20)
@pytest.mark.trap(21)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("forward_prefetch", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=(2, 3))
def test_eval_is_exact(
    strategy: str, forward_prefetch: bool, use_orig_params: bool
) -> None:
    """Before the first step, between steps, with prefetches of either dtype."""
    differential = _make(
        strategy, use_orig_params=use_orig_params, forward_prefetch=forward_prefetch
    )
    _compare_eval(differential)
    _train(differential, 2)
    _compare_eval(differential)
    _train(differential, 2)
    _compare_eval(differential)
    _compare_eval(differential)
    assert_idle(differential.model)


@distributed(world_size=4)
def test_replicas() -> None:
    """The same where shards have replicas."""
    with hybrid_groups(2, 2) as groups:
        differential = _make("HYBRID_SHARD", groups=groups)
        _train(differential, 1)
        _compare_eval(differential)
        _train(differential, 1)
        del differential


@pytest.mark.parametrize("value", [None, "0"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=2)
def test_off(rank: int, strategy: str, value: str | None) -> None:
    """Without the variable eval is in bf16, like training."""
    differential = _make(strategy, value=value)
    _train(differential, 1)
    seen = differential.model.module.seen
    seen.clear()
    differential.model.eval()
    with torch.no_grad():
        (x,) = differential.batches()[rank]
        assert differential.model(x).dtype == torch.bfloat16
    assert seen == {torch.bfloat16}
    differential.model.train()
    differential.evaluate()
    _train(differential, 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=2)
def test_mode_changes_in_mid_step(strategy: str) -> None:
    """A forward in each mode, then both backwards' turn."""
    differential = _make(strategy, reduce_dtype=torch.float32)
    model = differential.model
    _train(differential, 1)
    differential.train(1, inside=lambda: _compare_eval(differential))
    differential.zero_grad()
    with model.no_sync():
        differential.forward_backward()
        _compare_eval(differential)
    differential.forward_backward()
    differential.check()


@distributed(world_size=2)
def test_summon_and_state_dict_in_eval_mode() -> None:
    """Both show the master values in either mode."""
    differential = _make()
    _train(differential, 1)
    expected = full_state_dict(differential.model)
    differential.model.eval()
    state = full_state_dict(differential.model)
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(state[name], tensor)
    with FSDP.summon_full_params(differential.model):
        for name, param in differential.model.named_parameters():
            assert torch.equal(param, expected[name])
    differential.model.train()
    _train(differential, 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=2)
def test_a_root_without_parameters(strategy: str) -> None:
    """Its inputs are not cast in eval mode either."""
    module = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, 2))
    with _setting("1"):
        model = fsdp(
            copy.deepcopy(module),
            units={nn.Linear},
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
            strategy=strategy,
            use_orig_params=True,
        )
    x = torch.randn(BATCH, DIM)
    assert model(x).dtype == torch.bfloat16
    model.eval()
    with torch.no_grad():
        assert_same("output", model(x), module(x))
