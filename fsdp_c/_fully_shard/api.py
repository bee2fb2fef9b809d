"""fully_shard() and the functions beside it."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_c._engines.lent_shards import lend_to_optimizers
from fsdp_c._engines.replaced_params import replace_for_good
from fsdp_c._fully_shard.arguments import Arguments, check_arguments
from fsdp_c._fully_shard.forward import run_forward
from fsdp_c._fully_shard.group import Group, own_modules
from fsdp_c._fully_shard.meshes import data_mesh_from
from fsdp_c._fully_shard.module import FSDPModule, _check_fsdp_modules
from fsdp_c._fully_shard.module_state import ModuleState
from fsdp_c._fully_shard.rows import shard_param
from fsdp_c._fully_shard.sharded_params import Place, register, sharded_names
from fsdp_c._fully_shard.torch_state_dicts import correct_state_dicts
from fsdp_c._torch_compat import interpreted, note_fully_sharded, noted_state
from fsdp_c._units.apart import choose_apart, have_units_inside
from fsdp_c._units.base import ShardedModule
from fsdp_c._units.cuts import Cut, local_of
from fsdp_c._units.fused_layers import ask_to_be_called
from fsdp_c._units.keep_whole import Kept, kept_of
from fsdp_c._units.params import check_module, check_param
from fsdp_c._units.uses import mark_sharded, sharding_unit

# By the module's own class.
_classes: dict[type[nn.Module], Any] = {}


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008, frozen
    offload_policy: OffloadPolicy | None = OffloadPolicy(),  # noqa: B008, likewise
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Shard the parameters of a module, in place, as PyTorch's FSDP2 does.

    Call it bottom-up: the parameters that no call on a submodule took become one unit,
    which is gathered and reduced together; of a module with other calls inside, large
    ones become units of their own, which run with it. They become DTensors, of which
    each rank has what ``torch.chunk`` gives it; in forward the modules see plain
    tensors. Optimizers, ``clip_grad_norm_`` and state dicts are torch's own, on the
    DTensors.

    Args:
        module: The module, or modules that are one group.
        mesh: 1-D, or 2-D ``(replicate, shard)`` with names, or, with ``dp_mesh_dims``,
            the one that all parameters are on; all ranks if None.
        reshard_after_forward: Reshard the parameters after forward and gather them
            again for backward. None: True for all groups but the root's. An int N:
            between forward and backward keep each parameter sharded over N ranks.
        shard_placement_fn: The dimension in which a parameter is cut, as a Shard, or
            a ShardPlacementResult, which has a mesh, too: parameters of one mesh are a
            unit.
        mp_policy: dtypes of compute, reduction and outputs.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards and gradients in host
            memory; on the CPU they are there anyway. None: as the default.
        ignored_params: Parameters to leave alone.
        dp_mesh_dims: A DataParallelMeshDims: the dimensions of ``mesh`` that shard and
            replicate. Parameters are DTensors on ``mesh``, and modules see them so.

    Returns:
        ``module``, whose class, and that of each module in a list, is a subclass of
        :class:`FSDPModule` now.

    Raises:
        AssertionError: The module has been sharded before, or a parameter does not have
            the dimension that ``shard_placement_fn`` returned.
        TypeError: An argument is of a wrong type.
        ValueError: An argument has a wrong value or is not supported, or a parameter
            cannot be sharded; the message names it.

    Source:
        ``torch.distributed.fsdp.fully_shard`` (torch 2.13).
    """
    modules = _check_modules(module)
    correct_state_dicts()
    lend_to_optimizers()
    arguments = check_arguments(
        mesh,
        reshard_after_forward,
        shard_placement_fn,
        mp_policy,
        offload_policy,
        dp_mesh_dims,
    )
    ignored = ignored_params or set()
    own = list(own_modules(modules))
    _move_buffers(own, arguments)
    groups = _make_groups(modules, own, arguments, ignored)
    state = ModuleState(groups[0])
    for each in modules:
        # Not by setattr(): the module may have one of its own.
        each.__dict__["_fsdp_c_groups"] = groups
        note_fully_sharded(each, state)
        each.__class__ = _class_over(type(each))
        ask_to_be_called(each)
    return module


fully_shard.state = noted_state  # type: ignore[attr-defined] # torch's name


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.<method_name>(...)`` run like forward, with whole parameters.

    Does nothing for a module that fully_shard() was not called on.

    Args:
        module: An FSDPModule.
        method_name: The name of the method.

    Raises:
        ValueError: There is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    method = getattr(module, method_name)

    @interpreted
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        return run_forward(module, method, args, kwargs)

    setattr(module, method_name, run)


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """No effect: modules over one process group share its transport anyway.

    Args:
        modules: FSDPModules.

    Raises:
        ValueError: One is not an FSDPModule.
    """
    _check_fsdp_modules(modules)


def _check_modules(module: Any) -> tuple[nn.Module, ...]:
    given = [module] if isinstance(module, nn.Module) else list(module)
    if not given:
        raise ValueError("fully_shard needs a module, or modules, got an empty list")
    for each in given:
        if not isinstance(each, nn.Module):
            raise TypeError(f"fully_shard takes modules, got {type(each).__name__}")
        if isinstance(each, FSDPModule):
            raise AssertionError(  # torch's class and first words
                "Each distinct composable distributed API can only be applied to a "
                "module once. fully_shard was called on this "
                f"{type(each).__name__} before"
            )
        if (
            isinstance(each, (nn.ModuleList, nn.ModuleDict))
            and type(each).forward is nn.Module.forward
        ):
            raise ValueError(  # torch's first words
                "fully_shard does not support containers that do not implement "
                f"forward: {each}; call it on their children"
            )
        for submodule in each.modules():
            if isinstance(submodule, ShardedModule):
                raise ValueError(
                    f"{type(each).__name__} contains a FullyShardedDataParallel "
                    "module: use one of the two APIs in a module tree"
                )
    inside = {sub for each in given for sub in each.modules() if sub is not each}
    return tuple(each for each in dict.fromkeys(given) if each not in inside)


def _move_buffers(own: Sequence[tuple[str, nn.Module]], arguments: Arguments) -> None:
    for _, module in own:
        for buffer in module.buffers(recurse=False):
            if buffer.device != arguments.device and not buffer.is_meta:
                buffer.data = buffer.to(arguments.device)


def _make_groups(
    modules: Sequence[nn.Module],
    own: Sequence[tuple[str, nn.Module]],
    arguments: Arguments,
    ignored: set[nn.Parameter],
) -> tuple[Group, ...]:
    """Shard the parameters; those of one mesh are a group, but for units apart."""
    found: dict[nn.Parameter, list[tuple[nn.Module, str, str]]] = {}
    registered = [each for _, module in own for each in module._parameters.values()]
    # Of a module that is shared with another group the parameters are that group's.
    names = sharded_names() if any(isinstance(p, DTensor) for p in registered) else {}
    for prefix, module in own:
        for name, param in module._parameters.items():
            if param is None or param in ignored:
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            check_module(module, fqn, "ignored_params")
            if param not in found:
                _check_param(fqn, param, names.get(param) or sharding_unit(param))
            found.setdefault(param, []).append((module, name, fqn))
    makings: dict[Any, _Making] = {}
    for param, uses in found.items():
        fqn = uses[0][2]
        dim, info = arguments.choose(fqn, param)
        making = _making_for(makings, arguments, fqn, info)
        data = making.arguments.data
        cut = data.cut(fqn, param, dim)
        _check_kept(kept_of(*uses[0][:2]), fqn, cut, data.num_shards)
        making.params[param] = cut
    made = list(makings.values())
    if have_units_inside(modules):
        made = [part for making in made for part in _with_apart(making, found)]
    storage = torch.device("cpu") if arguments.offloads else arguments.device
    for making in made:
        data = making.arguments.data
        for param, cut in making.params.items():
            making.sharded.append(
                shard_param(
                    found[param][0][2],
                    param,
                    cut,
                    data.shard_rank,
                    data.num_shards,
                    storage,
                )
            )
    groups = []
    for making in made:
        places: list[Place] = []
        for index, (param, new) in enumerate(
            zip(making.params, making.sharded, strict=True)
        ):
            mark_sharded(param, found[param][0][2])  # whoever shares it is told
            replace_for_good(param, found[param][0][2])
            vars(new).pop("_fsdp_flattened", None)
            for module, name, fqn in found[param]:
                register(module, name, new)
                places.append(Place(module, name, fqn, index))
        cuts = tuple(making.params.values())
        groups.append(
            Group(modules, making.arguments, places, making.sharded, cuts, making.apart)
        )
    return tuple(groups) or (Group(modules, arguments, (), (), ()),)


class _Making:
    """A group that is being made."""

    def __init__(self, arguments: Arguments, info: Any) -> None:
        self.arguments = arguments
        self.info = info  # torch's object of its mesh; None: the argument
        self.params: dict[nn.Parameter, Cut] = {}
        self.sharded: list[nn.Parameter] = []
        self.apart = ""  # the name of its parameter, if its unit is apart


def _making_for(
    makings: dict[Any, _Making], arguments: Arguments, fqn: str, info: Any
) -> _Making:
    """Return the group of a parameter by its mesh, added if there is none."""
    data = arguments.data if info is None else data_mesh_from(info, fqn)
    key = data.shard_group, data.replica_group
    if key not in makings:
        its_own = arguments if info is None else arguments.over(data)
        makings[key] = _Making(its_own, info)
    elif makings[key].info is not info:  # torch's first words
        raise ValueError(
            "Params sharing the same process group must use the same FSDPMeshInfo "
            f"object, but shard_placement_fn returned another one for parameter {fqn!r}"
        )
    return makings[key]


def _with_apart(
    making: _Making, found: dict[nn.Parameter, list[tuple[nn.Module, str, str]]]
) -> Iterator[_Making]:
    """Yield the group, and those of its parameters that become units apart."""
    params = list(making.params)
    chosen = choose_apart(
        [making.params[p].shape.numel() if p.requires_grad else 0 for p in params]
    )
    parts = []
    for index in chosen:
        part = _Making(making.arguments, making.info)
        part.apart = found[params[index]][0][2]
        part.params[params[index]] = making.params.pop(params[index])
        parts.append(part)
    yield making
    yield from parts


def _check_kept(kept: Kept | None, fqn: str, cut: Cut, num_shards: int) -> None:
    """Refuse what keep_whole() asks for and rows cannot give."""
    if kept is None or num_shards == 1:
        return
    shape = cut.shape
    row_numel = shape[1:].numel()
    has_whole_rows = cut.dim == 0 and cut.parallel is None
    if has_whole_rows and (shape[0] == 1 or row_numel % kept.numel == 0):
        return
    raise ValueError(
        f"parameter {fqn!r} of shape {tuple(shape)} is to be kept whole in blocks of "
        f"{kept.numel:,} elements, and fully_shard() cuts it between rows of "
        f"{row_numel:,}, or along another dimension: leave it out of keep_whole(); "
        "whole_parameter_optimizer() steps it whole"
    )


def _check_param(fqn: str, param: nn.Parameter, taken: str | None) -> None:
    if taken is not None:
        raise ValueError(
            f"parameter {fqn!r} is shared with {taken!r}, already managed by another "
            "call of fully_shard: pass the modules that share it in one list, or call "
            "fully_shard only on a module that contains both"
        )
    whole: Any = local_of(param)
    if param.dim() == 0:  # torch's first words
        raise ValueError(
            "fully_shard doesn't support scalar parameters. "
            f"Change {fqn} to a 1D tensor with numel equal to 1."
        )
    if is_traceable_wrapper_subclass(whole):
        return  # with fsdp_pre_all_gather, which may be defined later
    check_param(fqn, whole)


def _class_over(cls: type[nn.Module]) -> Any:
    if cls not in _classes:
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    return _classes[cls]
