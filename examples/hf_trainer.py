"""Train a small GPT-2 with transformers' Trainer, sharded over processes by fsdp_c.

    torchrun --nproc-per-node 2 examples/hf_trainer.py

fsdp_c needs one added line, marked below. The launcher makes it unnecessary:

    python -m fsdp_c launch torchrun --nproc-per-node 2 your_script.py

Nothing is downloaded: tokens are bytes of fsdp_c's README. ``--resume`` continues from
the last checkpoint in the output folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

import fsdp_c.integrations.huggingface.auto  # noqa: F401  (the added line)

CONTEXT = 64  # bytes of one example
README = Path(__file__).resolve().parent.parent / "README.md"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--text", type=Path, default=README, help="a file to learn")
    parser.add_argument("--out", type=Path, default=Path("out/hf_trainer"))
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--resume", action="store_true", help="continue from --out")
    return parser.parse_args()


def make_examples(path: Path) -> list[dict[str, torch.Tensor]]:
    """Cut a file into examples of CONTEXT bytes; labels are the same bytes."""
    data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    if data.numel() < CONTEXT:
        raise SystemExit(f"--text {path} has {data.numel()} bytes, need {CONTEXT}")
    return [{"input_ids": x, "labels": x} for x in data.split(CONTEXT)[:-1]]


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=CONTEXT,
            n_embd=128,
            n_layer=4,
            n_head=4,
            bos_token_id=10,
            eos_token_id=10,
            pad_token_id=0,
        )
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.out),
            max_steps=args.steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            logging_steps=10,
            save_steps=max(args.steps // 2, 1),
            bf16=args.bf16,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            fsdp=True,
            fsdp_config={
                "version": 1,  # the class; 2, the default, is fully_shard
                "transformer_layer_cls_to_wrap": ["GPT2Block"],
                "reshard_after_forward": "full_shard",
                "backward_prefetch": "backward_pre",
                "state_dict_type": "SHARDED_STATE_DICT",
            },
        ),
        train_dataset=make_examples(args.text),
        data_collator=default_data_collator,
    )
    trainer.train(resume_from_checkpoint=args.resume or None)

    # Checkpoints are sharded; the last save is for from_pretrained().
    trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(args.out / "model"))
    if trainer.is_world_process_zero():
        print(f"wrapped in: {type(trainer.model_wrapped).__module__}")
        saved = GPT2LMHeadModel.from_pretrained(args.out / "model")
        prompt = torch.tensor([list(b"fsdp_c ")])
        tokens = saved.generate(prompt, max_new_tokens=32, do_sample=False)
        print(bytes(tokens[0].tolist()).decode(errors="replace"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
