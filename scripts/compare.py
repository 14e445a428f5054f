"""Compare the algorithms of the ladder: the same as ``pgprog compare``."""

import sys

from pgprog.cli import main

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))
