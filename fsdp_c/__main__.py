"""Command line: python -m fsdp_c COMMAND ..."""

import sys
from importlib import import_module

# Command: (module with main(words), arguments, purpose).
COMMANDS = {
    "doctor": (
        "fsdp_c.tools.doctor",
        "[--json]",
        "check the installation: what was built, which paths are active, what is "
        "broken (exit status 1)",
    ),
    "checkpoint": (
        "fsdp_c.checkpoint._command",
        "info|verify|export PATH ...",
        "inspect and convert checkpoints",
    ),
    "trace": (
        "fsdp_c.tools.trace._command",
        "summary|merge|show FOLDER ...",
        "summarize, merge or draw recorded timelines",
    ),
    "launch": (
        "fsdp_c.integrations._launch",
        "torchrun|accelerate|SCRIPT.py ...",
        "run a program with fsdp_c in place of torch's FSDP",
    ),
    "bench": (
        "fsdp_c.tools.bench._command",
        "[--device cuda|cpu] [--seconds S] ...",
        "measure fsdp_c, FSDP1, FSDP2 and DDP on this machine",
    ),
    "plan": (
        "fsdp_c.tools.plan._command",
        "--model MODEL --world-size N ...",
        "estimate memory, communication and step time of one rank, without a GPU",
    ),
}


def usage() -> str:
    """Return the text of ``--help``."""
    lines = ["usage: python -m fsdp_c COMMAND ...", ""]
    for command, (_, arguments, purpose) in COMMANDS.items():
        lines += [f"  {command} {arguments}", f"      {purpose}"]
    return "\n".join(lines) + "\n"


def main(words: list[str]) -> int:
    """Run the command ``words``; return the exit status."""
    if words and words[0] in COMMANDS:
        module, _, _ = COMMANDS[words[0]]
        status: int = import_module(module).main(words[1:])
        return status
    is_help = words in (["-h"], ["--help"], ["help"])
    print(usage(), end="", file=sys.stdout if is_help else sys.stderr)
    return 0 if is_help else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
