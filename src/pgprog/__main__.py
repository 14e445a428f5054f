"""``python -m pgprog``: the same as ``pgprog``."""

from pgprog.cli import script

if __name__ == "__main__":
    script()
