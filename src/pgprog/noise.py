"""Randomness of K replicas: each replica's stream is a pure function of (seed, stream, step).

Nothing of a generator's state needs saving to resume a run, and a replica draws the same numbers, bit for
bit, whatever stands beside it. Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")
is a counter-based generator: the seed and the stream are its key, the step is the high word of its counter.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

# Streams keep the draws of one purpose from those of another: evaluating a policy does not move its training.
STREAMS = {"init": 0, "train": 1, "evaluate": 2, "resample": 3, "critic": 4}


class ReplicaGenerator:
    """Uniform noise for K replicas, one seed each.

    Args:
        seeds: K integers in [0, 2**63), one per replica; repeats are allowed and draw the same numbers.
        stream: the purpose, a key of ``STREAMS``.
        step: where to start; see ``seek``.

    Raises:
        ValueError: no seeds, a seed out of range, or an unknown stream.
    """

    def __init__(self, seeds: Sequence[int], stream: str = "train", step: int = 0) -> None:
        if not seeds:
            raise ValueError("seeds is empty: give at least one, one per replica")
        if bad := [seed for seed in seeds if not isinstance(seed, int) or not 0 <= seed < 2**63]:
            raise ValueError(f"seed {bad[0]} is out of range: a seed is an integer in [0, 2**63)")
        if stream not in STREAMS:
            raise ValueError(f"unknown stream {stream!r}: choose one of {', '.join(STREAMS)}")
        self.seeds = tuple(seeds)
        self.stream = stream
        keys = [np.array([seed, STREAMS[stream]], dtype=np.uint64) for seed in self.seeds]
        self._bits = [np.random.Generator(np.random.Philox(key=key)) for key in keys]
        self._starts = [bits.bit_generator.state for bits in self._bits]
        self.seek(step)

    def seek(self, step: int) -> None:
        """Go to the start of a step, an integer of 0 or more; what was drawn before does not matter."""
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"step {step} is out of range: a step is an integer of 0 or more")
        for bits, start in zip(self._bits, self._starts, strict=True):
            start["state"]["counter"][3] = step
            bits.bit_generator.state = start  # a tenth of the time of a new generator

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float64) -> Float[Tensor, "K *shape"]:
        """Draw the next numbers in [0, 1), as (K, *shape); no gradient.

        They are drawn in float64 and rounded: the same draw in float32 differs by at most half a unit in its last
        place.
        """
        draws = np.stack([bits.random(shape) for bits in self._bits])
        # Rounding to float32 can give 1.0, which lies outside the range that a sampler may rely on.
        return torch.from_numpy(draws).to(dtype).clamp_(max=1 - torch.finfo(dtype).eps / 2)
