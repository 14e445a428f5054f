"""Runs: the loop, the run directory, the comparison."""
