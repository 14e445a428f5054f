"""Train one algorithm: the same as ``pgprog train``."""

import sys

from pgprog.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
