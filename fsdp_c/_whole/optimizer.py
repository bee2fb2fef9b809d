"""whole_parameter_optimizer(): any optimizer on whole parameters, sharded.

Note [A step of whole parameters]
Between steps the model has parts of parameters and of gradients, as always: clipping
and scaling take those. In step() the owner of a parameter gets its whole and its whole
gradient, the user's own optimizer steps it there, and the parts of the new values go
home. That is done in rounds, so that an owner has few wholes at a time; see
csrc/core/layout/owners.h. Where exchanges run on a stream, the next round is under way
while the optimizer steps this one. The state of a parameter stays with its owner.
"""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fsdp_c._state.optim.torch_state_dicts import show_names_of_flat_states
from fsdp_c._state.parts import ParamPart
from fsdp_c._units.collectives import on_any_rank
from fsdp_c._units.owner import owners_in
from fsdp_c._whole.between_rounds import BetweenRounds
from fsdp_c._whole.choice import Chosen, chosen_groups, others_of
from fsdp_c._whole.options import differs, digest_flags, warn_of_difference
from fsdp_c._whole.owned import (
    Dealt,
    Travelling,
    WholeParam,
    begin_gather,
    lend,
    parts_of,
    scatter,
    take_back,
)
from fsdp_c._whole.spans import GATHER, SCATTER, STEP, span
from fsdp_c._whole.states import (
    load_states,
    other_entries,
    other_states,
    save_states,
    states_of_params,
)

# What an owner steps at a time, about.
ROUND_NBYTES = 64 * 1024 * 1024


def whole_parameter_optimizer(
    model: nn.Module,
    make: Callable[[list[dict[str, Any]]], Optimizer],
    params: Chosen | Sequence[Mapping[str, Any]] | None = None,
    *,
    rest: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    cost: Callable[[torch.Size], int] | None = None,
) -> "WholeParameterOptimizer":
    """Return an optimizer that steps whole parameters, each on one rank.

    For optimizers that need more of a parameter than a shard has: Muon, Shampoo,
    Adafactor, a norm per tensor. Each parameter has one owner, over replicas too;
    work and state are balanced over the ranks.

    Call it with the same arguments on all ranks, after sharding; or before, if
    :func:`fsdp_c.fully_shard` shards the model before the first step, as accelerate
    does. A model that is not sharded is stepped by each rank itself. ``step()``,
    ``state_dict()`` and ``load_state_dict()`` are collectives. Gradients are the
    sharded ones, as ever: clip them, scale them, accumulate them before ``step()``.

    Args:
        model: A sharded module, of either API, or one that contains some.
        make: Is given parameter groups, a list of dicts, and returns the optimizer over
            them: ``lambda groups: torch.optim.Muon(groups, lr=0.02)``. A group has the
            parameters that this rank owns, maybe none; their values are there in steps
            only. It must not need a closure. Called again, as ``rest``, for a model
            that was sharded later.
        params: Which parameters: a function of name and unsharded shape, names, or
            dicts whose "params" are one of these and that have options, as groups of
            torch.optim. None: all that require gradients.
        rest: Makes the optimizer of the other parameters that require gradients, of
            which each rank steps its shards: ``lambda params: AdamW(params)``. Its
            groups follow the others in ``param_groups``. None: they are not stepped.
        cost: The work of a step of a parameter of this unsharded shape, in any unit, an
            integer. None: its number of elements times the smaller of its last two
            sizes, as of products of matrices.

    Raises:
        TypeError: ``make`` or ``rest`` returned no optimizer.
        ValueError: A name is unknown or given twice, nothing is chosen, or a parameter
            cannot be stepped so.

    Example:
        >>> optimizer = fsdp_c.whole_parameter_optimizer(  # doctest: +SKIP
        ...     model,
        ...     lambda groups: torch.optim.Muon(groups, lr=0.02),
        ...     lambda name, shape: len(shape) == 2 and "embed" not in name,
        ...     rest=lambda params: torch.optim.AdamW(params, lr=3e-4),
        ... )
    """
    _check_model(model)
    return WholeParameterOptimizer(model, make, params, rest, cost or product_cost)


def product_cost(shape: torch.Size) -> int:
    """Return the work of products of a matrix with itself, or of several matrices."""
    return shape.numel() * min(shape[-2:]) if len(shape) > 1 else shape.numel()


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    for owner, name in owners_in(model).items():
        owner.stepped_params()  # parameters are to be the sharded ones
        if owner.has_optimizer:
            raise ValueError(
                f"unit {owner.unit_name(name)!r} steps an optimizer in backward, where "
                "no parameter is whole: leave out optimizer_in_backward"
            )


class WholeParameterOptimizer(Optimizer):
    """An optimizer of whole parameters; see :func:`whole_parameter_optimizer`.

    ``param_groups`` have the parameters of the model, sharded, and the options of the
    optimizers inside, which follow them. A state dict is that of an optimizer over the
    sharded parameters, so everything that takes one takes it.

    Attributes:
        optimizer: What ``make`` returned.
        rest: What ``rest`` returned, or None.
    """

    # State that is not element-wise is of the whole, on any number of ranks.
    steps_wholes = True

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[list[dict[str, Any]]], Optimizer],
        params: Chosen | Sequence[Mapping[str, Any]] | None,
        rest: Callable[[list[nn.Parameter]], Optimizer] | None,
        cost: Callable[[torch.Size], int],
    ) -> None:
        show_names_of_flat_states()
        self._model, self._make, self._make_rest, self._cost = model, make, rest, cost
        parts = parts_of(model)
        self._asked = [
            (options, [part.fqn for part in members])
            for options, members in chosen_groups(parts, params)
        ]
        self._is_complete = self._has_begun = self._has_warned = False
        self._round_nbytes = 0  # the most that came to this rank
        shown = self._bind(parts)
        super().__init__(
            [
                {**_options(group), "params": members}
                for group, members in zip(self._inside(), shown, strict=True)
            ],
            dict(self.optimizer.defaults),
        )
        self._is_complete = True

    def _bind(self, parts: Mapping[str, ParamPart]) -> list[list[nn.Parameter]]:
        """Choose owners and make the optimizers; return the parameters of all groups.

        ``parts`` are the model's.
        """
        self._owner = next(iter(owners_in(self._model)), None)
        self._is_sharded = self._owner is not None
        groups = [[parts[name] for name in names] for _, names in self._asked]
        chosen = [part for members in groups for part in members]
        others = others_of(self._model, parts, chosen)
        for part in chosen:
            _check_part(part)
        costs = [self._cost(part.shape) for part in chosen]
        self._dealt = Dealt(chosen, costs, ROUND_NBYTES)
        mine = {each.part: shown for each, shown in self._dealt.shown.items()}
        inner = [
            {**options, "params": [mine[part] for part in members if part in mine]}
            for (options, _), members in zip(self._asked, groups, strict=True)
        ]
        self.optimizer = _made("make", self._make(inner))
        _check_step(self.optimizer)
        self.rest: Optimizer | None = None
        if self._make_rest is not None:
            self.rest = _made("rest", self._make_rest(others))
        shown = [list(dict.fromkeys(part.param for part in each)) for each in groups]
        of_rest = [] if self.rest is None else self.rest.param_groups
        return [*shown, *(list(group["params"]) for group in of_rest)]

    def _follow_sharding(self) -> None:
        """Bind to the parts of a model that fully_shard() has sharded since.

        accelerate does so between the making of an optimizer and the first step.
        """
        if self._is_sharded or not owners_in(self._model):
            return
        if self._has_begun:
            raise RuntimeError(
                "the model was sharded after the first step of its "
                "whole_parameter_optimizer: shard it before"
            )
        shown = self._bind(parts_of(self._model))
        for group, members in zip(self.param_groups, shown, strict=True):
            group["params"] = members
        self.state.clear()

    @property
    def held_name(self) -> str:
        """The classes of the optimizers inside, for checkpoints and messages."""
        return " and ".join(type(each).__name__ for each in reversed(self._optimizers))

    @property
    def _optimizers(self) -> list[Optimizer]:
        """The optimizers inside; what the later one keeps by name goes first."""
        return [*([] if self.rest is None else [self.rest]), self.optimizer]

    @property
    def owners(self) -> dict[str, int]:
        """The owner of each parameter, by name: its rank in the parameter's grid.

        That is ``replica * shards + shard``: the rank, in a model that is sharded over
        all ranks. Each tensor parallel rank counts as a replica.
        """
        return {
            whole.part.fqn: whole.replica_rank * whole.grid.num_shards
            + whole.shard_rank
            for whole in self._dealt.wholes
        }

    def memory_stats(self) -> dict[str, int]:
        """Return what this rank has for whole parameters.

        * num_params, state_nbytes: those that it owns, and the state that ``optimizer``
          has for them.
        * num_rounds: of a step.
        * round_nbytes: values and gradients that other ranks had parts of, in the
          largest round so far. While they travel, at most as much again is held, or
          three times as much where the next round is under way; between steps nothing.
        """
        leaves = tree_leaves([*self.optimizer.state.values()])
        return {
            "num_params": len(self._dealt.shown),
            "num_rounds": self._dealt.num_rounds,
            "round_nbytes": self._round_nbytes,
            "state_nbytes": sum(x.nbytes for x in leaves if isinstance(x, Tensor)),
        }

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "a whole_parameter_optimizer cannot be copied or pickled: make one of the "
            "other model, and load this one's state_dict()"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse ``param_group``: owners are chosen once, over all parameters.

        Raises:
            ValueError: The optimizer is complete.
        """
        if getattr(self, "_is_complete", False):
            raise ValueError(
                "a whole_parameter_optimizer takes no further parameter group: its "
                "owners are chosen once. Pass all groups when it is made"
            )
        super().add_param_group(param_group)

    # Steps --------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient. Collective.

        ``closure``, if given, runs the model before; what it returns is returned.

        Raises:
            RuntimeError: The optimizer failed on this rank, or a gradient on some rank
                cannot be stepped; the message says which.
        """
        self._follow_sharding()
        self._has_begun = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = self._with_gradients()
        self._pass_options_on()
        between = BetweenRounds(self.optimizer)
        # An optimizer that has nothing to step counts, too.
        is_idle = not any(each.is_mine for each in stepped)
        failure: RuntimeError | None = None
        rounds = [
            [each for each in stepped if each.round == number]
            for number in range(self._dealt.num_rounds)
        ]
        arriving = self._begin_lending(rounds[0])
        for members, following in zip(rounds, [*rounds[1:], []], strict=True):
            with span(self._owner, GATHER, members):
                arriving()
                arriving = self._begin_lending(following)
            error = self._step_round(members, between, is_idle and not following)
            failure = failure or error
        between.end()
        if failure is not None:
            raise failure  # not before: the other ranks wait in the rounds
        if self.rest is not None:
            self.rest.step()
        self._take_options_back()
        self._mark_begun()
        return loss

    def _step_round(
        self, members: Sequence[WholeParam], between: BetweenRounds, is_idle: bool
    ) -> RuntimeError | None:
        """Step parameters, or none, if this rank has none in the whole step.

        Returns what the optimizer raised, if it did.
        """
        failure = None
        mine = [each for each in members if each.is_mine]
        try:
            with span(self._owner, STEP, members):
                if mine or is_idle:
                    between.begin_round()
                    self.optimizer.step()
                    between.end_round([self._dealt.shown[each] for each in mine])
        except Exception as error:
            names = ", ".join(repr(each.part.fqn) for each in mine) or "none"
            rank = dist.get_rank() if dist.is_initialized() else 0
            failure = RuntimeError(
                f"{type(self.optimizer).__name__} failed on rank {rank}, "
                f"which stepped the parameters {names}: {error}"
            )
            failure.__cause__ = error
        with span(self._owner, SCATTER, members):
            self._bring_home(members)
        return failure

    def _bring_home(self, members: Sequence[WholeParam]) -> None:
        """Put the new values into the parts, and let the wholes have no memory."""
        travelling = []
        for each in members:
            own = None
            if each.is_mine:
                own = self._dealt.shown[each].detach().reshape(-1)
                self._dealt.shown[each].grad = None  # before the way home takes memory
            travelling.append(Travelling(each, own, each.part.param.dtype))
        parts = scatter(travelling, "whole parameters")
        for each, part in zip(members, parts, strict=True):
            each.part.home.put(part)  # collective where they are no rows
        for each in members:
            if each.is_mine:
                take_back(self._dealt.shown[each], each)

    def _begin_lending(self, members: Sequence[WholeParam]) -> Callable[[], None]:
        """Begin to bring values and gradients to those that this rank owns.

        What is returned ends it. Exchanges that run beside this thread begin here, the
        others there, one after the other: messages and what they bring are there at the
        same time.
        """
        early = [each for each in members if each.grid.runs_beside]
        late = [each for each in members if not each.grid.runs_beside]
        ends = [_begin_gathers(early, *kind) for kind in _KINDS] if early else []

        def end() -> None:
            self._lend(early, *(each() for each in ends))
            self._lend(late, *(_begin_gathers(late, *kind)() for kind in _KINDS))

        return end

    def _lend(
        self,
        members: Sequence[WholeParam],
        values: Sequence[Tensor | None] = (),
        grads: Sequence[Tensor | None] = (),
    ) -> None:
        """Let those that this rank owns show their values and gradients."""
        nbytes = 0
        for each, value, grad in zip(members, values, grads, strict=True):
            if value is not None and grad is not None:
                lend(self._dealt.shown[each], each, value, grad)
                nbytes += value.nbytes + grad.nbytes if each.travels else 0
        self._round_nbytes = max(self._round_nbytes, nbytes)

    def _with_gradients(self) -> list[WholeParam]:
        """Return the parameters that have a gradient on any rank; the same on all."""
        found: list[WholeParam] = []
        problem: str | None = None
        for grid in self._dealt.grids:
            members = [whole for whole in self._dealt.wholes if whole.grid is grid]
            has_grad = [whole.part.param.grad is not None for whole in members]
            its_problem = next(filter(None, map(_problem, members)), None)
            problem = problem or its_problem
            flags = [*has_grad, its_problem is not None, *digest_flags(self.optimizer)]
            for group in grid.groups:
                what = "agreement on gradients of whole parameters"
                flags = on_any_rank(flags, group, grid.device, what)
            has_problem, *digests = flags[len(members) :]
            if has_problem and problem is None:
                problem = "another rank cannot step a gradient: see its error"
            found += compress(members, flags)  # the last flags are no member's
            if differs(digests) and not self._has_warned:
                self._has_warned = True
                warn_of_difference(self.optimizer)
        if problem is not None:
            raise RuntimeError(problem)
        return found

    # Options -----------------------------------------------------------------

    def _inside(self) -> list[dict[str, Any]]:
        """Return the groups inside, in the order of ``param_groups``."""
        rest = [] if self.rest is None else self.rest.param_groups
        return [*self.optimizer.param_groups, *rest]

    def _pass_options_on(self) -> None:
        for group, inside in zip(self.param_groups, self._inside(), strict=True):
            inside.update(_options(group))

    def _take_options_back(self) -> None:
        for group, inside in zip(self.param_groups, self._inside(), strict=True):
            group.update(_options(inside))

    def _mark_begun(self) -> None:
        """Have state: torch.distributed.checkpoint steps an optimizer without any."""
        for group in self.param_groups[: len(self.optimizer.param_groups)]:
            for param in group["params"]:
                self.state[param]  # a defaultdict
        self._share_rest()

    def _share_rest(self) -> None:
        """Have the state of the rest, too, the very dicts."""
        if self.rest is not None:
            self.state.update(states_of_params(self.rest))

    # State dicts ---------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the sharded parameters. Collective.

        State with one value per element is cut as its parameter is. Other state is
        whole, on each rank that has elements of the parameter.
        """
        self._follow_sharding()
        self._share_rest()
        own, self._plain_state_names = save_states(
            self._model, self.optimizer, self._dealt, self._whole_groups
        )
        kept = self.state
        self.state = defaultdict(dict, {k: v for k, v in kept.items() if v})
        self.state.update(own)
        for each in self._optimizers:
            self.state.update(other_states(each))
        try:
            result: dict[str, Any] = super().state_dict()
        finally:
            self.state = kept
        for each in self._optimizers:
            result.update(other_entries(each.state_dict()))
        return result

    @property
    def _whole_groups(self) -> list[dict[str, Any]]:
        return self.param_groups[: len(self.optimizer.param_groups)]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` such as :meth:`state_dict` gives. Collective.

        Tensors keep their dtypes.
        """
        self._follow_sharding()
        super().load_state_dict({**state_dict, "state": {}})
        # A state dict may name its parameters as it likes, as torch.optim's may.
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        position = {key: number for number, key in enumerate(keys)}
        given = {
            position[key]: value
            for key, value in state_dict["state"].items()
            if key in position
        }
        others = {
            key: copy.deepcopy(value)
            for key, value in state_dict["state"].items()
            if key not in position
        }
        entries = other_entries(state_dict)
        num_shown = sum(len(group["params"]) for group in self._whole_groups)
        load_states(
            self._model,
            self.optimizer,
            self._dealt,
            self._whole_groups,
            {key: value for key, value in given.items() if key < num_shown},
            others,
            entries,
        )
        if self.rest is not None:
            inside = self.rest.state_dict()
            states: dict[Any, Any] = {
                k - num_shown: v for k, v in given.items() if k >= num_shown
            }
            states.update(others)
            self.rest.load_state_dict({**inside, **entries, "state": states})
        self._pass_options_on()
        if self._any_rank(bool(given)):  # a rank may have no elements of any state
            self._mark_begun()

    def _any_rank(self, flag: bool) -> bool:
        """Whether any rank that has some of the parameters says so. Collective."""
        for grid in self._dealt.grids:
            for group in grid.groups:
                what = "agreement on loaded states of whole parameters"
                (flag,) = on_any_rank([flag], group, grid.device, what)
        return flag


def _made(argument: str, optimizer: Any) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{argument} must return a torch.optim.Optimizer over what it is given, "
            f"got {type(optimizer).__name__}"
        )
    return optimizer


def _check_step(optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__}.step() needs a closure, which would run the "
            "model in the middle of a round: use an optimizer that steps gradients "
            "which are there"
        )


def _check_part(part: ParamPart) -> None:
    what = f"parameter {part.fqn!r}"
    if part.cut is not None:
        raise ValueError(
            f"{what} is a tensor parallel DTensor of FullyShardedDataParallel, of "
            "which no rank can have the whole: use fully_shard(), or another optimizer "
            "for it"
        )
    if part.home.opaque is not None:
        raise ValueError(
            f"{what} is a {type(part.home.opaque).__name__}, whose values cannot be "
            "moved: choose other parameters"
        )


def _problem(whole: WholeParam) -> str | None:
    """Return why a gradient cannot be stepped, or None."""
    param = whole.part.param
    grad = param.grad
    if grad is None:
        return None
    if grad.layout is not torch.strided:
        return (
            f"the gradient of {whole.part.fqn!r} is sparse, which cannot be whole on "
            "another rank: leave the parameter to an optimizer of its own"
        )
    if grad.dtype != param.dtype:
        return (
            f"the gradient of {whole.part.fqn!r} is {grad.dtype} and the parameter "
            f"{param.dtype}: unset keep_low_precision_grads"
        )
    return None


def _begin_gathers(
    members: Sequence[WholeParam], part_of: Callable[[WholeParam], Tensor], what: str
) -> Callable[[], list[Tensor | None]]:
    """Begin to gather the wholes that this rank owns. Collective."""
    return begin_gather(
        [Travelling(each, part_of(each), each.part.param.dtype) for each in members],
        what,
    )


def _value(whole: WholeParam) -> Tensor:
    """Return this rank's part of the parameter, 1-D."""
    return whole.part.home.values()


def _gradient(whole: WholeParam) -> Tensor:
    """Return this rank's part of the gradient, 1-D; zeros where it has none."""
    home = whole.part.home
    grad = home.param.grad
    if grad is None:
        return torch.zeros_like(home.values())
    return home.part_in(grad.detach())


_KINDS = ((_value, "whole parameters"), (_gradient, "whole gradients"))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    left_out = ("params", "param_names")
    return {key: value for key, value in group.items() if key not in left_out}
