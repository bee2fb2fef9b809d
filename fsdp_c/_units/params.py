"""Collects a unit's own parameters and moves them to its device."""

from collections.abc import Iterable, Iterator, Set

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fsdp_c._torch_compat import overrides_dispatch
from fsdp_c._units.base import sharded_modules
from fsdp_c._units.cuts import row_cut
from fsdp_c._units.names import clean_name
from fsdp_c._units.uses import ParamUse, is_flat_param, is_taken, sharding_unit


def own_modules(
    module: nn.Module, ignored_modules: Set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``module`` and what is in it, by name, each once, parents first.

    Neither ignored modules nor wrapped ones, nor what is in them.
    """
    yield from module.named_modules({*ignored_modules, *sharded_modules(module)})


def unsharded_params(
    module: nn.Module, ignored_params: Set[nn.Parameter]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters in ``module`` that no unit shards yet, by name."""
    for name, param in module.named_parameters():
        if param not in ignored_params and not is_taken(param):
            yield name, param


def check_params(
    module: nn.Module,
    named_params: Iterable[tuple[str, nn.Parameter]],
    device_mesh: DeviceMesh | None,
) -> None:
    """Check that all of these parameters in ``module`` can be flattened.

    Before ``module`` is wrapped, and before they have memory.
    """
    for name, param in named_params:
        path, _, _ = name.rpartition(".")
        check_module(module.get_submodule(path), clean_name(name), "ignored_modules")
        if isinstance(param, DTensor) and device_mesh is not None:
            row_cut(clean_name(name), param, device_mesh)  # raises if it cannot be
        else:
            check_param(clean_name(name), param)


def collect_uses(
    module: nn.Module, *, ignored_params: Set[nn.Parameter], left_out: Set[nn.Parameter]
) -> list[ParamUse]:
    """Return the uses of the parameters that a unit over ``module`` shards.

    These are all that no nested unit has taken, in the order of the module tree.
    A nested unit leaves out a parameter that is used outside it as well, see
    :func:`fsdp_c._units.wrap.auto_wrap`; ``left_out`` are those of this one.
    """
    nested: set[nn.Module] = set()
    for sharded in sharded_modules(module):
        nested.update(sharded.modules())

    uses: list[ParamUse] = []
    slots: dict[nn.Parameter, int] = {}
    for prefix, current in module.named_modules():
        for name, param in current._parameters.items():
            if (
                param is None
                or param in ignored_params
                or param in left_out
                or is_flat_param(param)
            ):
                continue
            fqn = clean_name(f"{prefix}.{name}" if prefix else name)
            unit_name = sharding_unit(param)
            if unit_name is None:
                slot = slots.setdefault(param, len(slots))
                uses.append(ParamUse(current, name, fqn, param, param.shape, slot))
            elif current not in nested:
                raise ValueError(
                    f"parameter {fqn!r} of {type(module).__name__} is shared with "
                    f"unit {unit_name!r}, which shards it already: wrap the modules "
                    "that share it in one unit, or wrap with auto_wrap_policy, which "
                    "keeps it in their lowest common ancestor"
                )
    return uses


def move_to_device(
    own: Iterable[tuple[str, nn.Module]], uses: list[ParamUse], device: torch.device
) -> None:
    """Move a unit's own parameters and buffers to ``device``, in place.

    Objects and shared parameters stay as they are. Gradients are dropped: a
    sharded parameter could not carry them.
    """
    for use in uses:
        if use.param.is_meta:
            raise ValueError(_still_on_meta("parameter", use.fqn))
        check_param(use.fqn, use.param)
        use.param.grad = None
        if use.param.device != device:
            use.param.data = use.param.data.to(device)
    for prefix, current in own:
        for name, buffer in current._buffers.items():
            if buffer is None:
                continue
            if buffer.is_meta:
                fqn = f"{prefix}.{name}" if prefix else name
                raise ValueError(_still_on_meta("buffer", fqn))
            if buffer.device != device:
                buffer.data = buffer.data.to(device)


def _still_on_meta(kind: str, fqn: str) -> str:
    return (
        f"{kind} {fqn!r} is still on the meta device: param_init_fn must give every "
        "parameter and buffer of the module that it gets real memory, for example "
        "with module.to_empty(device=..., recurse=False) and reset_parameters()"
    )


# Which parameters can be flattened: plain tensors with memory of their own --------


def check_param(name: str, param: nn.Parameter) -> None:
    problem = _problem(param)
    if problem is not None:
        raise ValueError(f"parameter {name!r} {problem}")


def _problem(param: nn.Parameter) -> str | None:
    """Return what keeps a parameter from being flattened, and the remedy."""
    kind = type(param).__name__
    left_alone = "or list it in ignored_states, which leaves it alone"
    if is_lazy(param):
        return (
            f"is an {kind}, which has no shape yet: run the module's forward once "
            "before wrapping it"
        )
    if isinstance(param, DTensor):
        return (
            f"is a DTensor ({', '.join(map(str, param.placements))}): pass the data "
            "parallel part of its mesh, as device_mesh=mesh['dp'], instead of a "
            f"process group, {left_alone}"
        )
    if param.is_nested:
        return (
            "is a nested tensor, whose parts have shapes of their own: register one "
            f"parameter for each part, {left_alone}"
        )
    if param.is_quantized:
        return (
            f"is a quantized tensor ({param.dtype}), whose elements mean nothing "
            f"without their scale: pass its dequantize(), {left_alone}"
        )
    if param.layout is not torch.strided:
        layout = str(param.layout).removeprefix("torch.")
        what = "sparse" if "sparse" in layout else "opaque"
        return (
            f"is {what} ({layout}): make it dense with to_dense(), or list its module "
            "in ignored_modules"
        )
    if not param.is_leaf:
        return (
            "is not a leaf of the autograd graph (it is the result of a computation): "
            "register it as nn.Parameter(value.detach())"
        )
    if overrides_dispatch(param) and not _has_own_memory(param):
        other = "pass a plain tensor"
        if hasattr(param, "fsdp_pre_all_gather"):
            other = "use fsdp_c.fully_shard, which calls fsdp_pre_all_gather"
        return (
            f"is a {kind}, a tensor subclass that wraps other tensors and has no "
            f"memory of its own: {other}, {left_alone}"
        )
    return None


def check_module(module: nn.Module, fqn: str, argument: str) -> None:
    """Refuse a parameter, ``fqn``, that ``module`` cannot have replaced.

    ``argument`` is the one that leaves it alone.

    Raises:
        ValueError: The module is one of TorchScript.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"parameter {fqn!r} belongs to a module of TorchScript "
            f"({module.original_name}), whose parameters cannot be replaced: pass the "
            "module that was scripted or traced, and compile it with torch.compile; "
            f"or leave this one alone with {argument}"
        )


def _has_own_memory(param: nn.Parameter) -> bool:
    """Whether the elements lie in the tensor's own storage, or will (meta)."""
    try:
        return (
            param.is_meta
            or param.numel() == 0
            or param.untyped_storage().data_ptr() != 0
        )
    except RuntimeError:  # a storage that nothing may read
        return False
