"""Compare the algorithms of the ladder: the same as ``pgprog compare``."""

import sys

from pgprog.__main__ import script

if __name__ == "__main__":
    script(["compare", *sys.argv[1:]])
