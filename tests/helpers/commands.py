"""Commands of ``python -m fsdp_c``, run in this process."""

from fsdp_c.__main__ import main


def exit_status(*words: str) -> int:
    """Run the command ``words``; return what its process would end with."""
    try:
        return main(list(words))
    except SystemExit as error:  # argparse's
        return int(error.code or 0)
