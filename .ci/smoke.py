"""What an installed wheel must do: `torchrun --nproc-per-node 2 .ci/smoke.py`.

A training step in units, and a state dict as the unsharded model has it.
"""

import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist

import fsdp_c
from fsdp_c import FullyShardedDataParallel as FSDP


def main() -> None:
    """Train one step on this rank and compare with the unsharded model."""
    installed = Path(sysconfig.get_path("platlib"))
    assert Path(fsdp_c.__file__).is_relative_to(installed), fsdp_c.__file__
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    whole = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    whole.load_state_dict(model.state_dict())
    sharded = FSDP(model, use_orig_params=True)
    batch = torch.randn(4, 5)  # the same on all ranks, so that their mean is it
    for module in (whole, sharded):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        module(batch).square().sum().backward()
        optimizer.step()
    state = sharded.state_dict()
    for name, expected in whole.state_dict().items():
        torch.testing.assert_close(state[name], expected)
    dist.destroy_process_group()
    print(f"rank trained with {fsdp_c.__file__} and torch {torch.__version__}")


main()
