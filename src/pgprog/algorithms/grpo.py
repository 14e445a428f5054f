"""GRPO: against RLOO, the group's rewards are z-scored.

    grad J = E[ sum_t grad log pi(a_t | s_t) A ],        A_i = (r_i - mean(r)) / std(r) in the group

Dividing by the group's std gives hard and easy prompts more weight than those of middling success. With binary rewards
it is the gradient of another, monotone objective of each prompt's success probability. This file is GRPO's advantage
alone: one step per batch (so no ratio to clip), no KL term, and tokens summed, not averaged, over a sequence.

Paper: Shao et al. 2024, arXiv:2402.03300, section 4.1.2.
Bias: see ``group_z_score``.
"""

from torch import Tensor

from pgprog.algorithms.advantages import group_z_score
from pgprog.algorithms.update import Advantage, Metrics, update
from pgprog.noise import ReplicaGenerator
from pgprog.optimizer import Optimizer
from pgprog.policy import Policy, Rollout


def advantage(batch: Rollout) -> Tensor:
    """A_i = (r_i - mean(r)) / std(r), over the group."""
    return group_z_score(batch.rewards)


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
    """One step of GRPO for every replica: ``group_size`` completions of each prompt; see ``update``."""
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
