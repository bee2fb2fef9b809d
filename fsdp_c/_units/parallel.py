"""Parameters of a unit that are DTensors of a tensor parallel mesh.

Note [Tensor parallel units]
The unit shards the local tensors. They are plain parameters, which stand in the place
of the DTensors from wrapping on and which optimizers step, as in FSDP1. In forward and
backward the modules see DTensors over the whole local tensors; see Note [Parallel
parameters] in csrc/torch/rows.cpp. Whole parameters of a summon and the values of
state dicts are DTensors, too: whole ones on the tensor parallel mesh, sharded ones on
the mesh of both.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_c import _native
from fsdp_c._torch_compat import local_tensor
from fsdp_c._units.cuts import (
    Cut,
    as_dtensor,
    local_grad,
    local_of,
    parallel_param,
    row_cut,
    row_placements,
)
from fsdp_c._units.uses import ParamUse


def localize(
    uses: Sequence[ParamUse], mesh: DeviceMesh | None
) -> tuple[list[ParamUse], dict[nn.Parameter, Cut]]:
    """Register their local tensors instead of DTensors.

    Returns:
        The uses, and how those parameters are cut; both with the new parameters.
    """
    new: dict[nn.Parameter, nn.Parameter] = {}
    cuts: dict[nn.Parameter, Cut] = {}
    for use in uses:
        param = use.param
        if not isinstance(param, DTensor) or param in new:
            continue
        assert mesh is not None
        local = nn.Parameter(local_of(param).detach(), param.requires_grad)
        vars(local).update(vars(param))
        cuts[local] = row_cut(use.fqn, param, mesh)
        new[param] = local
    localized = []
    for use in uses:
        own = new.get(use.param, use.param)
        if own is not use.param:
            setattr(use.module, use.name, own)
        localized.append(use._replace(param=own, shape=own.shape))
    return localized, cuts


class ParallelParams:
    """What the modules of a unit see of its tensor parallel parameters.

    Args:
        cuts: How they are cut, by parameter of the unit.
        param_dtype: In which forward sees them; None: their own.
    """

    def __init__(
        self, cuts: Mapping[nn.Parameter, Cut], param_dtype: torch.dtype | None
    ) -> None:
        self.cuts = dict(cuts)
        self._param_dtype = param_dtype
        self._shown: dict[nn.Parameter, nn.Parameter] = {}  # in forward
        self._whole: dict[nn.Parameter, nn.Parameter] = {}  # in a summon

    def __bool__(self) -> bool:
        return bool(self.cuts)

    def shown(self, param: nn.Parameter) -> nn.Parameter:
        return self._shown.get(param, param)

    def stands_for(self, shown: object, param: nn.Parameter) -> bool:
        """Whether ``shown`` is ``param`` or a DTensor over it."""
        if shown is param:
            return True
        ours = (self._shown.get(param), self._whole.get(param))
        return shown is not None and any(shown is each for each in ours)

    def bind(self, unit: _native.Unit, uses: Sequence[ParamUse]) -> None:
        """Make what forward shows; the unit is a new one."""
        self._shown = {}
        for use in uses:
            cut = self.cuts.get(use.param)
            if cut is None or use.param in self._shown:
                continue
            dtype = use.param.dtype
            if dtype.is_floating_point:
                dtype = self._param_dtype or dtype
            shown = parallel_param(use.param, cut, dtype)
            unit.bind_parallel(use.slot, shown, local_of(shown))
            self._shown[use.param] = shown

    def place(self, unit: _native.Unit, uses: Iterable[ParamUse]) -> None:
        """Let the unit register it in forward, where the parameters are now."""
        uses = list(uses)
        names = {use.param: use.fqn for use in reversed(uses)}
        by_index = {
            use.slot: self.cuts[use.param] for use in uses if use.param in self.cuts
        }
        places = []
        for use in uses:
            if use.param not in self.cuts:
                continue
            holder: dict[str, Any] = use.module.__dict__
            if holder.get(use.name) is not use.param:
                holder = use.module._parameters
            shown = self._shown[use.param]
            places.append((holder, use.name, use.param, shown, None, None))

        def take_local_grad(index: int, grad: Tensor) -> Tensor:
            return local_grad(grad, by_index[index])

        def make_grad(index: int, local: Tensor) -> tuple[Tensor, Tensor]:
            raise AssertionError("gradients are on the plain parameters")

        whole = self._whole

        def on_replaced() -> None:
            if whole:  # a forward inside a summon
                return
            raise RuntimeError(
                f"Cannot writeback to one of the parameters {list(names.values())} of "
                f"unit {unit_name!r}: it was replaced after wrapping, which is not "
                "supported for DTensors; copy new values into it"
            )

        unit_name = unit.name
        unit.bind_rows(places, make_grad, on_replaced, take_local_grad)

    @contextmanager
    def whole(self, uses: Sequence[ParamUse]) -> Iterator[None]:
        """Register DTensors over the summoned parameters, for a while.

        Gradients are DTensors too, where they are whole and not offloaded. If the user
        sets another gradient, or None, the parameter gets it afterwards.
        """
        grads: dict[nn.Parameter, Tensor | None] = {}
        for param, cut in self.cuts.items():
            assert cut.parallel is not None
            dtensor = as_dtensor(param.detach(), cut.shape, *cut.parallel)
            shown = nn.Parameter(dtensor, param.requires_grad)
            grad = param.grad
            if grad is not None and (grad.shape, grad.device) == (
                param.shape,
                param.device,
            ):
                shown.grad_dtype = grad.dtype  # not reduced: it may be another one
                shown.grad = as_dtensor(grad, cut.shape, *cut.parallel)
            grads[param] = shown.grad
            self._whole[param] = shown
        pairs = [
            (use, self._whole[use.param]) for use in uses if use.param in self.cuts
        ]
        for use, shown in pairs:
            if use.module._parameters.get(use.name) is use.param:
                use.module._parameters[use.name] = shown
        try:
            yield
        finally:
            for use, shown in pairs:
                if use.module._parameters.get(use.name) is shown:
                    use.module._parameters[use.name] = use.param
            for param, shown in self._whole.items():
                grad = shown.grad
                if grad is not grads[param]:
                    cut = self.cuts[param]
                    param.grad = None if grad is None else local_grad(grad, cut)
            self._whole.clear()


# The values of state dicts -------------------------------------------------------


def to_state(value: Any, cut: Cut | None) -> Any:
    """Return the DTensor that a state dict has for a tensor parallel parameter.

    ``value`` is its whole local tensor, or a DTensor of that in rows. Without a cut
    ``value`` is returned as it is.
    """
    if cut is None:
        return value
    assert cut.parallel is not None
    if isinstance(value, DTensor):
        return as_dtensor(local_of(value), cut.shape, cut.mesh, cut.placements)
    return as_dtensor(value, cut.shape, *cut.parallel)


def from_state(value: Any, cut: Cut, mesh: DeviceMesh) -> Any:
    """Return the opposite of :func:`to_state`; also of a plain tensor of the whole.

    What is of another shape stays as it is. All ranks must call it, if a DTensor has
    other placements than :func:`to_state` gives. ``mesh`` is data parallel.
    """
    assert cut.parallel is not None
    parallel_mesh, placements = cut.parallel
    if not isinstance(value, Tensor) or value.shape != cut.shape:
        return value
    if not isinstance(value, DTensor):
        plain = value.detach()
        return local_tensor(
            distribute_tensor(plain, parallel_mesh, placements, src_data_rank=None)
        )
    value = value.detach()
    if value.device_mesh == cut.mesh:
        rows = local_tensor(value.redistribute(placements=cut.placements))
        return as_dtensor(rows, cut.local_shape, mesh, row_placements(mesh))
    if value.device_mesh == parallel_mesh:
        return local_tensor(value.redistribute(placements=placements))
    raise ValueError(
        f"a value of shape {tuple(value.shape)} in a state dict is a DTensor on "
        f"{value.device_mesh}, but its parameter is on {cut.mesh}: load it with "
        "torch.distributed.checkpoint.load() into model.state_dict(), which reshards it"
    )
