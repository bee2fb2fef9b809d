"""Models on a mesh of data and tensor parallel ranks, beside the unsharded ones."""

import itertools
import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdp_c import FullyShardedDataParallel
from helpers.groups import device_under_test, kept_mesh
from helpers.models import VOCAB, Inputs
from helpers.random_models import Node
from helpers.reference import Differential, clean_name, sgd
from helpers.rows import TOLERANCE, Rows, in_either_api, shard_by, whole_of
from helpers.seeds import seeded


class Replicated(ParallelStyle):
    """Replicates a module's parameters; inputs and outputs are plain tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def wrap_inputs(_: nn.Module, inputs: Inputs, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, [Replicate()]) for x in inputs)

        def unwrap(_: nn.Module, output: Any, __: DeviceMesh) -> Tensor:
            local: Tensor = output.to_local()
            return local

        # torch passes the mesh, which its annotations do not know.
        return distribute_module(
            module,
            device_mesh,
            input_fn=wrap_inputs,  # type: ignore[arg-type]
            output_fn=unwrap,  # type: ignore[arg-type]
        )


class InSequence(ParallelStyle):
    """Sequence parallelism of one module; inputs and outputs are plain tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        styles: tuple[ParallelStyle, ...] = (
            PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Shard(0)
            ),
            SequenceParallel(sequence_dim=0),
            PrepareModuleOutput(
                output_layouts=Shard(0), desired_output_layouts=Replicate()
            ),
        )
        for style in styles:
            module = style._apply(module, device_mesh)
        return module


def plan_of_part(part: Node, num_tp: int) -> dict[str, ParallelStyle]:
    """Return how a node of a random program is cut on some ranks; some stay plain."""
    rng = random.Random(part.spec.option)
    columns = ColwiseParallel(output_layouts=Replicate())
    rows = RowwiseParallel(input_layouts=Replicate())
    either = rng.choice([columns, rows])
    # Uneven parts must stay DTensors: a plain tensor has no global shape.
    pair = {"down": ColwiseParallel(use_local_output=False), "up": RowwiseParallel()}
    plans: dict[str, dict[str, ParallelStyle]] = {
        "low_rank": {**pair},
        "adapter": {"fc": either, **pair},
        "norm": {"norm": rng.choice([Replicated(), InSequence()])},
        "tied": {"first": columns, "second": columns},
        "sometimes": {"first": columns, "second": rows},
        "embedding": {"table": either},
    }
    # torch looks nothing up in a table of which a rank has no row.
    if part.spec.kind == "embedding":
        num_rows = part.table.num_embeddings
        has_empty = math.ceil(num_rows / num_tp) * (num_tp - 1) >= num_rows
        plans["embedding"] = {"table": columns if has_empty else either}
    # torch's DTensors do not do without a dimension of one element that is cut.
    is_plain = rng.random() < 0.2 or any(1 in p.shape for p in part.own_params())
    others = {"fc": either} if hasattr(part, "fc") else {}
    return {} if is_plain else plans.get(part.spec.kind, others)


def parallelize_nodes(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut parameters of a random program's nodes."""
    for part in model.modules():
        if isinstance(part, Node) and (plan := plan_of_part(part, mesh.size())):
            parallelize_module(part, mesh, plan)
            if part.spec.kind == "tied":
                part.second.weight = part.first.weight


# torch caches groups, which tests destroy, by equal meshes.
_mesh_numbers = itertools.count()


def new_meshes(
    shape: tuple[int, ...], num_tp: int | None
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return a data parallel mesh, and a tensor parallel one if it has ranks.

    ``shape`` is (shard,) or (replicate, shard).
    """
    number = next(_mesh_numbers)
    names = tuple(f"{n}{number}" for n in ("replicate", "shard")[-len(shape) :])
    if num_tp is None:
        return init_device_mesh(device_under_test(), shape, mesh_dim_names=names), None
    of_tp = f"tp{number}"
    sizes = (*shape, num_tp)
    whole = init_device_mesh(device_under_test(), sizes, mesh_dim_names=(*names, of_tp))
    return whole[names], whole[of_tp]


def gather_summoned(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return whole parameters and gradients of FSDP1's API. Collective."""
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        named = {clean_name(name): p for name, p in model.named_parameters()}
        mine = {name for name, param in named.items() if param.grad is not None}
        theirs: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(theirs, mine)
        params = _whole_values(named)
        has_grad = [name for name in named if any(name in names for names in theirs)]
        grads = {name: torch.zeros_like(value) for name, value in params.items()}
        grads |= _whole_values({name: grad_of(named[name]) for name in has_grad})
    return params, grads


def _whole_values(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors and the wholes of DTensors, in one exchange."""
    parts = {n: value for n, value in values.items() if isinstance(value, DTensor)}
    wholes = dict(zip(parts, whole_of(list(parts.values())), strict=True))
    return {
        name: wholes[name] if name in wholes else value.detach().clone()
        for name, value in values.items()
    }


def grad_of(param: nn.Parameter) -> Tensor:
    """Return the gradient; a rank with no element of a DTensor has none."""
    if param.grad is None:
        assert isinstance(param, DTensor)
        assert param.to_local().numel() == 0
        return torch.zeros_like(param)
    assert isinstance(param.grad, DTensor) == isinstance(param, DTensor)
    return param.grad


def whole_value(value: Tensor) -> Tensor:
    """Return the whole of a DTensor, or ``value``. Collective."""
    return value.full_tensor() if isinstance(value, DTensor) else value


class ParallelBlock(nn.Module):
    """Two linear layers and a norm with a residual."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ParallelModel(nn.Module):
    """An embedding by columns, blocks, a head by columns.

    With an odd ``hidden`` the ranks' parts of the blocks differ in size.
    """

    def __init__(self, dim: int = 6, hidden: int = 10, num_blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(
            ParallelBlock(dim, hidden) for _ in range(num_blocks)
        )
        self.head = nn.Linear(dim, VOCAB - 1, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cut or replicate every parameter of a ParallelModel over ``mesh``."""
    # Uneven parts must stay DTensors: a plain tensor has no global shape.
    plan: dict[str, ParallelStyle] = {
        "embedding": ColwiseParallel(output_layouts=Replicate()),
        "blocks.*.norm": Replicated(),
        "blocks.*.up": ColwiseParallel(use_local_output=False),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    return model


def tokens(generator: torch.Generator) -> Inputs:
    """Return a batch of token ids."""
    return (torch.randint(0, VOCAB, (3, 5), generator=generator),)


def two_meshes(
    num_dp: int, num_tp: int, num_replicas: int | None = None
) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the data parallel and the tensor parallel part of one mesh.

    With ``num_replicas`` the first one is (replicate, shard).
    """
    if num_replicas is None:
        mesh = kept_mesh((num_dp, num_tp), ("dp", "tp"))
        return mesh["dp"], mesh["tp"]
    mesh = kept_mesh((num_replicas, num_dp, num_tp), ("replicas", "dp", "tp"))
    return mesh["replicas", "dp"], mesh["tp"]


def make(
    api: str,
    num_dp: int,
    num_tp: int,
    *,
    hidden: int = 7,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Return a model of either API over the mesh, of values by ``seed``.

    ``options`` go to :func:`helpers.rows.shard_by`.
    """
    dp, tp = two_meshes(num_dp, num_tp)
    torch.manual_seed(seed)
    model = parallelize(ParallelModel(hidden=hidden), tp)
    return shard_by(api, model, {ParallelBlock}, mesh=dp, **options)


def shared_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, seed: int
) -> Tensor:
    """Run a step on a batch that all ranks share; return the loss."""
    optimizer.zero_grad()
    batch = tokens(seeded(seed))
    loss: Tensor = model(*batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def place_in(dp: DeviceMesh) -> tuple[int, int]:
    """Return rank and size: ranks of a tensor parallel group have the same batch."""
    return int((dp.mesh == dist.get_rank()).flatten().nonzero()), dp.size()


class Summoned(Differential):
    """FSDP1's model over tensor parallel parameters: whole ones are summoned."""

    def gather(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return gather_summoned(self.model)


def make_both(
    api: str,
    num_dp: int,
    num_tp: int,
    *,
    num_replicas: int | None = None,
    build: Callable[[], nn.Module] = ParallelModel,
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = sgd,
    **options: Any,
) -> Differential:
    """Return a model over (dp, tp) and the unsharded one, in fp64; see :func:`make`."""
    dp, tp = two_meshes(num_dp, num_tp, num_replicas)
    both = in_either_api(
        api,
        build,
        (),
        tokens,
        optimizer=optimizer,
        shard=lambda model: shard_by(
            api, parallelize(model, tp), {ParallelBlock}, mesh=dp, **options
        ),
        kinds=(Summoned, Rows),
    )
    both.tolerance = TOLERANCE
    both.rank, both.world_size = place_in(dp)
    return both


def train_and_check(both: Differential) -> None:
    """Train both models with clipping, evaluate, accumulate; compare all along."""
    for _ in range(3):
        both.zero_grad()
        both.forward_backward()
        both.check()
        both.clip(0.1)
        both.checked_step()
    both.evaluate()
    both.zero_grad()
    both.accumulate(2, no_sync=True)
    both.check()
