"""Train a byte-level GPT on the Python standard library's source, sharded.

    torchrun --nproc-per-node 2 examples/train_lm.py

Runs one process per GPU over NCCL, or over gloo on the CPU if there are no GPUs.
``--verify`` first compares the sharded model with the unsharded one. ``--resume``
continues from the last checkpoint in the output folder, on any number of processes.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, Block, GPTConfig
from matplotlib.figure import Figure
from torch import Tensor
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from tqdm import tqdm
from verify import largest_differences

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import checkpoint, whole_parameter_optimizer

MAX_GRAD_NORM = 1.0
VERIFY_TOLERANCE = 1e-4  # float32, summed in another order


def parse_arguments() -> argparse.Namespace:
    """Read and check the command line."""

    def positive(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
        return int(text)

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument("--batch", type=positive, default=4, help="windows per rank")
    parser.add_argument("--context", type=positive, default=128, help="bytes a window")
    parser.add_argument("--lr", type=float, default=7e-4, help="peak learning rate")
    parser.add_argument(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="muon: for the matrices of the blocks; AdamW has the rest",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(sysconfig.get_path("stdlib")),
        help="folder of .py files (default: the standard library)",
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="output folder")
    parser.add_argument(
        "--save-every", type=positive, default=100, metavar="STEPS", help="checkpoints"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the last checkpoint"
    )
    parser.add_argument(
        "--verify", action="store_true", help="compare with the unsharded model first"
    )
    parser.add_argument("--verify-steps", type=positive, default=3)
    args = parser.parse_args()
    if not 0.0 < args.lr < math.inf:
        parser.error(f"--lr must be a positive number, got {args.lr}")
    if not args.data.is_dir():
        parser.error(f"--data {args.data} is not a folder")
    if "RANK" not in os.environ:
        parser.error("start with: torchrun --nproc-per-node 2 examples/train_lm.py")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out} cannot be created: {error.strerror}")
    return args


def start_process_group() -> torch.device:
    """Join the other ranks and return this rank's device."""
    local_rank = int(os.environ["LOCAL_RANK"])
    num_local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.is_available():
        if num_local_ranks > torch.cuda.device_count():
            sys.exit(
                f"{num_local_ranks} processes for {torch.cuda.device_count()} GPUs: "
                "use a smaller --nproc-per-node, or CUDA_VISIBLE_DEVICES= for the CPU"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_local_ranks))
    dist.init_process_group("gloo")
    return torch.device("cpu")


def read_text(folder: Path, context: int) -> tuple[Tensor, Tensor]:
    """Return training and held-out bytes; every 20th file is held out."""
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = sorted(f for f in folder.rglob("*.py") if skip.isdisjoint(f.parts))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for index, file in enumerate(files):
        parts[index % 20 == 19].append(file.read_bytes())
    train, held_out = (
        torch.frombuffer(bytearray(b"\n".join(part) or b"\n"), dtype=torch.uint8)
        for part in parts
    )
    if min(train.numel(), held_out.numel()) <= context:
        sys.exit(
            f"{folder}: {len(files)} .py files give {train.numel()} bytes to train on "
            f"and {held_out.numel()} held out, too little for a context of {context}"
        )
    return train, held_out


def cut_windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, int64 of shape [len(starts), context]."""
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def draw_batch(
    text: Tensor,
    args: argparse.Namespace,
    *,
    step: int,
    rank: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return the random batch that ``rank`` sees at ``step``."""
    seed = hash((args.seed, step, rank)) % 2**63
    starts = torch.randint(
        text.numel() - args.context,
        (args.batch,),
        generator=torch.Generator().manual_seed(seed),
    )
    inputs, targets = cut_windows(text, starts, args.context)
    return inputs.to(device), targets.to(device)


def shard(model: GPT, device: torch.device) -> FSDP:
    """Make each block a unit, and the rest of the model another."""
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=device,
    )


def mean_over_ranks(value: Tensor) -> float:
    """Return the mean of one number per rank."""
    total = value.detach().double().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def full_state_dict(model: FSDP) -> dict[str, Tensor]:
    """Gather the unsharded parameters on rank 0, in CPU memory."""
    # torch's own FSDP crashes if it offloads tensors that are on the CPU already.
    offload = next(model.parameters()).is_cuda
    config = FullStateDictConfig(offload_to_cpu=offload, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state: dict[str, Tensor] = model.state_dict()
    return state


def verify(model: GPT, text: Tensor, args: argparse.Namespace) -> bool:
    """Check the sharded model against the unsharded one on all ranks' data."""
    device = model.embedding.weight.device
    batches = [
        [
            draw_batch(text, args, step=step, rank=rank, device=device)
            for rank in range(dist.get_world_size())
        ]
        for step in range(args.verify_steps)
    ]
    largest = largest_differences(
        copy.deepcopy(model),
        shard(copy.deepcopy(model), device),
        batches,
        max_grad_norm=MAX_GRAD_NORM,
    )
    good = max(largest.values()) <= VERIFY_TOLERANCE
    if dist.get_rank() == 0:
        found = ", ".join(f"{what} {value:.1e}" for what, value in largest.items())
        verdict = "ok" if good else f"FAILED: above {VERIFY_TOLERANCE:.0e}"
        print(f"verify: largest difference in {args.verify_steps} steps: {found}")
        print(f"verify: {verdict}", flush=True)
    return good


@torch.no_grad()
def held_out_loss(model: FSDP, text: Tensor, args: argparse.Namespace) -> float:
    """Return the mean loss over 64 windows per rank, spread over the text."""
    device = next(model.parameters()).device
    last = text.numel() - args.context - 1
    starts = torch.linspace(0, last, 64 * dist.get_world_size(), dtype=torch.float64)
    total = torch.zeros((), device=device)
    model.eval()
    for piece in starts.long()[dist.get_rank() :: dist.get_world_size()].chunk(8):
        inputs, targets = cut_windows(text, piece, args.context)
        total += model(inputs.to(device), targets.to(device)) / 8
    model.train()
    return mean_over_ranks(total)


def memory_gib(device: torch.device) -> float:
    """Return this process's memory in GiB: the peak on a GPU, current on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE") / 2**30


def create_optimizer(model: FSDP, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Return AdamW; or Muon, which needs whole matrices, and AdamW beside it."""

    def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            params, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1
        )

    if args.optimizer == "adamw":
        return adamw(model.parameters())
    return whole_parameter_optimizer(
        model,
        lambda groups: torch.optim.Muon(
            groups, lr=args.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        ),
        lambda name, shape: len(shape) == 2 and name.startswith("blocks."),
        rest=adamw,
    )


def train(model: FSDP, text: Tensor, args: argparse.Namespace) -> list[float]:
    """Run all steps and return the loss of each, averaged over ranks."""
    device = next(model.parameters()).device
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    optimizer = create_optimizer(model, args)
    peaks = [group["lr"] for group in optimizer.param_groups]
    warmup = max(1, args.steps // 10)
    losses: list[float] = []
    saved = args.out / "training"
    if args.resume:
        losses = checkpoint.load(saved, model, optimizer).extra["losses"]
    first = len(losses)
    saving: checkpoint.SaveHandle | None = None
    began = time.perf_counter()
    bar = tqdm(
        range(first, args.steps),
        initial=first,
        total=args.steps,
        disable=rank != 0,
        unit="step",
    )
    for step in bar:
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / args.steps)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * min(1.0, (step + 1) / warmup) * cosine
        loss = model(*draw_batch(text, args, step=step, rank=rank, device=device))
        loss.backward()
        model.clip_grad_norm_(MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
        if not math.isfinite(losses[-1]):
            sys.exit(f"loss is {losses[-1]} at step {step}: try a smaller --lr")
        if (step + 1) % args.save_every == 0:
            saving = checkpoint.save(
                saved, model, optimizer, extra={"losses": losses}, blocking=False
            )
        num_tokens = (step + 1 - first) * num_ranks * args.batch * args.context
        bar.set_postfix_str(
            f"loss {losses[-1]:.3f}, "
            f"{num_tokens / (time.perf_counter() - began):.0f} tokens/s, "
            f"{memory_gib(device):.2f} GiB"
        )
    if saving is not None:
        saving.result()  # waits for the thread that writes
    return losses


def save_atomically(state: dict[str, Tensor], path: Path) -> None:
    """Write a checkpoint; an interrupted write leaves none."""
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def draw_losses(losses: list[float], held_out: float, path: Path) -> None:
    """Write the loss curve as a picture."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(losses, linewidth=1, label="training")
    axes.axhline(held_out, color="C1", label=f"held out, at the end: {held_out:.3f}")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Verify if asked, train, and write checkpoint, sample and picture."""
    args = parse_arguments()
    text, held_out_text = read_text(args.data, args.context)
    device = start_process_group()
    torch.manual_seed(args.seed)
    unsharded = GPT(GPTConfig(context=args.context)).to(device)
    num_params = sum(param.numel() for param in unsharded.parameters())
    is_main = dist.get_rank() == 0
    if is_main:
        print(
            f"{num_params / 1e6:.1f} M parameters, {dist.get_world_size()} ranks "
            f"({dist.get_backend()}, {FSDP.__module__}), {text.numel() / 1e6:.1f} MB "
            f"of text, {held_out_text.numel() / 1e6:.1f} MB held out"
        )
    if args.verify and not verify(unsharded, text, args):
        return 1

    model = shard(unsharded, device)
    losses = train(model, text, args)
    held_out = held_out_loss(model, held_out_text, args)
    state = full_state_dict(model)
    if is_main:
        save_atomically(state, args.out / "checkpoint.pt")
        draw_losses(losses, held_out, args.out / "loss.png")
        # The unsharded model loads the checkpoint.
        restored = GPT(GPTConfig(context=args.context))
        restored.load_state_dict(torch.load(args.out / "checkpoint.pt"))
        sample = restored.generate(b"def ", num_bytes=300, temperature=0.7)
        (args.out / "sample.txt").write_bytes(sample)
        print(f"held-out loss {held_out:.3f} nats per byte\n--- sample")
        print(sample.decode(errors="replace"))
        print(
            f"--- written to {args.out}: checkpoint.pt (the model), training/ (for "
            "--resume), loss.png, sample.txt"
        )
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
