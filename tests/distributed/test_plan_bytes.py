"""python -m fsdp_c plan against training: the same bytes, to the byte.

Training runs a few steps on gloo ranks; what its engine holds, what its optimizer
holds and what its collectives carry is what the plan says, which saw no rank.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp_c
from fsdp_c import WholeParameterOptimizer, _native
from fsdp_c.tools.plan import ModelSource, Settings, Sharding, find_model, plan_model
from fsdp_c.tools.plan._trace import Inputs
from fsdp_c.tools.plan._whole import is_hidden_matrix
from helpers.distributed import TEST_DEVICE, distributed
from helpers.groups import hybrid_groups
from helpers.impl import fsdp
from helpers.transports import c10d_only, num_scratches

VOCABULARY, WIDTH, NUM_STEPS = 37, 20, 4


ON_CPU = pytest.mark.skipif(
    TEST_DEVICE != "cpu", reason="counts what gloo's calls carry"
)


class Inner(nn.Module):
    """A unit inside a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.linear(x))


class Block(nn.Module):
    """A block; ``frozen`` freezes its first layer, ``nested`` has a unit inside."""

    def __init__(self, *, frozen: bool, nested: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.inner = Inner() if nested else nn.Identity()
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.up.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + self.inner(hidden)


class Net(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            Block(frozen=i in case.frozen, nested=case.nested) for i in range(3)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if case.tied:
            self.head.weight = self.embedding.weight
        if case.frozen_embedding:
            self.embedding.requires_grad_(False)
        self.order = case.order
        self.is_bare = case.is_bare

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index in self.order:
            x = self.blocks[index](x)
        if self.is_bare:
            return x
        logits: Tensor = self.head(self.norm(x))
        return logits.float().mean()


@dataclass(frozen=True)
class Case:
    """One way to train, and to plan."""

    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    use_orig_params: bool = False
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    keeps_low_precision: bool = False
    frozen: tuple[int, ...] = ()  # blocks
    frozen_embedding: bool = False
    nested: bool = False
    tied: bool = False
    wraps: bool = True
    prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = False
    accumulation: str | None = None
    order: tuple[int, ...] = (0, 1, 2)  # in which blocks run
    is_bare: bool = False  # the root returns its last unit's output; no head runs
    optimizer: str = "adamw"
    by_rows: bool = False  # fully_shard()


CASES = {
    "flat": Case(),
    "orig": Case(use_orig_params=True),
    "bf16": Case(use_orig_params=True, param_dtype=torch.bfloat16),
    "bf16-flat": Case(param_dtype=torch.bfloat16),
    "bf16-fp32-reduce": Case(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        keeps_low_precision=True,
        optimizer="sgd",  # torch's AdamW takes no bf16 gradients of fp32 parameters
    ),
    "frozen": Case(use_orig_params=True, frozen=(0, 2)),
    "frozen-flat": Case(frozen=(1,), frozen_embedding=True),
    "frozen-beginning": Case(use_orig_params=True, frozen_embedding=True),
    "nested": Case(use_orig_params=True, nested=True),
    "nested-bf16-flat": Case(nested=True, param_dtype=torch.bfloat16, frozen=(1,)),
    "tied": Case(use_orig_params=True, tied=True),
    "reversed": Case(use_orig_params=True, order=(2, 1, 0)),
    "one-twice": Case(order=(0, 1, 0, 2), nested=True),
    "one-unused": Case(use_orig_params=True, order=(0, 2)),
    "bare": Case(is_bare=True, use_orig_params=True),
    "bare-nested-flat": Case(is_bare=True, nested=True, param_dtype=torch.bfloat16),
    "one-unit": Case(use_orig_params=True, wraps=False),
    "grad-op": Case(strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True),
    "no-shard": Case(strategy=ShardingStrategy.NO_SHARD, nested=True),
    "no-shard-bf16": Case(
        strategy=ShardingStrategy.NO_SHARD, param_dtype=torch.bfloat16
    ),
    "post": Case(prefetch=BackwardPrefetch.BACKWARD_POST, nested=True),
    "no-prefetch": Case(prefetch=None, use_orig_params=True),
    "forward-prefetch": Case(forward_prefetch=True, use_orig_params=True),
    "accumulated": Case(accumulation="unsharded", use_orig_params=True),
    "accumulated-sharded": Case(accumulation="sharded", param_dtype=torch.bfloat16),
    "accumulated-grad-op": Case(
        accumulation="unsharded", strategy=ShardingStrategy.SHARD_GRAD_OP
    ),
    "rows": Case(by_rows=True, nested=True, frozen=(1,)),
    "rows-bf16": Case(
        by_rows=True, tied=True, param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    ),
    "rows-accumulated": Case(
        by_rows=True, accumulation="unsharded", strategy=ShardingStrategy.SHARD_GRAD_OP
    ),
}


def _plan(
    case: Case,
    world_size: int,
    rank: int,
    mesh: tuple[int, int] | None = None,
    *,
    wants_scratch: bool,
) -> Any:
    """Return the plan of a rank, from a model on meta."""

    def make(_batch: int, _sequence: int) -> tuple[nn.Module, Inputs]:
        return Net(case), Inputs((torch.zeros(2, 3, dtype=torch.long),))

    accumulation = {
        None: _native.SYNC_REDUCE,
        "unsharded": _native.SYNC_NONE,
        "sharded": _native.SYNC_SHARD,
    }[case.accumulation]
    plan = plan_model(
        ModelSource("net", make),
        [world_size],
        sharding=Sharding(
            strategy=case.strategy,
            param_dtype=case.param_dtype,
            reduce_dtype=case.reduce_dtype,
            keep_low_precision_grads=case.keeps_low_precision,
            use_orig_params=case.use_orig_params,
            backward_prefetch=case.prefetch,
            forward_prefetch=case.forward_prefetch,
            fully_shard=case.by_rows,
        ),
        settings=Settings(
            on_cpu=TEST_DEVICE == "cpu",
            optimizer=case.optimizer,
            rank=rank,
            num_batches=1 if case.accumulation is None else 2,
            accumulation=accumulation,
            wants_scratch=wants_scratch,
        ),
        mesh=mesh,
        wrap=",".join(each.__name__ for each in _wrapped(case)) or "none",
    )
    assert "fused kernel" in plan.notes[0]  # the forward ran on meta
    return plan.ranks[0]


def _wrapped(case: Case) -> tuple[type[nn.Module], ...]:
    if not case.wraps:
        return ()
    return (Block, Inner) if case.nested else (Block,)


class _Carried(TorchDispatchMode):
    """Counts the bytes that c10d's collectives carry."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func.__name__.partition(".")[0]
            # Inputs of alltoall_base_ are its second tensor, of the others the first.
            tensors = args[1] if name == "alltoall_base_" else args[0]
            nbytes = sum(x.nbytes for x in tree_leaves(tensors) if torch.is_tensor(x))
            self.nbytes[name] = self.nbytes.get(name, 0) + nbytes
        return func(*args, **(kwargs or {}))


def _wants_scratch() -> bool:
    """Whether reductions of this engine went through gloo; ask it after a step."""
    return TEST_DEVICE == "cpu" and num_scratches() > 0


def _shard_rows(case: Case) -> Any:
    model = Net(case)
    for module in list(model.modules())[::-1]:
        if isinstance(module, _wrapped(case)):
            fsdp_c.fully_shard(
                module,
                reshard_after_forward=case.strategy is ShardingStrategy.FULL_SHARD,
                mp_policy=MixedPrecisionPolicy(case.param_dtype, case.reduce_dtype),
            )
    return fsdp_c.fully_shard(
        model, mp_policy=MixedPrecisionPolicy(case.param_dtype, case.reduce_dtype)
    )


def _wrap(case: Case, groups: Any) -> Any:
    if case.by_rows:
        return _shard_rows(case)
    classes = _wrapped(case)
    return fsdp(
        Net(case),
        process_group=groups,
        sharding_strategy=case.strategy,
        units=classes,
        mixed_precision=MixedPrecision(
            param_dtype=case.param_dtype,
            reduce_dtype=case.reduce_dtype,
            keep_low_precision_grads=case.keeps_low_precision,
        ),
        use_orig_params=case.use_orig_params,
        backward_prefetch=case.prefetch,
        forward_prefetch=case.forward_prefetch,
    )


def _measure(model: Any, case: Case, step: Callable[[Any], None]) -> dict[str, int]:
    """Train; return what the last step and its end had, by name.

    ``step(optimizer)`` is one step.
    """
    optimizer = _make_optimizer(model, case)
    for _ in range(NUM_STEPS - 1):
        step(optimizer)
    before = fsdp_c.memory_stats(model)
    carried = _Carried()
    with carried:
        step(optimizer)
    stats = fsdp_c.memory_stats(model)
    inside = [optimizer]
    if isinstance(optimizer, WholeParameterOptimizer):
        assert optimizer.rest is not None
        inside = [optimizer.optimizer, optimizer.rest]
        stats |= optimizer.memory_stats()
    state = [
        each.to_local() if isinstance(each, DTensor) else each
        for each in tree_leaves([[*each.state.values()] for each in inside])
    ]
    return {
        **stats,
        "optimizer_nbytes": sum(x.nbytes for x in state if torch.is_tensor(x)),
        "step_allocs": stats["num_allocs"] - before["num_allocs"],
        "all_gathers": stats["num_all_gathers"] - before["num_all_gathers"],
        **carried.nbytes,
    }


def _make_optimizer(model: Any, case: Case) -> torch.optim.Optimizer:
    if case.optimizer == "muon":
        return fsdp_c.whole_parameter_optimizer(
            model, torch.optim.Muon, is_hidden_matrix, rest=torch.optim.AdamW
        )
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[case.optimizer]
    trained = [param for param in model.parameters() if param.requires_grad]
    return make(trained, lr=1e-3)


def _step(model: Any, optimizer: Any, case: Case, rank: int) -> None:
    tokens = (torch.arange(6).view(2, 3) + rank) % VOCABULARY
    optimizer.zero_grad()
    if case.accumulation is not None and case.by_rows:
        model.set_requires_gradient_sync(False)
        model(tokens).float().mean().backward()
        model.set_requires_gradient_sync(True)
    elif case.accumulation is not None:
        options = {"sharded": True} if case.accumulation == "sharded" else {}
        with model.no_sync(**options):
            model(tokens).float().mean().backward()
    model(tokens).float().mean().backward()
    optimizer.step()


def _train(case: Case, rank: int, groups: Any = None) -> dict[str, int]:
    torch.manual_seed(0)
    model = _wrap(case, groups)
    return _measure(model, case, lambda optimizer: _step(model, optimizer, case, rank))


def _sent(plan: Any, world_size: int) -> int:
    """Return what gloo's reductions are given: the other ranks' parts."""
    payload: int = plan.reduce_scatter.payload_nbytes
    return payload // world_size * (world_size - 1)


def _check(plan: Any, real: dict[str, int]) -> None:
    planned = {
        "num_units": len(plan.units),
        "shard_nbytes": plan.shard_nbytes,
        "grad_shard_nbytes": plan.grad_shard_nbytes,
        "peak_nbytes": plan.arena_nbytes,
        "partial_grad_nbytes": plan.partial_grad_nbytes,
        "scratch_nbytes": plan.scratch_nbytes,
        "optimizer_nbytes": plan.optimizer_nbytes,
        "step_allocs": plan.step_allocs,
        "all_gathers": plan.all_gather.launches,
    }
    if plan.whole is not None:
        names = ("num_params", "num_rounds", "round_nbytes", "state_nbytes")
        planned |= {name: getattr(plan.whole, name) for name in names}
    wrong = {
        name: f"planned {value}, is {real[name]}"
        for name, value in planned.items()
        if value != real[name]
    }
    assert not wrong, wrong


@pytest.mark.parametrize("name", CASES)
@distributed(world_size=(2, 3))
def test_memory(rank: int, world_size: int, name: str) -> None:
    """Of every rank: shards, gradients, blocks, optimizer state."""
    case = CASES[name]
    real = _train(case, rank)
    plan = _plan(case, world_size, rank, wants_scratch=_wants_scratch())
    _check(plan, real)


MUON_CASES = {
    "orig": Case(use_orig_params=True, optimizer="muon", frozen=(1,), nested=True),
    "one-unused": Case(use_orig_params=True, optimizer="muon", order=(0, 2)),
    "one-unit": Case(use_orig_params=True, optimizer="muon", wraps=False),
    "rows": Case(by_rows=True, optimizer="muon", nested=True, frozen=(1,)),
    "no-shard": Case(
        strategy=ShardingStrategy.NO_SHARD, use_orig_params=True, optimizer="muon"
    ),
}


@ON_CPU
@pytest.mark.parametrize("name", MUON_CASES)
@distributed(world_size=(2, 3))
def test_wholes(
    rank: int, world_size: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Owners, their state, rounds and what travels, of every rank."""
    for module in ("fsdp_c._whole.optimizer", "fsdp_c.tools.plan._whole"):
        monkeypatch.setattr(f"{module}.ROUND_NBYTES", 4 * 3 * WIDTH * WIDTH)
    case = MUON_CASES[name]
    with c10d_only():
        real = _train(case, rank)
    plan = _plan(case, world_size, rank, wants_scratch=True)
    _check(plan, real)
    assert plan.whole.wire_nbytes == real.get("send", 0)
    if world_size == 3 or name == "rows":  # on two ranks a boundary may cut no matrix
        assert plan.whole.num_rounds > 1
        assert plan.whole.wire_nbytes > 0


@ON_CPU
@distributed(world_size=4)
def test_wholes_of_replicas(rank: int, world_size: int) -> None:
    """Two replicas of two shards: one owner over all."""
    case = replace(MUON_CASES["orig"], strategy=ShardingStrategy.HYBRID_SHARD)
    with c10d_only(), hybrid_groups(2, 2) as groups:
        row, column = groups[1].rank(), groups[0].rank()
        real = _train(case, rank, groups)
    plan = _plan(case, world_size, 2 * row + column, (2, 2), wants_scratch=True)
    _check(plan, real)
    assert plan.whole.wire_nbytes == real["send"]


@ON_CPU
@pytest.mark.parametrize("name", ["orig", "nested-bf16-flat", "accumulated-sharded"])
@distributed(world_size=(2, 3))
def test_bytes_of_collectives(rank: int, world_size: int, name: str) -> None:
    """Gloo gathers with one broadcast a rank and reduces with all-to-all."""
    case = CASES[name]
    with c10d_only():
        real = _train(case, rank)
    plan = _plan(case, world_size, rank, wants_scratch=True)
    _check(plan, real)
    assert plan.scratch_nbytes > 0
    assert plan.all_gather.payload_nbytes == real["broadcast_"]
    assert _sent(plan, world_size) == real["alltoall_base_"]
    own = plan.all_gather.payload_nbytes // world_size
    assert plan.all_gather.wire_nbytes == plan.all_gather.payload_nbytes - own
    assert plan.all_reduce.calls == 0
    assert "allreduce_" not in real


@ON_CPU
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=4)
def test_hybrid(
    rank: int, world_size: int, use_orig_params: bool, transport: str
) -> None:
    """Two replicas of two shards, in bf16, with nested units and a frozen layer."""
    case = replace(
        CASES["nested-bf16-flat"],
        strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=use_orig_params,
    )
    with (
        c10d_only() if transport == "c10d" else nullcontext(),
        hybrid_groups(2, 2) as groups,
    ):
        shard_rank = dist.get_rank(groups[0])
        real = _train(case, rank, groups)
    wants_scratch = transport == "c10d"
    plan = _plan(case, world_size, shard_rank, (2, 2), wants_scratch=wants_scratch)
    _check(plan, real)
    assert (plan.replicas, plan.shard_ranks) == (2, 2)
    if transport == "c10d":
        assert plan.all_gather.payload_nbytes == real["broadcast_"]
        assert _sent(plan, 2) == real["alltoall_base_"]
        assert plan.all_reduce.payload_nbytes == real["allreduce_"]


@ON_CPU
@distributed(world_size=2)
def test_no_shard_bytes(rank: int, world_size: int) -> None:
    """Replicas alone: one all_reduce a unit, of all that is trained."""
    case = CASES["no-shard"]
    with c10d_only():
        real = _train(case, rank)
    plan = _plan(case, world_size, rank, wants_scratch=True)
    assert plan.all_reduce.payload_nbytes == real["allreduce_"]
    assert plan.all_gather.calls == plan.reduce_scatter.calls == 0


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}
GPT2 = {  # its head shares the embedding's weight
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 3,
    "vocab_size": 101,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}


@pytest.mark.bookkeeping
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@distributed(world_size=2, timeout_s=180)
def test_hugging_face(rank: int, world_size: int, config: dict[str, Any]) -> None:
    """The plan is made of the JSON file, training runs the model of that config."""
    transformers = pytest.importorskip("transformers")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config))
        source = find_model(str(file), batch=2, sequence=6, dtype=torch.float32)
    case = Case(use_orig_params=True, param_dtype=torch.bfloat16)
    made = transformers.AutoConfig.for_model(**config)
    module = getattr(transformers, config["architectures"][0])(made)
    blocks = {type(m) for m in module.modules() if type(m).__name__.endswith("Layer")}
    blocks |= {type(m) for m in module.modules() if type(m).__name__ == "GPT2Block"}
    model = fsdp(
        module,
        units=blocks,
        mixed_precision=MixedPrecision(param_dtype=case.param_dtype),
        use_orig_params=True,
    )
    tokens = torch.arange(12).view(2, 6) + rank

    def step(optimizer: Any) -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    real = _measure(model, case, step)
    plan = plan_model(
        source,
        [world_size],
        sharding=Sharding(use_orig_params=True, param_dtype=case.param_dtype),
        settings=Settings(
            on_cpu=TEST_DEVICE == "cpu", rank=rank, wants_scratch=_wants_scratch()
        ),
    )
    assert "fused kernel" in plan.notes[0]
    assert len(plan.ranks[0].units) == 4
    _check(plan.ranks[0], real)
