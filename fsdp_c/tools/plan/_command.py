"""The command line: python -m fsdp_c plan --model MODEL --world-size N."""

import argparse
import json
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch.distributed.fsdp.api import BackwardPrefetch, ShardingStrategy

from fsdp_c import _native
from fsdp_c._text import finite_float, positive_int
from fsdp_c.tools.plan._errors import PlanError
from fsdp_c.tools.plan._model_plan import MAX_RANKS, Sharding, plan_model
from fsdp_c.tools.plan._models import find_model
from fsdp_c.tools.plan._picture import save_picture
from fsdp_c.tools.plan._plan import OPTIMIZERS, Link, Settings
from fsdp_c.tools.plan._table import bars_text, plan_text
from fsdp_c.tools.plan._whole import Chooser

_SWEEP = (8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536, 100_000)
_STRATEGIES = {each.name.lstrip("_"): each for each in ShardingStrategy}
_DTYPES = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")
}
_PREFETCHES = {
    "pre": BackwardPrefetch.BACKWARD_PRE,
    "post": BackwardPrefetch.BACKWARD_POST,
    "none": None,
}
_GIB = 2**30


def _number(text: str) -> float:
    return finite_float(text, "a number > 0", lambda value: value > 0)


def _latency(text: str) -> float:
    return finite_float(text, "microseconds >= 0", lambda value: value >= 0)


def _world_sizes(text: str) -> list[int]:
    if text == "sweep":
        return list(_SWEEP)
    sizes = []
    for item in text.split(","):
        if not item.strip().isdecimal() or not 1 <= int(item) <= MAX_RANKS:
            raise argparse.ArgumentTypeError(
                f"{item.strip()!r} is not a number of ranks: write one from 1 to "
                f"{MAX_RANKS:,}, several with commas between, or sweep"
            )
        sizes.append(int(item))
    return sizes


def _mesh(text: str) -> tuple[int, int]:
    replicas, separator, shards = text.partition("x")
    if not separator or not replicas.isdecimal() or not shards.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a mesh: write REPLICASxSHARDS, such as 4x8"
        )
    return int(replicas), int(shards)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_c plan",
        description="Estimate one rank's memory, communication and step time, without "
        "a GPU or a process group. See docs/guide/plan.md.",
    )
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help="a Hugging Face config.json or its folder, a model name known to "
        "transformers, or package.module:function returning model or (model, inputs)",
    )
    add(
        "--world-size",
        required=True,
        type=_world_sizes,
        metavar="N|N,N,...|sweep",
        help="number of ranks, or several; sweep: 8 to 100,000",
    )
    _add_sharding(parser.add_argument_group("sharding"))
    _add_training(parser.add_argument_group("training"))
    _add_estimates(parser.add_argument_group("time estimates"))
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print JSON")
    out.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="draw the plan: .png, .svg or .pdf needs matplotlib; .txt is plain text",
    )
    return parser


def _add_sharding(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--strategy",
        default="FULL_SHARD",
        choices=_STRATEGIES,
        help="sharding strategy (default: FULL_SHARD)",
    )
    add(
        "--fully-shard",
        action="store_true",
        help="plan fully_shard() instead of FullyShardedDataParallel",
    )
    add(
        "--mesh",
        type=_mesh,
        metavar="RxS",
        help="replicas x shards of HYBRID_SHARD, such as 4x8",
    )
    add(
        "--wrap",
        default="auto",
        metavar="auto|none|size:NUMEL|Class,Class",
        help="modules to wrap as units (default: auto, the model's blocks)",
    )
    add(
        "--param-dtype",
        choices=_DTYPES,
        help="dtype of forward and backward (default: --dtype)",
    )
    add(
        "--reduce-dtype",
        choices=_DTYPES,
        help="dtype of gradient reduction (default: --param-dtype)",
    )
    add(
        "--keep-low-precision-grads",
        action="store_true",
        help="keep sharded gradients in --param-dtype",
    )
    add("--use-orig-params", action="store_true", help="plan use_orig_params=True")
    add(
        "--backward-prefetch",
        default="pre",
        choices=_PREFETCHES,
        help="when backward gathers the next unit (default: pre)",
    )
    add(
        "--forward-prefetch",
        action="store_true",
        help="gather the next unit early in forward",
    )
    add(
        "--cpu-offload",
        action="store_true",
        help="keep shards, gradients and optimizer state in host memory",
    )
    add(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="device to plan for (default: cuda)",
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--optimizer",
        default="adamw",
        choices=OPTIMIZERS,
        help="optimizer whose state is counted; muon: with AdamW for the rest, by "
        "whole_parameter_optimizer (default: adamw)",
    )
    add(
        "--whole",
        action="append",
        metavar="PATTERN",
        help="parameters that muon steps, by name, such as 'model.layers.*' (default: "
        "names without embed, head, wte and wpe; always matrices)",
    )
    add(
        "--dtype",
        default="float32",
        choices=_DTYPES,
        help="dtype of the shards (default: float32)",
    )
    add("--batch", type=positive_int, default=1, help="sequences per rank (default: 1)")
    add(
        "--sequence",
        type=positive_int,
        default=2048,
        help="sequence length (default: 2048)",
    )
    add(
        "--micro-batches",
        type=positive_int,
        default=1,
        help="micro-batches per step, accumulated in no_sync() (default: 1)",
    )
    add(
        "--accumulate-sharded",
        action="store_true",
        help="accumulate sharded gradients: no_sync(sharded=True)",
    )
    add(
        "--checkpoint-activations",
        action="store_true",
        help="recompute every unit's activations in backward",
    )
    add(
        "--offload-activations",
        action="store_true",
        help="keep activations in host memory: fsdp_c.offload_activations()",
    )
    add(
        "--offload-keep-last",
        type=positive_int,
        metavar="N",
        default=1,
        help="units whose activations stay on the device (default: 1)",
    )
    add(
        "--freeze",
        action="append",
        default=[],
        metavar="PATTERN",
        help="freeze parameters by name, such as 'model.embed*'",
    )


def _add_estimates(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--link-gbps",
        type=_number,
        default=400.0,
        help="link bandwidth per rank and direction, in Gbit/s (default: 400)",
    )
    add(
        "--latency-us",
        type=_latency,
        default=10.0,
        help="latency of a hop, in microseconds (default: 10)",
    )
    add(
        "--replica-link-gbps",
        type=_number,
        help="link bandwidth between replicas (default: --link-gbps)",
    )
    add(
        "--replica-latency-us",
        type=_latency,
        help="latency between replicas (default: --latency-us)",
    )
    add(
        "--ranks-per-host",
        type=positive_int,
        metavar="N",
        help="ranks of a sharding group per host: collectives use --link-gbps inside "
        "a host and --host-link-gbps between hosts (default: one link for all ranks)",
    )
    add(
        "--host-link-gbps",
        type=_number,
        help="link bandwidth of a host, which its ranks share (default: --link-gbps)",
    )
    add(
        "--host-latency-us",
        type=_latency,
        help="latency between hosts (default: --latency-us)",
    )
    add(
        "--copy-gbps",
        type=_number,
        default=200.0,
        help="bandwidth between device and host memory per direction, in Gbit/s "
        "(default: 200)",
    )
    add(
        "--tflops",
        type=_number,
        default=400.0,
        help="achieved TFLOP/s of a device (default: 400)",
    )
    add(
        "--memory-gib",
        type=_number,
        help="device memory, in GiB; suggest plans that fit first",
    )


def _sharding(words: argparse.Namespace) -> Sharding:
    return Sharding(
        strategy=_STRATEGIES[words.strategy],
        param_dtype=_DTYPES.get(words.param_dtype),
        reduce_dtype=_DTYPES.get(words.reduce_dtype),
        keep_low_precision_grads=words.keep_low_precision_grads,
        use_orig_params=words.use_orig_params,
        backward_prefetch=_PREFETCHES[words.backward_prefetch],
        forward_prefetch=words.forward_prefetch,
        cpu_offload=words.cpu_offload,
        fully_shard=words.fully_shard,
    )


def _chooser(patterns: Sequence[str] | None) -> Chooser | None:
    if patterns is None:
        return None
    return lambda name, shape: (
        len(shape) == 2 and any(fnmatchcase(name, pattern) for pattern in patterns)
    )


def _settings(words: argparse.Namespace) -> Settings:
    link = Link(words.link_gbps, words.latency_us)

    def other(gbps: float | None, latency: float | None) -> Link:
        return Link(
            link.gbps if gbps is None else gbps,
            link.latency_us if latency is None else latency,
        )

    return Settings(
        link=link,
        replica_link=other(words.replica_link_gbps, words.replica_latency_us),
        ranks_per_host=words.ranks_per_host or 0,
        host_link=other(words.host_link_gbps, words.host_latency_us),
        tflops=words.tflops,
        optimizer=words.optimizer,
        steps_whole=_chooser(words.whole),
        on_cpu=words.device == "cpu",
        recomputes=words.checkpoint_activations,
        offload_keep_last=words.offload_keep_last if words.offload_activations else 0,
        copy_gbps=words.copy_gbps,
        num_batches=words.micro_batches,
        accumulation=_native.SYNC_SHARD
        if words.accumulate_sharded
        else _native.SYNC_NONE,
    )


def _run(words: argparse.Namespace) -> None:
    source = find_model(
        words.model,
        batch=words.batch,
        sequence=words.sequence,
        dtype=_DTYPES[words.dtype],
        frozen=tuple(words.freeze),
    )
    memory = None if words.memory_gib is None else int(words.memory_gib * _GIB)
    plan = plan_model(
        source,
        words.world_size,
        sharding=_sharding(words),
        settings=_settings(words),
        mesh=words.mesh,
        wrap=words.wrap,
        memory_nbytes=memory,
    )
    if words.json:
        print(json.dumps(plan.as_dict(), indent=2))
    else:
        print(plan_text(plan), end="")
        print(f"\n{bars_text(plan.ranks)}", end="")
    if words.picture is not None:
        path = save_picture(plan, words.picture)
        if path != words.picture:
            print(
                f"matplotlib is not installed: the picture is text, {path}",
                file=sys.stderr,
            )


def main(words: Sequence[str]) -> int:
    """Run the command ``words``; return the exit status.

    0: done. 2: wrong words, or a model that cannot be planned.
    """
    parsed = _parser().parse_args(words)
    try:
        _run(parsed)
    except (PlanError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
