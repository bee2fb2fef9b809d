"""Loading: state dicts of every kind into the shards.

Note [Loading without gathering]
A unit takes the values of its own parameters out of the state dict and copies its part
of each into its shard; torch's recursion loads the rest (buffers, ignored parameters,
extra state), and meanwhile the parameters are not registered. So a FULL or LOCAL state
dict needs no communication, and a SHARDED one needs one collective per unit.

That is possible where loading a module means copying its parameters. A unit of which a
module does more (hooks around loading, ``_load_from_state_dict()`` or
``set_extra_state()`` of its own) is gathered while torch's recursion loads it.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.api import StateDictType
from torch.overrides import is_tensor_like

from fsdp_c import _native
from fsdp_c._engines.summon import summoned
from fsdp_c._state.exchange import ExchangeItem, exchange
from fsdp_c._state.forms import load_item
from fsdp_c._state.model.local import find_local_problems, load_local, local_names
from fsdp_c._state.model.plain import LOADING, moves_plainly
from fsdp_c._state.model.save import check_tree, kind_of
from fsdp_c._state.parts import ParamPart, named_parts
from fsdp_c._state.sharded_tensors import (
    find_problem,
    has_rows,
    is_sharded,
    sharded_shape,
)
from fsdp_c._units.base import Load, ShardedModule, sharded_modules
from fsdp_c._units.collectives import on_any_rank
from fsdp_c._units.device import CPU, wait_for_uploads
from fsdp_c._units.names import WRAPPED_PREFIX, clean_name
from fsdp_c._units.parallel import from_state
from fsdp_c._units.tree import Tree


def begin_load(
    module: ShardedModule,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    missing_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Load the parameters of ``module``'s unit; prepare torch's recursion into it.

    Called before the module's own loading; :func:`finish_load` ends it, after
    that of all that is in it. After an error no wrapped module was changed.
    """
    if local_metadata.get("assign_to_params_buffers", False):
        raise ValueError(
            "load_state_dict(assign=True) would replace the sharded parameters: "
            "pass assign=False"
        )
    try:
        load = module._state_dict_load
        if load is None:
            load = _begin_tree(module, state_dict, prefix)
        load.error_msgs = error_msgs
        with torch.no_grad():
            _load_unit(module, state_dict, prefix, missing_keys, load)
    except BaseException:
        _end_tree(module)
        raise
    for key in [key for key in state_dict if key.startswith(prefix)]:
        name = key[len(prefix) :]
        state_dict[f"{prefix}{WRAPPED_PREFIX}{name}"] = state_dict.pop(key)


def finish_load(module: nn.Module, incompatible_keys: Any) -> None:
    """End what :func:`begin_load` began, and clean the names in messages."""
    assert isinstance(module, ShardedModule)
    load = module._state_dict_load
    if load is None or load.error_msgs is None:
        return
    if load.modules[0] is not module:
        module.end_state_dict_load()
        return
    _end_tree(module)
    for names in (
        incompatible_keys.missing_keys,
        incompatible_keys.unexpected_keys,
        load.error_msgs,
    ):
        names[:] = [clean_name(name) for name in names]


def _end_tree(module: ShardedModule) -> None:
    load = module._state_dict_load
    for each in () if load is None else load.modules:
        each.end_state_dict_load()


# Check ------------------------------------------------------------------------


def _begin_tree(module: ShardedModule, state_dict: dict[str, Any], prefix: str) -> Load:
    """Check, for all units in ``module``, that what ``state_dict`` has fits."""
    for each in sharded_modules(module):
        each.end_state_dict_load()  # one that an exception has left
    tree = check_tree(module, "load_state_dict")
    modules = tree.modules
    wait_for_uploads(modules)
    kinds = {each: kind_of(each) for each in modules}
    is_plain = all(moves_plainly(each, tree.own[each], LOADING) for each in modules)
    problems: list[str] = []
    prefixes = {each: prefix + clean_name(own) for each, own in tree.prefixes.items()}
    left: set[str] = set()
    for each in modules:
        left |= _replace_parts(each, state_dict, prefixes[each])
        if is_plain:  # or a hook might change the state dict before a unit sees it
            problems += _find_problems(each, kinds[each], state_dict, prefixes[each])
    communicates = not is_plain or StateDictType.SHARDED_STATE_DICT in kinds.values()
    _raise_problems(module, problems, communicates=communicates)
    _native.expect_writes()
    for each in reversed(modules):
        load = Load(tuple(modules), is_plain, frozenset(left))
        each.begin_state_dict_load(load)
    return load  # of the outermost


def _raise_problems(
    module: ShardedModule, problems: list[str], *, communicates: bool
) -> None:
    """Raise if there are problems on this rank; on any, if it ``communicates``."""
    what = f"Error(s) in loading state_dict for {type(module.wrapped).__name__}"
    is_bad = bool(problems)
    if communicates:
        group, device = module.process_group, module.compute_device
        operation = "check of a state dict on all ranks"
        (is_bad,) = on_any_rank([is_bad], group, device, operation)
    if problems:
        lines = "".join(f"\n\t{clean_name(problem)}." for problem in problems)
        raise RuntimeError(f"{what}, of which nothing was loaded:{lines}")
    if is_bad:
        raise RuntimeError(
            f"{what}, of which nothing was loaded: another rank found values that do "
            "not fit; see its error"
        )


def _find_problems(
    module: ShardedModule, kind: StateDictType, state_dict: dict[str, Any], prefix: str
) -> list[str]:
    """Return what of ``state_dict`` does not fit the parameters of one unit."""
    given = [
        (f"{prefix}{name}", part, state_dict[f"{prefix}{name}"])
        for name, part in named_parts(module).items()
        if f"{prefix}{name}" in state_dict
    ]
    names = [name for name in local_names(module) if f"{prefix}{name}" in state_dict]
    if kind is StateDictType.LOCAL_STATE_DICT:
        are_slices = all(
            isinstance(value, Tensor) and value.shape == part.home.values().shape
            for _, part, value in given
        )
        if not names and not are_slices:
            return [
                f"the state dict has {given[0][0]!r}, but a LOCAL state dict would "
                f"have {prefix + local_names(module)[0]!r} for unit "
                f"{module._sharded.name!r}: load it with state_dict_type "
                "FULL_STATE_DICT or SHARDED_STATE_DICT"
            ]
        return find_local_problems(module, state_dict, prefix)
    problems = []
    for key, part, value in given:
        problem = _find_mismatch(module, kind, value, part.shape)
        if problem is not None:
            problems.append(problem.format(key=key))
    if names and (problems or not given):
        return [
            f"{prefix + names[0]!r} belongs to a LOCAL state dict, but the type "
            f"is {kind.name}: load it with state_dict_type LOCAL_STATE_DICT"
        ]
    return problems


def _find_mismatch(
    module: ShardedModule, kind: StateDictType, value: Any, shape: torch.Size
) -> str | None:
    """Return why ``value`` cannot be loaded, a text with {key} in it; or None."""
    if not is_tensor_like(value):  # type: ignore[no-untyped-call]
        return (
            '"{key}": expected torch.Tensor or Tensor-like object from checkpoint but '
            f"received {type(value)}"
        )
    size = sharded_shape(value) if is_sharded(value) else value.shape
    wants_sharded = kind is StateDictType.SHARDED_STATE_DICT and has_rows(shape)
    if wants_sharded != is_sharded(value):
        actual = f"a {type(value).__name__} of shape {tuple(size)}"
        if wants_sharded:
            return (
                f"{{key}} is {actual}, and SHARDED_STATE_DICT needs a ShardedTensor or "
                f"DTensor of shape {tuple(shape)}: load whole tensors with "
                "state_dict_type FULL_STATE_DICT"
            )
        return (
            f"{{key}} is {actual}, and a whole tensor of shape {tuple(shape)} is "
            "needed: load sharded tensors with state_dict_type SHARDED_STATE_DICT and "
            "a strategy that shards"
        )
    # As nn.Module: a 0-dim parameter may have been saved as one of one element.
    if size != shape and not (shape == () and size == (1,)):
        return (
            "size mismatch for {key}: copying a param with shape "
            f"{size} from checkpoint, the shape in current model is {shape}"
        )
    problem = find_problem(module, value) if is_sharded(value) else None
    return None if problem is None else f"{{key}} {problem}"


def _replace_parts(
    module: ShardedModule, state_dict: dict[str, Any], prefix: str
) -> set[str]:
    """Drop what the unit has registered; replace tensor parallel values by its own.

    ``set_model_state_dict()`` of torch.distributed.checkpoint adds the former to the
    whole tensors that the user gives. They are this rank's shards and say nothing new.
    Return the clean keys of those that are frozen, such as all but the adapters of
    LoRA: to torch they are given. Others are missing.
    """
    left: set[str] = set()
    parts: dict[str, ParamPart | None] = {**named_parts(module)}
    parts.update(dict.fromkeys(local_names(module)))
    sharded = module._sharded
    own: set[int] = set()
    if not sharded.unit.is_summoned:
        own.update(map(id, sharded.originals.flat_params()))
        if sharded.groups.shard_group is not None:
            own.update(id(use.param) for use in sharded.uses)
    for name, part in parts.items():
        key = f"{prefix}{name}"
        if id(state_dict.get(key)) in own:
            del state_dict[key]
            if part is not None and not part.home.param.requires_grad:
                left.add(clean_name(key))
        elif part is not None and part.cut is not None and key in state_dict:
            value = from_state(state_dict[key], part.cut, module.dtensor_mesh)
            state_dict[key] = value
    return left


# Load -------------------------------------------------------------------------


def _load_unit(
    module: ShardedModule,
    state_dict: dict[str, Any],
    prefix: str,
    missing_keys: list[str],
    load: Load,
) -> None:
    """Take the values of one unit's parameters out of ``state_dict`` and load them."""
    kind = kind_of(module)
    is_local = kind is StateDictType.LOCAL_STATE_DICT
    own = Tree.of(module).own[module]
    is_plain = is_local or moves_plainly(module, own, LOADING)
    if not load.is_checked:
        problems = _find_problems(module, kind, state_dict, prefix)
        if kind is StateDictType.FULL_STATE_DICT and not is_plain:
            problems = [each for each in problems if "size mismatch" not in each]
        _raise_problems(module, problems, communicates=True)
    values: dict[str, Any] = {}
    parts = named_parts(module)
    names: Iterable[str] = parts
    if is_local:
        names = _load_slices(module, state_dict, prefix, missing_keys, parts)
    for name in names:
        key = f"{prefix}{name}"
        if key in state_dict:
            values[name] = state_dict.pop(key)
        elif is_plain and clean_name(key) not in load.left:
            missing_keys.append(key)
    if is_local:
        load_local(module, values)
    elif is_plain:
        _write(module, values, parts)
    else:
        whole = _whole(module, values, parts)
        state_dict.update((f"{prefix}{name}", value) for name, value in whole.items())
        load.stack.enter_context(summoned(module, writeback=True))
        for use in module._sharded.uses:
            if clean_name(f"{prefix}{use.fqn}") in load.left:  # onto itself
                state_dict[f"{prefix}{use.fqn}"] = getattr(use.module, use.name)
        return
    # A rank that holds nothing of a parameter copied nothing. Yet the ranks must agree
    # on whether a block that was kept between micro-batches is stale, since they gather
    # it again together.
    for use in module._sharded.uses:
        torch.autograd.graph.increment_version(use.param)
    load.stack.enter_context(module._sharded.originals.absent())


_Parts = dict[str, ParamPart]  # of one unit, by all names


def _load_slices(
    module: ShardedModule,
    state_dict: dict[str, Any],
    prefix: str,
    missing_keys: list[str],
    parts: _Parts,
) -> list[str]:
    """Take this rank's slices of parameters out of a LOCAL state dict.

    Return the names of the flat parameters, which hold the same elements and are
    loaded; without any of them the slices are, and no name is returned.
    """
    names = local_names(module)
    slices = {
        name: state_dict.pop(f"{prefix}{name}")
        for name in parts
        if f"{prefix}{name}" in state_dict
    }
    if not slices or any(f"{prefix}{name}" in state_dict for name in names):
        return names
    missing_keys += [f"{prefix}{name}" for name in parts if name not in slices]
    for name, value in slices.items():
        parts[name].home.values().copy_(value)
    return []


def _write(module: ShardedModule, values: dict[str, Any], parts: _Parts) -> None:
    if module._sharded.unit.is_summoned:
        values = _whole(module, values, parts)
    for name, value in values.items():
        if not is_sharded(value):
            parts[name].write(_as_tensor(value))
    for name, value in _exchanged(module, values, parts, are_whole=False).items():
        parts[name].home.put(value)


def _as_tensor(value: Any) -> Tensor:
    """Return the tensor that a tensor-like stands for, as one read when it is used.

    Only what ``nn.Module.load_state_dict()`` needs is asked of it: shape and copying.
    """
    if isinstance(value, Tensor):
        return value
    return torch.empty(tuple(value.shape), dtype=value.dtype).copy_(value)


def _whole(
    module: ShardedModule, values: dict[str, Any], parts: _Parts
) -> dict[str, Any]:
    """Return ``values`` with whole tensors for sharded ones."""
    found = _exchanged(module, values, parts, are_whole=True)
    whole = {
        name: value.to(module.compute_device).view(sharded_shape(values[name]))
        for name, value in found.items()
    }
    return {**values, **whole}


def _exchanged(
    module: ShardedModule, values: dict[str, Any], parts: _Parts, *, are_whole: bool
) -> dict[str, Tensor]:
    """Return the sharded ones of ``values``, whole or this rank's parts, 1-D."""
    items = [
        load_item(parts[name], name, value, is_whole=are_whole)
        for name, value in values.items()
        if is_sharded(value)
    ]
    if not are_whole:
        items = _into_place(items)
    try:
        return {item.key: value for item, value in exchange(items, "parameters")}
    except RuntimeError as error:
        raise RuntimeError(
            f"load_state_dict() could not exchange the values of unit "
            f"{module._sharded.name!r} on rank {module.rank} ({error}): all ranks must "
            "load state dicts with the same keys"
        ) from error


def _into_place(items: list[ExchangeItem]) -> list[ExchangeItem]:
    """Return ``items`` with the parameters' own memory as targets, where it can be."""
    storages = {
        item.move.source.untyped_storage().data_ptr()
        for item in items
        if item.move.source is not None
    }
    places = set()  # shared parameters have several values
    placed = []
    for item in items:
        own = item.part.home.values()
        is_place = (
            item.part.home.memory is not None
            and own.device == CPU
            and own.dtype == item.move.dtype
            and own.untyped_storage().data_ptr() not in storages
            and own.data_ptr() not in places
        )
        places.add(own.data_ptr())
        move = item.move._replace(target=own if is_place else None)
        placed.append(item._replace(move=move))
    return placed


def with_wrapped_metadata(module: nn.Module, state_dict: Any) -> Any:
    """Return ``state_dict`` with module versions under the wrapped names as well.

    torch looks the version of a module up by its name in the module tree. It also
    notes ``assign=True`` there, so the user's own metadata is left alone.
    """
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is None:
        return state_dict
    extended = OrderedDict(state_dict)
    names = OrderedDict((name, dict(version)) for name, version in metadata.items())
    for name, _ in module.named_modules():
        clean = clean_name(name)
        if clean in metadata:
            names[name] = dict(metadata[clean])
    cast("Any", extended)._metadata = names
    return extended
