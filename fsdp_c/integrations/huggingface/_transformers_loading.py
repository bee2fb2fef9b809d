"""transformers' from_pretrained: with cpu_ram_efficient_loading only rank 0 reads.

Seen in transformers 5.23.0, ``core_model_loading.py``: every rank reads the whole
checkpoint into memory, though rank 0's weights overwrite it on the other ranks. Here
the other ranks get only the shapes, and memory that is not written yet: the system
provides its pages as the broadcast fills one unit after the other.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fsdp_c.integrations._patch import Function, Patch


def _stand_in(value: Any, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor with the shape of ``value`` and memory for one element.

    ``value`` is a tensor or an unread slice of a safetensors file, whose dtype counts
    if ``dtype`` is None.
    """
    shape = value.shape if isinstance(value, Tensor) else value.get_shape()
    if dtype is None:
        dtype = value.dtype if isinstance(value, Tensor) else value[:0].dtype
    return torch.empty((), dtype=dtype).expand(tuple(shape))


def _lacks_memory(tensor: Tensor) -> bool:
    if tensor.is_meta:
        return True
    held = tensor.untyped_storage().nbytes()
    return held < tensor.numel() * tensor.element_size()


def _give_memory(model: nn.Module) -> None:
    """Give stand-ins and meta tensors of the state dict memory of their own."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and _lacks_memory(param):
                if param not in made:
                    empty = torch.empty(param.shape, dtype=param.dtype, device="cpu")
                    made[param] = nn.Parameter(empty, param.requires_grad)
                module._parameters[name] = made[param]
        for name, buffer in module._buffers.items():
            is_saved = name not in module._non_persistent_buffers_set
            if buffer is not None and is_saved and _lacks_memory(buffer):
                module._buffers[name] = torch.empty(
                    buffer.shape, dtype=buffer.dtype, device="cpu"
                )


def _only_rank_0_reads(load_config: Any) -> bool:
    """Return whether this rank's weights will come from rank 0."""
    from transformers.distributed.fsdp import is_fsdp_enabled  # noqa: PLC0415
    from transformers.distributed.utils import is_local_dist_rank_0  # noqa: PLC0415

    return (
        is_fsdp_enabled()
        and not is_local_dist_rank_0()
        and not load_config.is_quantized
    )


def _wrap_load(original: Function) -> Function:
    def load(
        model: nn.Module,
        state_dict: dict[str, Any],
        load_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not _only_rank_0_reads(load_config):
            return original(model, state_dict, load_config, *args, **kwargs)
        dtypes = {name: value.dtype for name, value in model.state_dict().items()}
        shapes = {
            key: _stand_in(value, dtypes.get(key)) for key, value in state_dict.items()
        }
        result = original(model, shapes, load_config, *args, **kwargs)
        _give_memory(model)
        return result

    return load


PATCHES = (
    Patch(
        module="transformers.core_model_loading",
        function="convert_and_load_state_dict_in_model",
        purpose="cpu_ram_efficient_loading: only rank 0 reads the weights",
        parameters="model state_dict load_config",
        mentions="device_map hf_quantizer",
        wrap=_wrap_load,
    ),
)
