"""The last reference to a process group goes with a unit."""

import gc
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_c import FSDP
from helpers.distributed import distributed


@pytest.mark.cpu_only("gloo's threads are those of the host")
@distributed(world_size=2)
def test_gloo_thread_that_waits_for_the_interpreter() -> None:
    """The destructor of gloo waits for a thread that frees a tensor under the GIL."""
    group = dist.new_group()
    model = FSDP(nn.Linear(4, 4), process_group=group, device_id=torch.device("cpu"))
    model(torch.ones(1, 4)).sum().backward()
    value, ready = torch.ones(4), torch.zeros(1)
    if dist.get_rank() == 1:
        dist.recv(ready, 0)
        dist.all_reduce(value, group=group)
        dist.destroy_process_group(group)
        return
    work = dist.all_reduce(value, group=group, async_op=True)
    del work
    dist.destroy_process_group(group)
    unit = model._sharded.unit
    del group, model
    gc.collect()
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1000)  # nobody else gets the GIL by waiting for it
        dist.send(ready, 1)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:  # the call ends meanwhile
            pass
        del unit
    finally:
        sys.setswitchinterval(interval)
