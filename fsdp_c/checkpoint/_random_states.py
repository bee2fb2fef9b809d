"""Random states of one process: torch, accelerators, Python, numpy if it is used."""

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """Return the states as plain values and tensors."""
    version, state, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, _on_host(state), gauss],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        states["numpy"] = [
            kind,
            _on_host(keys.tolist()),
            int(position),
            int(has_gauss),
            float(cached),
        ]
    return states


def _on_host(numbers: Sequence[int]) -> torch.Tensor:
    """Return them in host memory, whatever torch's default device is."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def check_random_states(states: Any) -> None:
    """Check that ``states`` can be set; the current ones stay.

    Raises:
        ValueError: They were not made by random_states.
    """
    before = random_states()
    try:
        set_random_states(states)
    except Exception as error:
        raise ValueError(f"they are damaged: {error!r:.200}") from None
    finally:
        set_random_states(before)


def set_random_states(states: Any) -> None:
    """Set what :func:`random_states` returned."""
    torch.set_rng_state(states["torch"])
    version, state, gauss = states["python"]
    random.setstate((version, tuple(state.tolist()), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states:
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            kind, keys, position, has_gauss, cached = states["numpy"]
            numpy.random.set_state(
                (kind, keys.numpy().astype("uint32"), position, has_gauss, cached)
            )
