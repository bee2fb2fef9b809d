"""The messages of fsdp_c that docs/guide/faq.md quotes are those that it raises."""

import contextlib
import copy
import re
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import (
    DTensor,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.utils.checkpoint import checkpoint

from fsdp_c import fully_shard
from helpers.distributed import distributed
from helpers.doc_pages import blocks_of
from helpers.impl import FSDP, fsdp

PAGE = "docs/guide/faq.md"
POLICY = ModuleWrapPolicy({nn.Linear})
LIMIT = timedelta(seconds=3)


class Net(nn.Module):
    """An embedding and a head that may share their weight."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 8)
        self.block = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        if is_tied:
            self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(self.emb(tokens)))
        return out


class Branches(nn.Module):
    """Runs another unit on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x) if dist.get_rank() == 0 else self.b(x)
        return out


class Result:
    """An output that holds more than is looked at."""

    def __init__(self, logits: Tensor) -> None:
        self.parts = [*([i] for i in range(20_000)), [logits]]


def _wrap_dtensors() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fsdp(distribute_module(nn.Linear(4, 4), mesh, _shard_rows))


def _shard_rows(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    weight = distribute_tensor(module.weight.detach(), mesh, [Shard(0)])
    module.register_parameter("weight", nn.Parameter(weight))


def _return_a_large_object() -> None:
    net = Net()
    forward = net.forward
    net.forward = lambda tokens: Result(forward(tokens))  # type: ignore[assignment]
    fsdp(net)(torch.tensor([[1, 2]]))


def _clip_without_gradients() -> None:
    import fsdp_c

    model = fsdp(Net())
    fsdp_c.optimizer_in_backward(model, lambda ps: torch.optim.SGD(ps, lr=0.1))
    model(torch.tensor([[1, 2]])).sum().backward()
    model.clip_grad_norm_(1.0)


def _share_over_units() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fsdp(Net(is_tied=True), auto_wrap_policy=POLICY)


def _share_over_units_by_hand() -> None:
    net = Net(is_tied=True)
    net.head = fsdp(net.head)
    fsdp(net)


def _leave_on_meta() -> None:
    with torch.device("meta"):
        module = nn.Linear(3, 3)
    fsdp(module, param_init_fn=lambda module: None)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)


class Reader(nn.Module):
    """Reads a parameter of a unit that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = Tokens()

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.tokens.table(ids)
        return out


def _read_shards() -> None:
    fsdp(Reader(), units={Tokens}, use_orig_params=True)(torch.tensor([1]))


def _fail(grad: Tensor) -> None:
    raise ArithmeticError


def _clip_after_an_exception() -> None:
    model = fsdp(Net())
    out = model(torch.tensor([[1, 2]]))
    out.register_hook(_fail)
    with contextlib.suppress(ArithmeticError):
        out.sum().backward()
    try:
        model.clip_grad_norm_(1.0)
    finally:
        import fsdp_c

        del out
        fsdp_c.reset(model)


def _in_a_group(body: Callable[[dist.ProcessGroup], None]) -> None:
    """Run ``body`` in a group that may break."""
    group = dist.new_group(timeout=LIMIT)
    assert group is not None
    try:
        body(group)
    finally:
        dist.barrier()
        dist.destroy_process_group(group)


def _run_different_units() -> None:
    def body(group: dist.ProcessGroup) -> None:
        model = fsdp(Branches(), auto_wrap_policy=POLICY, process_group=group)
        model(torch.randn(1, 4))

    _in_a_group(body)


def _save_on_rank_0() -> None:
    def body(group: dist.ProcessGroup) -> None:
        model = fsdp(Net(), process_group=group)
        if dist.get_rank() == 0:
            model.state_dict()

    _in_a_group(body)


def _load_parts() -> None:
    model = fsdp(Net(), use_orig_params=True)
    state = model.state_dict()
    state["head.weight"] = torch.empty(0)
    model.load_state_dict(state)


def _pickle() -> None:
    import pickle

    pickle.dumps(fsdp(Net()))


# What makes each message, in the order of the page.
CASES: list[Callable[[], None]] = [
    _wrap_dtensors,
    _share_over_units,
    _share_over_units_by_hand,
    _leave_on_meta,
    _read_shards,
    _clip_after_an_exception,
    _return_a_large_object,
    _run_different_units,
    _save_on_rank_0,
    _clip_without_gradients,
    _load_parts,
    _pickle,
]


def _messages() -> list[str]:
    return [block.code for block in blocks_of(PAGE) if not block.language]


def test_every_message_has_a_case() -> None:
    assert len(_messages()) == len(CASES)


@pytest.mark.parametrize("index", range(len(CASES)))
@distributed(world_size=2, device="cpu")
def test_message(rank: int, index: int) -> None:
    """Rank 0 raises it, or its note; ``...`` on the page stands for any text."""
    if CASES[index] is _read_shards and sys.version_info < (3, 11):
        return  # without notes
    raised = ""
    try:
        CASES[index]()
    except Exception as error:
        (text,) = getattr(error, "__notes__", [str(error)])
        raised = " ".join(text.split())
    if rank == 0:
        expected = " ".join(_messages()[index].split())
        pattern = re.escape(expected).replace(r"\.\.\.", ".*")
        assert re.fullmatch(pattern, raised), raised
    dist.barrier()


@distributed(world_size=2, device="cpu")
def test_optimizers_made_before_wrapping() -> None:
    """They step nothing with flat parameters, and everything with original ones."""
    for use_orig_params in (False, True):
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        model = fsdp(net, use_orig_params=use_orig_params)
        before = model.state_dict()
        model(torch.tensor([[1, 2]])).sum().backward()
        optimizer.step()
        after = model.state_dict()
        changed = [key for key in before if not torch.equal(before[key], after[key])]
        assert changed == (list(before) if use_orig_params else [])


@distributed(world_size=2, device="cpu")
def test_ranks_differ_inside_a_summon(rank: int) -> None:
    """Nothing is gathered there: one rank alone may call the model."""
    model = fsdp(Net(), auto_wrap_policy=POLICY, use_orig_params=True)
    with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
        if rank == 0:
            assert model.module(torch.tensor([[1, 2]])).shape == (1, 2, 10)
    dist.barrier()


@distributed(world_size=2, device="cpu")
def test_a_module_inside_the_wrapper_gathers_nothing() -> None:
    """Its state dict has this rank's parts, so all ranks have other shapes."""
    model = fsdp(Net(), use_orig_params=True)
    shapes = [tuple(v.shape) for v in model.module.state_dict().values()]
    gathered: list[list[tuple[int, ...]]] = [[], []]
    dist.all_gather_object(gathered, shapes)
    assert gathered[0] != gathered[1]
    with pytest.raises(RuntimeError, match="'weight' must be 2-D"):
        model.module.emb(torch.tensor([1]))


@distributed(world_size=2, device="cpu")
def test_gradients_of_gradients_fail() -> None:
    """Not silently: FSDP1 leaves the parameters without gradients."""
    model = fsdp(nn.Linear(3, 1), use_orig_params=True)
    x = torch.randn(2, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.square().sum().backward()


@distributed(world_size=2, device="cpu")
def test_what_a_forward_writes_is_dropped() -> None:
    """With both APIs, as in torch's."""
    for is_flat_api in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(4, 6, max_norm=0.1), nn.Linear(6, 2))
        before = net[0].weight.detach().clone()
        model = fsdp(net, auto_wrap_policy=POLICY) if is_flat_api else net
        if not is_flat_api:
            fully_shard(model)
        model(torch.arange(4)).sum().backward()
        state = model.state_dict()["0.weight"]
        after = state.full_tensor() if isinstance(state, DTensor) else state
        assert torch.equal(after, before)


@distributed(world_size=2, device="cpu")
def test_averages_of_models_with_frozen_parameters() -> None:
    """The parts are equal if the copy was frozen after wrapping, or copied then."""

    def partly_frozen() -> nn.Module:
        net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        net[0].requires_grad_(False)
        return net

    def parts(model: nn.Module) -> list[torch.Size]:
        return [param.shape for param in model.parameters()]

    model = fsdp(partly_frozen(), use_orig_params=True)
    late = fsdp(partly_frozen(), use_orig_params=True).requires_grad_(False)
    early = fsdp(partly_frozen().requires_grad_(False), use_orig_params=True)
    assert parts(copy.deepcopy(model)) == parts(late) == parts(model) != parts(early)


class Inside(nn.Module):
    """Recomputes its first layer in backward; its first result may be an output."""

    returns = True

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.b = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        self.kept = checkpoint(lambda x: self.a(x).tanh(), x, use_reentrant=False)
        out: Tensor = self.b(self.kept)
        return (out, self.kept) if self.returns else out


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=2, device="cpu")
def test_a_loss_of_tensors_from_inside_a_unit(api: str) -> None:
    inside = Inside()
    model: nn.Module = nn.Sequential(inside)
    if api == "FSDP":
        model = fsdp(model, auto_wrap_policy=ModuleWrapPolicy({Inside}))
    else:
        fully_shard(inside)
        fully_shard(model)
    x = torch.randn(2, 3, requires_grad=True)
    model(x)[1].sum().backward()
    inside.returns = False
    model(x)
    with pytest.raises(RuntimeError, match=r"is sharded now|got mixed torch.Tensor"):
        inside.kept.sum().backward()


@distributed(world_size=2, device="cpu")
def test_policy_finds_blocks_inside_compiled_ones() -> None:
    import fsdp_c

    module = nn.Sequential(nn.Linear(4, 4))
    module[0] = torch.compile(module[0], backend="eager")
    model = fsdp(module, auto_wrap_policy=POLICY)
    assert [unit.name for unit in fsdp_c.explain(model).units] == ["", "0._orig_mod"]
