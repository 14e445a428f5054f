"""RLOO: against REINFORCE, several completions of each prompt, and the baseline is the mean of the others.

A group of completions of one prompt estimates what the prompt is worth, as a critic does, with nothing to learn.
Leaving the sample out of its own baseline makes the gradient exactly unbiased.

    grad J = E[ sum_t grad log pi(a_t | s_t) A ],        A_i = r_i - mean(r_j, j != i) in the group

Paper: Kool, van Hoof & Welling 2019; Ahmadian et al. 2024, arXiv:2402.14740, eq. 8.
Bias: none.
"""

from torch import Tensor

from pgprog.algorithms.advantages import leave_one_out
from pgprog.algorithms.update import Advantage, Metrics, update
from pgprog.noise import ReplicaGenerator
from pgprog.optimizer import Optimizer
from pgprog.policy import Policy, Rollout


def advantage(batch: Rollout) -> Tensor:
    """A_i = r_i - mean(r_j, j != i), over the group."""
    return leave_one_out(batch.rewards)


def train_step(
    policy: Policy,
    optimizer: Optimizer,
    generator: ReplicaGenerator,
    *,
    advantage: Advantage = advantage,
    prompts: int = 64,
    group_size: int = 8,
    entropy_coef: float = 0.02,
    max_grad_norm: float = 1.0,
) -> Metrics:
    """One step of RLOO for every replica: ``group_size`` completions of each prompt; see ``update``."""
    return update(
        policy,
        optimizer,
        generator,
        advantage,
        prompts=prompts,
        group_size=group_size,
        entropy_coef=entropy_coef,
        max_grad_norm=max_grad_norm,
    )
