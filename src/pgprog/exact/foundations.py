"""The identities on which the family rests, each by exact enumeration.

Most on a bandit: four actions, a softmax of logits theta, a reward for each. There the score of action a is
grad log pi(a) = e_a - pi. Where a sequence, or a policy that is not linear, is needed: the task's own GRU, at a size
where all completions can be listed. An identity that fails says so: ``Identity.holds``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pgprog.algorithms.advantages import batch_mean, gae, leave_one_out
from pgprog.algorithms.objectives import policy_gradient_loss
from pgprog.env import DigitSum
from pgprog.exact.blackbox import Moments, black_box_moments, weighted_scores
from pgprog.exact.enumeration import completions
from pgprog.exact.values import prefix_values
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Policy

LOGITS = (0.4, -0.2, 1.1, 0.0)
REWARDS = (1.0, 0.0, 0.0, 1.0)
EXACT = 1e-12  # what rounding leaves of an identity in float64
PRINTED = 5e-6  # half a unit of the fifth decimal
SAMPLES = 200_000
Z = 5.0  # standard errors within which a sampled number must lie


@dataclass(frozen=True)
class Number:
    """A number, what it must be, and how closely; ``expected`` None is for show."""

    label: str
    value: list[float]
    expected: list[float] | None = None
    tolerance: float = EXACT
    error: float | None = None
    """One standard error, of what is sampled."""

    @property
    def holds(self) -> bool:
        if self.expected is None:
            return all(map(math.isfinite, self.value))
        pairs = zip(self.value, self.expected, strict=True)
        return all(abs(a - b) <= self.tolerance for a, b in pairs)  # NaN is no number within it


@dataclass(frozen=True)
class Identity:
    """One identity, and the numbers that show it."""

    number: int
    claim: str
    numbers: list[Number]

    @property
    def holds(self) -> bool:
        return all(n.holds for n in self.numbers)

    def as_dict(self) -> dict[str, Any]:
        numbers = [{**vars(n), "holds": n.holds} for n in self.numbers]
        return {"number": self.number, "claim": self.claim, "holds": self.holds, "numbers": numbers}


@dataclass(frozen=True)
class Bandit:
    """pi = softmax(theta); one action, one reward."""

    pi: Tensor
    rewards: Tensor
    s: Tensor
    """s[a] = grad log pi(a) = e_a - pi."""

    @property
    def gradient(self) -> Tensor:
        """grad J = sum_a pi(a) R(a) grad log pi(a)."""
        return (self.pi * self.rewards) @ self.s


def bandit(logits: Sequence[float] = LOGITS, rewards: Sequence[float] = REWARDS) -> Bandit:
    """The bandit of all the numbers below, in float64."""
    pi = torch.tensor(logits, dtype=torch.float64).softmax(0)
    return Bandit(pi, torch.tensor(rewards, dtype=torch.float64), torch.eye(len(logits), dtype=torch.float64) - pi)


def foundations(samples: int = SAMPLES, seed: int = 0) -> list[Identity]:
    """All ten, in order; ``samples`` and ``seed`` are for the sampled numbers beside the exact ones."""
    b = bandit()
    return [
        score_function(b),
        eglp(b),
        baselines_that_see(b),
        baselines_and_variance(b, samples, seed),
        one_expression(),
        process_reward(),
        sign_and_samples_of_q(b),
        fisher(),
        kl_as_a_loss(),
        gae_limits(),
    ]


def score_function(b: Bandit) -> Identity:
    """grad J = E[R grad log pi]."""
    h, theta = 1e-5, torch.tensor(LOGITS, dtype=torch.float64)

    def J(logits: Tensor) -> float:
        return (logits.softmax(0) @ b.rewards).item()

    steps = h * torch.eye(len(LOGITS), dtype=torch.float64)
    differences = [(J(theta + e) - J(theta - e)) / (2 * h) for e in steps]
    return Identity(
        1,
        "the score-function gradient is the gradient of J",
        [
            Number("E[R grad log pi]", b.gradient.tolist(), [0.1430, -0.0512, -0.1877, 0.0959], 5e-5),
            Number("finite differences of J", differences, b.gradient.tolist(), 1e-9),
        ],
    )


def eglp(b: Bandit) -> Identity:
    """E[b grad log pi] = 0, b not seeing the action."""
    zero = [0.0] * len(LOGITS)
    numbers = [
        Number(f"E[b grad log pi], b = {value:,g}", (value * (b.pi @ b.s)).tolist(), zero, EXACT * max(1, abs(value)))
        for value in (1.0, 0.7, -10_000.0)
    ]
    shifted = (b.pi * (b.rewards + 1e4)) @ b.s - b.gradient
    numbers.append(Number("E[(R + 10,000) grad log pi] - grad J", shifted.tolist(), zero, 1e-11))
    return Identity(2, "a baseline that does not see the action adds nothing (EGLP)", numbers)


def baselines_that_see(b: Bandit) -> Identity:
    """The trap: a baseline that sees its own action is biased; what the mean of A tells of it is nothing."""

    def own_mean(rewards: Tensor) -> Tensor:
        return batch_mean(rewards)

    def stale(rewards: Tensor) -> Tensor:
        return rewards + 3.0

    own = (b.pi * (b.rewards - b.rewards)) @ b.s
    numbers = [Number("b(a) = R(a): E[(R - b) grad log pi]", own.tolist(), [0.0] * len(LOGITS))]
    for G in (2, 3, 4):
        whole, others = _group(b, own_mean, G).mean / b.gradient, _group(b, leave_one_out, G).mean / b.gradient
        numbers.append(Number(f"G = {G}, mean of all: E[g] / grad J", whole.tolist(), [1 - 1 / G] * 4))
        numbers.append(Number(f"G = {G}, leave-one-out: E[g] / grad J", others.tolist(), [1.0] * 4))

    stale_mean = (b.pi @ b.rewards).item() + 3
    for name, advantage, mean, scale in (
        ("mean of all, biased", own_mean, 0.0, 0.75),
        ("stale b = -3, unbiased", stale, stale_mean, 1.0),
    ):
        numbers.append(Number(f"G = 4, {name}: E[A]", _mean_of(b, advantage, 4).tolist(), [mean]))
        ratio = _group(b, advantage, 4).mean / b.gradient
        numbers.append(Number(f"G = 4, {name}: E[g] / grad J", ratio.tolist(), [scale] * 4))
    return Identity(3, "the trap: a baseline that sees its own action is biased, whatever the mean of A", numbers)


def _mean_of(b: Bandit, advantage: Callable[[Tensor], Tensor], G: int) -> Tensor:
    """E[A], the mean over the group."""
    return black_box_moments(lambda a: advantage(b.rewards[a].unsqueeze(1)).mean(-1), b.pi.expand(G, -1)).mean


def _group(b: Bandit, advantage: Callable[[Tensor], Tensor], G: int) -> Moments:
    return black_box_moments(weighted_scores(advantage, b.rewards, b.s), b.pi.expand(G, -1))


def baselines_and_variance(b: Bandit, samples: int, seed: int) -> Identity:
    """tr Cov(g) of g = (R - b) grad log pi, with the exact expectation and sampled; b* = E[R |s|^2] / E[|s|^2]."""
    squared = b.s.square().sum(1)
    mean, best = float(b.pi @ b.rewards), float((b.pi * b.rewards) @ squared / (b.pi @ squared))
    numbers = [Number("b*, the best constant", [best], [0.53359], PRINTED)]
    actions = torch.multinomial(b.pi, samples, True, generator=torch.Generator().manual_seed(seed))
    for name, baseline, known in (("0", 0.0, 0.29318), ("E[R]", mean, 0.11378), ("b*", best, 0.10072)):
        A = b.rewards - baseline
        trace = float((b.pi * A.square()) @ squared - b.gradient.square().sum())
        g = A[actions].unsqueeze(1) * b.s[actions]
        distance = (g - b.gradient).square().sum(1)  # about the true mean: unbiased
        error = float(distance.std() / samples**0.5)
        bias = ((b.pi * A) @ b.s - b.gradient).abs().max()
        numbers += [
            Number(f"b = {name}: bias of the gradient", [float(bias)], [0.0]),
            Number(f"b = {name}: trace of the covariance", [trace], [known], PRINTED),
            Number(f"b = {name}: from {samples:,} samples", [float(distance.mean())], [trace], Z * error, error),
        ]
    return Identity(4, "a baseline changes the variance alone", numbers)


@dataclass(frozen=True)
class Sequences:
    """Every completion of four tokens of a small GRU, with the gradients of the two losses on each."""

    pi: Tensor
    logprobs: Tensor
    """(Y, T), with gradient."""
    success: Tensor
    parameters: list[Tensor]

    def losses(self, A: Tensor) -> Tensor:
        """The loss of each completion, with A per sequence (Y,) or per token (Y, T)."""
        mask = torch.ones(1, 1, self.logprobs.shape[1], dtype=torch.bool)
        rows = zip(self.logprobs, A, strict=True)
        return torch.stack([policy_gradient_loss(log.view(1, 1, -1), a.view(1, 1, *a.shape), mask) for log, a in rows])

    def gradients(self, A: Tensor) -> Tensor:
        """(Y, D)."""
        each = [torch.autograd.grad(x, self.parameters, retain_graph=True) for x in self.losses(A)]
        return torch.stack([torch.cat([g.flatten() for g in gradients]) for gradients in each])


def sequences() -> Sequences:
    """Four binary tokens, to sum to 2."""
    policy = _small_policy(DigitSum(seq_len=4, digits=2))
    target = torch.tensor([2])
    found = completions(policy, target)
    tokens = found.tokens.expand(1, 1, -1, -1)
    logprobs, _ = policy.score(target.expand(1, 1), tokens.contiguous())
    success = policy.task.success(target, found.tokens.unsqueeze(0))[0]
    return Sequences(found.logprobs[0, 0].exp().detach(), logprobs[0, 0], success, list(policy.parameters()))


def _small_policy(task: DigitSum, hidden: int = 3) -> Policy:
    return Policy(task, ReplicaGenerator([0], "init"), hidden=hidden, dtype=torch.float64)


def reward_to_go(rewards: Tensor) -> Tensor:
    """G_t = sum over u >= t of r_u, on the last axis."""
    return rewards.flip(-1).cumsum(-1).flip(-1)


def one_expression() -> Identity:
    """With the reward at the end and gamma = 1, reward-to-go is the return at every token."""
    x = sequences()
    rewards = torch.zeros_like(x.logprobs.detach())
    rewards[:, -1] = 0.7 * x.success.double()
    to_go = reward_to_go(rewards)
    winner = int(x.success.nonzero()[0])
    per_sequence, per_token = rewards.sum(-1), to_go
    value = (x.losses(per_sequence) - x.losses(per_token)).detach().abs().max()
    gradient = (x.gradients(per_sequence) - x.gradients(per_token)).abs().max()
    return Identity(
        5,
        "with an outcome reward and gamma = 1, the per-token and the per-sequence loss are one expression",
        [
            Number("reward-to-go of a completion with outcome 0.7", to_go[winner].tolist(), [0.7] * 4),
            Number("largest difference of the losses, over all completions", [float(value)], [0.0]),
            Number("largest difference of their gradients", [float(gradient)], [0.0]),
        ],
    )


def process_reward() -> Identity:
    """One process reward ends that: the losses differ, their expectations do not, their variances do."""
    x = sequences()
    rewards = torch.zeros_like(x.logprobs.detach())
    rewards[:, -1] = 0.7 * x.success.double()
    rewards[:, 1] += 0.3
    to_go = reward_to_go(rewards)
    winner = int(x.success.nonzero()[0])
    whole, causal = x.gradients(rewards.sum(-1)), x.gradients(to_go)
    least = (whole - causal).norm(dim=1).min()
    mean_whole, mean_causal = x.pi @ whole, x.pi @ causal
    traces = [float(x.pi @ g.square().sum(1) - (x.pi @ g).square().sum()) for g in (whole, causal)]
    return Identity(
        6,
        "a process reward (0.3 at the second token) ends that: other losses, the same expectation, another variance",
        [
            Number("reward-to-go", to_go[winner].tolist(), [1.0, 1.0, 0.7, 0.7]),
            Number("every sample differs: least |difference| of gradients > 0", [float(least > 1e-3)], [1.0]),
            Number("least |difference| of gradients", [float(least)]),
            Number("difference of the expected gradients", [float((mean_whole - mean_causal).abs().max())], [0.0]),
            Number("norm of the expected gradient", [float(mean_causal.norm())]),
            Number("trace of the covariance, per sequence", traces[:1]),
            Number("trace of the covariance, per token", traces[1:]),
            Number("the variances differ", [float(abs(traces[0] - traces[1]) > 1e-3)], [1.0]),
        ],
    )


def sign_and_samples_of_q(b: Bandit) -> Identity:
    """A step along psi grad log pi(a) moves log pi(a) in the direction of psi; E[G_t | s, a] = Q(s, a)."""
    numbers = []
    for psi in (1.0, -1.0, 0.0):
        moved = []
        for a in range(len(LOGITS)):
            theta = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
            logprob = theta.log_softmax(0)[a]
            A = torch.full((1, 1), psi, dtype=torch.float64)
            loss = policy_gradient_loss(logprob.view(1, 1, 1), A, torch.ones(1, 1, 1, dtype=torch.bool))
            (gradient,) = torch.autograd.grad(loss, theta)
            moved.append(((theta - 0.1 * gradient).log_softmax(0)[a] - logprob).item())
        signs = [math.copysign(1.0, m) if m else 0.0 for m in moved]
        numbers.append(Number(f"psi = {psi:+g}: sign of the change of log pi(a), each a", signs, [psi] * len(LOGITS)))
    policy, target = _small_policy(DigitSum(seq_len=3, digits=2, reward_form="halfway")), torch.tensor([2])
    found = completions(policy, target)
    G = reward_to_go(policy.task.process_rewards(target, found.tokens.unsqueeze(0), torch.float64)[0])
    pi, worst, prefixes = found.logprobs[0, 0].exp().detach(), 0.0, 0
    for t, level in enumerate(prefix_values(policy, target)):
        after = policy.task.digits ** (policy.task.seq_len - t - 1)  # completions in counting order: blocks of it
        mean = (pi * G[:, t]).unflatten(0, (-1, after)).sum(1) / pi.unflatten(0, (-1, after)).sum(1)
        worst = max(worst, (mean - level.Q[0, 0].flatten()).abs().max().item())
        prefixes += level.V.numel()
    numbers.append(Number(f"largest |E[G_t | s, a] - Q(s, a)| over {prefixes} prefixes", [worst], [0.0]))
    return Identity(7, "the sign: psi > 0 raises log pi(a), psi < 0 lowers it; and G_t is one sample of Q", numbers)


def fisher() -> Identity:
    """E[s s^T] = - E[Hessian of log pi], on a GRU: on a softmax bandit every Hessian is the same."""
    policy, target = _small_policy(DigitSum(seq_len=2, digits=2), hidden=2), torch.tensor([1])
    parameters = list(policy.parameters())
    logprobs = completions(policy, target).logprobs[0, 0]
    pi = logprobs.exp().detach()

    def flat(value: Tensor, create_graph: bool = False) -> Tensor:
        grads = torch.autograd.grad(value, parameters, None, True, create_graph, materialize_grads=True)
        return torch.cat([g.flatten() for g in grads])

    s = torch.stack([flat(x) for x in logprobs])
    hessians = [torch.stack([flat(g) for g in flat(x, create_graph=True)]) for x in logprobs]
    F = s.mT @ (pi.unsqueeze(1) * s)
    expected = sum(p * H for p, H in zip(pi, hessians, strict=True))
    spread = max(float((H - hessians[0]).abs().max()) for H in hessians)
    return Identity(
        8,
        "the Fisher matrix is minus the expected Hessian of log pi, on a policy that is not linear",
        [
            Number(f"largest |F + E[Hessian]| of {F.numel()} entries", [float((F + expected).abs().max())], [0.0]),
            Number("trace of F", [float(F.trace())]),
            Number("the Hessians of two completions differ", [float(spread > 1e-3)], [1.0]),
            Number("by as much as", [spread]),
        ],
    )


def kl_as_a_loss() -> Identity:
    """What the gradients of k1, k2, k3 are, on average: pi = (.8, .2), ref = (.5, .5), by the logit of action 0."""
    x = torch.tensor(math.log(4.0), dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.5, 0.5], dtype=torch.float64)

    def log_pi(x: Tensor) -> Tensor:
        return torch.stack([x, torch.zeros_like(x)]).log_softmax(0)

    def derivative(value: Tensor) -> float:
        return torch.autograd.grad(value, x)[0].item()

    pi = log_pi(x).exp().detach()

    def expected(estimator: Callable[[Tensor], Tensor]) -> float:
        return derivative((pi * estimator(log_pi(x))).sum())

    def k1(log: Tensor) -> Tensor:
        return log - ref.log()

    def k2(log: Tensor) -> Tensor:
        return k1(log).square() / 2

    def k3(log: Tensor) -> Tensor:
        return (-k1(log)).exp() - 1 + k1(log)

    def with_ratio(log: Tensor) -> Tensor:
        return (log - log.detach()).exp() * k3(log)

    forward = derivative((log_pi(x).exp() * (log_pi(x) - ref.log())).sum())
    backward = derivative((ref * (ref.log() - log_pi(x))).sum())
    return Identity(
        9,
        "KL estimators as a loss: k1 has no gradient, k2 that of KL(pi || ref), k3 that of KL(ref || pi)",
        [
            Number("grad KL(pi || ref)", [forward], [0.2218], 5e-5),
            Number("grad KL(ref || pi)", [backward], [0.3], EXACT),
            Number("E[grad k1]", [expected(k1)], [0.0]),
            Number("E[grad k2]", [expected(k2)], [forward]),
            Number("E[grad k3]", [expected(k3)], [backward]),
            Number("E[grad (live ratio k3)]", [expected(with_ratio)], [forward]),
        ],
    )


def gae_limits() -> Identity:
    """GAE at its two ends, on generic rewards, values and gamma; the second completion ends early."""
    rewards = torch.tensor([[0.1, -0.3, 0.95, 0.0, 0.7], [0.2, 0.4, 1.0, 0.0, 0.0]], dtype=torch.float64)
    values = torch.tensor([[0.5, 0.2, -0.4, 0.9, 0.3], [0.6, 0.1, 0.8, 0.7, 0.7]], dtype=torch.float64)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    gamma, T = 0.9, 5
    powers = gamma ** torch.arange(T, dtype=torch.float64)
    kept = [row[m] for row, m in zip(rewards, mask, strict=True)]
    G = [torch.stack([(powers[: len(r) - t] * r[t:]).sum() for t in range(len(r))]) for r in kept]
    V = [row[m] for row, m in zip(values, mask, strict=True)]
    monte_carlo = torch.cat([g - v for g, v in zip(G, V, strict=True)])
    td = torch.cat([r + gamma * torch.cat([v[1:], v.new_zeros(1)]) - v for r, v in zip(kept, V, strict=True)])
    return Identity(
        10,
        "GAE at lambda = 1 is G - V, at lambda = 0 the TD error",
        [
            Number("lambda = 1", gae(rewards, values, mask, gamma, 1.0)[mask].tolist(), monte_carlo.tolist()),
            Number("lambda = 0", gae(rewards, values, mask, gamma, 0.0)[mask].tolist(), td.tolist()),
        ],
    )
