"""Parameters that say themselves what is gathered of them: fsdp_pre_all_gather.

torch's protocol for float8 and other tensor subclasses. The local tensor of such a
parameter hands over what its rank sends, and makes the parameter of what came; Note
[Extended parameters] in csrc/torch/extension.cpp.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from fsdp_c._torch_compat import preserved_version
from fsdp_c._units.cuts import local_of, with_memory
from fsdp_c._units.device import note_use

# The stages of csrc/torch/bridge.h.
GATHER, SHOW, FREE = range(3)


def is_extended(local: Tensor) -> bool:
    """Whether a sharded parameter's local tensor has the protocol.

    Raises:
        AssertionError: It has only one half of it.
    """
    halves = [
        hasattr(local, name) for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather")
    ]
    if halves[0] != halves[1]:  # torch's first words
        raise AssertionError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if "
            f"using all-gather extensions: {type(local).__name__}"
        )
    return halves[0]


class Extension:
    """The memory of one such parameter, from its gather until it is freed.

    Attributes:
        sharded: The sharded parameter.
        param: What modules see in forward; None before the first gather.
    """

    def __init__(
        self,
        fqn: str,
        module: nn.Module,
        sharded: nn.Parameter,
        mesh: DeviceMesh,
        device: torch.device,
        policy: Any,
        on_made: Callable[[nn.Parameter], None],
    ) -> None:
        self.sharded = sharded
        self.param: nn.Parameter | None = None
        self._fqn = fqn
        self._module = module
        self._mesh = mesh
        self._device = device
        self._policy = policy
        self._on_made = on_made
        self._stride = torch.empty(sharded.shape, device="meta").stride()
        self._local_class: type | None = None
        self._num_arguments = 0  # of its fsdp_pre_all_gather
        self._metadata: Any = None
        self._sizes: list[torch.Size] = []
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._inner: tuple[Tensor, ...] = ()

    def run(self, stage: int) -> Any:
        """Do one of the stages; what it returns is in csrc/torch/bridge.h."""
        with torch.no_grad():
            if stage == GATHER:
                return self._gather()
            if stage == SHOW:
                return self._show()
            return self._free()

    def _gather(self) -> list[tuple[Tensor, Tensor]]:
        given, self._metadata = self._call_pre()
        inputs = (given,) if isinstance(given, Tensor) else tuple(given)
        self._sizes = [each.size() for each in inputs]
        # As FSDP2, which copies them. In backward autograd's own thread calls: there a
        # default device that the user set for his thread does not hold.
        self._inputs = [_as_plain(each).to(self._device) for each in inputs]
        num_ranks = self._mesh.size()
        kinds = [(each.numel() * num_ranks, each.dtype) for each in self._inputs]
        if kinds == [(each.numel(), each.dtype) for each in self._outputs]:
            for output in self._outputs:
                _allocate(output)
        else:
            self._outputs = [
                torch.empty(numel, dtype=dtype, device=self._device)
                for numel, dtype in kinds
            ]
        return list(zip(self._outputs, self._inputs, strict=True))

    def _call_pre(self) -> Any:
        local: Any = local_of(self.sharded)
        if local.device != self._device:
            local = local.to(self._device, non_blocking=True)
        function = local.fsdp_pre_all_gather
        if type(local) is not self._local_class:  # once: it takes long
            self._num_arguments = len(inspect.signature(function).parameters)
            self._local_class = type(local)
        if self._num_arguments == 1:
            return function(self._mesh)
        if self._num_arguments != 5:
            raise AssertionError(
                f"Invalid fsdp_pre_all_gather of parameter {self._fqn!r}: it takes "
                "(mesh, outer_size, outer_stride, module, mp_policy), or the mesh "
                f"alone, not {self._num_arguments} arguments"
            )
        shape = self.sharded.shape
        result = function(self._mesh, shape, self._stride, self._module, self._policy)
        padded = torch.Size((-(-shape[0] // self._mesh.size()), *shape[1:]))
        if local.size() != padded and any(each.size() != padded for each in result[0]):
            raise AssertionError(
                f"fsdp_pre_all_gather of parameter {self._fqn!r}, which "
                f"{self._mesh.size()} ranks do not divide evenly, must return tensors "
                f"of the padded size {tuple(padded)}, got "
                f"{[tuple(each.size()) for each in result[0]]}"
            )
        return result

    def _show(self) -> nn.Parameter:
        local: Any = local_of(self.sharded)
        outputs = tuple(
            output.view(-1, *size[1:])
            for output, size in zip(self._outputs, self._sizes, strict=True)
        )
        dtype = self._policy.param_dtype
        if dtype is None or not self.sharded.is_floating_point():
            dtype = self.sharded.dtype
        self._inputs = []
        metadata = self._metadata
        if self.param is None:
            tensor, self._inner = local.fsdp_post_all_gather(outputs, metadata, dtype)
            tensor = torch.as_strided(tensor, self.sharded.shape, self._stride, 0)
            self.param = nn.Parameter(tensor, self.sharded.requires_grad)
            vars(self.param).update(vars(self.sharded))
            if self.param.requires_grad and is_traceable_wrapper_subclass(self.param):
                self.param.register_hook(_as_plain_grad)
            self._on_made(self.param)
            return self.param
        for tensor in self._inner:
            _allocate(tensor)
        with preserved_version(self.param):
            local.fsdp_post_all_gather(outputs, metadata, dtype, out=self.param)
        if self.param.requires_grad != self.sharded.requires_grad:
            self.param.requires_grad_(self.sharded.requires_grad)
        return self.param

    def _free(self) -> None:
        for tensor in (*self._outputs, *self._inner):
            note_use(tensor)
            tensor.untyped_storage().resize_(0)
        # Computation may still read it, such as the scale of float8.
        metadata, self._metadata = self._metadata, None
        for leaf in tree_leaves(metadata):
            if isinstance(leaf, Tensor):
                note_use(leaf)


def _as_plain(tensor: Tensor) -> Tensor:
    return with_memory(tensor).detach().reshape(-1)


def _as_plain_grad(grad: Tensor) -> Tensor:
    """Return the gradient of a tensor subclass as one that can be reduced."""
    return _as_plain(grad).view(grad.shape)


def _allocate(tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    nbytes = tensor.numel() * tensor.itemsize
    if storage.size() != nbytes:
        storage.resize_(nbytes)
