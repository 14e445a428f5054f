"""The batches that every library is called on: numpy alone, seeded, the same numbers on every machine.

Shapes: P prompts, G completions of each, up to T tokens. Numbers are uniform draws rounded to four decimals, so that
no libm enters. Masked places hold ordinary numbers: a library that reads them shows it.

| case      | P G T | what it is for                                                                              |
|-----------|-------|---------------------------------------------------------------------------------------------|
| mild      | 3 4 6 | log-ratios within 0.4; a group whose rewards are all 0.95                                    |
| far       | 2 8 5 | log-ratios up to 3 either way                                                                |
| empty     | 3 4 6 | one row with no token in the mask, and a group whose rewards are all 0                       |
| on_policy | 2 3 4 | old_logprobs equal logprobs; a group of three 0.95s, whose mean is off by a rounding         |
| single    | 3 1 4 | groups of one (advantages alone)                                                             |
| extreme   | 1 2 4 | log-ratios of 25 and log(policy/reference) of 12 either way (the libraries' clamps alone)    |
"""

import dataclasses
import hashlib
import json

import numpy as np

LOSS_CASES = ("mild", "far", "empty", "on_policy")


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch; every array is float64 except ``mask`` (bool)."""

    mask: np.ndarray  # (P, G, T): row i holds its first lengths[i] tokens
    rewards: np.ndarray  # (P, G)
    greedy_rewards: np.ndarray  # (P,): ReMax's baseline
    logprobs: np.ndarray  # (P, G, T), as all below
    old_logprobs: np.ndarray
    ref_logprobs: np.ndarray
    sampler_logprobs: np.ndarray
    values: np.ndarray
    new_values: np.ndarray
    returns: np.ndarray
    entropies: np.ndarray
    token_advantages: np.ndarray
    advantages: np.ndarray  # (P, G): what the losses are called with; unrelated to rewards

    @property
    def token_rewards(self) -> np.ndarray:
        """(P, G, T): each reward at its row's last token; at place T - 1 where the whole row is masked."""
        tokens = np.zeros(self.mask.shape)
        last = self.mask.sum(-1) - 1  # -1 for an empty row, which is place T - 1
        np.put_along_axis(tokens, last[..., None] % self.mask.shape[-1], self.rewards[..., None], -1)
        return tokens


def _draw(seed, lengths, rewards, *, ratio, kl, sampler, old=(-4.0, -0.5)) -> Case:
    rng = np.random.Generator(np.random.PCG64(seed))
    lengths, rewards = np.array(lengths), np.array(rewards, dtype=np.float64)
    shape = (*lengths.shape, int(lengths.max()))

    def uniform(low, high, size=shape):
        return np.round(low + (high - low) * rng.random(size), 4)

    old_logprobs = uniform(*old)
    logprobs = np.minimum(np.round(old_logprobs + ratio * uniform(-1, 1), 4), -0.01)
    advantages = uniform(-2, 2, shape[:2])
    advantages.flat[1] = 0.0
    return Case(
        mask=np.arange(shape[2]) < lengths[..., None],
        rewards=rewards,
        greedy_rewards=uniform(0, 1, shape[:1]),
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        ref_logprobs=np.minimum(np.round(logprobs + kl * uniform(-1, 1), 4), -0.01),
        sampler_logprobs=np.minimum(np.round(old_logprobs + sampler * uniform(-1, 1), 4), -0.01),
        values=uniform(-1, 1),
        new_values=uniform(-1.5, 1.5),
        returns=uniform(-1, 1.5),
        entropies=uniform(0.05, 2),
        token_advantages=uniform(-2, 2),
        advantages=advantages,
    )


def cases() -> dict[str, Case]:
    """Every case by name; each call makes new arrays."""
    mild = {"ratio": 0.4, "kl": 1.0, "sampler": 0.5}
    far = {"ratio": 3.0, "kl": 3.0, "sampler": 1.5, "old": (-6.5, -3.1)}
    made = {
        "mild": _draw(
            1,
            [[6, 3, 1, 4], [2, 5, 6, 2], [4, 1, 3, 6]],
            [[1, 0, 0.95, 0], [0.95, 0.95, 0.95, 0.95], [0, 0.3, 1, 0.95]],
            **mild,
        ),
        "far": _draw(
            2,
            [[5, 2, 1, 4, 3, 5, 2, 1], [1, 3, 5, 2, 4, 4, 1, 5]],
            [[1, 0, 0, 0.95, 0, 1, 0.5, 0], [0.95, 0.95, 0, 1, 0.2, 0, 0, 0.95]],
            **far,
        ),
        "empty": _draw(
            3,
            [[4, 6, 2, 3], [5, 0, 1, 6], [3, 2, 6, 4]],
            [[0.95, 1, 0, 0], [0, 1, 0.95, 0.4], [0, 0, 0, 0]],
            **mild | {"ratio": 1.0},
        ),
        "on_policy": _draw(4, [[4, 1, 3], [2, 4, 4]], [[0.95, 0.95, 0.95], [1, 0, 0.95]], **mild | {"ratio": 0.0}),
        "single": _draw(5, [[4], [2], [3]], [[1], [0.95], [0]], **mild),
        "extreme": _draw(6, [[4, 3]], [[1, 0]], **mild),
    }
    plus, minus = np.array([0, 0, 0]), np.array([0, 1, 0])  # two live places of "extreme": (prompt, row, token)
    extreme = made["extreme"]
    for place, sign in ((plus, 1), (minus, -1)):
        place = tuple(place)
        extreme.logprobs[place] = -30.0
        extreme.old_logprobs[place] = -30.0 - 25 * sign
        extreme.ref_logprobs[place] = -30.0 - 12 * sign
    return made


def digest() -> str:
    """A hash of every number of every case: golden files carry it, so a changed case is seen as such."""
    table = {
        name: {field.name: getattr(case, field.name).tolist() for field in dataclasses.fields(case)}
        for name, case in cases().items()
    }
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
