"""python -m fsdp_c launch: runs a program with fsdp_c in the place of torch's FSDP.

The program and all Python processes that it starts find a sitecustomize first on
their path, which installs fsdp_c; see ``_startup``.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

STARTUP = Path(__file__).resolve().parent / "_startup"

# Programs that are modules: (the module, the package that has it).
MODULES = {
    "torchrun": ("torch.distributed.run", "torch"),
    "accelerate": ("accelerate.commands.accelerate_cli", "accelerate"),
}
# Options of python with which it reads no PYTHONPATH, or no sitecustomize.
BLIND_OPTIONS = ("-I", "-E", "-S")


class LaunchError(Exception):
    """What is to be run cannot be run."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_c launch",
        description=(
            "Run a program with fsdp_c's FullyShardedDataParallel and fully_shard in "
            "the place of torch's, in all Python processes that it starts. The program "
            "is not changed."
        ),
    )
    parser.add_argument(
        "program",
        help="torchrun, accelerate, python, a script (x.py), or another program",
    )
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="arguments of the program"
    )
    return parser


def command(program: str, arguments: Sequence[str]) -> list[str]:
    """Return the command line to execute, of this Python where it is Python's.

    Raises:
        LaunchError: There is no such program, or it would not see fsdp_c.
    """
    if program in MODULES:
        module, package = MODULES[program]
        if find_spec(package) is None:
            raise LaunchError(f"{package} is not installed for {sys.executable}")
        return [sys.executable, "-m", module, *arguments]
    is_script = program.endswith(".py")
    if is_script and not Path(program).is_file():
        raise LaunchError(f"there is no file {program!r}")
    if is_script:
        return [sys.executable, program, *arguments]
    if program in {"python", "python3"}:
        blind = [word for word in arguments[:1] if word in BLIND_OPTIONS]
        if blind:
            raise LaunchError(
                f"python {blind[0]} does not look for what installs fsdp_c: leave "
                f"{blind[0]} out, or call "
                "fsdp_c.install() in the script"
            )
        return [sys.executable, *arguments]
    path = shutil.which(program)
    if path is None:
        raise LaunchError(
            f"there is no program {program!r}: pass torchrun, accelerate, python, a "
            "script that ends in .py, or a program on PATH"
        )
    return [path, *arguments]


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` with what makes Python processes install fsdp_c."""
    paths = [str(STARTUP), *filter(None, [env.get("PYTHONPATH")])]
    return {**env, "FSDP_C_INSTALL": "1", "PYTHONPATH": os.pathsep.join(paths)}


def main(words: list[str]) -> int:
    """Become the program; return only if it cannot be run."""
    options = _parser().parse_args(words)
    try:
        line = command(options.program, options.arguments)
    except LaunchError as error:
        print(f"python -m fsdp_c launch: {error}", file=sys.stderr)
    else:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(line[0], line, environment(os.environ))
    return 2
