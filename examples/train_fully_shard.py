"""Train the model of train_lm.py with ``fully_shard``, PyTorch's FSDP2 API.

    torchrun --nproc-per-node 2 examples/train_fully_shard.py

Parameters are DTensors; optimizer, clipping and checkpoints are torch's own.
``--resume`` continues from the last checkpoint, on any number of processes.

``--tp 2`` divides every matrix over 2 ranks, with tensor parallelism, and shards over
the others. Ranks of one tensor parallel group have the same batch:

    torchrun --nproc-per-node 4 examples/train_fully_shard.py --tp 2
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, Block, GPTConfig
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
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
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    return parser.parse_args()


class Replicated(ParallelStyle):
    """Every rank has the whole module: clipping then finds one mesh everywhere."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> object:
            return tuple(DTensor.from_local(x, mesh, [Replicate()]) for x in inputs)

        def leave(_: nn.Module, output: DTensor, __: DeviceMesh) -> Tensor:
            return output.to_local()

        # torch passes the mesh, which its annotations do not know.
        return distribute_module(
            module,
            device_mesh,
            input_fn=enter,  # type: ignore[arg-type]
            output_fn=leave,  # type: ignore[arg-type]
        )


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the matrices of a GPT over the ranks of ``mesh``."""
    plan: dict[str, ParallelStyle] = {
        "embedding": ColwiseParallel(output_layouts=Replicate()),
        "blocks.*.norm_attention": Replicated(),
        "blocks.*.attention.to_qkv": ColwiseParallel(output_layouts=Replicate()),
        "blocks.*.attention.to_out": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.norm_mlp": Replicated(),
        "blocks.*.mlp.0": ColwiseParallel(),
        "blocks.*.mlp.2": RowwiseParallel(),
        "norm": Replicated(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def make_mesh(num_tp: int, device: torch.device) -> DeviceMesh:
    """Return the mesh ("dp", "tp") of all ranks."""
    num_ranks = dist.get_world_size()
    if num_tp < 1 or num_ranks % num_tp != 0:
        raise SystemExit(f"--tp {num_tp} does not divide the {num_ranks} processes")
    return init_device_mesh(
        device.type, (num_ranks // num_tp, num_tp), mesh_dim_names=("dp", "tp")
    )


def main() -> None:
    """Train, print losses and save."""
    args = parse_arguments()
    device = start_process_group()
    text, _ = read_text(Path(args.data), args.context)
    torch.manual_seed(args.seed)
    model = GPT(GPTConfig(context=args.context)).to(device)
    mesh = make_mesh(args.tp, device)
    if args.tp > 1:
        parallelize(model, mesh["tp"])
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
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
            text, args, step=step, rank=mesh.get_local_rank("dp"), device=device
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
