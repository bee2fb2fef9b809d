"""Names that wrappers put into a module tree, and how to take them out again."""

from fsdp_c._torch_compat import CHECKPOINT_PREFIX

WRAPPED_MODULE = "_fsdp_wrapped_module"
WRAPPED_PREFIX = f"{WRAPPED_MODULE}."
FLAT_PARAM = "_flat_param"


def flat_param_name(segment: int) -> str:
    """Return the name under which a unit registers a segment's flat parameter."""
    return FLAT_PARAM if segment == 0 else f"{FLAT_PARAM}_{segment}"


def clean_name(name: str) -> str:
    """Return a module's or tensor's name as it is in the unwrapped model.

    Example:
        >>> clean_name("_fsdp_wrapped_module.blocks.0._fsdp_wrapped_module.weight")
        'blocks.0.weight'
        >>> clean_name("blocks.0._fsdp_wrapped_module")
        'blocks.0'
    """
    return f"{name}.".replace(WRAPPED_PREFIX, "").replace(CHECKPOINT_PREFIX, "")[:-1]
