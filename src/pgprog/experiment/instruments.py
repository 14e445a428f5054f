"""The costly instruments of a run, every so many steps, read off the batch where its advantage is computed.

They draw nothing and change nothing: a run reaches the same parameters, bit for bit, however often they are read.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from pgprog.algorithms.diagnostics import gradient_metrics, gradient_noise
from pgprog.algorithms.from_recipe import advantage_of, aggregation_of, objective_of
from pgprog.algorithms.ladder import ADVANTAGES
from pgprog.algorithms.update import Advantage, Metrics
from pgprog.exact.enumeration import success_probabilities
from pgprog.exact.values import expected_return
from pgprog.experiment.config import RunConfig
from pgprog.experiment.learner import Learner
from pgprog.policy import Policy, Rollout


def usual_advantage(config: RunConfig, learner: Learner) -> Advantage:
    """The rung's own A, or the recipe's: what a step takes where it is given no other."""
    return ADVANTAGES[config.algo] if config.recipe is None else advantage_of(config.choices, learner.policy)


def observed(
    config: RunConfig, learner: Learner, advantage: Advantage, into: Metrics, *, exact_critic: bool = False
) -> Advantage:
    """The same advantage, which notes on its way what the batch says of the gradient (and of the critic).

    - ``grad_signal``, ``grad_noise``, ``grad_snr``: of the first gradient step on the batch, see ``gradient_noise``;
      not with one prompt
    - ``value_error``: mean over the batch's prompts of |V - V_exact|, where there is a critic and ``exact_critic``

    Raises, when called: UsageError where the exact values need too large a tree.
    """
    objective, aggregation = objective_of(config.choices), aggregation_of(config.choices.aggregation)

    def measured(batch: Rollout) -> Tensor:
        A = advantage(batch)
        seen = batch if batch.old_logprobs is not None else batch._replace(old_logprobs=batch.logprobs.detach())
        if config.prompts > 1:
            found = gradient_noise(learner.policy, seen, A.detach(), objective, aggregation(seen.mask))
            into.update(gradient_metrics(found))
        if exact_critic and (values := prompt_values(batch)) is not None:
            into["value_error"] = (values - exact_values(learner.policy, batch.targets)).abs().mean(-1)
        return A

    return measured


def prompt_values(batch: Rollout) -> Float[Tensor, "K P"] | None:
    """The critic's V(prompt), of either kind; None without one."""
    return batch.values if batch.prefix_values is None else batch.prefix_values[..., 0, 0]


@torch.no_grad()
def exact_values(policy: Policy, targets: Tensor) -> Float[Tensor, "K P"]:
    """V(prompt) = E[r | prompt] under the task's own rewards, by enumeration, for the prompts of each replica."""
    chosen, place = targets.unique(return_inverse=True)
    value = success_probabilities if policy.task.reward_form == "outcome" else expected_return
    return torch.cat([value(policy, some) for some in chosen.split(8)], dim=-1).gather(1, place)
