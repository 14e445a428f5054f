"""Failure modes of policy gradients, each made to happen: the fault, what shows it, the proof, the cure."""
