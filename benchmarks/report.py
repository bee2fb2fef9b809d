"""Write docs/measurements/benchmarks.md and its pictures.

    python benchmarks/report.py

Runs all benchmarks, or draws what earlier runs left with ``--json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import host_instructions
import host_overhead
import memory
import pictures
import state_dict
import state_dict_worker
import train_step
from common import Json, environment_line, write_json

from fsdp_c._text import positive_int

DOCS = Path(__file__).resolve().parent.parent / "docs" / "measurements"

TEXT = """\
# Benchmarks

Made by

{commands}

on {machine}.

A time is the smallest of {rounds} medians, one per round. Each median comes from a
fresh process that runs one implementation; the rounds are interleaved. Beside it stand
the median of the rounds, and their spread: the largest minus the smallest, over the
smallest. What is counted (instructions, bytes) is measured once. "To fsdp_c" is a
figure divided by that of fsdp_c with `use_orig_params=True`: above 1, fsdp_c is faster.

## Host time added to a step

{num_units} transformer blocks of {params_per_unit} parameters, tiny tensors, a fake
process group of {world_size} ranks, one thread, forward and backward. The bare
model's time is subtracted and the rest divided by the number of units. The fake group
copies each rank's piece, which takes {fake_group_us:.0f} us per unit when called from
Python and is part of every sharded row. DDP has no units and shards nothing; its row
is a lower bound for data parallelism. (The fake group makes it use a hook in Python,
once per bucket.)

{host_overhead}

The same steps in instructions, counted by valgrind. Other processes hardly change
them. They leave out the kernel and stalls of the processor.

{host_instructions}

![Instructions that each implementation adds](host.png)

## A training step on {num_ranks} ranks

Forward, backward and {optimizer} step with a gloo group, one thread per rank, {batch}
x {time} bytes per rank. fsdp_c's collectives go through shared memory; with
`FSDP_C_TRANSPORT=c10d` they go through gloo, as the others' do. DDP keeps the whole
model and optimizer state on every rank. The bare model is the limit: as many processes,
the whole model and optimizer state on every rank, no communication. Equal last losses
show that all that communicate have trained the same model. All run with a heap that
keeps its memory ([how](../guide/faq.md#steps-on-a-cpu-vary-from-run-to-run)).

{train_step}

### On {num_more_ranks} ranks

The same on {num_more_ranks} ranks, in {more_rounds} rounds. Where there are more ranks
than cores, ranks that wait for each other also wait for a core.

{more_ranks}

### Over size

A step's time over that of the bare model of the same size. The larger the model, the
fewer steps it takes; the sizes that are not above take two rounds at most.

{over_size}

![Step time over the number of parameters](step.png)

### gloo's own time

The collectives of one such step, each timed alone. An implementation over gloo can
only overlap this time, and on a CPU it takes cores from the computation. Without
shared memory, fsdp_c makes other gloo calls for the same result
([design.md](../internals/design.md#transports)), so its step can be shorter than the
sum.

{collectives}

{memory}
{state_dict}"""

MEMORY_TEXT = """\
## Memory per rank

Made by

    {command}

on {machine}.

Peak of live tensor memory on rank 0, in MiB, after two steps of warm-up: all
allocations of torch's CPU allocator, on all threads, and the shared memory that fsdp_c
reserves. torch's rows are over gloo, whose own buffers do not count. The model has
{model}.

- **parameters** (shards), **gradients** (shards), **optimizer** (state) and
  **unsharded** are the peak of a step of one byte, which has next to no activations.
  **unsharded** are unsharded parameters and gradients, buffers of collectives, and the
  sharded sum of an accumulation.
- **peak**: a step with a batch, and **rings**: shared memory. **activations**: what the
  batch adds to the peak of one byte; less where blocks are gone when activations are
  largest.

At its peak on 2 ranks over gloo, in full fine-tuning, accumulation with `no_sync()`
and activation checkpointing, fsdp_c holds the shards, their gradients so far, the
optimizer's state, the activations, what is accumulated, and the whole parameters of the
root and of one block. Every implementation holds most of that, so the last column can
fall little. Over shared memory the ranks read the shards of blocks in place, without
unsharded parameters, and each other's gradients, without gradient blocks. Pages that
are kept for the next step ([how](../internals/design.md#memory-and-kernels)) are free
memory and do not count.

torch's figures vary between runs by up to a shard of a block, probably because gloo
frees its buffers on threads of its own.

![Peaks on 2 ranks](memory.png)
{notices}
{tables}
"""

STATE_DICT_TEXT = """\
## State dicts and checkpoints

Made by

    {command}

on {machine}.

{num_ranks} ranks of one host, GPTs with AdamW, smallest of {rounds} medians of {steps}
(of the larger model: of a third), of the slowest rank. Full state dicts are made
on rank 0 (`rank0_only`; for `fully_shard` by `get_model_state_dict` and
`get_optimizer_state_dict`) and loaded on all ranks. A copy is one `Tensor.clone()` of
the bytes that a rank gets. A checkpoint holds model and optimizer. It is made by
`fsdp_c.checkpoint`, by torch.distributed.checkpoint from torch's state dicts, and by
plain writes (with fsync) and reads of as many bytes. Reads come from the page cache.
Python's garbage collector is off in each operation: a collection takes 0.2 s here.
"To fsdp_c" compares FSDP1 with fsdp_c with the same `use_orig_params`, FSDP2 with
fsdp_c's `fully_shard`. Extra memory is the peak of torch's CPU allocator above the
memory before and the result, on the rank that needs most.

{tables}
"""

# On more ranks: the two sizes in detail, of what is measured over all sizes, in as
# many rounds as the other sizes.
MORE_RANKS = ["--ranks", "4", "--model", *train_step.IN_DETAIL]
MORE_RANKS += ["--rounds", str(train_step.OVER_SIZE_ROUNDS)]
MORE_RANKS += ["--only", *train_step.OVER_SIZE]

FILES = (
    "host_overhead.json",
    "host_instructions.json",
    "train_step.json",
    "train_step_of_more_ranks.json",
    "memory.json",
    "state_dict.json",
)


def read_or_run_all(args: argparse.Namespace) -> list[Json]:
    """Return the results of all benchmarks, from files if there is a folder of them."""
    if args.json is not None:
        return [json.loads((args.json / name).read_text()) for name in FILES]
    rounds = ["--rounds", str(args.rounds)]
    results = []
    benchmarks = (
        (host_overhead, ["--steps", str(3 * args.steps), *rounds]),
        (host_instructions, []),
        (train_step, ["--steps", str(args.steps), *rounds]),
        (train_step, ["--steps", str(args.steps), *rounds, *MORE_RANKS]),
        (memory, []),
        (state_dict, []),
    )
    for file, (benchmark, words) in zip(FILES, benchmarks, strict=True):
        begin = time.monotonic()
        results.append(benchmark.measure(benchmark.parser().parse_args(words)))
        if args.save_json is not None:
            write_json(args.save_json / file, results[-1])
        seconds = time.monotonic() - begin
        print(f"{benchmark.__name__}: {seconds:.0f} s", file=sys.stderr)
    return results


def memory_section(peaks: Json) -> str:
    """Return the part of the page on memory."""
    return MEMORY_TEXT.format(
        command=peaks["command"],
        machine=environment_line(peaks["environment"]),
        model=memory.describe(peaks),
        notices="".join(f"\n{notice}.\n" for notice in peaks["notices"]),
        tables=memory.render_all(peaks, heading="### ", markdown=True),
    )


def state_dict_section(states: Json) -> str:
    """Return the part of the page on state dicts."""
    return STATE_DICT_TEXT.format(
        command=states["command"],
        machine=environment_line(states["environment"]),
        num_ranks=state_dict_worker.NUM_RANKS,
        rounds=states["settings"]["rounds"],
        steps=states["settings"]["steps"],
        tables=state_dict.render_all(states, markdown=True),
    )


def write_markdown(results: list[Json], path: Path) -> None:
    """Write the page."""
    host, counts, step, more, peaks, states = results
    commands = dict.fromkeys(each["command"] for each in (host, counts, step, more))
    machine = environment_line(host["environment"])
    if step["environment"] != host["environment"]:
        machine += f" (training step: {environment_line(step['environment'])})"
    text = TEXT.format(
        commands="\n".join(f"    {command}" for command in commands),
        machine=machine,
        num_units=host_overhead.NUM_UNITS,
        params_per_unit=host_overhead.PARAMS_PER_UNIT,
        world_size=host_overhead.WORLD_SIZE,
        fake_group_us=host["fake_group_us_per_unit"],
        host_overhead=host_overhead.render(host, markdown=True),
        host_instructions=host_instructions.render(counts, markdown=True),
        num_ranks=train_step.NUM_RANKS,
        optimizer={"sgd": "SGD", "adamw": "AdamW"}[step["settings"]["optimizer"]],
        batch=train_step.BATCH,
        time=train_step.TIME,
        train_step=train_step.render_all(step, markdown=True),
        num_more_ranks=more["settings"]["ranks"],
        more_rounds=more["settings"]["rounds"],
        more_ranks=train_step.render_all(more, markdown=True),
        over_size=train_step.render_over_size(step, markdown=True),
        rounds=step["settings"]["rounds"],
        collectives=train_step.render_collectives(step, markdown=True),
        memory=memory_section(peaks),
        state_dict=state_dict_section(states),
    )
    path.write_text(text)


def main() -> int:
    """Make page and picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FOLDER",
        help=f"read {', '.join(FILES)} here instead of running",
    )
    parser.add_argument(
        "--save-json", type=Path, metavar="FOLDER", help="keep the results here"
    )
    parser.add_argument("--steps", type=positive_int, default=20)
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument(
        "--out", type=Path, default=DOCS, help="default: docs/measurements/"
    )
    args = parser.parse_args()
    if args.json is not None:
        for name in FILES:
            if not (args.json / name).is_file():
                parser.error(f"--json {args.json}: {name} is not there")
    results = read_or_run_all(args)
    _, counts, step, _, peaks, _ = results
    args.out.mkdir(parents=True, exist_ok=True)
    write_markdown(results, args.out / "benchmarks.md")
    pictures.draw_host(counts, args.out / "host.png")
    pictures.draw_memory(peaks, args.out / "memory.png")
    pictures.draw_over_size(step, args.out / "step.png")
    print(f"written: {args.out / 'benchmarks.md'} and its pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
