"""FSDPModule: the class that fully_shard() mixes into a module's own."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from fsdp_c._engines.engine import ensure_engine
from fsdp_c._fully_shard.forward import run_forward
from fsdp_c._fully_shard.group import Group, groups_in
from fsdp_c._torch_compat import interpreted, noted_state


class UnshardHandle(TorchUnshardHandle):
    """Waits for what :meth:`FSDPModule.unshard` issued."""

    def __init__(self, groups: tuple[Group, ...]) -> None:
        self._groups = groups

    def wait(self) -> None:
        """Wait for the all-gather; the module then has plain parameters registered."""
        groups, self._groups = self._groups, ()
        for group in groups:
            if group.unit is not None:
                group.unit.wait_unshard()


class GradientReductionHandle:
    """What :meth:`FSDPModule.finalize_backward` returns with ``async_op``."""

    def wait(self) -> None:
        """Nothing: the gradients are reduced, in order on the current stream."""


class FSDPModule(TorchFSDPModule):
    """What a module can do after ``fully_shard(module)``.

    torch's class is a base, so ``isinstance`` holds in torch and elsewhere; none of
    torch's runtime runs.
    """

    _fsdp_c_groups: tuple[Group, ...]

    # transformers: generate() on one rank must go on as long as on the others.
    _is_fsdp_managed_module = True
    # torch.compile: its parameters are inputs of graphs, not constants.
    _fsdp_use_orig_params = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make one of the module's own class: a slice of a container, for example."""
        own = cls.__mro__[cls.__mro__.index(TorchFSDPModule) + 1]
        module = own.__new__(own, *args, **kwargs)
        module.__init__(*args, **kwargs)
        return module

    @interpreted
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, hooks included, with whole parameters.

        Raises:
            RuntimeError: A step with another engine is not finished, a parameter has
                no memory, or a collective failed.
        """
        run: Any = super().__call__  # type: ignore[misc] # of the module's class
        return run_forward(cast("nn.Module", self), run, args, kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, those of parameters that are unsharded now included.

        Until backward, modules that keep their parameters have the plain ones
        registered, which have no gradients; nn.Module.zero_grad() sees only these.

        Args:
            set_to_none: Drop gradients; False: fill them with zeros.
        """
        module = cast("nn.Module", self)
        nn.Module.zero_grad(module, set_to_none)
        modules = set(module.modules())  # a group may have others
        for group in groups_in(module):
            if not group.shows_kept:
                continue
            for param in group.params.current_in(modules):
                if param.grad is not None and not set_to_none:
                    param.grad.zero_()
                else:
                    param.grad = None

    # On demand -------------------------------------------------------------

    def reshard(self) -> None:
        """Free the whole parameters and register the sharded ones. Not recursive."""
        for group in self._fsdp_c_groups:
            if group.unit is not None:
                group.unit.reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather the parameters and register the plain ones. Not recursive.

        They stay until :meth:`reshard`, or until the module's next forward or the
        root's next backward ends. All ranks must call.

        Args:
            async_op: Return a handle whose ``wait()`` does the second part; the
                module's forward waits too.
        """
        ensure_engine(cast("nn.Module", self))
        for group in self._fsdp_c_groups:
            assert group.unit is not None
            group.unit.unshard()
        handle = UnshardHandle(self._fsdp_c_groups)
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self) -> None:
        """Make the model usable after an exception in forward or backward.

        Gradients that were not reduced yet are dropped, those of accumulation without
        synchronization included. All ranks must call it, on the root.

        Raises:
            RuntimeError: Called on a module that is not the root.
        """
        group = self._root("reset_iter_state")
        if group._running is not None:
            group._running.engine.reset()

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Let :meth:`finalize_backward` reduce what backwards without sync have kept.

        A backward with gradient synchronization reduces by itself, in this mode too.

        Args:
            enabled: Whether ``finalize_backward`` may be called.

        Raises:
            RuntimeError: Called on a module that is not the root.
        """
        root = self._root("set_manual_backward_finalization")
        root.change(finalizes_by_hand=enabled)

    def finalize_backward(
        self, *, async_op: bool = False
    ) -> GradientReductionHandle | None:
        """Reduce and free what the backwards of this step have kept.

        All ranks must call it, with gradient synchronization enabled and after the last
        of these backwards. Before the first forward it does nothing.

        Args:
            async_op: Return a handle, whose ``wait()`` has nothing left to do.

        Raises:
            RuntimeError: Called on a module that is not the root, without
                :meth:`set_manual_backward_finalization`, or inside a step.
        """
        root = self._root("finalize_backward")
        if root._running is not None:
            if not root.settings.finalizes_by_hand:
                raise RuntimeError(
                    "finalize_backward requires manual backward finalization. Call "
                    "set_manual_backward_finalization(True) before forward"
                )
            root._running.engine.reduce_kept()
        return GradientReductionHandle() if async_op else None

    # Settings --------------------------------------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Let backward reduce gradients, or accumulate them without communication.

        What was accumulated is part of the next reduction.

        Args:
            requires_gradient_sync: Whether backward reduces.
            recurse: Also for the groups inside.
        """
        value = requires_gradient_sync
        _set(self._groups(recurse), syncs=value, all_reduces=value)

    def set_requires_all_reduce(
        self, requires_all_reduce: bool, *, recurse: bool = True
    ) -> None:
        """With a 2-D mesh, let backward all-reduce, or only reduce-scatter.

        Args:
            requires_all_reduce: Whether backward all-reduces.
            recurse: Also for the groups inside.
        """
        _set(self._groups(recurse), all_reduces=requires_all_reduce)

    def set_reshard_after_forward(
        self, reshard_after_forward: bool, recurse: bool = True
    ) -> None:
        """Change fully_shard()'s argument of this name.

        Args:
            reshard_after_forward: Its new value. With False an evaluation, or a model
                that generates, gathers the parameters once: forwards without gradients
                keep them for the next one, until a forward that trains, the step of an
                optimizer, a write to the parameters or ``reshard()``.
            recurse: Also for the groups inside.

        Raises:
            ValueError: Not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                "reshard_after_forward should be a bool, got "
                f"{type(reshard_after_forward)}"
            )
        groups = self._groups(recurse)
        _set(groups, reshards=reshard_after_forward, keeps_part=False)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide sums of gradients by ``factor`` instead of the number of ranks.

        Raises:
            ValueError: ``factor`` is not > 0.
        """
        if not factor > 0:
            raise ValueError(f"factor must be > 0, got {factor!r}")
        _set(self._fsdp_c_groups, divisor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Torch's old name of :meth:`set_gradient_divide_factor`.

        Args:
            factor: As there.
        """
        self.set_gradient_divide_factor(factor)

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Gather these modules' parameters right after the module's own, in forward.

        Args:
            modules: FSDPModules, in the order of their gathers; those that are in
                another root are passed over. Empty: none is gathered early.

        Raises:
            ValueError: One is not an FSDPModule.
        """
        self._set_prefetches(0, modules)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Gather these modules' parameters right after the module's own, in backward.

        Args:
            modules: As there. Empty: the one whose backward comes next, by the order of
                forward; on the CPU when the module's gradients are reduced.

        Raises:
            ValueError: One is not an FSDPModule.
        """
        self._set_prefetches(1, modules)

    def _set_prefetches(self, in_backward: int, modules: Sequence[Any]) -> None:
        _check_fsdp_modules(modules)
        # A module's groups enter like nested modules; see run_forward().
        first, *others = self._fsdp_c_groups
        targets = [first, *reversed(others)]
        if in_backward:
            targets.reverse()
        for module in modules:
            groups = module._fsdp_c_groups
            targets += reversed(groups) if in_backward else groups
        refs = [weakref.ref(group) for group in targets] if modules else []
        for group in self._fsdp_c_groups:
            lists = list(group.settings.prefetches)
            lists[in_backward] = refs
            group.change(prefetches=tuple(lists))

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the current stream wait for ``event``, as the next all-gather does it."""
        wait = getattr(event, "wait", None)
        if wait is not None and self._fsdp_c_groups[0].arguments.device.type != "cpu":
            wait()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Choose whether backward waits for its reductions, in all modules of the root.

        With False, the next backward waits for them. Until then ``.grad`` must not be
        used, except by hooks of ``register_post_accumulate_grad_hook``. On the CPU
        every backward waits.

        Args:
            is_last_backward: Whether the coming backwards wait for their reductions.
        """
        group = self._fsdp_c_groups[0]
        root = group if group._running is None else group._running.root()
        if isinstance(root, Group):
            root.change(is_last_backward=is_last_backward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Let a backward that does not reduce keep the parameters for the next forward.

        Args:
            reshard_after_backward: False: keep them, until they are changed.
            recurse: Also for the groups inside.
        """
        groups = self._groups(recurse)
        _set(groups, reshards_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Let backward leave the module's parameters sharded.

        For modules whose gradients do not depend on their parameters: an embedding. A
        recomputed forward gathers them all the same.

        Args:
            unshard_in_backward: Whether backward gathers them.
        """
        _set(self._fsdp_c_groups, unshards_in_backward=unshard_in_backward)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Let parameters that backward did not reach take part with zeros.

        Their gradients are then zeros, not None, also if no rank used them, and the
        group is reduced after each forward, even if this rank used none of them.

        Args:
            reduce_scatter_unused_params: Whether they do.
            recurse: Also for the groups inside.
        """
        groups = self._groups(recurse)
        _set(groups, fills_unused=reduce_scatter_unused_params)

    # Without effect here -----------------------------------------------------

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """No effect: collectives always sum, and scaling is a part of packing.

        Args:
            enable: Ignored.
        """

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """No effect: whole parameters return to the same addresses in every step.

        Args:
            keep: Ignored.
            recurse: Ignored.
        """

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """No effect: the arena decides how many blocks gradients have.

        Args:
            max_input_buffers: Ignored.
            recurse: Ignored.

        Raises:
            TypeError: ``max_input_buffers`` is not an int.
            ValueError: It is not positive.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(
            max_input_buffers, int
        ):
            raise TypeError(
                "max_input_buffers must be an int, got "
                f"{type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ValueError(
                f"max_input_buffers must be a positive int, got {max_input_buffers}"
            )

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """No effect: gathers and reductions have a channel each already.

        Args:
            enable: Ignored.
            recurse: Ignored.
        """

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """No effect: all-gathers are always asynchronous."""

    # Collectives of the user's own --------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> None:
        """Let ``comm`` gather this module's parameters, in one call for each unit.

        Args:
            comm: torch's AllGather: it allocates the buffer and fills it.

        Raises:
            RuntimeError: In the middle of a step.
            ValueError: The parameters are on several meshes.
        """
        self._set_comm("set_custom_all_gather", all_gather=comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Let ``comm`` reduce this module's gradients, in one call for each unit.

        Args:
            comm: torch's ReduceScatter. Its ``op`` is always a sum, which the engine
                divides.

        Raises:
            RuntimeError: In the middle of a step.
            ValueError: The parameters are on several meshes.
        """
        self._set_comm("set_custom_reduce_scatter", reduce_scatter=comm)

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], object], *, stream: Any = None
    ) -> None:
        """Call ``hook`` with the reduced gradients of this module, which it may change.

        They are one 1-D tensor per dtype, the mean over the ranks of the mesh, without
        what earlier backwards left in ``.grad``.

        Args:
            hook: Takes the tensor.
            stream: On which it runs; None: that of the reduction.

        Raises:
            RuntimeError: In the middle of a step.
            ValueError: The parameters are on several meshes, or ``stream`` was passed
                for a mesh with replicas.
        """
        has_replicas = self._fsdp_c_groups[0].arguments.data.replica_group is not None
        if stream is not None and has_replicas:
            raise ValueError("stream cannot be set when using native HSDP")
        self._set_comm("set_all_reduce_hook", hook=hook, stream=stream)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """No effect: fsdp_c's buffers are memory of torch's allocator.

        Args:
            enable: Ignored.

        Raises:
            AssertionError: A custom collective was set.
        """
        for group in self._fsdp_c_groups:
            group.comms.check_own_memory("set_allocate_memory_from_process_group")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """No effect: fsdp_c's buffers are memory of torch's allocator.

        Args:
            backend: ``"NCCL"``, the only one.

        Raises:
            AssertionError: A custom collective was set.
            ValueError: Another backend.
        """
        if backend != "NCCL":
            raise ValueError(f"backend must be 'NCCL', got {backend!r}")
        for group in self._fsdp_c_groups:
            group.comms.check_own_memory("set_symm_mem")

    def _set_comm(self, method: str, **changes: Any) -> None:
        num_meshes = sum(not group.apart for group in self._fsdp_c_groups)
        if num_meshes > 1:  # torch's first words
            raise ValueError(
                f"{method} is not supported with multiple param groups (from per-param "
                "mesh via shard_placement_fn): the parameters are on "
                f"{num_meshes} meshes"
            )
        for group in self._fsdp_c_groups:
            group.set_comm(**changes)

    def _root(self, method: str) -> Group:
        """Return the module's group; before the first forward any may be the root."""
        group = self._fsdp_c_groups[0]
        if group._running is not None and not group._is_root:
            raise RuntimeError(
                f"{method} must be called on the root, the module that was called "
                f"first, not on {type(self).__name__} inside it"
            )
        return group

    # The module --------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Convert or move sharded parameters and buffers: ``to()``, ``to_empty()``.

        Raises:
            RuntimeError: In the middle of a step; or ``fn`` changes parameters while
                gradients of their model wait to be reduced.
        """
        with ExitStack() as stack:
            for group in self._groups(recurse=True):
                is_spared = group.accumulates and stack.enter_context(group.spared(fn))
                if not is_spared:
                    group.dissolve()
            # Past torch's class, which asks for its own state.
            return super(TorchFSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise AssertionError(  # torch's first words
            "FSDP does not support deepcopy. Please use state dict for serialization: "
            "a copy would need process groups and memory of its own"
        )

    def _get_fsdp_state(self) -> Any:
        return noted_state(cast("nn.Module", self))

    def _groups(self, recurse: bool) -> Iterator[Group]:
        if not recurse:
            yield from self._fsdp_c_groups
        else:
            yield from groups_in(cast("nn.Module", self))


def _set(groups: Iterable[Group], **settings: Any) -> None:
    for group in groups:
        group.change(**settings)


def _check_fsdp_modules(modules: Iterable[Any]) -> None:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"Expects FSDPModule but got {type(module)}: call fully_shard() on it"
            )
