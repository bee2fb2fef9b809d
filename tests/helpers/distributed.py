"""Runs a test function on several ranks, in worker processes that are reused.

    @distributed(world_size=(2, 3))
    def test_x(rank: int, world_size: int) -> None: ...  # or without one, or both

pytest sees one test per world size. Its body runs in `helpers.worker`
processes, which start once per world size and share a gloo process group over a
file store. Values of `pytest.mark.parametrize` are pickled to the workers.

Note [Workers are forked]
Importing torch takes a process seconds, so one process imports it and the workers are
its forks. It is multiprocessing's fork server: it runs nothing but imports and has one
thread.

Note [What a failure shows]
The message of a failed test is the traceback of the rank that failed. Ranks that
still ran then (they wait in a collective for the one that failed) and ranks of a
test that ran out of time are shown by the stacks of all their threads, which
`faulthandler` writes on a signal. After a failure the workers are replaced: their
collectives may be out of step. Only processes started here are ended, by pid.
"""

import ast
import contextlib
import functools
import inspect
import marshal
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe, forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import pytest

from helpers.seeds import seed_of

TESTS_DIR = Path(__file__).resolve().parent.parent

# Seconds. A test may ask for another timeout; the environment scales them all.
DEFAULT_TIMEOUT_S = 60.0
START_TIMEOUT_S = 120.0
# How long ranks may go on after one has failed, before their stacks are shown.
GRACE_S = 2.0
# How long ranks may take to write their stacks, on loaded cores. They end by it.
STACKS_S = 20.0
_STDERR_TAIL_CHARS = 4000
# What the workers' parent imports for all of them. conftest.py adds what the folders
# of collected tests need.
preloaded = ["torch._dynamo", "helpers.worker", "helpers.state_dicts"]

# Where bodies make their tensors: "cpu"; "cuda", a GPU per rank or, where there are
# fewer, one GPU for all ranks (helpers.one_gpu); without a GPU, on the fake CUDA.
TEST_DEVICE = os.environ.get("FSDP_C_TEST_DEVICE", "cpu")

Status = Literal["passed", "skipped", "xfailed", "failed"]


@dataclass(frozen=True)
class Task:
    """One test, as sent to a worker."""

    number: int
    path: str
    module: str
    code: bytes
    """Of the module, with pytest's plain-assert messages, as marshal writes it."""
    qualname: str
    arguments: bytes
    """Pickled keyword arguments, without ``rank``."""
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What one rank made of a task."""

    status: Status
    message: str = ""
    keeps_pool: bool = True
    """Whether the rank can run more tests."""


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker is told when it starts."""

    rank: int
    world_size: int
    device: str
    store: str
    stacks: Path
    stderr: Path
    path: list[str]
    env: dict[str, str]


@dataclass
class _Worker:
    rank: int
    process: BaseProcess
    connection: Connection
    stacks_path: Path
    stderr_path: Path

    def stacks(self) -> str:
        """Return the stacks that the last dump wrote."""
        return self.stacks_path.read_text(errors="replace").strip()

    def stderr_tail(self) -> str:
        """Return the end of what the worker wrote to stderr."""
        return self.stderr_path.read_text(errors="replace")[-_STDERR_TAIL_CHARS:]


def _work(config: WorkerConfig, connection: Connection) -> None:
    from helpers.worker import main

    main(config, connection)


def _worker_environment() -> dict[str, str]:
    defaults = {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        # c10d's flight recorder takes the GIL in every gloo collective.
        "TORCH_FR_BUFFER_SIZE": "0",
    }
    return {**defaults, **os.environ, "PYTHONPATH": str(TESTS_DIR)}


@functools.cache
def fork_server() -> Any:
    """Start the process of which workers are forks; see Note [Workers are forked]."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preloaded)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _worker_environment().items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS_DIR), *sys.path]))
        forkserver.ensure_running()
    return context


class Pool:
    """The worker processes of one world size and device."""

    def __init__(self, world_size: int, device: str = TEST_DEVICE) -> None:
        self.world_size = world_size
        self.device = device
        # fully_shard() without a mesh, as frameworks, takes a GPU that it sees.
        self._hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        self.num_tasks = 0
        self._directory = tempfile.TemporaryDirectory(prefix="fsdp_c_test_")
        self._workers: list[_Worker] = []
        try:
            for rank in range(world_size):
                self._workers.append(self._start(rank))
            outcomes, late = self._collect(START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise
        bad = [o.message for o in outcomes.values() if o.status != "passed"]
        if bad or late:
            message = self._describe(outcomes, late, "did not start in time")
            self.kill()
            raise RuntimeError(f"test workers did not start:\n{message}")

    def _start(self, rank: int) -> _Worker:
        directory = Path(self._directory.name)
        ours, theirs = Pipe(duplex=True)
        stacks_path = directory / f"rank{rank}.stacks"
        stderr_path = directory / f"rank{rank}.stderr"
        config = WorkerConfig(
            rank=rank,
            world_size=self.world_size,
            device=self.device,
            store=str(directory / "store"),
            stacks=stacks_path,
            stderr=stderr_path,
            path=[str(TESTS_DIR), *(p or os.getcwd() for p in sys.path)],
            env={**_worker_environment(), **self._hidden},
        )
        process = fork_server().Process(target=_work, args=(config, theirs))
        process.start()
        theirs.close()
        return _Worker(rank, process, ours, stacks_path, stderr_path)

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid or 0 for worker in self._workers]

    def run(
        self, task: Task, timeout_s: float
    ) -> tuple[dict[int, Outcome], str | None]:
        """Run ``task`` on all ranks.

        Returns:
            The outcomes by rank and, if the pool is no longer usable, a message
            that describes every rank that did not pass.
        """
        for worker in self._workers:
            with contextlib.suppress(BrokenPipeError):  # reported as its exit
                worker.connection.send(task)
        outcomes, late = self._collect(timeout_s)
        failed = [o for o in outcomes.values() if o.status == "failed"]
        if not late and all(o.keeps_pool for o in failed):
            return outcomes, None
        why = (
            "was still running; its stacks"
            if failed
            else f"did not finish within {timeout_s:g} s; its stacks"
        )
        return outcomes, self._describe(outcomes, late, why)

    def _collect(self, timeout_s: float) -> tuple[dict[int, Outcome], list[_Worker]]:
        """Receive one outcome per rank; also return the ranks that sent none."""
        deadline = time.monotonic() + timeout_s
        outcomes: dict[int, Outcome] = {}
        waiting = {worker.connection: worker for worker in self._workers}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                worker = waiting.pop(connection)
                try:
                    outcome = connection.recv()
                except (EOFError, ConnectionResetError):
                    outcome = _outcome_of_exit(worker)
                outcomes[worker.rank] = outcome
                if outcome.status == "failed":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        late = list(waiting.values())
        for worker in late:
            os.kill(worker.process.pid or 0, signal.SIGUSR1)
        if late:
            _await_stacks(late)
        return outcomes, late

    def _describe(
        self, outcomes: dict[int, Outcome], late: Sequence[_Worker], why: str
    ) -> str:
        parts = [describe_failures(outcomes, self.world_size)]
        for worker in late:
            tail = worker.stderr_tail().strip()
            parts.append(
                f"rank {worker.rank} of {self.world_size} {why}:\n"
                + (worker.stacks() or "(no stack could be written)")
                + (f"\nits stderr:\n{tail}" if tail else "")
            )
        return "\n\n".join(part for part in parts if part)

    def close(self) -> None:
        """End the workers: politely, then by signal."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.connection.send(None)
        deadline = time.monotonic() + 5.0
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the workers by signal and remove their files."""
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        self._workers.clear()
        self._directory.cleanup()


def _await_stacks(workers: Sequence[_Worker]) -> None:
    """Wait until all have ended by the signal: their stacks are complete then."""
    deadline = time.monotonic() + STACKS_S
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))


def _outcome_of_exit(worker: _Worker) -> Outcome:
    worker.process.join()
    code = worker.process.exitcode or 0
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    tail = worker.stderr_tail().strip()
    return Outcome("failed", f"process ended with {how}\n{tail}", keeps_pool=False)


def describe_failures(outcomes: dict[int, Outcome], world_size: int) -> str:
    """Return the messages of the failed ranks; equal messages stand once."""
    ranks_of: dict[str, list[int]] = {}
    for rank, outcome in sorted(outcomes.items()):
        if outcome.status == "failed":
            ranks_of.setdefault(outcome.message, []).append(rank)
    parts = []
    for message, ranks in ranks_of.items():
        who = "rank " if len(ranks) == 1 else "ranks "
        who += ", ".join(map(str, ranks))
        parts.append(f"{who} of {world_size} failed:\n{message}")
    return "\n\n".join(parts)


@functools.cache
def _code_of(path: str) -> bytes:
    """Compile a test module: once, and not in every worker."""
    source = Path(path).read_bytes()
    tree = ast.parse(source, filename=path)
    # pytest's own rewriting, private: without it asserts only lose detail.
    with contextlib.suppress(Exception):
        from _pytest.assertion.rewrite import rewrite_asserts

        rewrite_asserts(tree, source)
    return marshal.dumps(compile(tree, path, "exec", dont_inherit=True))


# Of all pools of a pytest process on a device, of which each rank takes 0.8 GiB.
MAX_RANKS_ON_DEVICE = 6

_pools: dict[tuple[int, str], Pool] = {}  # the last used one is the last


def _pool_of(world_size: int, device: str) -> Pool:
    """Return the pool of such ranks; on a device end others that leave no room."""
    key = (world_size, device)
    pool = _pools.pop(key, None)
    if pool is None:
        if device != "cpu":
            while sum(size for size, *_ in _pools) + world_size > MAX_RANKS_ON_DEVICE:
                if not _pools:
                    break
                _pools.pop(next(iter(_pools))).close()
        pool = Pool(world_size, device)
    _pools[key] = pool
    return pool


def close_pools() -> None:
    """End all workers. Called once, at the end of the pytest session."""
    while _pools:
        _pools.popitem()[1].close()


def run_task(
    body: Callable[..., None],
    world_size: int,
    arguments: dict[str, Any],
    timeout_s: float = DEFAULT_TIMEOUT_S,
    device: str = TEST_DEVICE,
) -> None:
    """Run ``body`` on ``world_size`` ranks; raise pytest's outcome of it."""
    timeout_s *= float(os.environ.get("FSDP_C_TEST_TIMEOUT_FACTOR", "1"))
    key = (world_size, device)
    pool = _pool_of(world_size, device)
    pool.num_tasks += 1
    path = sys.modules[body.__module__].__file__  # a decorator's body is elsewhere
    assert path is not None, body
    task = Task(
        number=pool.num_tasks,
        path=path,
        module=body.__module__,
        code=_code_of(path),
        qualname=body.__qualname__,
        arguments=pickle.dumps({**arguments, "world_size": world_size}),
        seed=seed_of(body.__module__, body.__qualname__),
    )
    try:
        outcomes, broken = pool.run(task, timeout_s)
    except BaseException:
        _pools.pop(key).kill()
        raise
    if broken is not None:
        _pools.pop(key).kill()
        pytest.fail(broken, pytrace=False)
    message = describe_failures(outcomes, world_size)
    if message:
        pytest.fail(message, pytrace=False)
    if not all(outcome.keeps_pool for outcome in outcomes.values()):
        _pools.pop(key).close()
    statuses = {outcome.status for outcome in outcomes.values()}
    if len(statuses) > 1:
        by_rank = {rank: outcomes[rank].status for rank in sorted(outcomes)}
        pytest.fail(f"ranks disagree: {by_rank}", pytrace=False)
    first = outcomes[0]
    if first.status == "skipped":
        pytest.skip(first.message)
    if first.status == "xfailed":
        pytest.xfail(first.message)


def varied(**values: Sequence[Any]) -> Callable[[Any], Any]:
    """Run a test with every value of each parameter, which its body need not name."""

    def decorate(test: Any) -> Any:
        signature = inspect.signature(test)
        named = dict(signature.parameters)
        for name in values:
            keyword = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
            named.setdefault(name, keyword)
        vars(test)["__signature__"] = signature.replace(parameters=[*named.values()])
        for name in reversed(values):
            test = pytest.mark.parametrize(name, values[name])(test)
        return test

    return decorate


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
every_strategy = varied(strategy=STRATEGIES, use_orig_params=(True, False))


def distributed(
    world_size: int | Sequence[int],
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    device: str = TEST_DEVICE,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make ``test_x(rank, world_size, ...)`` a test on ``world_size`` ranks.

    Args:
        world_size: Ranks; a sequence runs the test once for each.
        timeout_s: Seconds after which the ranks' stacks are shown and they end.
        device: "cpu" or "cuda"; by default what FSDP_C_TEST_DEVICE says.
    """
    sizes = [world_size] if isinstance(world_size, int) else list(world_size)

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(world_size: int, **arguments: Any) -> None:
            run_task(body, world_size, arguments, timeout_s, device)

        signature = inspect.signature(body)
        named = {
            name: parameter
            for name, parameter in signature.parameters.items()
            if name != "rank" and parameter.kind is not parameter.VAR_KEYWORD
        }
        size = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
        named.setdefault("world_size", size)
        # pytest asks for the signature, and must not look through the wrapper.
        vars(test)["__signature__"] = signature.replace(parameters=list(named.values()))
        del vars(test)["__wrapped__"]
        vars(test)["distributed_body"] = body
        vars(test)["distributed_device"] = device
        return pytest.mark.parametrize("world_size", sizes)(test)

    return decorate
