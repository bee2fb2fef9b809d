"""transformers' Trainer: the loss of models that do not count tokens.

Seen in transformers 5.23.0, ``trainer.py``: a model whose forward takes any keyword
is assumed to divide its loss by ``num_items_in_batch``. T5 ignores it: its loss and
gradients are then multiplied by the number of ranks, and are not divided by the steps
of gradient accumulation.
"""

import inspect
import warnings
from typing import Any

from fsdp_c.integrations._patch import Function, IntegrationWarning, Patch, mentioned_by

# Names in the forward of models that compute a mean loss; of those that use the count.
OWN_LOSSES = frozenset(
    {
        "BCEWithLogitsLoss",
        "CrossEntropyLoss",
        "KLDivLoss",
        "L1Loss",
        "MSELoss",
        "NLLLoss",
        "binary_cross_entropy_with_logits",
        "cross_entropy",
        "mse_loss",
    }
)
COUNTING = frozenset({"loss_function", "num_items_in_batch"})


def ignores_count(forward: Function) -> bool:
    """Return whether a model's forward computes a mean loss of its own."""
    function = inspect.unwrap(forward)
    function = getattr(function, "__func__", function)
    if not inspect.isfunction(function):
        return False
    mentioned = mentioned_by(function)
    return bool(mentioned & OWN_LOSSES) and not mentioned & COUNTING


def _unwrapped(trainer: Any) -> Any:
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def _wrap_init(original: Function) -> Function:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not self.is_fsdp_enabled or not self.model_accepts_loss_kwargs:
            return
        model = _unwrapped(self)
        if hasattr(model, "accepts_loss_kwargs") or not ignores_count(model.forward):
            return
        self.model_accepts_loss_kwargs = False
        warnings.warn(
            f"{type(model).__name__} computes its loss without num_items_in_batch: "
            "fsdp_c keeps the Trainer from multiplying it by the number of ranks",
            IntegrationWarning,
            stacklevel=3,
        )

    return init


PATCHES = (
    Patch(
        module="transformers.trainer",
        function="Trainer.__init__",
        purpose="the loss of models like T5 is not multiplied by the number of ranks",
        parameters="self model args",
        mentions="model_accepts_loss_kwargs VAR_KEYWORD",
        wrap=_wrap_init,
    ),
)
