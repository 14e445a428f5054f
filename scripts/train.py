"""Train one algorithm: the same as ``pgprog train``."""

import sys

from pgprog.cli import script

if __name__ == "__main__":
    script(["train", *sys.argv[1:]])
