"""CheckpointError: all problems of a checkpoint in one exception."""

from collections.abc import Iterable


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or cannot be used.

    Attributes:
        problems: One sentence each; also in the message.
    """

    def __init__(self, headline: str, problems: Iterable[str] = ()) -> None:
        self.headline = headline
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__("\n  - ".join((headline, *self.problems)))

    def __reduce__(self) -> tuple[type, tuple[str, tuple[str, ...]]]:
        return type(self), (self.headline, self.problems)


def mismatches(
    missing: Iterable[str], unexpected: Iterable[str], where: str
) -> list[str]:
    """Return as sentences the names that only the model, or only ``where``, has."""
    return [
        *(
            f"{each!r} is missing: it is in the model, not in {where}"
            for each in missing
        ),
        *(
            f"{each!r} is unexpected: it is in {where}, not in the model"
            for each in unexpected
        ),
    ]


def reason(error: BaseException) -> str:
    """Return an exception as one sentence."""
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"
