"""What a user gets for input that cannot be planned."""


class PlanError(ValueError):
    """The model, a number or an option cannot be planned; the message says why."""
