"""Tensors of classes of their own: kept as the tensors that they wrap.

See Note [States of other classes] in fsdp_c/_state/optim/classes.py. A rank's entry
has a record of each, under the key of its piece: the class's name, its shape, the
tensors in it, and its context if that is plain. Nothing is imported for it: a class is
found if the program has imported it.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map, tree_map_only

from fsdp_c._state.optim.classes import (
    StateClasses,
    class_name,
    cloned,
    filled,
    inner_tensors,
    rewrapped,
    special_tensor,
    values_of,
)
from fsdp_c._state.parts import ParamPart
from fsdp_c._units.cuts import local_of
from fsdp_c.checkpoint._dtypes import dtype_name, dtype_named
from fsdp_c.checkpoint._holders import Held
from fsdp_c.checkpoint._manifest import TensorSpec
from fsdp_c.checkpoint._plain import decode, encode, tensor_keys
from fsdp_c.checkpoint._plan import Target, find_part, find_ranks
from fsdp_c.checkpoint._rank_entry import model_key, state_key
from fsdp_c.checkpoint._source import RankSource, Source

_DTYPE = "torch.dtype"
_REMEDY = "load it with the number of ranks and the wrapping that saved it"

# Records ---------------------------------------------------------------------


def make_record(
    tensor: Tensor, what: str, put_tensor: Callable[[Tensor], str]
) -> dict[str, Any] | None:
    """Return the encoded record of a tensor; None if it wraps what is no plain one."""
    inner = inner_tensors(tensor)
    if not inner or any(special_tensor(each) is not None for each in inner.values()):
        return None
    context: Any = None
    if is_traceable_wrapper_subclass(tensor):
        _, context = tensor.__tensor_flatten__()
    try:
        encoded = [encode(_without_dtypes(context, what), what, put_tensor)]
    except TypeError:  # it can only be put into a tensor that is there
        encoded = []
    return {
        "class": class_name(tensor),
        "shape": list(tensor.shape),
        "tensors": encode(inner, what, put_tensor),
        "context": encoded,
    }


def _without_dtypes(context: Any, what: str) -> Any:
    return tree_map_only(
        torch.dtype, lambda dtype: {_DTYPE: dtype_name(dtype, what)}, context
    )


def _with_dtypes(context: Any) -> Any:
    def is_dtype(each: Any) -> bool:
        return isinstance(each, dict) and each.keys() == {_DTYPE}

    return tree_map(
        lambda each: dtype_named(each[_DTYPE]) if is_dtype(each) else each,
        context,
        is_leaf=is_dtype,
    )


def _class_named(name: str) -> type[Tensor] | None:
    """Return a class of tensors that the program has imported."""
    module, _, qualname = name.rpartition(".")
    found = getattr(sys.modules.get(module), qualname, None)
    return found if isinstance(found, type) and issubclass(found, Tensor) else None


class Saved(NamedTuple):
    """Elements of a tensor that one rank saved; without a record as values."""

    held: Held
    rank: RankSource
    record: dict[str, Any] | None

    def inner(self, device: torch.device) -> dict[str, Tensor]:
        assert self.record is not None
        inner = decode(self.record["tensors"], self.rank.tensor)
        if not isinstance(inner, dict):
            raise ValueError(f"a record of {self.rank.name} is damaged")
        return {name: each.to(device) for name, each in inner.items()}

    def tensor(self, what: str, device: torch.device) -> Tensor:
        """Return the tensor, in new memory.

        Raises:
            ValueError: It cannot be made.
        """
        record = self.record
        assert record is not None
        cls = _class_named(record["class"])
        if cls is None or not record["context"]:
            reason = "is not imported" if cls is None else "cannot be made anew"
            raise ValueError(
                f"{what} was saved as {record['class']}, which {reason}: {_REMEDY}, "
                "or load without the optimizer"
            )
        inner = self.inner(device)
        numel = self.held.part_end - self.held.part_begin
        try:
            if inner.keys() == {""}:
                return inner[""].as_subclass(cls)
            context = _with_dtypes(decode(record["context"][0], self.rank.tensor))
            shape = torch.Size(record["shape"])
            stride = torch.empty(shape, device="meta").stride()
            made: Any = cls
            result: Tensor = made.__tensor_unflatten__(inner, context, shape, stride)
        except Exception as error:
            raise ValueError(
                f"{what}: {record['class']} does not take what was saved "
                f"({error!r:.200})"
            ) from error
        if result.numel() != numel:  # nobody allocates more than the files hold
            raise ValueError(f"{what}: {result.numel()} elements, expected {numel}")
        return result


def find_saved(
    source: Source,
    what: str,
    spec: TensorSpec,
    key: str,
    elements: tuple[int, int],
) -> list[Saved]:
    """Return who saved elements of a tensor, ascending; plan to check its records."""
    found = []
    for held, rank in find_ranks(source, what, spec, elements):
        record = rank.entry.special.get(key)
        if record is not None:
            for each in tensor_keys(record):
                rank.want_tensor(each)
        found.append(Saved(held, rank, record))
    return found


# Optimizer states -------------------------------------------------------------


@dataclass
class SpecialState:
    """One state that some rank saved in a class of its own."""

    what: str  # its name in messages
    name: str  # of the state
    part: ParamPart  # of the parameter, on this rank
    values: Tensor  # 1-D, what was saved as values; without memory if nothing was
    saved: list[Saved]  # by the ranks that hold elements of the part
    # What the optimizer gets; None until prepare(), or if it gets `values`, of the
    # class of `like`.
    result: Tensor | None = None
    like: Tensor | None = None  # a state of the optimizer's own, if it is special

    @staticmethod
    def plan(
        source: Source,
        what: str,
        spec: TensorSpec,
        dtype: str,
        name: str,
        part: ParamPart,
        make: Callable[[], Tensor],
    ) -> "SpecialState":
        """Plan the reads of one; ``make`` returns memory for values."""
        key = state_key(spec.name, name)
        saved = find_saved(source, what, spec, key, (part.begin, part.end))
        needs_values = part.is_flat or part.home.communicates
        if not needs_values and all(each.record is not None for each in saved):
            values = torch.empty(1, dtype=dtype_named(dtype), device=part.param.device)
            values = values.expand(part.part_numel)
            return SpecialState(what, name, part, values, saved)
        values = make()
        for held, rank, record in saved:
            if record is None:
                own = find_part(source, what, held, rank, key, dtype)
                if own is not None:
                    own.plan_read(what, part.begin, values)
        return SpecialState(what, name, part, values, saved)

    @property
    def _has_memory(self) -> bool:
        return self.values.numel() == 0 or self.values.stride() == (1,)

    def prepare(self, classes: StateClasses) -> None:
        """Make what can be made of the records.

        Raises:
            ValueError: They do not fit this rank's part.
        """
        part, device = self.part, self.part.param.device
        if part.part_numel == 0:
            return
        first = self.saved[0]
        whole = (first.held.part_begin, first.held.part_end)
        own_shape = list(local_of(part.param).shape)
        if (
            first.record is not None
            and not self._has_memory
            and whole == (part.begin, part.end)
            and first.record["shape"] == own_shape
        ):
            self.result = first.tensor(self.what, device)
            return
        own = classes.like(part.param, self.name, is_special=True)
        self.like = own if special_tensor(own) is not None else None
        tensors = {
            each.held: each.tensor(self.what, device)
            for each in self.saved
            if each.record is not None
        }
        local = special_tensor(own)
        if local is not None and not self._has_memory:
            self.result = _cut(local, tensors, part)
        if self.result is not None:
            return
        if not self._has_memory:
            self.values = torch.empty(
                part.part_numel, dtype=self.values.dtype, device=device
            )
        for held, tensor in tensors.items():
            values = values_of(self.what, tensor).reshape(-1)
            self.values[held.begin - part.begin : held.end - part.begin] = values[
                held.begin - held.part_begin : held.end - held.part_begin
            ]

    def finished(self, state: Tensor) -> Tensor:
        """Return the state to install; ``state`` are the values that it came with."""
        if self.result is not None:
            return rewrapped(state, self.result)
        return state if self.like is None else filled(self.like, state)


def _cut(like: Tensor, tensors: dict[Held, Tensor], part: ParamPart) -> Tensor | None:
    """Return a tensor such as ``like`` with parts of others, exactly.

    None where the class cannot be cut so, as between blocks of a quantized one.
    """
    result = cloned(like)
    try:
        with torch.no_grad():
            flat = result.view(-1)
            for held, tensor in tensors.items():
                begin, numel = held.begin - part.begin, held.end - held.begin
                source = tensor.view(-1)
                if type(source) is not type(flat):
                    return None
                flat.narrow(0, begin, numel).copy_(
                    source.narrow(0, held.begin - held.part_begin, numel)
                )
    except Exception:  # whatever the class raises
        return None
    return result


# Parameters ---------------------------------------------------------------------


@dataclass
class SpecialTarget(Target):
    """A parameter of a class that has no values: only its own tensors can be loaded."""

    local: Tensor  # what this rank has of it
    saved: Saved | None = None  # what it gets, once that is planned

    def plan(self, source: Source, spec: TensorSpec) -> None:
        """Plan to check its record; problems go to the source."""
        name = class_name(self.local)
        if self.begin == self.end:
            return
        key, elements = model_key(spec.name), (self.begin, self.end)
        for each in find_saved(source, self.what, spec, key, elements):
            whole = (each.held.part_begin, each.held.part_end)
            saved_as = "plain values" if each.record is None else each.record["class"]
            if saved_as != name:
                source.problems.append(
                    f"{self.what} is a {name} and was saved as {saved_as}: load it "
                    "into a model with the same classes"
                )
            elif whole != elements:
                source.problems.append(
                    f"{self.what} is a {name}, which cannot be cut anew: rank "
                    f"{each.held.rank} saved elements [{whole[0]}, {whole[1]}), and "
                    f"this rank holds [{self.begin}, {self.end}); {_REMEDY}"
                )
            elif not self._fits(each):
                source.problems.append(
                    f"{self.what} is a {name} of other tensors than those that were "
                    "saved: quantize it in the same way"
                )
            else:
                self.saved = each

    def _fits(self, saved: Saved) -> bool:
        """Whether the tensors in a record are as large as those of the parameter."""
        own = inner_tensors(self.local)
        given = {} if saved.record is None else saved.record["tensors"]
        if own.keys() != given.keys():
            return False
        for name, each in own.items():
            pieces = [saved.rank.entry.pieces.get(k) for k in tensor_keys(given[name])]
            numels = [0 if p is None else p.end - p.begin for p in pieces]
            if (sum(numels) if pieces else 1) != each.numel():  # 0-dim: no piece
                return False
        return True

    def finish(self) -> None:
        """Copy the tensors that were saved into those of the parameter."""
        if self.saved is None:
            return
        own = inner_tensors(self.local)
        for name, each in self.saved.inner(self.local.device).items():
            own[name].copy_(each.reshape(own[name].shape))
