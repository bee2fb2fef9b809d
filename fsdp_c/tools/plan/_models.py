"""Makes the model that is planned, on meta: from a Hugging Face config or a factory."""

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from fsdp_c.tools.plan._errors import PlanError
from fsdp_c.tools.plan._trace import Inputs


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from; every call of :meth:`build` makes a new one.

    Attributes:
        name: As the user wrote it.
        make: Makes the model, and its inputs or None; called under
            ``torch.device("meta")``.
        batch: Sequences of one forward, per rank.
        sequence: Tokens of each.
        dtype: Of floating parameters before wrapping (the shards').
        frozen: Patterns of the names of parameters that need no gradient.
    """

    name: str
    make: Callable[[int, int], tuple[nn.Module, Inputs | None]]
    batch: int = 1
    sequence: int = 2048
    dtype: torch.dtype | None = None
    frozen: tuple[str, ...] = ()

    def build(self) -> tuple[nn.Module, Inputs | None]:
        """Return a new model on meta, and its inputs if they are known.

        Raises:
            PlanError: The factory raised, returned no model, or a pattern of
                ``frozen`` matches no parameter.
        """
        try:
            with torch.device("meta"):
                model, inputs = self.make(self.batch, self.sequence)
        except PlanError:
            raise
        except Exception as error:
            raise PlanError(
                f"--model {self.name}: it cannot be made on the meta device "
                f"({type(error).__name__}: {error})"
            ) from error
        _check_model(self.name, model)
        model.to("meta")
        _freeze(model, self.frozen)
        if self.dtype is not None:
            model.to(self.dtype)
        return model, inputs


def _check_model(name: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"--model {name}: the factory returned a {type(model).__name__}: return "
            "an nn.Module, or (module, inputs)"
        )
    if next(model.parameters(), None) is None:
        raise PlanError(
            f"--model {name}: the {type(model).__name__} has no parameters: nothing "
            "would be sharded"
        )


def _freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        matches = [p for name, p in model.named_parameters() if fnmatch(name, pattern)]
        if not matches:
            raise PlanError(
                f"--freeze {pattern!r} matches no parameter: the first is "
                f"{next(iter(dict(model.named_parameters())))!r}; * stands for any text"
            )
        for param in matches:
            param.requires_grad_(False)


def find_model(text: str, **settings: Any) -> ModelSource:
    """Return the source that ``--model text`` names.

    Args:
        text: A folder with a ``config.json``, a JSON file, a name that transformers
            knows (in its cache, or on the hub), or ``module:factory``.
        settings: The fields of ModelSource after ``make``.

    Raises:
        PlanError: There is no such model, or transformers is not installed.
    """
    path = Path(text)
    if path.is_dir() or path.suffix == ".json":
        return ModelSource(text, _from_config(text, _read_config(path)), **settings)
    module, separator, function = text.partition(":")
    if separator:
        factory = _import(text, module, function)
        return ModelSource(text, _from_factory(factory), **settings)
    return ModelSource(text, _from_config(text, _named_config(text)), **settings)


# Factories --------------------------------------------------------------------


def _import(text: str, module: str, function: str) -> Callable[[], Any]:
    folder = str(Path.cwd())
    if folder not in sys.path:  # as with python -m, wherever the command came from
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise PlanError(
            f"--model {text}: module {module!r} cannot be imported ({error}): write "
            "package.module:function, in the current folder or installed"
        ) from error
    for name in function.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise PlanError(
            f"--model {text}: {module} has no function {function!r}: write "
            "package.module:function, of a function without arguments that returns "
            "the model"
        )
    factory: Callable[[], Any] = found
    return factory


def _from_factory(
    factory: Callable[[], Any],
) -> Callable[[int, int], tuple[nn.Module, Inputs | None]]:
    def make(_batch: int, _sequence: int) -> tuple[nn.Module, Inputs | None]:
        made = factory()
        if not isinstance(made, tuple):
            return made, None
        if len(made) != 2:
            raise PlanError(
                f"the factory returned {len(made)} values: return the model, or "
                "(model, inputs), inputs a tuple of arguments or a dict of keywords"
            )
        model, inputs = made
        inputs = tree_map(lambda x: x.to("meta") if torch.is_tensor(x) else x, inputs)
        if isinstance(inputs, Mapping):
            return model, Inputs((), inputs)
        return model, Inputs(inputs if isinstance(inputs, tuple) else (inputs,))

    return make


# Hugging Face -----------------------------------------------------------------


def _transformers(text: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise PlanError(
            f"--model {text} names a Hugging Face config and transformers cannot be "
            f"imported ({error}): pip install transformers, or pass a factory, "
            "package.module:function"
        ) from error


def _read_config(path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise PlanError(
            f"--model {path}: {error.strerror}: {file}: pass a folder with a "
            "config.json, a JSON file, or package.module:function"
        ) from error
    except ValueError as error:
        raise PlanError(f"--model {path}: {file} is not JSON: {error}") from error
    transformers = _transformers(str(path))
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if kind is None:
        raise PlanError(
            f'--model {path}: {file} has no "model_type": it is not a config of '
            "transformers"
        )
    try:
        return transformers.AutoConfig.for_model(
            **{key: value for key, value in fields.items() if key != "model_type"},
            model_type=kind,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"--model {path}: {file}: {error}") from error


def _named_config(text: str) -> Any:
    transformers = _transformers(text)
    try:
        return transformers.AutoConfig.from_pretrained(text)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise PlanError(
            f"--model {text}: no such folder or file, and transformers finds no "
            f"config of that name ({first}): pass a folder with a config.json, a JSON "
            "file, a name on the hub, or package.module:function"
        ) from error


def _from_config(
    text: str, config: Any
) -> Callable[[int, int], tuple[nn.Module, Inputs | None]]:
    transformers = _transformers(text)
    names = getattr(config, "architectures", None) or ()
    classes = [getattr(transformers, name, None) for name in names]
    known = next((found for found in classes if found is not None), None)

    def make(batch: int, sequence: int) -> tuple[nn.Module, Inputs | None]:
        if known is not None:
            model = known(config)
        else:
            auto = transformers.AutoModelForCausalLM
            if type(config) not in auto._model_mapping:
                auto = transformers.AutoModel
            model = auto.from_config(config)
        model.train()
        return model, _inputs_of(model, batch, sequence)

    return make


def _inputs_of(model: Any, batch: int, sequence: int) -> Inputs | None:
    """Return token inputs, with labels if the model has a loss of its own."""
    if getattr(model, "main_input_name", None) != "input_ids":
        return None
    ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    keywords: dict[str, Any] = {"input_ids": ids}
    if getattr(model.config, "is_encoder_decoder", False):
        keywords["decoder_input_ids"] = ids
    elif model.get_output_embeddings() is not None:
        keywords["labels"] = ids
    if hasattr(model.config, "use_cache"):
        keywords["use_cache"] = False
    return Inputs((), keywords)
