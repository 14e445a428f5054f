"""REINFORCE with a baseline: the first rung.

The plain policy gradient weights every token by the return r. A baseline that is the same for all changes nothing in
expectation but a scale, and takes away variance; here it is the mean reward of the batch.

    grad J = E[ sum_t grad log pi(a_t | s_t) A ],        A = r - mean(r) over the batch

Paper: Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning".
Bias: the mean holds the sample itself, so the gradient is (1 - 1/N) grad J for a batch of N.
"""

from torch import Tensor

from pgprog.algorithms.advantages import batch_mean
from pgprog.algorithms.update import Advantage, Metrics, update
from pgprog.noise import ReplicaGenerator
from pgprog.optimizer import Optimizer
from pgprog.policy import Policy, Rollout


def advantage(batch: Rollout) -> Tensor:
    """A = r - mean(r), over the batch."""
    return batch_mean(batch.rewards)


def train_step(
    policy: Policy,
    optimizer: Optimizer,
    generator: ReplicaGenerator,
    *,
    advantage: Advantage = advantage,
    prompts: int = 64,
    entropy_coef: float = 0.02,
    max_grad_norm: float = 1.0,
) -> Metrics:
    """One step of REINFORCE for every replica: one completion of each prompt; see ``update`` for the arguments."""
    return update(
        policy,
        optimizer,
        generator,
        advantage,
        prompts=prompts,
        entropy_coef=entropy_coef,
        max_grad_norm=max_grad_norm,
    )
