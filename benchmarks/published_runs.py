"""fsdp_c.tools.plan's times and memory beside published figures of FSDP runs on GPUs.

    python benchmarks/published_runs.py

The figures are those of torchtitan's FSDP2 (github.com/pytorch/torchtitan): A100s from
docs/performance.md at commit 0413364, H100s from
benchmarks/llama3_h100_202412_torchtitan.md at commit b5bcd76. What a GPU achieves is
not known beforehand, so the first run of each table sets it; the others are predicted.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from common import format_table

from fsdp_c.tools.plan import (
    Link,
    ModelSource,
    Settings,
    Sharding,
    find_model,
    plan_model,
)
from fsdp_c.tools.plan._plan import RankPlan

GIB = 2**30
SHARDING = Sharding(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, fully_shard=True
)


@dataclass(frozen=True)
class Llama:
    """The shape of a model, as its configuration names it."""

    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int

    def source(self, folder: Path, batch: int, sequence: int) -> ModelSource:
        """Return it as a source of plans."""
        config = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.width,
            "intermediate_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": sequence,
        }
        path = folder / "config.json"
        path.write_text(json.dumps(config))
        return find_model(str(path), batch=batch, sequence=sequence)


LLAMA2_13B = Llama(5120, 13824, 40, 40, 40, 32000)
LLAMA2_70B = Llama(8192, 28672, 80, 64, 8, 32000)
LLAMA3_8B = Llama(4096, 14336, 32, 32, 8, 128256)
LLAMA3_70B = Llama(8192, 28672, 80, 64, 8, 128256)


@dataclass(frozen=True)
class Run:
    """A published run: what was trained how, and the tokens per second of a GPU."""

    name: str
    model: Llama
    num_gpus: int
    batch: int
    sequence: int
    recomputes: bool
    tokens_per_second: float
    memory_gib: float | None = None


@dataclass(frozen=True)
class Cluster:
    """Runs on the same GPUs and links; links are in Gbit/s, per GPU and direction."""

    name: str
    in_host: float
    between_hosts: float
    runs: Sequence[Run]


CLUSTERS = (
    Cluster(
        "A100, 8 a host (links assumed: NVLink 2,400, network 200 Gbit/s a GPU)",
        2400,
        200,
        (
            Run("Llama 2 13B, 2 x 4096", LLAMA2_13B, 64, 2, 4096, False, 2162),
            Run("Llama 2 70B, 2 x 4096, full", LLAMA2_70B, 64, 2, 4096, True, 353),
            Run("Llama 3 70B, 1 x 8192, full", LLAMA3_70B, 64, 1, 8192, True, 331),
        ),
    ),
    # Selective checkpointing recomputes operations, which a plan does not know: what
    # the GPU achieves stands for it, and only differences of memory are compared.
    Cluster(
        "H100, 8 a host (NVLink 3,600, network 400 Gbit/s a GPU)",
        3600,
        400,
        (
            Run("Llama 3.1 8B, 8 GPUs", LLAMA3_8B, 8, 2, 8192, False, 5762, 82.4),
            Run("Llama 3.1 8B, 128 GPUs", LLAMA3_8B, 128, 2, 8192, False, 5605, 67.0),
        ),
    ),
)


def plan_run(run: Run, cluster: Cluster, tflops: float, folder: Path) -> RankPlan:
    """Return the plan of one rank of a run."""
    hosts = run.num_gpus // 8
    settings = Settings(
        link=Link(cluster.in_host),
        ranks_per_host=8 if hosts > 1 else 0,
        host_link=Link(8 * cluster.between_hosts),
        tflops=tflops,
        recomputes=run.recomputes,
    )
    source = run.model.source(folder, run.batch, run.sequence)
    return plan_model(
        source, [run.num_gpus], sharding=SHARDING, settings=settings
    ).ranks[0]


def planned_rate(run: Run, plan: RankPlan) -> float:
    """Return the tokens per second of a GPU."""
    return run.batch * run.sequence / plan.step_seconds


def achieved(run: Run, cluster: Cluster, folder: Path) -> float:
    """Return the TFLOP/s with which the plan of a run has the published time."""
    tflops = 200.0
    for _ in range(4):  # what is exposed changes a little
        rate = planned_rate(run, plan_run(run, cluster, tflops, folder))
        tflops *= run.tokens_per_second / rate
    return tflops


def show(cluster: Cluster, folder: Path) -> str:
    """Return the table of a cluster."""
    first = cluster.runs[0]
    tflops = achieved(first, cluster, folder)
    rows = []
    memory: list[tuple[float, int]] = []
    for run in cluster.runs:
        plan = plan_run(run, cluster, tflops, folder)
        rate = planned_rate(run, plan)
        distance = f"{rate / run.tokens_per_second - 1:+.1%}"
        rows.append(
            [
                run.name,
                f"{run.tokens_per_second:,.0f}",
                f"{rate:,.0f}",
                f"sets {tflops:.0f} TFLOP/s" if run is first else distance,
                f"{plan.exposed_seconds / plan.step_seconds:.1%}",
            ]
        )
        if run.memory_gib is not None:
            memory.append((run.memory_gib, plan.peak_nbytes))
    headers = ["run", "published", "planned", "distance", "exposed, planned"]
    text = f"{cluster.name}, tokens per second and GPU\n\n"
    text += format_table(headers, rows, markdown=True)
    if len(memory) > 1:
        published = memory[0][0] - memory[-1][0]
        planned = (memory[0][1] - memory[-1][1]) / GIB
        text += (
            f"\n\nFrom the first to the last a GPU's peak falls by {published:.1f} GiB "
            f"as published, by {planned:.1f} GiB as planned."
        )
    return text


def main() -> int:
    """Print a table for each cluster."""
    with tempfile.TemporaryDirectory(prefix="fsdp_c-plan-") as folder:
        print("\n\n".join(show(cluster, Path(folder)) for cluster in CLUSTERS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
