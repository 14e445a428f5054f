"""What fits a budget, before any run: memory by role, groups that carry a signal, signal to noise, time.

A prompt with success probability p, a group of G completions of it, r in {0, 1}:

    I(p) = 1 - p^G - (1 - p)^G                          the chance that the group's rewards differ
    h    = (1/G) sum_i A_i s_i,  s = grad log pi(y)     the gradient of one group
    S/N per rollout = (1/G) |E h|^2 / tr Cov(h)

E[A^2], w(p) and I(p) are exact given (p, G). S/N needs the scores too. Here all prompts move one logit, the least noisy
policy that there can be, with noise added that knows nothing of the reward:

    pi(success) = p = sigmoid(x + c),    s = (r - p) + noise,    E|noise|^2 = (kappa - 1) p (1 - p)

so that E|s|^2 = kappa |grad p|^2 / (p (1 - p)). With kappa = 1 S/N is, at one p, the most that any policy can have,
for E[|s|^2 | r] >= |E[s | r]|^2. As kappa grows, kappa S/N goes to E[w q]^2 / E[E[A^2] q], q = p (1 - p): divided by
its value for A = r - p this is the efficiency, w^2 q / E[A^2] at one p, in which no policy enters.

The moments come from ``exact.moments``, the advantages from ``from_recipe``; nothing is sampled.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from scipy.linalg import eigh_tridiagonal
from scipy.special import betaln
from torch import Tensor

from pgprog.algorithms import advantages
from pgprog.algorithms.from_recipe import advantage_of
from pgprog.algorithms.recipes import KLChoice, Recipe
from pgprog.algorithms.sampling import informative_groups
from pgprog.exact.estimators import with_rewards
from pgprog.exact.moments import group_moments, pooled, random_prompts
from pgprog.exact.scores import ScoreMoments
from pgprog.exact.weight import LARGEST_GROUP, GroupAdvantage, group_advantage

LARGEST_SEARCHED = 2**50  # for the smallest group
FISHER_PRODUCTS = 10
STEEP = 2.0**20
NO_NOISE = 1e-12  # a trace of this share of E|h|^2 is rounding


# ---- memory ----


@dataclass(frozen=True)
class Bytes:
    """Per parameter, of a model that is trained and of one that is not."""

    weights: float = 2.0
    gradients: float = 2.0
    optimizer: float = 12.0
    """AdamW's master weights and two moments, in float32: 4 + 4 + 4."""

    @property
    def trained(self) -> float:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class Role:
    """A model that is held."""

    name: str
    trained: bool
    params_b: float
    gigabytes: float


@dataclass(frozen=True)
class Sizes:
    """Of the models, in billions of parameters."""

    policy: float
    critic: float
    reward: float | None
    """None for a verifier, which needs no GPU."""
    reference: bool = False
    """Hold a reference even where the recipe has no KL term."""


def roles(recipe: Recipe, sizes: Sizes, each: Bytes) -> tuple[Role, ...]:
    """The models of a recipe and their decimal gigabytes, activations aside.

        trained: billions (weights + gradients + optimizer),    inference only: billions weights

    The policy first; then the critic, the reference and the reward model where there are any. The rollout engine's
    copy is apart: it may stand on other GPUs.
    """
    held = [("policy", True, sizes.policy)]
    if recipe.critic != "none":
        held.append(("critic", True, sizes.critic))
    if recipe.reference or sizes.reference:
        held.append(("reference", False, sizes.policy))
    if sizes.reward is not None:
        held.append(("reward model", False, sizes.reward))
    return tuple(Role(name, trained, b, b * (each.trained if trained else each.weights)) for name, trained, b in held)


def gpus_for(gigabytes: float, gpu_gb: float, overhead: float) -> int:
    """The least number of GPUs over which so much can be sharded: ceil(gigabytes / (gpu_gb (1 - overhead)))."""
    return max(1, math.ceil(gigabytes / (gpu_gb * (1 - overhead)) - 1e-9))


# ---- prompts and groups ----


class Prompts(NamedTuple):
    """Success probabilities and how often a prompt has each."""

    p: Float[Tensor, "P"]
    draw: Float[Tensor, "P"]


def spread(mean: float, concentration: float | None, group_size: int) -> Prompts:
    """Prompts whose success is ``mean``: all alike, or p ~ Beta(mean k, (1 - mean) k) with k the concentration.

    The Beta is n points of Gauss and Jacobi, which integrate polynomials up to degree 2 n - 1 exactly; the moments
    of a group of G are polynomials in p of degree G + 2 at most.
    """
    if concentration is None:
        return Prompts(torch.tensor([mean], dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    a, b = mean * concentration, (1 - mean) * concentration
    return beta_points(a, b, group_size // 2 + 8)


def beta_points(a: float, b: float, n: int) -> Prompts:
    """n points for Beta(a, b): eigenvalues of the Jacobi matrix, and their vectors' first entries squared.

    The monic polynomials P_k that are orthogonal under Beta(a, b) obey, with S = a + b,

        P_(k+1) = (p - m_k) P_k - v_k P_(k-1),     m_k = 1/2 + (a - b) (S - 2) / (2 (2k + S - 2) (2k + S))
        v_k = k (k + a - 1) (k + b - 1) (k + S - 2) / ((2k + S - 2)^2 (2k + S - 1) (2k + S - 3))

    where m_0 = a / S and v_1 = a b / (S^2 (S + 1)), the mean and the variance.
    """
    S, k = a + b, torch.arange(2, n, dtype=torch.float64)
    later = k * (k + a - 1) * (k + b - 1) * (k + S - 2)
    later = later / ((2 * k + S - 2) ** 2 * (2 * k + S - 1) * (2 * k + S - 3))
    v = torch.cat([torch.tensor([a * b / (S**2 * (S + 1))], dtype=torch.float64), later])
    k = torch.arange(1, n, dtype=torch.float64)
    m = 0.5 + (a - b) * (S - 2) / (2 * (2 * k + S - 2) * (2 * k + S))
    m = torch.cat([torch.tensor([a / S], dtype=torch.float64), m])
    p, vectors = eigh_tridiagonal(m.numpy(), v.sqrt().numpy())
    return Prompts(torch.from_numpy(p).clamp(0, 1), torch.from_numpy(vectors[0] ** 2))


def informative(mean: float, concentration: float | None, group_size: int) -> float:
    """E[I(p)] over the prompts.

    With all alike 1 - p^G - (1 - p)^G; with Beta(a, b) 1 - B(a + G, b) / B(a, b) - B(a, b + G) / B(a, b).
    """
    if concentration is None:
        return float(informative_groups(torch.tensor(mean, dtype=torch.float64), group_size))
    a, b, G = mean * concentration, (1 - mean) * concentration, group_size
    all_right, all_wrong = (math.exp(betaln(*ab) - betaln(a, b)) for ab in ((a + G, b), (a, b + G)))
    return max(0.0, 1 - all_right - all_wrong)


def smallest_group(mean: float, concentration: float | None, share: float = 0.5) -> int | None:
    """The smallest G of which ``share`` of the groups are informative; None beyond 2^50. I grows with G: bisection."""
    high = 2
    while informative(mean, concentration, high) < share:
        if (high := 2 * high) > LARGEST_SEARCHED:
            return None
    low = high // 2  # too small, or 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if informative(mean, concentration, middle) >= share else (middle, high)
    return high


# ---- signal to noise ----


@dataclass(frozen=True)
class Signal:
    """Of a recipe's first gradient from fresh data, lengths equal."""

    signal_to_noise: float
    """Per rollout that was sampled: |E g|^2 / tr Cov(g) of N rollouts, divided by N. Infinite without any noise."""
    efficiency: float
    """Limit of the same for noisy scores, relative to A = r - p."""
    weight: float
    """E[w q] / E[q]: how much longer the mean gradient is than grad J."""
    squared_advantage: float
    """E[A^2] of a sampled completion that is kept."""


def scores_of(prompts: Prompts, kappa: float) -> ScoreMoments:
    """Moments of s = (r - p) + noise: grad p = q, E[|s|^2; 1] = p (1 - p)^2 + p (kappa - 1) q, E|s|^2 = kappa q."""
    p = prompts.p
    q = p * (1 - p)
    return ScoreMoments(p, q.unsqueeze(-1), q * (1 - p) + (kappa - 1) * p * q, kappa * q)


def table_of(
    recipe: Recipe, prompts: Prompts, group_size: int, batch: int, critic_quality: float, kappa: float
) -> GroupAdvantage:
    """A by its own reward and the number of successes among the others: (G,), (P, 1) with a critic, (N,) of a batch.

    What divides a whole batch's A by one number is left out, since it cancels in S/N as the batch grows; what takes the
    batch's mean off is kept. The critic is V = J + critic_quality (p - J), and GAE is r - V(prompt): a completion is
    one decision here. The optimal constant b* = E[|s|^2 r] / E|s|^2 is taken as found.
    """
    a, one = recipe.advantage, torch.ones(1, dtype=torch.float64)
    if recipe.critic != "none":
        J = prompts.draw @ prompts.p
        V = (J + critic_quality * (prompts.p - J)).unsqueeze(-1)
        return GroupAdvantage(1 - V, -V)
    if a.baseline == "optimal_constant":
        scores = pooled(scores_of(prompts, kappa), prompts.draw)
        b = scores.second_success / scores.second
        return GroupAdvantage(1 - b, -b)
    if a.baseline == "batch_mean" or (a.baseline == "none" and a.whiten != "none"):
        return group_advantage(advantages.batch_mean, batch, recipe.name)
    if a.baseline == "none":
        return GroupAdvantage(one, 0 * one)
    scale = "none" if a.scale == "batch_std" else a.scale
    grouped = replace(recipe, advantage=replace(a, whiten="none", scale=scale), kl=KLChoice())
    of_rollout = advantage_of(grouped)

    def of_rewards(rewards: Tensor) -> Tensor:
        return of_rollout(with_rewards(rewards.unsqueeze(0), torch.zeros(1, len(rewards), dtype=torch.long), None))[0]

    return group_advantage(of_rewards, group_size, recipe.name)


def signal(
    recipe: Recipe, prompts: Prompts, group_size: int, batch: int, *, kappa: float = 1.0, critic_quality: float = 1.0
) -> Signal:
    """S/N per sampled rollout of a recipe at these prompts, and what it is made of.

    A recipe that draws until groups are informative sees h given that: E[h | I] = E[h] / E[I] and
    E|h|^2 given I is E|h|^2 / E[I], from G / E[I] sampled rollouts, since an uninformative group has h = 0.

    Args:
        batch: N, completions of a step; a statistic of the batch is taken over at most 1000 of them.
    """
    of_batch, G = is_of_batch(recipe), group_size if recipe.sampling.group else 1
    N = min(batch, LARGEST_GROUP)
    draw = prompts.draw
    if of_batch:
        G, draw = N, torch.ones(1, dtype=torch.float64)

    def moments(table: GroupAdvantage, kappa: float) -> tuple[float, float, float, float]:
        """|E h|^2, E|h|^2, w along grad J and E[A^2]."""
        scores = scores_of(prompts, kappa)
        J = (prompts.draw.unsqueeze(-1) * scores.gradient).sum()
        groups = group_moments(table, pooled(scores, prompts.draw) if of_batch else scores)
        found = random_prompts(groups, draw, 1)
        mean = float(found.mean.sum())
        return mean**2, float(found.second), mean / float(J), float(found.squared_advantage)

    table = table_of(recipe, prompts, G, N, critic_quality, kappa)
    mean, second, weight, squared = moments(table, kappa)
    kept = 1.0
    if recipe.sampling.dynamic > 1:
        kept = float(draw @ informative_groups(prompts.p, G))
        mean, second, weight, squared = mean / kept**2, second / kept, weight / kept, squared / kept
    trace = second - mean
    per_rollout = math.inf if trace <= NO_NOISE * second else mean / trace / G * kept
    if recipe.advantage.baseline == "optimal_constant":
        table = table_of(recipe, prompts, G, N, critic_quality, STEEP)
    least, more = moments(table, 1.0), moments(table, 1.0 + STEEP)
    slope = (more[1] - least[1]) / STEEP  # E|h|^2 is linear in kappa, with slope E[E[A^2] q] / G
    q = prompts.p * (1 - prompts.p)
    exact_baseline = float(prompts.draw @ q) ** 2 / float(prompts.draw @ q**2)
    efficiency = least[0] / (G * slope) / exact_baseline
    return Signal(per_rollout, efficiency, weight, squared)


def is_of_batch(recipe: Recipe) -> bool:
    """Whether A depends on the rewards of the whole batch, and on no group."""
    a = recipe.advantage
    return a.baseline == "batch_mean" or (a.baseline == "none" and a.whiten != "none")


# ---- a step, and its time ----


@dataclass(frozen=True)
class Step:
    """Of one update."""

    groups: float
    """Groups that are sampled, or completions where G = 1."""
    kept: float
    """Groups that are trained on."""
    informative: float | None
    """Of those, how many carry a signal; None without groups."""
    rollouts: float


def step(recipe: Recipe, prompts: int, group_size: int, share: float) -> Step:
    """P prompts with G completions each; P prompts with one each where the recipe has no groups.

    Where it draws until groups are informative, up to D batches: 1 / I batches, at most D, and P min(1, D I) groups.
    """
    D = recipe.sampling.dynamic
    if not recipe.sampling.group:
        return Step(float(prompts), float(prompts), None, float(prompts))
    if D == 1:
        return Step(float(prompts), float(prompts), prompts * share, float(prompts * group_size))
    batches = min(float(D), 1 / share) if share > 0 else float(D)
    found = prompts * min(1.0, D * share)
    return Step(prompts * batches, found, found, prompts * batches * group_size)


@dataclass(frozen=True)
class Pace:
    """How fast completions are made, and how the time of the plainest step divides."""

    per_gpu_hour: float
    """R, completions that one GPU generates in an hour."""
    generation_share: float
    """g, of the wall clock of a step with one forward and backward pass of the policy and no other model."""


@dataclass(frozen=True)
class Hours:
    """GPU hours per sampled rollout."""

    generation: float
    training: float

    @property
    def total(self) -> float:
        return self.generation + self.training


def passes(recipe: Recipe, sizes: Sizes) -> dict[str, float]:
    """Passes over a completion that is trained on, in forward passes of the policy; a backward pass is two.

    A model of another size costs in proportion. Minibatches divide a pass and add none; a step on data that are no
    longer fresh needs the old log-probabilities.
    """
    s, ratio = recipe.sampling, sizes.critic / sizes.policy
    found = {"policy": 3.0 * s.epochs}
    if recipe.gradient_steps > 1:
        found["old log-probabilities"] = 1.0
    if recipe.reference or sizes.reference:
        found["reference"] = 1.0
    if recipe.other_sampler:
        found["sampler"] = 1.0
    if recipe.critic != "none":
        found["critic"] = (1 + 3 * s.epochs) * ratio
    if recipe.advantage.baseline == "optimal_constant":
        found["a gradient per completion"] = 3.0
    if recipe.constraint.kind == "trust_region":
        found["Fisher products"] = 3.0 * FISHER_PRODUCTS
    return found


def hours(recipe: Recipe, sizes: Sizes, pace: Pace, kept: float = 1.0) -> Hours:
    """Generation 1 / R; a forward pass F, three of which are the training of the plainest step.

        3 F = (1 / R) (1 - g) / g,        training = F (reward + kept passes)

    Args:
        kept: the share of sampled completions that are trained on. A reward model scores all.
    """
    generation = 1 / pace.per_gpu_hour
    F = generation * (1 - pace.generation_share) / pace.generation_share / 3
    reward = 0.0 if sizes.reward is None else sizes.reward / sizes.policy
    return Hours(generation, F * (reward + kept * sum(passes(recipe, sizes).values())))


def rollout_gpus(train_gpus: int, replica: int, spent: Hours) -> int:
    """GPUs that generate as fast as ``train_gpus`` train, in whole replicas of the policy of ``replica`` GPUs."""
    return replica * max(1, math.ceil(train_gpus * spent.generation / spent.training / replica - 1e-9))


# ---- which ----

LEAD = 1.25


@dataclass(frozen=True)
class Candidate:
    """A recipe at a group size, as the choice sees it."""

    name: str
    group_size: int
    score: float
    """S/N or efficiency, per rollout or per GPU hour."""
    critic: bool
    models: int
    biased: bool
    """Toward another objective than J; a scale is none."""
    fits: bool


def choose_recipe(candidates: list[Candidate], tie: float = 1.02) -> Candidate | None:
    """The highest score of those that fit; within 2% the unbiased, then the fewest models, then the first.

    A critic is chosen only if it leads by ``LEAD``, for its V is assumed, and has to be learned first.
    """

    def best(of: list[Candidate]) -> Candidate | None:
        if not of:
            return None
        top = max(c.score for c in of)
        return min((c for c in of if c.score * tie >= top), key=lambda c: (c.biased, c.models))

    fitting = [c for c in candidates if c.fits]
    without, every = best([c for c in fitting if not c.critic]), best(fitting)
    if without is None or every is None or not every.critic:
        return every
    return every if every.score >= LEAD * without.score else without


def other_objective(recipe: Recipe) -> bool:
    """Whether E g points elsewhere than grad J: a group's std, a filter, or a sequence's own length divides it."""
    length = recipe.aggregation.denominator == "sequence_mean"
    return recipe.advantage.scale == "group_std" or recipe.sampling.dynamic > 1 or length
