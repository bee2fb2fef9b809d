"""Ranks in processes of their own, which may be killed or stopped in mid-step.

A `Starter` is a process that has imported torch and forks the ranks of one scenario
after the other. It says their process ids, and frees those numbers when it is told to.
Every rank trains, over gloo, shared memory or NCCL, in a group with a time limit of
seconds; at one place of its third step the victim is killed, is stopped, raises, or
runs other units. What the others are told stands in ``<folder>/<rank>.json`` then.
"""

import contextlib
import functools
import gc
import json
import math
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from helpers.programs import start

# Also for NCCL's communicators, which take seconds on a GPU that many processes share.
GROUP_TIMEOUT_S = 3.0 * float(os.environ.get("FSDP_C_TEST_TIMEOUT_FACTOR", "1"))
POST_MORTEM_S = 5.0  # kLimit in csrc/torch/groups/post_mortem.cpp
# Of a whole test: above all the start of the processes.
LIMIT_S = 120.0
# Places before the first step: before wrapping, in it, before the first meeting.
WRAPPING = ("before", "construction", "meeting")
# What makes the victim run other units.
PARTINGS = ("skip", "reorder")
# How late a rank that is late comes to each of several waits: to one it is in time.
DELAY_S = 0.6 * GROUP_TIMEOUT_S
# Steps before the one with the failure.
NUM_GOOD_STEPS = 2


@dataclass(frozen=True)
class Scenario:
    """What goes wrong, on which rank, and where."""

    action: str  # kill, stop, raise, late, skip, reorder
    place: str = "forward"
    victim: int = 1
    world_size: int = 3
    store: str = "file"  # or tcp, which is in the process of rank 0
    strategy: str = "FULL_SHARD"  # or fully_shard
    transport: str = "shm"
    """Or c10d, which is gloo; hierarchical: hosts of 2 ranks; nccl."""
    recovers: bool = False
    """Whether the ranks go on afterwards, in a new group."""
    syncs: bool = False
    """Whether rank 0's parameters are broadcast in wrapping, which is what fails."""
    stays: bool = False
    """Whether ranks that failed do not end before all that can have failed, too."""
    makes_groups: bool = False
    """Whether HYBRID_SHARD makes its groups by itself, for nodes of 2 ranks."""
    words: tuple[str, ...] = ()
    """Of the keys in the store that a victim that is late writes so late."""


@dataclass(frozen=True)
class Report:
    """What one rank wrote before it ended."""

    kind: str  # of the exception
    message: str
    seconds: float
    """Since the victim did what it did."""
    end_seconds: float = -1.0
    """The same, to the end of the process."""


class Starter:
    """The process that the ranks are forked from."""

    def __init__(self, folder: Path) -> None:
        self._connection, theirs = Pipe()
        self._process = start(serve, folder / "starter", theirs)
        theirs.close()

    def close(self) -> None:
        """End it, and with it ranks that are left."""
        self._process.kill()
        self._process.join()
        self._connection.close()

    def run(self, scenario: Scenario, folder: Path) -> dict[int, Report]:
        """Run ``scenario``; return the reports of the ranks that wrote one.

        Ends only processes that it started. A rank that is neither the victim nor ends
        by itself is an error.
        """
        pids = self._ask({"folder": str(folder), **asdict(scenario)})
        try:
            ends = self._wait(folder, scenario, pids)
        finally:
            for pid in pids:  # no number is free before the starter was told
                _send(pid, signal.SIGKILL)
                _send(pid, signal.SIGCONT)
            assert self._ask({}) == []
        moment = _moment(folder)
        return {
            rank: replace(
                Report(**json.loads(path.read_text())),
                end_seconds=ends[rank] - moment if rank in ends else -1.0,
            )
            for rank in range(scenario.world_size)
            if (path := folder / f"{rank}.json").exists()
        }

    def _ask(self, question: dict[str, Any]) -> list[int]:
        self._connection.send(question)
        is_answered = self._connection.poll(LIMIT_S)
        assert is_answered, "the process that starts the ranks does not answer"
        return self._connection.recv()

    def _wait(
        self, folder: Path, scenario: Scenario, pids: list[int]
    ) -> dict[int, float]:
        """Wait until all ranks but a stopped one have ended; return when they did."""
        deadline = time.monotonic() + LIMIT_S
        late = set(range(scenario.world_size))
        if scenario.action == "stop":
            late.remove(scenario.victim)
        ends: dict[int, float] = {}
        while True:
            ended = {rank for rank in late if not _runs(pids[rank])}
            ends |= dict.fromkeys(ended, time.monotonic())
            late -= ended
            if not late:
                return ends
            if time.monotonic() >= deadline:
                stderr = (folder / "stderr").read_text(errors="replace")[-3000:]
                raise AssertionError(
                    f"ranks {sorted(late)} did not end within {LIMIT_S:g} s:\n{stderr}"
                )
            time.sleep(0.05)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _moment(folder: Path) -> float:
    """Return when the victim did what it did; a future without end if it did not."""
    path = folder / "moment"
    return float(path.read_text()) if path.exists() else math.inf


def _runs(pid: int) -> bool:
    """Whether the process has not ended; a zombie has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


# In the processes that a `Starter` has -------------------------------------------


def _shard_rows(model: Any, process_group: Any) -> Any:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from fsdp_c import fully_shard

    mesh = DeviceMesh.from_group(process_group, torch.get_default_device().type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class _Ranks:
    """Everything one rank has: the group, the model, the steps."""

    def __init__(self, config: dict[str, Any], rank: int) -> None:
        import torch
        import torch.distributed as dist

        from helpers.impl import ShardingStrategy, fsdp
        from helpers.one_gpu import set_up_device

        self.config = config
        self.rank = rank
        self.folder = Path(config["folder"])
        self.is_victim = rank == config["victim"]
        self.is_due = False
        self.is_late = False
        self._num_blocks = 0
        world_size = config["world_size"]
        is_on_gpu = config["transport"] == "nccl"
        self.store = self._late(self._store())
        dist.init_process_group(
            set_up_device("cuda" if is_on_gpu else "cpu", rank, world_size),
            store=self.store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        group: Any = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
        if config["makes_groups"]:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=GROUP_TIMEOUT_S))
            os.environ["LOCAL_WORLD_SIZE"] = "2"
            group = None
        elif config["strategy"] == "HYBRID_SHARD":
            group = _hybrid_groups(rank, world_size)
        torch.manual_seed(0)
        self.reference = Blocks(self)
        self.is_by_rows = config["strategy"] == "fully_shard"
        if self.is_by_rows:
            self.wrap: Any = _shard_rows
        else:
            self.wrap = functools.partial(
                fsdp,
                sharding_strategy=ShardingStrategy[config["strategy"]],
                auto_wrap_policy=self._policy,
                sync_module_states=config["syncs"],
                use_orig_params=True,
            )
        self.groups = group if isinstance(group, tuple) else (group,)
        self.group = group
        self.x = torch.ones(4, 6, requires_grad=True)
        dist.barrier()

    def _policy(self, module: Any, recurse: bool, **_: Any) -> bool:
        """Wrap the blocks; with the second one the victim is in the middle of it."""
        from helpers.models import Block

        if not recurse and isinstance(module, Block):
            self._num_blocks += 1
            if self._num_blocks == 2:
                self.act("construction")
        return recurse or isinstance(module, Block)

    def construct(self) -> None:
        """Wrap the model and let the ranks meet, which may fail."""
        import torch
        import torch.distributed as dist

        self.is_due = self.config["place"] in WRAPPING
        self.act("before")
        torch.manual_seed(0)
        self.use(self.wrap(Blocks(self), process_group=self.group))
        self.act("meeting")
        if not self.is_due:
            dist.barrier()

    def use(self, model: Any) -> None:
        """Train ``model`` from now on."""
        import torch

        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def _store(self) -> Any:
        import torch.distributed as dist

        if self.config["store"] == "file":
            path = str(self.folder / "store")
            return dist.FileStore(path, self.config["world_size"])  # type: ignore[attr-defined]
        if self.rank == 0:
            store = dist.TCPStore(
                "127.0.0.1", 0, is_master=True, wait_for_workers=False
            )
            port = self.folder / "port.new"
            port.write_text(str(store.port))
            port.rename(self.folder / "port")
            return store
        while not (self.folder / "port").exists():
            time.sleep(0.01)
        port_number = int((self.folder / "port").read_text())
        return dist.TCPStore("127.0.0.1", port_number, is_master=False)

    def _late(self, store: Any) -> Any:
        """Let the victim's own words come late, if that is what is to happen."""
        is_late = self.is_victim and self.config["words"]
        return LateStore(self, store) if is_late else store

    def act(self, place: str) -> None:
        """Do what is to be done at ``place``, if this is the rank and the moment."""
        if not (self.is_due and self.is_victim and place == self.config["place"]):
            return
        (self.folder / "moment").write_text(str(time.monotonic()))
        action = self.config["action"]
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if action == "raise":
            raise ValueError("the victim's own mistake")
        self.is_late = action == "late"

    def order(self) -> list[int]:
        """Return the blocks to run."""
        if self.is_due and self.is_victim:
            if self.config["action"] == "skip":
                return [0, 1]
            if self.config["action"] == "reorder":
                return [0, 2, 1, 3]
        return [0, 1, 2, 3]

    def step(self) -> None:
        """Train one step, summon, and make a state dict."""
        import torch

        from helpers.impl import FSDP

        out = self.model(self.x)
        if out.requires_grad:
            out.register_hook(lambda _: self.act("backward"))
        out.sum().backward()
        self.act("clip")
        if not self.is_by_rows:
            self.model.clip_grad_norm_(1.0)
        self.act("optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.is_by_rows:
            return  # the rest is torch's
        with FSDP.summon_full_params(self.model):
            self.act("summon")
        if self.config["action"] in PARTINGS and self.x.is_cuda:
            # Here all ranks know their units; comparing states they would not.
            torch.cuda.synchronize()
        self.model.state_dict()
        self.act("optim_state_dict")
        FSDP.optim_state_dict(self.model, self.optimizer)

    def recover(self) -> None:
        """Go on from the shards in a new group; compare with an unsharded model."""
        import torch
        import torch.distributed as dist

        from fsdp_c import reset
        from helpers.impl import FSDP, StateDictType

        self.is_due = False
        reset(self.model)
        with FSDP.state_dict_type(self.model, StateDictType.LOCAL_STATE_DICT):
            state = self.model.state_dict()
        optimizer_state = self.optimizer.state_dict()
        group = dist.new_group(timeout=timedelta(seconds=60))
        self.use(self.wrap(Blocks(self), process_group=group))
        with FSDP.state_dict_type(self.model, StateDictType.LOCAL_STATE_DICT):
            self.model.load_state_dict(state)
        self.optimizer.load_state_dict(optimizer_state)
        for _ in range(2):
            self.step()
        optimizer = torch.optim.SGD(self.reference.parameters(), lr=0.01, momentum=0.9)
        for _ in range(NUM_GOOD_STEPS + 2):
            optimizer.zero_grad()
            self.reference(self.x).sum().backward()
            torch.nn.utils.clip_grad_norm_(self.reference.parameters(), 1.0)
            optimizer.step()
        expected = self.reference.state_dict()
        for name, value in self.model.state_dict().items():
            torch.testing.assert_close(value, expected[name])
        (self.folder / f"{self.rank}.recovered").touch()

    def await_others(self) -> None:
        """Wait for the reports of all that can write one; not for ever."""
        deadline = time.monotonic() + LIMIT_S / 2
        others = set(range(self.config["world_size"]))
        if self.config["action"] in ("kill", "stop"):
            others.remove(self.config["victim"])
        while not all((self.folder / f"{rank}.json").exists() for rank in others):
            if time.monotonic() >= deadline:
                return
            time.sleep(0.05)

    def check_transport(self) -> None:
        """Raise unless the groups, which were used, have the scenario's transport."""
        import torch

        from fsdp_c import _native

        for group in self.groups:
            name, why = _native.transport(group, torch.get_default_device())
            assert name == self.config["transport"], why

    def train(self) -> None:
        """Train until it fails."""
        import torch

        self.construct()
        for index in range(NUM_GOOD_STEPS + 3):
            self.is_due = index == NUM_GOOD_STEPS
            if self.is_due and self.config["action"] in PARTINGS:
                (self.folder / "moment").write_text(str(time.monotonic()))
            self.step()
            if self.x.is_cuda:
                torch.cuda.synchronize()  # a step behind it learns of the failure
            if index == 0:
                self.check_transport()


def LateStore(ranks: _Ranks, store: Any) -> Any:  # noqa: N802 - as `Blocks`
    """Return a store where some keys are written late, once for each of the words."""
    import torch.distributed as dist

    words = list(ranks.config["words"])

    class _LateStore(dist.Store):
        def set(self, key: str, value: Any) -> None:
            word = next((word for word in words if f"/{word}" in key), None)
            if ranks.is_late and word is not None:
                words.remove(word)
                time.sleep(DELAY_S)
            store.set(key, value)

        def get(self, key: str) -> Any:
            return store.get(key)

        def add(self, key: str, change: int) -> int:
            return store.add(key, change)

        def wait(self, keys: list[str], *limit: Any) -> None:
            store.wait(keys, *limit)

        def check(self, keys: list[str]) -> bool:
            return store.check(keys)

        def delete_key(self, key: str) -> bool:
            return store.delete_key(key)

        def has_extended_api(self) -> bool:
            return False

        def clone(self) -> Any:
            return self

    return _LateStore()


def _hybrid_groups(rank: int, world_size: int) -> Any:
    """Make shard groups of two ranks, and the groups across them."""
    import torch.distributed as dist

    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    half = world_size // 2
    lists = [[2 * i, 2 * i + 1] for i in range(half)]
    across = [list(range(i, world_size, 2)) for i in range(2)]
    groups = [
        [dist.new_group(ranks, timeout=timeout) for ranks in each]
        for each in (lists, across)
    ]
    return groups[0][rank // 2], groups[1][rank % 2]


def Blocks(ranks: _Ranks) -> Any:  # noqa: N802 - a class where torch is imported
    """Return the model: four blocks in an order that may change."""
    from torch import Tensor, nn

    from helpers.models import Block

    class _Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.blocks[1].register_forward_hook(lambda *_: ranks.act("forward"))
            self.blocks[2].register_state_dict_pre_hook(
                lambda *_: ranks.act("state_dict")
            )

        def forward(self, x: Tensor) -> Tensor:
            for index in ranks.order():
                x = self.blocks[index](x)
            return x

    return _Blocks()


def _run_rank(config: dict[str, Any], rank: int) -> int:
    folder = Path(config["folder"])
    ranks = _Ranks(config, rank)
    try:
        ranks.train()
    except Exception as error:
        seconds = time.monotonic() - _moment(folder)
        report = Report(type(error).__name__, str(error), seconds)
        (folder / f"{rank}.json").write_text(json.dumps(asdict(report)))
        traceback.print_exc()
        if config["stays"]:
            ranks.await_others()
        if not config["recovers"]:
            return 1
    if config["recovers"]:
        ranks.recover()
    return 0


def _die_with_parent() -> None:
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _fork_rank(config: dict[str, Any], rank: int) -> int:
    """Return the process id; the rank itself does not return."""
    pid = os.fork()
    if pid != 0:
        return pid
    _die_with_parent()
    if config["transport"] == "c10d":
        os.environ["FSDP_C_TRANSPORT"] = "c10d"
    if config["transport"] == "hierarchical":
        os.environ["FSDP_C_HOST_ID"] = f"host{rank // 2}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    stderr = os.open(Path(config["folder"]) / "stderr", flags)
    os.dup2(stderr, 1)
    os.dup2(stderr, 2)
    sys.exit(_run_rank(config, rank))


def serve(connection: Connection) -> None:
    """Start the ranks of a scenario per message; an empty one waits for their ends."""
    # Loaded before the fork: imported once. Optimizers import dynamo.
    import torch
    import torch._dynamo
    import torch.distributed.fsdp.wrap

    from helpers import impl, models  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()  # the ranks need not look at all that
    pids: list[int] = []
    while True:
        config = connection.recv()
        if config:
            pids = [_fork_rank(config, rank) for rank in range(config["world_size"])]
            connection.send(pids)
        else:
            for pid in pids:
                os.waitpid(pid, 0)
            connection.send([])
