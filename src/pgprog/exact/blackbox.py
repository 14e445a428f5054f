"""Mean and covariance of any estimator, by calling it on every batch that can happen.

    E[g] = sum over batches of P(batch) g(batch),        Cov(g) = E[g g^T] - E[g] E[g]^T

A batch is S slots (the arms of a bandit; the completions of one prompt, or of several), and slot s shows outcome y with
probability pi_s(y), on its own. Any rewards, any statistic, a black box included; Y^S batches, so for tiny problems.
Letters: S slots, Y outcomes, B batches, D parameters.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.optim import SGD

from pgprog.algorithms.update import Metrics
from pgprog.errors import UsageError
from pgprog.foreign import call_checked
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Critic, Policy

MOST_BATCHES = 2_000_000
BATCHES_AT_ONCE = 512

Estimator = Callable[[Int[Tensor, "B S"]], Float[Tensor, "B D"]]
"""From the outcomes in each slot, of many batches, to the gradient of each."""
AnyModule = TypeVar("AnyModule", bound=nn.Module)


class Moments(NamedTuple):
    """Exact, without graph."""

    mean: Float[Tensor, "D"]
    covariance: Float[Tensor, "D D"]

    @property
    def trace(self) -> Float[Tensor, ""]:
        """tr Cov(g)."""
        return self.covariance.trace()

    @property
    def second(self) -> Float[Tensor, ""]:
        """E|g|^2."""
        return self.trace + self.mean.square().sum()


def black_box_moments(estimator: Estimator, pi: Float[Tensor, "S Y"], name: str = "the estimator") -> Moments:
    """Enumerate all Y^S batches and average what the estimator returns.

    Args:
        estimator: gets outcomes (B, S) of B batches, returns their gradients (B, D), finite and detached; must not
            draw random numbers. See ``one_at_a_time`` for a function of a single batch, ``first_gradient`` for a rung.
        pi: the probability of each outcome in each slot, rows that sum to 1.
        name: of the estimator, for messages.

    Raises: UsageError where there are too many batches, or where the estimator raises or returns something else.
    """
    S, Y = pi.shape
    if (batches := Y**S) > MOST_BATCHES:
        raise UsageError(
            f"{Y} outcomes in {S} slots make {batches:,} batches, over the limit of {MOST_BATCHES:,}: "
            "give a smaller group, fewer actions or shorter sequences"
        )
    first: Tensor | None = None
    mean, second = pi.new_zeros(()), pi.new_zeros(())
    for start in range(0, batches, BATCHES_AT_ONCE):
        number = torch.arange(start, min(start + BATCHES_AT_ONCE, batches))
        outcomes = number.unsqueeze(1) // Y ** torch.arange(S - 1, -1, -1) % Y
        g = _call(estimator, outcomes, name).to(pi.dtype)
        chance = pi[torch.arange(S), outcomes].prod(1)
        first = g[0] if first is None else first
        if g.shape[1:] != first.shape:
            raise UsageError(f"{name} returned gradients of {g.shape[1]} and of {len(first)} numbers: one size wanted")
        g = g - first  # a shift that keeps what is constant from cancelling
        mean, second = mean + chance @ g, second + g.mT @ (chance.unsqueeze(1) * g)
    assert first is not None
    return Moments(mean + first, second - torch.outer(mean, mean))


def _call(estimator: Estimator, outcomes: Int[Tensor, "B S"], name: str) -> Tensor:
    B = len(outcomes)
    return call_checked(
        name,
        lambda: estimator(outcomes),
        f"outcomes of shape {tuple(outcomes.shape)}",
        f"a detached, finite tensor with a gradient for each batch, shape ({B}, D)",
        lambda found: len(found) == 2 and found[0] == B,
    )


def one_at_a_time(function: Callable[[Int[Tensor, "S"]], Float[Tensor, "D"]]) -> Estimator:
    """An estimator from a function of a single batch: outcomes (S,) to a gradient (D,)."""
    return lambda outcomes: torch.stack([function(row) for row in outcomes])


def weighted_scores(
    advantage: Callable[[Tensor], Tensor], rewards: Float[Tensor, "Y"], s: Float[Tensor, "Y D"]
) -> Estimator:
    """g = (1 / G) sum_i A_i s_i of one group, from an advantage of rewards (B, 1, G), any rewards."""

    def estimator(outcomes: Tensor) -> Tensor:
        A = advantage(rewards[outcomes].unsqueeze(1)).squeeze(1)
        return torch.einsum("bg,bgd->bd", A, s[outcomes]) / outcomes.shape[1]

    return estimator


def first_gradient(
    train_step: Callable[..., Metrics],
    policy: Policy,
    targets: Int[Tensor, "P"],
    group_size: int,
    tokens: Int[Tensor, "Y T"],
    *,
    replica: int = 0,
    critic: Critic | None = None,
    **options: Any,
) -> Estimator:
    """A rung's own train step as a black box: the gradient of J of its first epoch, no entropy term, nothing clipped.

    Args:
        train_step: of ``pgprog.algorithms``, or anything with its arguments.
        targets: the prompts of a batch; its slots are their completions, (P, G) in order.
        tokens: every completion, in the order of the outcomes: ``completions(policy, ...).tokens``.
        replica: whose parameters; each batch gets a copy of them, all in one pass.
        options: more arguments of the train step.
    """

    def estimator(outcomes: Tensor) -> Tensor:
        B = len(outcomes)
        clone = replicated(policy, replica, B)
        script = tokens[outcomes].view(B, len(targets), group_size, -1)
        clone.__dict__["sample"] = lambda *arguments: script
        clone.__dict__["task"] = _Prompted(policy.task, targets)
        more = dict(options)
        if group_size > 1:
            more["group_size"] = group_size
        held = list(clone.parameters())
        if critic is not None:
            more["critic"] = replicated(critic, replica, B)
            held += list(more["critic"].parameters())
        train_step(
            clone,
            SGD(held, lr=0.0),
            ReplicaGenerator([0] * B),
            prompts=len(targets),
            entropy_coef=0.0,
            max_grad_norm=float("inf"),
            **more,
        )
        return -torch.cat([p.grad.flatten(1) for p in clone.parameters() if p.grad is not None], dim=1)

    return estimator


def replicated(module: AnyModule, replica: int, copies: int) -> AnyModule:
    """A module of ``copies`` replicas, all with the parameters of one."""
    clone = copy.deepcopy(module)
    for name, parameter in module.named_parameters():
        one = parameter.detach()[replica : replica + 1]
        clone.register_parameter(name, nn.Parameter(one.expand(copies, *one.shape[1:]).clone()))
    return clone


class _Prompted:
    """A task whose prompts are given."""

    def __init__(self, task: Any, targets: Int[Tensor, "P"]) -> None:
        self._task, self._targets = task, targets

    def sample_targets(self, generator: ReplicaGenerator, prompts: int) -> Int[Tensor, "K P"]:
        return self._targets.expand(len(generator.seeds), -1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)
