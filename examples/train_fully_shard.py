"""Train the model of train_lm.py with ``fully_shard``, PyTorch's FSDP2 API.

    torchrun --nproc-per-node 2 examples/train_fully_shard.py

Parameters are DTensors; optimizer, clipping and checkpoints are torch's own.
``--resume`` continues from the last checkpoint, on any number of processes.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, Block, GPTConfig
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy
from train_lm import draw_batch, mean_over_ranks, read_text, start_process_group

from fsdp_c import fully_shard


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4, help="windows per rank")
    parser.add_argument("--context", type=int, default=128, help="bytes a window")
    parser.add_argument("--lr", type=float, default=7e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=sysconfig.get_path("stdlib"))
    parser.add_argument("--out", type=Path, default=Path("out/fully_shard"))
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Train, print losses and save."""
    args = parse_arguments()
    device = start_process_group()
    text, _ = read_text(Path(args.data), args.context)
    torch.manual_seed(args.seed)
    model = GPT(GPTConfig(context=args.context)).to(device)
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    def state() -> dict[str, object]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "step": first_step}

    first_step = 0
    if args.resume:
        loaded = state()
        dcp.load(loaded, checkpoint_id=args.out)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        first_step = int(str(loaded["step"]))

    for step in range(first_step, args.steps):
        inputs, targets = draw_batch(
            text, args, step=step, rank=dist.get_rank(), device=device
        )
        logits: Tensor = model(inputs)
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == args.steps - 1:
            mean = mean_over_ranks(loss)
            if dist.get_rank() == 0:
                print(f"step {step:4d}  loss {mean:.4f}", flush=True)
    first_step = args.steps
    dcp.save(state(), checkpoint_id=args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
