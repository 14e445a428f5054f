"""Policy gradients: the ladder, its building blocks, and the space that they span."""
