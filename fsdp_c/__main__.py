"""Command line: python -m fsdp_c doctor."""

import sys

from fsdp_c import doctor

USAGE = """\
usage: python -m fsdp_c doctor

  doctor  print what was built and which paths are active
"""


def main(words: list[str]) -> int:
    """Run the command ``words``; return the exit status."""
    if words == ["doctor"]:
        print(doctor.report())
        return 0
    is_help = words in (["-h"], ["--help"], ["help"])
    print(USAGE, end="", file=sys.stdout if is_help else sys.stderr)
    return 0 if is_help else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
