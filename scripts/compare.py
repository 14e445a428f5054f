"""Compare the algorithms of the ladder: the same as ``pgprog compare``."""

import sys

from pgprog.cli import script

if __name__ == "__main__":
    script(["compare", *sys.argv[1:]])
