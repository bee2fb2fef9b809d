"""transformers' Trainer: the loss of models that do not count tokens, or are renamed.

Seen in transformers 5.23.0, ``trainer.py``:

* A model whose forward takes any keyword is assumed to divide its loss by
  ``num_items_in_batch``. Some ignore it: T5 computes its own loss, and models that
  classify sequences, tokens and images call their ``loss_function`` without it. Their
  loss and gradients are then multiplied by the number of ranks, and are not divided by
  the steps of gradient accumulation.
* With ``label_smoothing_factor`` the name of the model's class decides whether labels
  are shifted. fully_shard names it FSDPLlamaForCausalLM, which is none of the known.
"""

import ast
import functools
import inspect
import textwrap
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
LIBRARY = "transformers"
LOSS = "loss_function"  # of its PreTrainedModel
COUNT = "num_items_in_batch"
# Names in those of its loss functions that use the count.
COUNTING = frozenset({COUNT, "fixed_cross_entropy"})


def ignores_count(model: Any) -> bool:
    """Return whether a model's loss is a mean whatever ``num_items_in_batch`` is."""
    function = inspect.unwrap(model.forward)
    function = getattr(function, "__func__", function)
    if not inspect.isfunction(function):
        return False
    mentioned = mentioned_by(function)
    if COUNT in mentioned:
        return False
    if LOSS in mentioned:
        return not (_passes_keywords(function) and _loss_counts(model))
    return bool(mentioned & OWN_LOSSES)


def _passes_keywords(forward: Function) -> bool:
    """Return whether a call of ``self.loss_function`` gets forward's keywords."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError):  # no source: as the Trainer assumes
        return True
    return any(
        keyword.arg is None
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == LOSS
        for keyword in call.keywords
    )


def _loss_counts(model: Any) -> bool:
    """Return whether the loss that a model's configuration names takes the count."""
    loss = getattr(model, LOSS, None)
    if not inspect.isfunction(loss) or loss.__module__.partition(".")[0] != LIBRARY:
        return True
    mentioned = mentioned_by(loss)
    if not mentioned & COUNTING:
        return False
    return not mentioned & OWN_LOSSES or not _is_regression(model.config)


def _is_regression(config: Any) -> bool:
    kind = getattr(config, "problem_type", None)
    return kind != "single_label_classification" and (
        kind is not None or getattr(config, "num_labels", None) == 1
    )


def _unwrapped(trainer: Any) -> Any:
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def _wrap_init(original: Function) -> Function:
    causal = original.__globals__["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"]

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not self.is_fsdp_enabled:
            return
        model = _unwrapped(self)  # not sharded yet
        if self.label_smoother is not None and type(model).__name__ in causal.values():
            self.label_smoother = functools.partial(
                self.label_smoother, shift_labels=True
            )
        if not self.model_accepts_loss_kwargs:
            return
        if hasattr(model, "accepts_loss_kwargs") or not ignores_count(model):
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
        purpose=(
            "the loss of models like T5 is not multiplied by the number of ranks, and "
            "label smoothing with version 2 shifts the labels of causal models"
        ),
        parameters="self model args",
        mentions="model_accepts_loss_kwargs VAR_KEYWORD label_smoother",
        wrap=_wrap_init,
    ),
)
