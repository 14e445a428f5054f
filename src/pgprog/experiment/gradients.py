"""How noisy each algorithm's gradient is, at a policy that does not change."""

from dataclasses import asdict, dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from pgprog.algorithms.recipes import at_first_gradient
from pgprog.exact.blackbox import gradient_of_step
from pgprog.experiment.config import RunConfig
from pgprog.experiment.learner import make_learner
from pgprog.experiment.loop import step_options, train_step_of
from pgprog.noise import ReplicaGenerator


@dataclass(frozen=True)
class GradientNoise:
    """Moments of a gradient over independent resamples of the same number of rollouts."""

    resamples: int
    rollouts: int
    """Completions that each resample is made from."""
    prompts: int
    mean_norm: float
    var_norm: float
    mean_squared_norm: float
    trace_covariance: float
    no_gradient: float
    """Share of resamples whose gradient is exactly 0."""
    norms: list[float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def gradient_noise(config: RunConfig, resamples: int = 50, rollouts: int = 64, policy_seed: int = 0) -> GradientNoise:
    """Measure the gradient of an algorithm's first step at the untrained policy, without entropy term.

    Every estimator pays the same: ``rollouts`` prompts with one completion each, or rollouts / G groups of G. The
    resamples are replicas: copies of one policy, each with its own prompts and noise, in one backward pass.

        mean_squared_norm = mean |g|^2,    trace_covariance = sum_j Var(g_j)  (ddof 1)
    """
    g = gradients(config, resamples, rollouts, policy_seed)
    norms = g.norm(dim=-1)
    return GradientNoise(
        resamples=resamples,
        rollouts=prompts_for(config, rollouts) * config.completions,
        prompts=prompts_for(config, rollouts),
        mean_norm=norms.mean().item(),
        var_norm=norms.var().item(),
        mean_squared_norm=norms.square().mean().item(),
        trace_covariance=g.var(0).sum().item(),
        no_gradient=(g == 0).all(-1).double().mean().item(),
        norms=norms.tolist(),
    )


def prompts_for(config: RunConfig, rollouts: int) -> int:
    """How many prompts make ``rollouts`` completions, draws that a filter may add included; at least one."""
    return max(1, rollouts // (config.completions * config.choices.sampling.dynamic))


def gradients(config: RunConfig, resamples: int, rollouts: int, policy_seed: int) -> Float[Tensor, "resamples N"]:
    """The policy's gradient (of J, not of the loss) in each resample, in float64."""
    learner = make_learner(config, [policy_seed] * resamples)
    options = step_options(config, learner) | {"prompts": prompts_for(config, rollouts)}
    if config.recipe is not None:
        options["recipe"] = at_first_gradient(config.choices)
    elif config.algo == "ppo":
        options["epochs"] = 1  # where every ratio is 1
    generator = ReplicaGenerator(range(resamples), "resample")
    return gradient_of_step(train_step_of(config), learner.policy, generator, **options).double()


def ratio_of_single_successes(group_size: int) -> float:
    """GRPO's advantage over RLOO's in a group with one success: (G - 1) / sqrt(G), with ddof 1."""
    return (group_size - 1) / group_size**0.5
