"""Time of a training step on 2 hosts of 2 ranks: network namespaces of one machine.

    python benchmarks/several_hosts.py

A link of limited rate (tc tbf) joins the two namespaces, with a delay where the kernel
has netem. Needs root, ip and tc. FSDP_C_HOST_ID makes a host of each namespace: fsdp_c
shares memory in a host and uses gloo between them, or gloo alone ("flat"). The
namespaces are removed at the end, also after a failure.

The last lines compare the planned time of a step's collectives with the step's time
above the bare model. The plan's links are measured: a host's by broadcasts between
peers, the one in a host by the same step with shards in each host only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from common import (
    QUIET,
    TIMED_HEADERS,
    WORKER_TIMEOUT_S,
    Json,
    check_losses,
    format_table,
    joined_group,
    make_parser,
    median_ms,
    ratio,
    report_result,
    results_of,
    run_benchmark,
    run_interleaved,
    timed_cells,
    timed_row,
)
from implementations import BARE, FSDP1_ORIG, FSDP2, FSDP_C_ORIG, LABELS, parallelise
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from train_step import BATCH, MODELS, TIME, describe, time_step

from fsdp_c import FullyShardedDataParallel, _native
from fsdp_c.tools.bench._processes import run_ranks
from fsdp_c.tools.bench._workload import Block
from fsdp_c.tools.plan import Link, ModelSource, Settings, Sharding, plan_model

NUM_HOSTS = 2
NUM_LOCAL = 2
NUM_RANKS = NUM_HOSTS * NUM_LOCAL
DELAY = "1ms"
# Rates, and how much may pass at once: what passes in a millisecond. With more, short
# calls would not see the rate.
RATES = {"1gbit": "128kb", "10gbit": "1mb"}
FLAT = "flat"
IN_HOST = "in-host"
LINK = "link"
LINK_NUMEL = 1 << 20
LABELS = {
    **LABELS,
    FSDP_C_ORIG: "fsdp_c, by hosts",
    FLAT: "fsdp_c, flat (FSDP_C_TRANSPORT=flat)",
    IN_HOST: "fsdp_c, shards in each host only",
}
IMPLEMENTATIONS = [BARE, FSDP_C_ORIG, FLAT, FSDP1_ORIG, FSDP2, IN_HOST]


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def _namespace(host: int) -> str:
    return f"fsdpc{os.getpid()}h{host}"


def _interface(host: int) -> str:
    return f"fc{os.getpid() % 100000}h{host}"


@contextlib.contextmanager
def linked_hosts() -> Iterator[None]:
    """Make a namespace per host and a link between them; remove them at the end."""
    # A signal ends Python without its clean-up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    try:
        for host in range(NUM_HOSTS):
            _run("ip", "netns", "add", _namespace(host))
        ends = [_interface(host) for host in range(NUM_HOSTS)]
        _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end in enumerate(ends):
            name = _namespace(host)
            _run("ip", "link", "set", end, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"10.77.0.{host + 1}/24", "dev", end)
            _run("ip", "-n", name, "link", "set", end, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        yield
    finally:  # interfaces go with their namespaces
        for host in range(NUM_HOSTS):
            subprocess.run(
                ["ip", "netns", "del", _namespace(host)],
                capture_output=True,
                check=False,
            )
        with contextlib.suppress(RuntimeError):
            _run("ip", "link", "del", _interface(0))


def limit_links(rate: str) -> str:
    """Limit both directions to ``rate``; return what was set, for the table."""
    netem = ["netem", "delay", DELAY, "rate", rate, "limit", "100000"]
    tbf = ["tbf", "rate", rate, "burst", RATES[rate], "latency", "50ms"]
    for words in (netem, tbf):
        try:
            for host in range(NUM_HOSTS):
                in_host = ["ip", "netns", "exec", _namespace(host)]
                change = [*in_host, "tc", "qdisc", "replace", "dev", _interface(host)]
                _run(*change, "root", *words)
        except RuntimeError as error:
            refused = str(error)
        else:
            delay = DELAY if words is netem else "0 (this kernel has no netem)"
            return f"{rate}, delay {delay}"
    raise RuntimeError(refused)


def time_link(args: argparse.Namespace) -> Json:
    """Return the bytes per second that come to a host, and the seconds of a call."""
    rank = dist.get_rank()
    local = rank % NUM_LOCAL
    groups = [
        dist.new_group(range(first, NUM_RANKS, NUM_LOCAL)) for first in range(NUM_LOCAL)
    ]

    def exchange(numel: int) -> float:
        tensors = [torch.zeros(numel) for _ in range(NUM_HOSTS)]

        def call() -> None:
            works = [
                dist.broadcast(
                    tensor, host * NUM_LOCAL + local, groups[local], async_op=True
                )
                for host, tensor in enumerate(tensors)
            ]
            for work in works:
                work.wait()

        return median_ms(call, num_steps=args.steps, num_warmup=args.warmup) / 1e3

    latency = exchange(1)
    seconds = exchange(LINK_NUMEL) - latency
    nbytes = 4 * LINK_NUMEL * NUM_LOCAL * (NUM_HOSTS - 1)
    return {"bytes_per_second": nbytes / seconds, "latency_s": latency}


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    """Return the model, sharded as asked for."""
    model = MODELS[args.model].create()
    if args.worker != IN_HOST:
        name = FSDP_C_ORIG if args.worker == FLAT else args.worker
        return parallelise(model, name)
    groups = [
        dist.new_group(range(host * NUM_LOCAL, (host + 1) * NUM_LOCAL))
        for host in range(NUM_HOSTS)
    ]
    sharded: torch.nn.Module = FullyShardedDataParallel(
        model,
        process_group=groups[dist.get_rank() // NUM_LOCAL],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    return sharded


def run_worker(args: argparse.Namespace) -> None:
    """Join the other ranks and time what is asked for."""
    args.optimizer = "sgd"
    with joined_group(args):
        if args.worker == LINK:
            report_result(args, time_link(args))
            return
        result = time_step(make_model(args), args)
        if args.worker in (FSDP_C_ORIG, FLAT):
            carrier = _native.transport(dist.group.WORLD, torch.device("cpu"))[0]
            expected = "c10d" if args.worker == FLAT else "hierarchical"
            if carrier != expected:
                raise RuntimeError(f"the group uses {carrier}, expected {expected}")
        report_result(args, result)


def on_host(name: str, rank: int) -> Sequence[str]:
    """Return the words that start a rank of an implementation on its host."""
    host = rank // NUM_LOCAL
    return [
        *("ip", "netns", "exec", _namespace(host), "env"),
        f"FSDP_C_HOST_ID=host{host}",
        f"GLOO_SOCKET_IFNAME={_interface(host)}",
        f"FSDP_C_TRANSPORT={'flat' if name == FLAT else ''}",
    ]


def run_on_hosts(name: str, words: Sequence[str]) -> Json:
    """Run an implementation, each rank started in the namespace of its host."""
    return run_ranks(
        [*words, "--worker-folder"],
        NUM_RANKS,
        timeout_s=WORKER_TIMEOUT_S,
        environ=QUIET,
        prefix=lambda rank: on_host(name, rank),
    )


def measure(args: argparse.Namespace) -> Json:
    """Run all implementations at all rates.

    Raises:
        RuntimeError: A command or a rank failed, or the losses differ.
    """
    rows: list[Json] = []
    links: Json = {}
    options = ["--model", args.model, "--steps", str(args.steps)]
    options += ["--warmup", str(args.warmup)]
    jobs = {
        name: [__file__, "--worker", name, *options]
        for name in (*IMPLEMENTATIONS, LINK)
    }
    with linked_hosts():
        for rate in args.rates:
            link = limit_links(rate)
            runs = run_interleaved(
                jobs,
                num_rounds=args.rounds,
                num_ranks=NUM_RANKS,
                run=lambda name: run_on_hosts(name, jobs[name]),
            )
            links[rate] = {"link": link, **runs.pop(LINK)[0]}
            losses = {name: each[0]["loss"] for name, each in runs.items()}
            check_losses(
                rate, {n: v for n, v in losses.items() if n not in (BARE, IN_HOST)}
            )
            rows += [
                {"rate": rate, "implementation": name, **timed_row(each)}
                for name, each in runs.items()
            ]
    return results_of(
        "several_hosts", args, model=args.model, links=links, results=rows
    )


def render(data: Json, rate: str, *, markdown: bool) -> str:
    """Return the step times at one rate as a table."""
    results = [row for row in data["results"] if row["rate"] == rate]
    times = {row["implementation"]: row["step_ms"] for row in results}
    rows = [
        [
            LABELS[row["implementation"]],
            *timed_cells(row, 1),
            f"{row['step_ms'] - times[BARE]:.1f}",
            ratio(row["step_ms"], times[FSDP_C_ORIG]),
        ]
        for row in results
    ]
    headers = ["implementation", "step (ms)", *TIMED_HEADERS]
    headers += ["above the bare model (ms)", "to by hosts"]
    return format_table(headers, rows, markdown=markdown)


def planned_seconds(args: argparse.Namespace, ranks: int, **links: object) -> Json:
    """Return fsdp_c.tools.plan's bytes and seconds of a step's collectives."""

    def make(batch: int, sequence: int) -> tuple[torch.nn.Module, object]:
        tokens = torch.zeros(batch, sequence, dtype=torch.long)
        return MODELS[args.model].create(), (tokens, tokens)

    plan = plan_model(
        ModelSource(args.model, make, BATCH, TIME),
        [ranks],
        sharding=Sharding(use_orig_params=True),
        settings=Settings(on_cpu=True, **links),
        wrap="Block",
    ).ranks[0]
    calls = (plan.all_gather, plan.reduce_scatter)
    return {
        "wire_nbytes": sum(each.wire_nbytes for each in calls),
        "seconds": sum(each.seconds for each in calls),
    }


def compare_with_plan(data: Json, rate: str, args: argparse.Namespace) -> str:
    """Return the time of communication: by hosts to flat, planned to measured."""
    times = {
        row["implementation"]: row["step_ms"]
        for row in data["results"]
        if row["rate"] == rate
    }
    found = data["links"][rate]
    in_host_s = max(times[IN_HOST] - times[BARE], 0.1) / 1e3
    in_host = planned_seconds(args, NUM_LOCAL)["wire_nbytes"] / in_host_s
    planned = planned_seconds(
        args,
        NUM_RANKS,
        link=Link(in_host * 8e-9, 0),
        ranks_per_host=NUM_LOCAL,
        host_link=Link(found["bytes_per_second"] * 8e-9, found["latency_s"] * 1e6),
    )
    planned_ms = planned["seconds"] * 1e3
    measured_ms = times[FSDP_C_ORIG] - times[BARE]
    flat_ms = times[FLAT] - times[BARE]
    return (
        f"communication by hosts is {flat_ms / measured_ms:.2f} times as fast as flat\n"
        f"planned communication {planned_ms:.1f} ms, measured {measured_ms:.1f} ms "
        f"({100 * (planned_ms / measured_ms - 1):+.0f} %); links: a host's "
        f"{found['bytes_per_second'] * 8e-9:.2f} Gbit/s and "
        f"{found['latency_s'] * 1e6:.0f} us, in a host {in_host * 8e-9:.1f} Gbit/s"
    )


def show(data: Json, args: argparse.Namespace) -> str:
    """Return a table for each rate, below its heading."""
    parts = [
        f"{NUM_HOSTS} hosts of {NUM_LOCAL} ranks, {BATCH} x {TIME} bytes per rank, "
        f"{describe(args.model)} parameters; smallest of {args.rounds} medians of "
        f"{args.steps} steps"
    ]
    for rate in args.rates:
        table = render(data, rate, markdown=args.markdown)
        plan = compare_with_plan(data, rate, args)
        parts.append(f"link of {data['links'][rate]['link']}\n{table}\n{plan}")
    return "\n\n".join(parts)


def parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, steps=5, warmup=2, rounds=2)
    parser.add_argument("--model", choices=list(MODELS), default="small")
    parser.add_argument(
        "--rates", nargs="+", choices=RATES, default=list(RATES), metavar="RATE"
    )
    return parser


if __name__ == "__main__":
    args = parser().parse_args()
    sys.exit(run_benchmark(args, worker=run_worker, measure=measure, show=show))
