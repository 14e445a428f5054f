"""Mean and covariance of any estimator, by calling it on every batch that can happen.

    E[g] = sum over batches of P(batch) g(batch),        Cov(g) = E[g g^T] - E[g] E[g]^T

A batch is S slots (the arms of a bandit; the completions of one prompt, or of several), and slot s shows outcome y with
probability pi_s(y), on its own. Any rewards, any statistic, a black box included; Y^S batches, so for tiny problems.
Letters: S slots, Y outcomes, B batches, D parameters; M runs, the outcomes of n slots that are alike, in any order.
"""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pgprog.algorithms.sampling import Past
from pgprog.algorithms.update import Metrics
from pgprog.errors import UsageError
from pgprog.foreign import call_checked
from pgprog.noise import ReplicaGenerator
from pgprog.optimizer import Still
from pgprog.policy import Critic, Policy, PrefixCritic

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


def black_box_moments(
    estimator: Estimator,
    pi: Float[Tensor, "S Y"],
    name: str = "the estimator",
    *,
    alike: int = 1,
    accepted: Callable[[Int[Tensor, "B S"]], Bool[Tensor, "B"]] | None = None,
) -> Moments:
    """Average what the estimator returns over all Y^S batches; one that cannot happen is not tried.

    Args:
        estimator: gets outcomes (B, S) of B batches, returns their gradients (B, D), finite and detached; must not
            draw random numbers. See ``one_at_a_time`` for a function of a single batch, ``first_gradient`` for a rung.
        pi: the probability of each outcome in each slot, rows that sum to 1.
        name: of the estimator, for messages.
        alike: n; each run of n slots has one row of pi, and the estimator does not mind their order. Then one order is
            tried for all: ((Y + n - 1) over n) ^ (S / n) batches, each with n! / (k_1! ... k_Y!) of every run.
        accepted: the batches that count, from their outcomes; the moments are conditional on it, P(batch | accepted).

    Raises: UsageError where there are too many batches, none is accepted, or the estimator raises or returns something
        else; ValueError where slots said to be alike are not.
    """
    S, Y = pi.shape
    if S % alike or not (pi.unflatten(0, (-1, alike)) == pi[::alike].unsqueeze(1)).all():
        raise ValueError(f"alike {alike}: each run of so many of the {S} slots must have the same probabilities")
    M = math.comb(Y + alike - 1, alike)
    if (batches := M ** (S // alike)) > MOST_BATCHES:
        raise UsageError(
            f"{Y} outcomes in {S} slots make {batches:,} batches, over the limit of {MOST_BATCHES:,}: "
            "give a smaller group, fewer actions or shorter sequences"
        )
    outcomes_of, ways = runs(Y, alike)
    first: Tensor | None = None
    mean, second, total = (pi.new_zeros(()) for _ in range(3))
    for start in range(0, batches, BATCHES_AT_ONCE):
        number = torch.arange(start, min(start + BATCHES_AT_ONCE, batches))
        run = number.unsqueeze(1) // M ** torch.arange(S // alike - 1, -1, -1) % M
        outcomes = outcomes_of[run].flatten(1)
        chance = pi[torch.arange(S), outcomes].prod(1) * ways.to(pi.dtype)[run].prod(1)
        tried = chance > 0 if accepted is None else (chance > 0) & accepted(outcomes)
        if not tried.any():
            continue
        outcomes, chance = outcomes[tried], chance[tried]
        g = _call(estimator, outcomes, name).to(pi.dtype)
        first = g[0] if first is None else first
        if g.shape[1:] != first.shape:
            raise UsageError(f"{name} returned gradients of {g.shape[1]} and of {len(first)} numbers: one size wanted")
        g = g - first  # a shift that keeps what is constant from cancelling
        mean, second, total = mean + chance @ g, second + g.mT @ (chance.unsqueeze(1) * g), total + chance.sum()
    if first is None:
        raise UsageError(f"{name} accepts no batch: give a policy that sometimes fails and sometimes succeeds")
    if accepted is not None:
        mean, second = mean / total, second / total
    return Moments(mean + first, second - torch.outer(mean, mean))


def runs(Y: int, n: int) -> tuple[Int[Tensor, "M n"], Float[Tensor, "M"]]:
    """The outcomes of n slots, ascending, and in how many orders each comes."""
    each = list(itertools.combinations_with_replacement(range(Y), n))
    ways = [math.factorial(n) // math.prod(math.factorial(run.count(y)) for y in set(run)) for run in each]
    return torch.tensor(each), torch.tensor(ways, dtype=torch.float64)


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
    critic: Critic | PrefixCritic | None = None,
    reference: Policy | None = None,
    old: Policy | None = None,
    **options: Any,
) -> Estimator:
    """A rung's own train step as a black box: the gradient of J of its first epoch, no entropy term, nothing clipped.

    Args:
        train_step: of ``pgprog.algorithms``, or anything with its arguments.
        targets: the prompts of a batch; its slots are their completions, (P, G) in order.
        tokens: every completion, in the order of the outcomes: ``completions(policy, ...).tokens``.
        replica: whose parameters; each batch gets a copy of them, all in one pass.
        critic, reference: copied likewise, for a train step that takes them.
        old: the policy of one update ago, that sampled: handed on as ``past``, and with it its log-probabilities.
            Whoever averages over batches then takes its probabilities.
        options: more arguments of the train step.
    """

    def estimator(outcomes: Tensor) -> Tensor:
        B = len(outcomes)
        script = tokens[outcomes].view(B, len(targets), group_size, -1)

        def scripted(one: Policy) -> Policy:
            clone = replicated(one, replica, B)
            clone.__dict__["sample"] = lambda *arguments: script
            clone.__dict__["task"] = _Prompted(one.task, targets.expand(B, -1))
            return clone

        clone, more = scripted(policy), dict(options)
        if group_size > 1:
            more["group_size"] = group_size
        if critic is not None:
            more["critic"] = replicated(critic, replica, B)
        if reference is not None:
            more["reference"] = replicated(reference, replica, B)
        if old is not None:
            more["past"] = Past(scripted(old), age=1)
        generator = ReplicaGenerator([0])  # of which nothing is drawn
        return gradient_of_step(train_step, clone, generator, prompts=len(targets), **more)

    return estimator


def gradient_of_step(
    train_step: Callable[..., Metrics], policy: Policy, generator: ReplicaGenerator, **options: Any
) -> Float[Tensor, "K D"]:
    """Each replica's gradient of J (not of the loss) in a train step that moves nothing: no entropy term, no bound."""
    critic = options.get("critic")
    held = [*policy.parameters(), *(() if critic is None else critic.parameters())]
    plain = {"entropy_coef": 0.0, "max_grad_norm": float("inf")}
    train_step(policy, Still(held), generator, **(options | plain))
    return -torch.cat([p.grad.flatten(1) for p in policy.parameters() if p.grad is not None], dim=1)


def replicated(module: AnyModule, replica: int, copies: int) -> AnyModule:
    """A module of ``copies`` replicas, all with the parameters of one."""
    clone = copy.deepcopy(module)
    for name, parameter in module.named_parameters():
        one = parameter.detach()[replica : replica + 1]
        clone.register_parameter(name, nn.Parameter(one.expand(copies, *one.shape[1:]).clone()))
    return clone


class _Prompted:
    """A task whose prompts are given."""

    def __init__(self, task: Any, targets: Int[Tensor, "K P"]) -> None:
        self._task, self._targets = task, targets

    def sample_targets(self, generator: ReplicaGenerator, prompts: int) -> Int[Tensor, "K P"]:
        return self._targets

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of an empty copy, before it has a task
            raise AttributeError(name)
        return getattr(self._task, name)
