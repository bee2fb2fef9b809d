"""Train a small Llama in a custom loop with accelerate, sharded by fsdp_c.

    python -m fsdp_c launch accelerate launch \
        --config_file examples/hf_accelerate.yaml examples/hf_accelerate.py

Nothing here names fsdp_c. The launcher replaces torch's FSDP1 by it, and the YAML says
how to shard. Nothing is downloaded: tokens are bytes of fsdp_c's README. ``--resume``
continues from the last state in the output folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

CONTEXT = 64  # bytes of one example
README = Path(__file__).resolve().parent.parent / "README.md"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8, help="examples per process")
    parser.add_argument("--accumulate", type=int, default=2, help="batches per step")
    parser.add_argument("--text", type=Path, default=README, help="a file to learn")
    parser.add_argument("--out", type=Path, default=Path("out/hf_accelerate"))
    parser.add_argument("--resume", action="store_true", help="continue from --out")
    return parser.parse_args()


def make_examples(path: Path) -> list[torch.Tensor]:
    """Cut a file into examples of CONTEXT bytes."""
    data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    if data.numel() < CONTEXT:
        raise SystemExit(f"--text {path} has {data.numel()} bytes, need {CONTEXT}")
    return list(data.split(CONTEXT)[:-1])


def main() -> None:
    args = parse_arguments()
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT,
        )
    )
    loader = DataLoader(make_examples(args.text), batch_size=args.batch, shuffle=True)
    model = accelerator.prepare(model)  # before the optimizer is made
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The scheduler of accelerate steps once per process.
    scheduler = get_linear_schedule_with_warmup(
        optimizer, 0, args.steps * accelerator.num_processes
    )
    optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)
    accelerator.print(f"wrapped in: {type(model).__module__}")

    step = 0
    if args.resume:
        accelerator.load_state(args.out / "state")
        step = int((args.out / "state" / "step").read_text())
    while step < args.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            mean = accelerator.reduce(loss.detach(), reduction="mean")
            accelerator.print(f"step {step} loss {mean:.4f} norm {norm:.4f}")
            if step == args.steps:
                break

    accelerator.save_state(args.out / "state")
    if accelerator.is_main_process:
        (args.out / "state" / "step").write_text(str(step))
    accelerator.unwrap_model(model).save_pretrained(
        args.out / "model",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        saved = LlamaForCausalLM.from_pretrained(args.out / "model")
        prompt = torch.tensor([list(b"fsdp_c ")])
        tokens = saved.generate(prompt, max_new_tokens=32, do_sample=False)
        print(bytes(tokens[0].tolist()).decode(errors="replace"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
