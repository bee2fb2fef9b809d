"""What a wrapped module may be in the middle of: a load, a save, a summon."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_c._units.base import ShardedModule


class Session:
    """One of them. A module is in at most one session of each class."""

    def close(self) -> None:
        """Put back what the session changed."""


@dataclass(slots=True)
class LoadSession(Session):
    """One module's part of a load_state_dict.

    Attributes:
        modules: All wrapped modules of the call, the outermost first.
        is_checked: The state dict fits all of them.
        stack: Undoes what loading into the module's unit needs.
        error_msgs: What load_state_dict collects; None until the module's turn.
    """

    modules: "tuple[ShardedModule, ...]"
    is_checked: bool
    stack: ExitStack = field(default_factory=ExitStack)
    error_msgs: list[str] | None = None

    def close(self) -> None:
        """Keep what was loaded."""
        self.stack.close()


@dataclass(frozen=True, slots=True)
class SaveSession(Session):
    """The state dict of a nested module, made before that of the outermost one.

    Attributes:
        state: The state dict.
        prefix: Of its keys.
    """

    state: dict[str, Any]
    prefix: str


class SummonSession(Session):
    """The names of parameters and buffers are those of the unwrapped module."""
