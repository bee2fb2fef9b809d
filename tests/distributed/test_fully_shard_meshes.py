"""fully_shard: dimensions of a mesh named in dp_mesh_dims, and several meshes."""

import copy
import importlib
import itertools
import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

import fsdp_c.checkpoint
from fsdp_c import FSDPModule, fully_shard
from fsdp_c._engines.models import units_in
from fsdp_c._fully_shard import arguments
from helpers.distributed import distributed
from helpers.groups import device_under_test, groups_destroyed, groups_kept, kept_mesh
from helpers.models import Inputs, vectors
from helpers.rows import Rows, shard_units
from helpers.seeds import seeded
from helpers.shared_folder import shared_folder
from helpers.tensor_parallel import train_and_check

# Not in torch 2.11.
DataParallelMeshDims: Any = getattr(
    torch.distributed.fsdp, "DataParallelMeshDims", None
)
ShardPlacementResult: Any = getattr(_fsdp_common, "ShardPlacementResult", None)
NEEDS_MESH_DIMS = pytest.mark.skipif(
    DataParallelMeshDims is None, reason="this torch has no DataParallelMeshDims"
)
NEEDS_PLACEMENTS = pytest.mark.skipif(
    ShardPlacementResult is None, reason="this torch has no ShardPlacementResult"
)

_numbers = itertools.count()


def make_mesh(**sizes: int) -> tuple[DeviceMesh, Callable[[str], str]]:
    """Return a mesh, and the names of its dimensions, which are new in each call."""
    number = next(_numbers)
    names = {name: f"{name}{number}" for name in sizes}
    mesh = init_device_mesh(
        device_under_test(), tuple(sizes.values()), mesh_dim_names=tuple(names.values())
    )
    return mesh, names.__getitem__


# dp_mesh_dims ----------------------------------------------------------------


class TwoLayers(nn.Module):
    """Few operators: on each new mesh torch takes long to find out about one."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, hidden)
        self.down = nn.Linear(hidden, 6)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.up(x).relu())
        return output


def distribute(
    model: nn.Module, mesh: DeviceMesh, tp: int | None, batch: Sequence[int]
) -> nn.Module:
    """Make DTensors of all parameters of TwoLayers, and of the model's inputs.

    ``tp`` is the dimension that cuts them; those of ``batch`` have a batch each.
    """

    def placements(dim: int | None) -> list[Placement]:
        result: list[Placement] = [Replicate()] * mesh.ndim
        if dim is not None and tp is not None:
            result[tp] = Shard(dim)
        return result

    cut_by_tp = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    for prefix, module in model.named_modules():
        for name, param in list(module.named_parameters(recurse=False)):
            dim = cut_by_tp.get(f"{prefix.rpartition('.')[2]}.{name}")
            dtensor = distribute_tensor(param.detach(), mesh, placements(dim))
            setattr(module, name, nn.Parameter(dtensor))
    of_batch: list[Placement] = [
        Shard(0) if dim in batch else Replicate() for dim in range(mesh.ndim)
    ]

    def to_dtensors(_: nn.Module, inputs: Inputs) -> Any:
        return tuple(DTensor.from_local(x, mesh, of_batch) for x in inputs)

    def to_local(_: nn.Module, __: Any, output: Any) -> Tensor:
        local: Tensor = output.redistribute(placements=of_batch).to_local()
        return local

    model.register_forward_pre_hook(to_dtensors)
    model.register_forward_hook(to_local)
    return model


class SpmdRows(Rows):
    """A model whose parameters all lie on one mesh, and the unsharded one."""

    def __init__(
        self,
        sizes: dict[str, int],
        shard: tuple[str, ...],
        replicate: tuple[str, ...] = (),
        hidden: int = 10,
        **options: Any,
    ) -> None:
        """Build both; ``options`` go to ``fully_shard``."""
        names = list(sizes)
        # By place: meshes of one shape are one, whatever their dimensions are for.
        of_mesh = tuple(f"dim{index}" for index in range(len(names)))
        name_of = dict(zip(names, of_mesh, strict=True)).__getitem__
        mesh = kept_mesh(tuple(sizes.values()), of_mesh)
        dims = DataParallelMeshDims(
            shard=tuple(map(name_of, shard)) or None,
            replicate=tuple(map(name_of, replicate)) or None,
        )
        self.mesh = mesh
        batch = [names.index(name) for name in (*replicate, *shard)]
        tp = names.index("tp") if "tp" in names else None
        super().__init__(
            lambda: nn.Sequential(TwoLayers(hidden), TwoLayers(hidden)),
            lambda model: shard_units(
                distribute(model, mesh, tp, batch),
                [TwoLayers],
                mesh=mesh,
                dp_mesh_dims=dims,
                **options,
            ),
            vectors,
        )
        place: Any = mesh.get_coordinate()
        self.world_size = math.prod(mesh.size(dim) for dim in batch)
        self.rank = 0
        for dim in sorted(batch):
            self.rank = self.rank * mesh.size(dim) + place[dim]


@NEEDS_MESH_DIMS
@pytest.mark.parametrize(
    ("sizes", "shard", "replicate"),
    [
        ({"dp": 2, "tp": 2}, ("dp",), ()),
        pytest.param({"tp": 2, "dp": 2}, ("dp",), (), marks=pytest.mark.only_full),
        pytest.param({"dp": 2, "cp": 2}, ("dp", "cp"), (), marks=pytest.mark.only_full),
        pytest.param(
            *({"dp": 2, "tp": 1, "cp": 2}, ("dp", "cp"), ()),
            marks=pytest.mark.only_full,
        ),
        pytest.param(
            *({"dp": 1, "cp": 2, "tp": 2}, ("dp", "cp"), ()),
            marks=pytest.mark.only_full,
        ),
        pytest.param({"hp": 2, "dp": 2}, ("dp",), ("hp",), marks=pytest.mark.only_full),
        ({"hp": 2, "dp": 1, "cp": 2}, ("dp", "cp"), ("hp",)),
        ({"hp": 2, "cp": 2}, (), ("hp", "cp")),
        pytest.param({"hp": 2, "tp": 2}, (), ("hp",), marks=pytest.mark.only_full),
    ],
    ids=lambda value: "-".join(map(str, value)),
)
@distributed(world_size=4)
def test_named_dimensions(
    sizes: dict[str, int], shard: tuple[str, ...], replicate: tuple[str, ...]
) -> None:
    """Dimensions that shard or replicate, in any place, one or several."""
    with groups_kept():
        both = SpmdRows(sizes, shard, replicate)
        train_and_check(both)
        seen: list[Any] = []
        up = both.model[0].up
        up.register_forward_pre_hook(lambda m, _: seen.append(m.weight))
        both.forward_backward()
        assert seen[0].device_mesh is both.mesh
        num_shards = math.prod(sizes[name] for name in shard)
        num_parts = num_shards * sizes.get("tp", 1)
        assert up.weight.to_local().shape[0] <= -(-up.weight.shape[0] // num_parts) + 1


@NEEDS_MESH_DIMS
@pytest.mark.bookkeeping
@distributed(world_size=2)
def test_named_dimensions_of_two_ranks() -> None:
    """One rank in a dimension, parts of different sizes, other dimensions."""
    with groups_kept():
        train_and_check(SpmdRows({"dp": 2, "tp": 1}, ("dp",), hidden=7))
        train_and_check(
            SpmdRows(
                {"tp": 1, "dp": 2},
                ("dp",),
                shard_placement_fn=lambda param: Shard(param.ndim - 1),
                reshard_after_forward=False,
            )
        )


@NEEDS_MESH_DIMS
@pytest.mark.skipif(find_spec("spmd_types") is None, reason="needs spmd_types")
@distributed(world_size=4)
def test_annotated_plain_tensors(rank: int) -> None:
    """Replicas and shards, as torchtitan makes them by default; against the whole."""
    spmd: Any = importlib.import_module("spmd_types")
    with groups_destroyed():
        mesh, name_of = make_mesh(dp=2, tp=2)
        names = name_of("dp"), name_of("tp")
        dims = DataParallelMeshDims(replicate=names[0], shard=names[1])
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2)).double()
        model: Any = copy.deepcopy(whole)
        axes = {spmd.MeshAxis.of(mesh.get_group(name)): spmd.R for name in names}
        for param in model.parameters():
            spmd.assert_type(param, axes)
        only = DataParallelMeshDims(shard=names[1])
        with pytest.raises(ValueError, match=r"'weight' is a plain .* R everywhere"):
            fully_shard(model[0], mesh=mesh, dp_mesh_dims=only)
        for module in (model[0], model):
            fully_shard(module, mesh=mesh, dp_mesh_dims=dims)
        inputs = torch.randn(4, 5, generator=seeded(0), dtype=torch.float64)
        whole(inputs).square().sum().div(4).backward()
        model(inputs[rank : rank + 1]).square().sum().backward()
        for param, other in zip(model.parameters(), whole.parameters(), strict=True):
            assert param.placements == (Replicate(), Shard(0))
            torch.testing.assert_close(param.full_tensor(), other)
            torch.testing.assert_close(param.grad.full_tensor(), other.grad)


@NEEDS_MESH_DIMS
@distributed(world_size=2)
def test_what_dp_mesh_dims_refuses() -> None:
    """As torch, and with its first words."""
    with groups_destroyed():
        mesh, name_of = make_mesh(dp=2, tp=1)
        dims = DataParallelMeshDims(shard=name_of("dp"))
        whole = [Replicate(), Replicate()]

        def linear(on: DeviceMesh, placements: list[Any]) -> nn.Module:
            module = nn.Linear(4, 4, bias=False)
            dtensor = distribute_tensor(module.weight.detach(), on, placements)
            module.weight = nn.Parameter(dtensor)
            return module

        with pytest.raises(ValueError, match="must be DTensors on the full SPMD mesh"):
            fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=dims)
        other, _ = make_mesh(dp=2, tp=1)
        with pytest.raises(ValueError, match="Expected param's DTensor mesh"):
            fully_shard(linear(other, whole), mesh=mesh, dp_mesh_dims=dims)
        with pytest.raises(ValueError, match=r"Expected Replicate\(\) on DP shard dim"):
            fully_shard(
                linear(mesh, [Shard(0), Replicate()]), mesh=mesh, dp_mesh_dims=dims
            )
        with pytest.raises(ValueError, match="on DP replicate dim"):
            fully_shard(
                linear(mesh, [Shard(0), Replicate()]),
                mesh=mesh,
                dp_mesh_dims=DataParallelMeshDims(replicate=name_of("dp")),
            )
        with pytest.raises(ValueError, match="not found in mesh"):
            fully_shard(
                linear(mesh, whole), mesh=mesh, dp_mesh_dims=DataParallelMeshDims("no")
            )
        unnamed = init_device_mesh(device_under_test(), (2, 1))
        with pytest.raises(ValueError, match="mesh must have mesh_dim_names"):
            fully_shard(linear(mesh, whole), mesh=unnamed, dp_mesh_dims=dims)
        with pytest.raises(TypeError, match="must be a DataParallelMeshDims"):
            fully_shard(linear(mesh, whole), mesh=mesh, dp_mesh_dims="dp")  # type: ignore[arg-type]
        with pytest.raises(NotImplementedError, match="reshard_after_forward as int"):
            fully_shard(
                linear(mesh, whole),
                mesh=mesh,
                dp_mesh_dims=dims,
                reshard_after_forward=2,
            )
        with pytest.raises(ValueError, match="Per-param mesh"):
            fully_shard(
                linear(mesh, whole),
                mesh=mesh,
                dp_mesh_dims=DataParallelMeshDims(replicate=name_of("dp")),
                shard_placement_fn=lambda _: Shard(0),
            )


# A mesh of its own for some parameters ------------------------------------------


class Experts(nn.Module):
    """Two experts, of which each rank of a mesh may have one."""

    def __init__(self, dim: int = 6, hidden: int = 5) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, hidden, dim) / 3)
        self.down = nn.Parameter(torch.randn(2, dim, hidden) / 3)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.up, DTensor):
            hidden = torch.einsum("bd,ehd->ebh", x, self.up).relu()
            return torch.einsum("ebh,edh->bd", hidden, self.down)
        assert isinstance(self.down, DTensor)
        group = self.up.device_mesh.get_group()
        everyone = all_gather_tensor_autograd(x, 0, group)
        up, down = self.up.to_local()[0], self.down.to_local()[0]
        output = (everyone @ up.T).relu() @ down.T
        return reduce_scatter_tensor_autograd(output, "sum", 0, group)


class Routed(nn.Module):
    """A router and experts with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 6)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = self.router(x)
        return x + self.experts(x)


class Mixture(nn.Module):
    """Two blocks of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Routed() for _ in range(2))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def shard_mixture(
    model: Any, mesh: DeviceMesh, answers: dict[str, Any], **options: Any
) -> Any:
    """Call ``fully_shard`` on blocks and model; the experts get ``answers``."""
    for block in model.blocks:
        named = {id(param): name for name, param in block.named_parameters()}

        def choose(param: nn.Parameter, named: dict[int, str] = named) -> Any:
            return answers.get(named[id(param)])

        fully_shard(block, mesh=mesh, shard_placement_fn=choose, **options)
    return fully_shard(model, mesh=mesh, **options)


def expert_meshes(name: str) -> tuple[DeviceMesh, dict[str, Any]]:
    """Return the mesh of all ranks, and the answers for the experts."""
    mesh, name_of = make_mesh(outer=2, inner=2)
    both = (name_of("outer"), name_of("inner"))
    whole = mesh[both]._flatten(f"{both[0]}_{both[1]}_flat")
    info: Any
    if name == "hybrid":
        info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    else:
        info = FSDPMeshInfo(mesh[name_of(name)], shard_mesh_dim=0)
    return whole, {
        "experts.up": ShardPlacementResult(Shard(1), info),
        "experts.down": ShardPlacementResult(None, info),
    }


@NEEDS_PLACEMENTS
@pytest.mark.parametrize("reshard_after_forward", [None, False, 2])
@distributed(world_size=4)
def test_mesh_of_single_parameters(reshard_after_forward: bool | int | None) -> None:
    """Experts over (2, 2) beside a router over all four ranks."""
    with groups_destroyed():
        arguments._part_meshes.clear()
        whole, answers = expert_meshes("hybrid")
        both = Rows(
            Mixture,
            lambda model: shard_mixture(
                model, whole, answers, reshard_after_forward=reshard_after_forward
            ),
            vectors,
        )
        both.train(2)
        both.evaluate()
        both.run("znsu")
        block = both.model.blocks[0]
        experts = block.experts
        assert experts.up.placements == (Replicate(), Shard(1))
        assert experts.down.placements == (Replicate(), Shard(0))
        assert block.router.weight.placements == (Shard(0),)
        handle = block.unshard(async_op=True)
        handle.wait()
        assert type(experts.up.data) is type(block.router.weight.data) is Tensor
        block.reshard()
        assert isinstance(experts.up, DTensor)
        names = [each.name for each in units_in(both.model)]
        assert len(names) == len(set(names)) == 5
        norms = [p.grad.full_tensor().norm() for p in both.model.parameters()]
        expected = torch.stack(norms).norm()
        torch.testing.assert_close(_clip_by_mesh(both.model, 0.1), expected)


def _clip_by_mesh(model: nn.Module, max_norm: float) -> Tensor:
    """Clip as trainers do: a norm of each mesh, since torch mixes none."""
    meshes: dict[DeviceMesh, list[Tensor]] = {}
    for param in model.parameters():
        assert isinstance(param, DTensor)
        meshes.setdefault(param.device_mesh, []).append(param)
    norms: list[Any] = [
        torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        for params in meshes.values()
    ]
    total = torch.stack([norm.full_tensor() for norm in norms]).norm()
    for params in meshes.values():
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, total)
    return total


@NEEDS_PLACEMENTS
@distributed(world_size=4)
def test_experts_of_each_group(rank: int) -> None:
    """Over two ranks only: the mean is that of the group, until a factor is set."""
    with groups_destroyed():
        whole, answers = expert_meshes("inner")
        torch.manual_seed(0)
        reference = Mixture().double()
        model: Any = Mixture().double()
        model.load_state_dict(reference.state_dict())
        shard_mixture(model, whole, answers)
        generator = seeded(0)
        inputs = [vectors(generator)[0].double() for _ in range(4)]
        model(inputs[rank]).sum().backward()
        group = (0, 1) if rank < 2 else (2, 3)
        for each in group:
            (reference(inputs[each]).sum() / 2).backward()
        for block, other in zip(model.blocks, reference.blocks, strict=True):
            for name in ("up", "down"):
                grad: Any = getattr(block.experts, name).grad
                expected = getattr(other.experts, name).grad
                torch.testing.assert_close(grad.full_tensor(), expected)
        for each in set(range(4)) - set(group):
            (reference(inputs[each]).sum() / 2).backward()
        torch.testing.assert_close(
            model.first.weight.grad.full_tensor(), reference.first.weight.grad / 2
        )


def shard_experts(model: Any, *, in_blocks: bool) -> Any:
    """Give each rank of "ep" an expert, sharded over the others; the rest over all.

    ``in_blocks``: by one call for experts and router.
    """
    mesh, name_of = make_mesh(efsdp=2, ep=2)
    both = (name_of("efsdp"), name_of("ep"))
    whole = mesh[both]._flatten(f"{both[0]}_{both[1]}_flat")
    over = mesh[both[0]]
    for block in model.blocks:
        for name in ("up", "down"):
            param = getattr(block.experts, name).detach()
            dtensor = distribute_tensor(param, mesh[both[1]], [Shard(0)])
            setattr(block.experts, name, nn.Parameter(dtensor))
        if not in_blocks:
            fully_shard(block.experts, mesh=over)
    info = FSDPMeshInfo(over, 0)
    answer = ShardPlacementResult(Shard(1), info)
    answers = {"experts.up": answer, "experts.down": answer} if in_blocks else {}
    shard_mixture(model, whole, answers)
    for block in model.blocks:
        for module in (block, block.experts):
            if isinstance(module, FSDPModule):  # an expert sees all tokens of "ep"
                module.set_gradient_divide_factor(4)
    return model


@NEEDS_PLACEMENTS
@pytest.mark.parametrize("in_blocks", [True, False])
@distributed(world_size=4)
def test_expert_parallel(rank: int, in_blocks: bool) -> None:
    """Experts of their own on each rank of a mesh."""
    with groups_destroyed():
        both = Rows(
            Mixture, lambda model: shard_experts(model, in_blocks=in_blocks), vectors
        )
        both.train(3)
        up = both.model.blocks[0].experts.up
        assert up.placements[1] == Shard(0)
        rows = 3 - rank // 2 if in_blocks else 5
        assert up.to_local().shape == (1 if in_blocks or rank < 2 else 0, rows, 6)


@NEEDS_PLACEMENTS
@pytest.mark.bookkeeping
@pytest.mark.parametrize(
    "kind",
    [
        "meshes",
        pytest.param("experts", marks=pytest.mark.only_full),
        pytest.param("experts_in_blocks", marks=pytest.mark.only_full),
    ],
)
@distributed(world_size=4)
def test_state_of_several_meshes(kind: str) -> None:
    """Full state dicts, torch.distributed.checkpoint and fsdp_c.checkpoint."""
    with groups_destroyed(), shared_folder() as folder:

        def make(seed: int) -> tuple[Any, torch.optim.Optimizer]:
            torch.manual_seed(seed)
            if kind == "meshes":
                whole, answers = expert_meshes("hybrid")
                model = shard_mixture(Mixture(), whole, answers)
            else:
                model = shard_experts(Mixture(), in_blocks=kind != "experts")
            return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)

        def step(model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
            loss: Tensor = model(torch.ones(2, 6)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        model, optimizer = make(0)
        for _ in range(2):
            step(model, optimizer)
        full = StateDictOptions(full_state_dict=True)
        expected = get_model_state_dict(model, options=full)
        path = Path(folder)
        state, optim = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optim": optim}, checkpoint_id=path / "dcp")
        fsdp_c.checkpoint.save(path / "own", model, optim=optimizer)
        loss = step(model, optimizer)
        for form in ("dcp", "own"):
            other, optimizer = make(1)
            if form == "own":
                fsdp_c.checkpoint.load(path / "own", other, optim=optimizer)
            else:
                state, optim = get_state_dict(other, optimizer)
                dcp.load({"model": state, "optim": optim}, checkpoint_id=path / "dcp")
                set_state_dict(
                    other, optimizer, model_state_dict=state, optim_state_dict=optim
                )
            for name, value in get_model_state_dict(other, options=full).items():
                assert torch.equal(value, expected[name]), (form, name)
            torch.testing.assert_close(step(other, optimizer), loss)


@NEEDS_PLACEMENTS
@distributed(world_size=2)
def test_what_placements_refuse() -> None:
    """Another object of one mesh, dimensions without a name, a wrong answer."""
    with groups_destroyed():
        mesh, name_of = make_mesh(outer=1, inner=2)
        inner = mesh[name_of("inner")]

        def shard(answer: Callable[[], Any]) -> None:
            fully_shard(
                nn.Linear(4, 4), mesh=inner, shard_placement_fn=lambda _: answer()
            )

        with pytest.raises(ValueError, match="must use the same FSDPMeshInfo object"):
            shard(lambda: ShardPlacementResult(None, FSDPMeshInfo(inner, 0)))
        with pytest.raises(ValueError, match="pass FSDPMeshInfo"):
            shard(lambda: ShardPlacementResult(None, FSDPMeshInfo(mesh, 1)))
        with pytest.raises(ValueError, match="Invalid shard_placement_fn result"):
            shard(Replicate)
        model: Any = Mixture()
        other, other_name = make_mesh(outer=2, inner=1)
        info = FSDPMeshInfo(other[other_name("inner")], 0)
        shard_mixture(model, inner, {"experts.up": ShardPlacementResult(None, info)})
        for method in (
            "set_custom_all_gather",
            "set_custom_reduce_scatter",
            "set_all_reduce_hook",
        ):
            with pytest.raises(ValueError, match="with multiple param groups"):
                getattr(model.blocks[0], method)(None)
