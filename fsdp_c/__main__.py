"""Command line: python -m fsdp_c doctor|checkpoint."""

import sys

from fsdp_c import doctor
from fsdp_c.checkpoint import _command as checkpoint

USAGE = """\
usage: python -m fsdp_c doctor [--json]
       python -m fsdp_c checkpoint info|verify|export|reshard PATH ...

  doctor      print what was built, which paths are active and what is wrong;
              the exit status is 1 if something is broken
  checkpoint  look at checkpoints, and convert them; see checkpoint --help
"""


def main(words: list[str]) -> int:
    """Run the command ``words``; return the exit status."""
    if words[:1] == ["doctor"]:
        return doctor.main(words[1:])
    if words[:1] == ["checkpoint"]:
        return checkpoint.main(words[1:])
    is_help = words in (["-h"], ["--help"], ["help"])
    print(USAGE, end="", file=sys.stdout if is_help else sys.stderr)
    return 0 if is_help else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
