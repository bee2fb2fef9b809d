"""Saving: state dicts of every kind, one unit at a time.

The keys are those of the unwrapped module: a wrapped module passes its own prefix
on to the module inside it.

Note [One unit at a time]
Parameters are exchanged to where they are needed (see fsdp_c._state.forms): whole on
all ranks or on rank 0, or in rows. So each rank needs little memory beyond its result.
That is possible where saving a module means handing out its parameters. A unit of which
a module does more (hooks around saving, ``_save_to_state_dict()`` or
``get_extra_state()`` of its own) is summoned, for they may look at its parameters.

The recursion of ``nn.Module.state_dict()`` goes into children while their parents are
being saved. So the outermost wrapped module saves what is nested in it beforehand,
innermost first: only one unit is summoned at a time. When the recursion comes to a
nested unit later, that hands out what was kept. Order of keys, metadata and hooks are
those of the unwrapped module.
"""

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp.api import ShardingStrategy, StateDictType

from fsdp_c._engines.engine import ensure_engine, shards_shown
from fsdp_c._engines.summon import summoned
from fsdp_c._state.exchange import UnitMoves, exchange_units
from fsdp_c._state.forms import Form
from fsdp_c._state.kinds import follow_mesh
from fsdp_c._state.model.local import local_state
from fsdp_c._state.model.plain import SAVING, moves_plainly
from fsdp_c._state.parts import spread_of, unit_values, uses_in_order
from fsdp_c._state.sharded_tensors import is_sharded
from fsdp_c._units.base import ShardedModule, sharded_modules
from fsdp_c._units.collectives import on_any_rank
from fsdp_c._units.names import clean_name
from fsdp_c._units.parallel import to_state
from fsdp_c._units.tree import Tree
from fsdp_c._units.uses import is_flat_param, sharding_unit

# State dicts of nested modules, with the prefix of their keys, while the outermost
# module is saved.
_kept: dict[ShardedModule, tuple[dict[str, Any], str]] = {}


def kind_of(module: ShardedModule) -> StateDictType:
    """Return the kind of state dict that ``module``'s own unit gives and takes.

    Source:
        Full state dicts for NO_SHARD: ``_pre_state_dict_hook`` (torch 2.13,
        ``fsdp/_state_dict_utils.py``).
    """
    kind: StateDictType = module._state_dict_type
    if kind is StateDictType.FULL_STATE_DICT:
        return kind
    if module._sharded.config.sharding_strategy is ShardingStrategy.NO_SHARD:
        warnings.warn(
            "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be "
            f"returned: nothing is sharded, and {kind.name} would mean nothing.",
            stacklevel=5,
        )
        return StateDictType.FULL_STATE_DICT
    follow_mesh(module, kind, module._state_dict_config)
    return kind


def _form_of(module: ShardedModule, kind: StateDictType) -> Form:
    """Return how the parameters of ``module``'s own unit stand in its state dict."""
    config = module._state_dict_config
    first = None
    if getattr(config, "rank0_only", False):
        first = dist.get_global_rank(module.process_group, 0)
    shards = kind is StateDictType.SHARDED_STATE_DICT
    return Form.of_config(config, shards=shards, first=first)


def check_tree(module: ShardedModule, method: str) -> Tree:
    """Return what is in ``module``; check that ``method`` can run on it.

    Not inside a step, and not if a parameter is shared with a module outside, whose
    unit shards it.
    """
    ensure_engine(module)
    tree = Tree.of(module)
    owned: set[int] = set()
    for each in tree.modules:
        if each.is_in_step:
            raise RuntimeError(
                f"{method}() was called inside forward or backward of unit "
                f"{each._sharded.name!r}: call it between steps; after an exception in "
                "the middle of one, call fsdp_c.reset(model) first"
            )
        each._sharded.originals.check()
        each._sharded.unit.show_kept(False)
        originals = each._sharded.originals
        owned.update([id(use.param) for use in originals.uses])
        owned.update(map(id, originals.flat_params()))
    for holder, places in tree.places.items():
        for name, param in holder._parameters.items():
            if id(param) in owned or param is None or is_flat_param(param):
                continue
            unit_name = sharding_unit(param)
            if unit_name is not None:
                raise RuntimeError(
                    f"parameter {clean_name(places[0] + name)!r} of unit "
                    f"{module._sharded.name!r} is shared with modules outside it, and "
                    f"sharded by unit {unit_name!r}: save or load the state dict of a "
                    "module that contains both"
                )
    return tree


def _new_state() -> "OrderedDict[str, Any]":
    state: OrderedDict[str, Any] = OrderedDict()
    cast("Any", state)._metadata = OrderedDict()
    return state


def save(
    module: ShardedModule,
    destination: dict[str, Any] | None,
    prefix: str,
    keep_vars: bool,
) -> dict[str, Any]:
    """Return the state dict of ``module``, its keys beginning with ``prefix``.

    See ``FullyShardedDataParallel.state_dict``. With ``rank0_only`` the other ranks
    get nothing, and hold no copy meanwhile.
    """
    if destination is None:
        destination = _new_state()
    if module in _kept:
        _hand_out(*_kept[module], destination, prefix)
        return destination
    tree = check_tree(module, "state_dict")
    modules = tree.modules
    kinds = {each: kind_of(each) for each in modules}
    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(shards_shown(module))
        exchanging = []
        for each in modules:
            originals = each._sharded.originals
            is_local = kinds[each] is StateDictType.LOCAL_STATE_DICT
            if is_local:
                stack.enter_context(originals.absent())
            else:
                exchanging.append(each)
                if originals.flat_params():  # else the originals are registered
                    stack.enter_context(originals.shown())
        summons = _find_summons(exchanging, tree)
        forms = {each: _form_of(each, kinds[each]) for each in modules}
        values = _exchanged([each for each in exchanging if each not in summons], forms)
        saving = _Saving(tree, kinds, forms, values, keep_vars)
        for each in reversed(modules[1:]):  # parents come first in it
            own_prefix = prefix + tree.prefixes[each]
            _kept[each] = _save_unit(saving, each, _new_state(), own_prefix), own_prefix
            stack.callback(_kept.pop, each)
        return _save_unit(saving, module, destination, prefix)


def _find_summons(modules: list[ShardedModule], tree: Tree) -> set[ShardedModule]:
    """Return the modules whose unit is summoned; the same on all ranks.

    A hook may be registered on some ranks only, so the ranks ask each other. One that
    runs before a unit is saved may change its parameters.
    """
    of_group: dict[ProcessGroup, list[ShardedModule]] = {}
    for each in modules:
        of_group.setdefault(each.process_group, []).append(each)
    summons: set[ShardedModule] = set()
    for group, its_modules in of_group.items():
        flags = [
            bool(each._sharded.unit.is_summoned or each._state_dict_pre_hooks)
            or not moves_plainly(each, tree.own[each], SAVING)
            for each in its_modules
        ]
        first = its_modules[0]
        operation = f"state_dict() of unit {first._sharded.name!r}"
        found = on_any_rank(flags, group, first.compute_device, operation)
        summons.update(
            each for each, flag in zip(its_modules, found, strict=True) if flag
        )
    return summons


def _exchanged(
    modules: list[ShardedModule], forms: dict[ShardedModule, Form]
) -> dict[ShardedModule, list[Any]]:
    """Return the values of units' parameters in the state dict, in the units' order.

    There are none for a unit whose values this rank does not want.
    """
    values: dict[ShardedModule, list[Any]] = {module: [] for module in modules}
    units: list[UnitMoves] = []
    shapes: dict[ShardedModule, Sequence[torch.Size]] = {}
    for module in modules:
        form, spread, own = forms[module], spread_of(module), unit_values(module)
        if module._sharded.groups.shard_group is not None:
            dtypes = [each.dtype for each in own]
            moves = form.moves(module, spread, range(len(own)), own, dtypes)
            units.append(UnitMoves(module, moves))
            shapes[module] = spread.shapes
        elif form.is_wanted:  # each rank has the whole; the result has its device
            device = module.compute_device
            values[module] = [
                form.of_whole(module, each.to(device).reshape(shape))
                for each, shape in zip(own, spread.shapes, strict=True)
            ]
    for unit, own in exchange_units(units, "parameters"):
        module, form = unit.module, forms[unit.module]
        if form.is_wanted:
            values[module] = form.of_exchanged(module, shapes[module], own)
    for module, its_values in values.items():
        cuts = module._sharded.originals.parallel.cuts
        if cuts and its_values:
            values[module] = [
                to_state(value, cuts.get(use.param))
                for value, use in zip(its_values, uses_in_order(module), strict=True)
            ]
    return values


def _hand_out(
    state: dict[str, Any], old_prefix: str, destination: dict[str, Any], prefix: str
) -> None:
    """Add the ``state`` that was kept of a nested unit to ``destination``."""
    versions = getattr(state, "_metadata", {})
    if prefix != old_prefix:
        state = {
            prefix + key.removeprefix(old_prefix): value for key, value in state.items()
        }
        versions = {
            (prefix + f"{name}.".removeprefix(old_prefix))[:-1]: version
            for name, version in versions.items()
        }
    destination.update(state)
    metadata = getattr(destination, "_metadata", None)
    if metadata is not None:
        metadata.update(versions)


class _Saving(NamedTuple):
    """One call for an outermost module, and what is known of its units."""

    tree: Tree
    kinds: dict[ShardedModule, StateDictType]
    forms: dict[ShardedModule, Form]
    # Of parameters, if a unit's were exchanged; none on a rank that does not want them.
    values: dict[ShardedModule, list[Any]]
    keep_vars: bool


def _save_unit(
    saving: _Saving, module: ShardedModule, destination: dict[str, Any], prefix: str
) -> dict[str, Any]:
    """Save one unit and what is in it; nested units hand out what was kept."""
    tree, keep_vars = saving.tree, saving.keep_vars
    form, values = saving.forms[module], saving.values.get(module)
    target = destination if form.is_wanted else _new_state()
    for pre_hook in module._state_dict_pre_hooks.values():
        pre_hook(module, prefix, keep_vars)
    is_local = saving.kinds[module] is StateDictType.LOCAL_STATE_DICT
    if is_local:
        own = local_state(module, offload_to_cpu=form.offload_to_cpu)
        target.update((f"{prefix}{name}", value) for name, value in own.items())
        for name, use in tree.named_uses(module) if module._use_orig_params else ():
            target[f"{prefix}{name}"] = use.param if keep_vars else use.param.detach()
    is_summoned = not is_local and values is None
    with summoned(module, writeback=False) if is_summoned else nullcontext():
        module.wrapped.state_dict(
            destination=target, prefix=prefix, keep_vars=keep_vars
        )
        if is_summoned and form.is_wanted:
            _replace_params(module, target, prefix, form, tree)
    if values:
        for name, use in tree.named_uses(module):
            key = prefix + name
            if key in target:
                target[key] = _like(target[key], values[use.slot])
    if form.is_wanted:
        _convert_rest(module, target, prefix, offload_to_cpu=form.offload_to_cpu)
    local_metadata = {"version": module._version}
    for hook in module._state_dict_hooks.values():
        result = hook(module, destination, prefix, local_metadata)
        if result is not None:
            destination = cast("dict[str, Any]", result)
    return destination


def _like(param: Tensor, value: Any) -> Any:
    """Return ``value``, of which a whole one requires a gradient if ``param`` does."""
    if param.requires_grad and not is_sharded(value):
        value.requires_grad_()
    return value


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _replace_params(
    module: ShardedModule,
    target: dict[str, Any],
    prefix: str,
    form: Form,
    tree: Tree,
) -> None:
    """Copy what lies in the memory of the summoned unit, whatever its key is.

    Tensors that were one tensor (shared parameters) stay one. Where a module inside a
    nested unit shares a parameter of this one, what that unit has kept is a part of it,
    and found by its key.
    """
    uses = module._sharded.uses
    storages = {_storage_of(use.param) for use in uses}
    copies: dict[tuple[Any, ...], Any] = {}

    def copy_once(value: Tensor) -> Any:
        place = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if place not in copies:
            copies[place] = _like(value, form.of_whole(module, value))
        return copies[place]

    for key, value in target.items():
        if (
            key.startswith(prefix)
            and isinstance(value, Tensor)
            and not is_sharded(value)
            and _storage_of(value) in storages
        ):
            target[key] = copy_once(value)
    nested = {
        inner
        for each in sharded_modules(module)
        if each is not module
        for inner in each.modules()
    }
    cuts = module._sharded.originals.parallel.cuts
    for name, use in tree.named_uses(module):
        key = f"{prefix}{name}"
        if key in target and (use.module in nested or use.param in cuts):
            value = copy_once(use.param.detach())
            target[key] = to_state(value, cuts.get(use.param))


def _convert_rest(
    module: ShardedModule, target: dict[str, Any], prefix: str, *, offload_to_cpu: bool
) -> None:
    """Give buffers the dtype from before ``buffer_dtype``; offload plain tensors."""
    for name, dtype in module._sharded.buffers.original_dtypes.items():
        value = target.get(f"{prefix}{name}")
        if isinstance(value, Tensor) and value.dtype != dtype:
            target[f"{prefix}{name}"] = value.to(dtype)
    if offload_to_cpu:
        for key, value in target.items():
            if key.startswith(prefix) and type(value) in (Tensor, nn.Parameter):
                target[key] = value.to("cpu")
