"""The cells of docs/reference/comparison.md that can be run here are what they say."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from helpers.distributed import distributed
from helpers.doc_pages import prose_of
from helpers.groups import groups_destroyed
from helpers.impl import FSDP

CPU = torch.device("cpu")
COLUMNS = ("fsdp_c", "FSDP1", "FSDP2", "DDP")
POLICY = ModuleWrapPolicy({nn.Linear})


def _wrap(column: str, module: nn.Module, **kwargs: Any) -> Any:
    """Wrap with the least that this library needs on the CPU."""
    if column == "fsdp_c":
        return FSDP(module, use_orig_params=True, **kwargs)
    if column == "FSDP1":
        return TorchFSDP(module, use_orig_params=True, device_id=CPU, **kwargs)
    if column == "FSDP2":
        return fully_shard(module, mesh=_mesh())
    return DistributedDataParallel(module)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Mixed(nn.Module):
    """A layer, and whatever a row adds; uses all of it that is floating."""

    def __init__(self, **added: nn.Parameter) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for name, param in added.items():
            self.register_parameter(name, param)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        for param in self._parameters.values():
            if param is not None and param.is_floating_point():
                out = out + param.float().sum()
        return out


class Shared(nn.Module):
    """An embedding and a head with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(tokens))
        return out


def _train(model: Any) -> None:
    model(torch.ones(2, 4)).sum().backward()


# One body per row: it raises where the row says no. --------------------------


def cpu(column: str, folder: Path) -> None:
    _train(_wrap(column, Mixed()))


def replicas(column: str, folder: Path) -> None:
    """Ranks whose gradients are 1 and 2 times something: the mean is 1.5 times."""
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard")
    )
    module = nn.Linear(1, 1, bias=False)
    if column == "FSDP2":
        model: Any = fully_shard(module, mesh=mesh)
    else:
        strategy = ShardingStrategy.HYBRID_SHARD
        model = _wrap(column, module, device_mesh=mesh, sharding_strategy=strategy)
    model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    grads = [_whole(param.grad) for param in model.parameters()]
    assert [grad.flatten().tolist() for grad in grads] == [[1.5]]


def frozen(column: str, folder: Path) -> None:
    """A frozen layer of 16 elements beside a trainable one of 4."""
    module = nn.Linear(4, 4)
    module.weight.requires_grad_(False)
    model = _wrap(column, module)
    _train(model)
    if column == "fsdp_c":
        import fsdp_c

        num_bytes = fsdp_c.memory_stats(model)["grad_shard_nbytes"]
        numel = num_bytes // 4 * dist.get_world_size()
    elif column == "FSDP1":
        numel = model._flat_param.grad.numel() * dist.get_world_size()
    else:
        params = list(model.parameters())
        numel = sum(p.grad.numel() for p in params if p.grad is not None)
    assert numel == 4


def two_dtypes(column: str, folder: Path) -> None:
    low = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    _train(_wrap(column, Mixed(low=low)))


def integers(column: str, folder: Path) -> None:
    codes = nn.Parameter(torch.arange(7, dtype=torch.uint8), requires_grad=False)
    _train(_wrap(column, Mixed(codes=codes)))


def scalars(column: str, folder: Path) -> None:
    _train(_wrap(column, Mixed(scale=nn.Parameter(torch.tensor(2.0)))))


def shared(column: str, folder: Path) -> None:
    module = Shared()
    if column == "FSDP2":
        fully_shard(module.head, mesh=_mesh())
    kwargs = {"auto_wrap_policy": POLICY} if column in ("fsdp_c", "FSDP1") else {}
    model = _wrap(column, module, **kwargs)
    model(torch.tensor([[1, 2]])).sum().backward()


def deepcopy(column: str, folder: Path) -> None:
    _train(copy.deepcopy(_wrap(column, Mixed())))


def clipping(column: str, folder: Path) -> None:
    """Torch's function gives the norm of the whole model on every rank."""
    reference = Mixed()
    model = _wrap(column, copy.deepcopy(reference))
    for each in (reference, model):
        _train(each)
    norms = [
        float(_whole(nn.utils.clip_grad_norm_(each.parameters(), 1e9)))
        for each in (model, reference)
    ]
    assert norms[0] == pytest.approx(norms[1])


def dtensors(column: str, folder: Path) -> None:
    model = _wrap(column, nn.Linear(4, 4))
    for param in model.parameters():
        assert isinstance(param, DTensor)
    assert model.weight.shape == (4, 4)


def without_pickle(column: str, folder: Path) -> None:
    """No file of a checkpoint is a pickle."""
    model = _wrap(column, Mixed())
    path = folder / column
    if column == "fsdp_c":
        import fsdp_c

        fsdp_c.checkpoint.save(path, model)
    else:
        if column == "FSDP1":
            TorchFSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        dcp.save(model.state_dict(), checkpoint_id=str(path))
    assert not [file.name for file in path.iterdir() if _is_pickle(file)]


def _is_pickle(file: Path) -> bool:
    try:
        pickle.loads(file.read_bytes())
    except Exception:
        return False
    return True


ROWS: dict[str, Callable[[str, Path], None]] = {
    "Trains on CPU processes over gloo": cpu,
    "Replicas of sharded groups, mesh (n, 1) included": replicas,
    "Frozen parameters have no gradient memory in a mixed unit": frozen,
    "Trainable parameters of two dtypes in a unit": two_dtypes,
    "Integer parameters, frozen, beside floating ones": integers,
    "Scalar parameters": scalars,
    "One parameter used by two units": shared,
    "`copy.deepcopy` of the wrapped model": deepcopy,
    "`torch.nn.utils.clip_grad_norm_` is right": clipping,
    "Parameters stay DTensors of the original shape": dtensors,
    "Checkpoint files without pickle": without_pickle,
}


def _table(page: str) -> dict[str, dict[str, str]]:
    """Return the cells of the first table of a page, by row and column."""
    lines = [line for line in prose_of(page).splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    found: dict[str, dict[str, str]] = {}
    for row in rows[2:]:
        if len(row) != len(rows[0]):
            break
        found[row[0]] = dict(zip(rows[0][1:], row[1:], strict=True))
    return found


TABLE = _table("docs/reference/comparison.md")


def _says(row: str, column: str) -> str:
    """Return "yes" or "no" of a cell; "" where it says neither."""
    word = TABLE[row][column].split(",")[0]
    return word if word in ("yes", "no") else ""


CELLS = [(r, c) for r in ROWS for c in COLUMNS if _says(r, c)]


def test_rows_are_on_the_page() -> None:
    assert ROWS.keys() <= TABLE.keys()
    assert len(CELLS) > 3 * len(ROWS)


@pytest.mark.parametrize(("row", "column"), CELLS)
@distributed(world_size=2, device="cpu")
@pytest.mark.filterwarnings("ignore")
def test_cell(world_size: int, row: str, column: str, tmp_path: Path) -> None:
    works = True
    with groups_destroyed():
        try:
            ROWS[row](column, tmp_path)
        except Exception:
            works = False
    verdicts = [False] * world_size
    dist.all_gather_object(verdicts, works)
    assert ("yes" if all(verdicts) else "no") == _says(row, column)
