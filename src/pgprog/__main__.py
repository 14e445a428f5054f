"""The ``pgprog`` command, and ``python -m pgprog``: ``cli.main`` in a process that does nothing else."""

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def script(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and end the process, without the 0.4 s in which torch would be unloaded."""
    code = 1

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(leave)  # before anything is imported: the first to be registered is called last
    gc.freeze()
    from pgprog.cli import main

    try:
        code = main(arguments)
    except SystemExit:  # of --help and --version
        code = 0
        raise
    sys.exit(code)


if __name__ == "__main__":
    script()
