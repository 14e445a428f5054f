"""The ``pgprog`` command, and ``python -m pgprog``: ``cli.main`` in a process that does nothing else."""

import atexit
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from pgprog.imports import own_process


def script(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and end the process, without the 0.4 s in which torch would be unloaded."""
    code = 1

    def leave() -> None:
        if any(name.startswith("pgprog_user_") for name in sys.modules):
            return  # a user's file may have something to close
        try:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
        except OSError:
            return  # Python says what is wrong with it
        os._exit(code)

    atexit.register(leave)  # before the rest is imported: the first to be registered is called last
    own_process()
    try:
        from pgprog.cli import main

        code = main(arguments)
    except SystemExit:  # of --help and --version
        code = 0
        raise
    except KeyboardInterrupt:  # while still importing
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    script()
