"""PPO: against Actor-Critic, the batch is used for several clipped epochs, and its advantages are standardised.

    ratio = pi(a_t | s_t) / pi_old(a_t | s_t)
    J ~ E[ sum_t min(ratio A, clip(ratio, 1 - clip, 1 + clip) A) ]
    A = (a - mean(a)) / std(a) over the batch,        a = r - V(prompt)

At the first epoch every ratio is 1 and the gradient is that of Actor-Critic with this A; the clip only acts later.

Paper: Schulman, Wolski, Dhariwal, Radford & Klimov 2017, arXiv:1707.06347, eq. 7.
Bias: the standardisation holds the sample; later epochs follow a surrogate of J, not its gradient.
"""

from functools import partial
from typing import Literal

from torch import Tensor

from pgprog.algorithms.advantages import standardize, value_baseline
from pgprog.algorithms.objectives import Surrogate, clipped_surrogate
from pgprog.algorithms.update import Advantage, Metrics, Weights, update
from pgprog.noise import ReplicaGenerator
from pgprog.optimizer import Optimizer
from pgprog.policy import Critic, Policy, Rollout


def raw_advantage(batch: Rollout) -> Tensor:
    """a = r - V(prompt), as in Actor-Critic."""
    assert batch.values is not None
    return value_baseline(batch.rewards, batch.values)


def advantage(batch: Rollout) -> Tensor:
    """A = (a - mean(a)) / std(a) over the batch, a = r - V(prompt).

    Lesson (``--raw-advantages`` takes the cure away): while every completion fails, a = -V(prompt), whose sign is an
    accident of the critic's start. Without the z-score all that was sampled is pushed down, or up, together, for
    several epochs in a row.
    """
    return standardize(raw_advantage(batch))


def clipped(
    logprobs: Tensor,
    batch: Rollout,
    A: Tensor,
    weights: Weights,
    *,
    clip: float,
    ratio_level: Literal["token", "sequence"],
) -> Surrogate:
    """sum_t min(ratio A, clip(ratio, 1 - clip, 1 + clip) A)."""
    assert batch.old_logprobs is not None
    return clipped_surrogate(
        logprobs, batch.old_logprobs, A, batch.mask, clip=clip, ratio_level=ratio_level, weights=weights
    )


def train_step(
    policy: Policy,
    optimizer: Optimizer,
    generator: ReplicaGenerator,
    *,
    critic: Critic,
    advantage: Advantage = advantage,
    prompts: int = 64,
    entropy_coef: float = 0.02,
    max_grad_norm: float = 1.0,
    epochs: int = 4,
    clip: float = 0.2,
    ratio_level: Literal["token", "sequence"] = "token",
) -> Metrics:
    """One batch of PPO for every replica: ``epochs`` gradient steps on it; see ``update``.

    Lesson: k epochs move k steps, so the learning rate of the optimiser should be lower than that of a rung with one
    step per batch; runs divide it by ``epochs`` (``--undivided-lr`` takes the cure away). The other half of it is the
    ratio per token: see ``clipped_surrogate``.
    """
    return update(
        policy,
        optimizer,
        generator,
        advantage,
        critic=critic,
        prompts=prompts,
        entropy_coef=entropy_coef,
        max_grad_norm=max_grad_norm,
        objective=partial(clipped, clip=clip, ratio_level=ratio_level),
        epochs=epochs,
    )
