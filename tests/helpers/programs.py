"""Runs a module of the helpers as a program, forked from a process that has torch."""

import os
import runpy
import subprocess
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from helpers.distributed import fork_server

TIMEOUT_S = 600


def _redirected(target: Any, env: dict[str, str], output: str, *args: Any) -> None:
    """Run ``target`` with more of an environment; its prints go to files."""
    os.environ.update(env)
    for stream, name in ((sys.stdout, output), (sys.stderr, output + ".err")):
        with open(name, "ab") as file:
            os.dup2(file.fileno(), stream.fileno())
    target(*args)


def _run_module(module: str, words: tuple[str, ...]) -> None:
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__")


def start(target: Any, output: Path, *args: Any, **env: str) -> BaseProcess:
    """Run ``target(*args)`` in a process; see Note [Workers are forked].

    What it prints goes to ``output``, errors to a file beside it.
    """
    args = (target, env, str(output), *args)
    process: BaseProcess = fork_server().Process(target=_redirected, args=args)
    process.start()
    return process


def run_fresh(module: str, *words: str, **env: str) -> str:
    """Do as `run_program`, with an interpreter of its own, which ends as a script's."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-6000:]}"
    return done.stdout


def run_program(module: str, *words: str, **env: str) -> str:
    """Run ``python -m module words...``; return what it printed."""
    with TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        process = start(_run_module, output, module, words, **env)
        process.join(TIMEOUT_S)
        status = process.exitcode
        process.kill()
        process.join()
        errors = Path(f"{output}.err").read_text(errors="replace")
        assert status == 0, f"status {status}: {errors[-6000:]}"
        return output.read_text()
