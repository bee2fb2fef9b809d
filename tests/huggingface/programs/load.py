"""Loads and wraps a Llama on several ranks; tells how much memory each rank needed.

    accelerate launch --config_file YAML load.py FOLDER

Rank 0 saves the model in FOLDER first. The environment must make malloc give memory
back as soon as it is free (MALLOC_MMAP_THRESHOLD_), as it does with the tensors of
models that are not tiny.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM


def status_nbytes(key: str) -> int:
    """Return a value of /proc/self/status: VmRSS is memory now, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    folder = Path(sys.argv[1])
    accelerator = Accelerator()
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=4,
    )
    torch.manual_seed(3)
    model = LlamaForCausalLM(config)
    expected = {n: p.double().sum().item() for n, p in model.named_parameters()}
    whole = sum(4 * param.numel() for param in model.parameters())
    if accelerator.is_main_process:
        model.save_pretrained(folder)
    del model
    accelerator.wait_for_everyone()

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status_nbytes("VmRSS")
    model = LlamaForCausalLM.from_pretrained(folder)
    loaded = status_nbytes("VmHWM") - before
    model = accelerator.prepare(model)
    wrapped = status_nbytes("VmHWM") - before

    state = accelerator.get_state_dict(model)  # on rank 0
    if accelerator.is_main_process:
        assert {n: w.double().sum().item() for n, w in state.items()} == expected
    told = {"rank": dist.get_rank(), "whole": whole, "loaded": loaded}
    (folder / f"rank{dist.get_rank()}.json").write_text(
        json.dumps({**told, "wrapped": wrapped})
    )
    accelerator.end_training()


main()
