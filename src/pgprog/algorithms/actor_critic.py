"""Actor-Critic: against REINFORCE, the baseline is learned.

Some targets are harder than others, so one mean for the whole batch is a poor guess of what a prompt is worth. A
critic learns V(prompt) by regression on the returns, beside the policy.

    grad J = E[ sum_t grad log pi(a_t | s_t) A ],        A = r - V(prompt)

Paper: Sutton, McAllester, Singh & Mansour 1999, "Policy gradient methods for reinforcement learning with function
approximation". Bias: none: V has not seen these completions, however wrong it is; a wrong V costs variance.
"""

from torch import Tensor

from pgprog.algorithms.advantages import value_baseline
from pgprog.algorithms.update import Advantage, Metrics, update
from pgprog.noise import ReplicaGenerator
from pgprog.optimizer import Optimizer
from pgprog.policy import Critic, Policy, Rollout


def advantage(batch: Rollout) -> Tensor:
    """A = r - V(prompt)."""
    assert batch.values is not None
    return value_baseline(batch.rewards, batch.values)


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
) -> Metrics:
    """One step of Actor-Critic for every replica; the optimiser holds the critic's parameters too; see ``update``."""
    return update(
        policy,
        optimizer,
        generator,
        advantage,
        critic=critic,
        prompts=prompts,
        entropy_coef=entropy_coef,
        max_grad_norm=max_grad_norm,
    )
