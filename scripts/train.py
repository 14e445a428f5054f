"""Train one algorithm: the same as ``pgprog train``."""

import sys

from pgprog.__main__ import script

if __name__ == "__main__":
    script(["train", *sys.argv[1:]])
