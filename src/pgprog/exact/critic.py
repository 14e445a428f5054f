"""What a critic does to bias and variance, exactly: GAE at any (gamma, lambda) with values that are right or wrong.

    g = sum_t A_t s_t,    s_t = grad log pi(a_t | s_t),    E|g|^2 = sum over y of pi(y) sum_tt' A_t A_t' (s_t . s_t')

The inner products s_t . s_t' of every completion are computed once; each choice of A is then a quadratic form.
Letters: Y completions, T tokens, D parameters, P targets; one replica.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pgprog.algorithms.advantages import gae
from pgprog.exact.enumeration import Level, completions, expand, prefix_levels, value_and_gradient
from pgprog.exact.scores import Walk, squared_norms, walk
from pgprog.exact.values import objective_gradient, prefix_values
from pgprog.policy import Policy


class Point(NamedTuple):
    """One estimator with a critic: g of one completion of a randomly drawn prompt."""

    baseline: str
    """``prompt``: A = G_0 - V(prompt) at every token; ``prefix``: GAE with V of every prefix."""
    gamma: float
    lam: float
    error: float
    """How far V is off at every prefix, up or down."""
    bias: float
    """|E g - grad J|."""
    relative_bias: float
    """|E g - grad J| / |grad J|."""
    trace: float
    """tr Cov(g), prompts random."""


class Trajectories(NamedTuple):
    """Every completion of every target, as an estimator with a critic sees it; no graph."""

    tokens: Int[Tensor, "Y T"]
    mask: Bool[Tensor, "Y T"]
    pi: Float[Tensor, "P Y"]
    rewards: Float[Tensor, "P Y T"]
    values: Float[Tensor, "P Y T"]
    """V before each token, at gamma = 1; 0 after the end."""
    wrong: Float[Tensor, "Y T"]
    """+1 or -1: the direction in which a wrong V is off before each token."""
    gram: Float[Tensor, "P Y T T"]
    """s_t . s_t', 0 after the end."""
    slot: Int[Tensor, "Y T"]
    """Place of each token among the tokens of its level, prefix by prefix; 0 after the end."""
    truth: Float[Tensor, "D"]
    """grad J, over the task's own distribution of targets."""


def trajectories(policy: Policy, targets: Int[Tensor, "P"], replica: int = 0) -> Trajectories:
    """Enumerate what ``critic_point`` needs. Raises: UsageError where the whole trees exceed the memory limit."""
    task = policy.task
    with torch.no_grad():
        found = completions(policy, targets)
        levels = prefix_values(policy, targets)
    tokens, mask = found.tokens, found.mask
    rewards = task.process_rewards(targets, tokens.expand(len(targets), -1, -1), found.logprobs.dtype)
    digits = torch.where(tokens < task.digits, tokens, 0)
    place, places, slots = torch.zeros_like(tokens[:, 0]), [], []
    for t in range(task.seq_len):
        places.append(place)
        slots.append(torch.where(mask[:, t], place * task.vocab_size + tokens[:, t], 0))
        place = place * task.digits + digits[:, t]
    values = torch.stack([level.V[replica][:, at] for level, at in zip(levels, places, strict=True)], -1)
    before = torch.cat([torch.zeros_like(digits[:, :1]), digits[:, :-1]], 1)
    gram = torch.stack([_token_gram(policy, target, replica) for target in targets.split(1)])
    pi = found.logprobs[replica].exp()
    wrong, truth = (1 - 2 * (before % 2)).to(pi.dtype), objective_gradient(policy).gradient[replica]
    return Trajectories(tokens, mask, pi, rewards, values * mask, wrong, gram, torch.stack(slots, 1), truth)


def _token_gram(policy: Policy, target: Int[Tensor, "1"], replica: int) -> Float[Tensor, "Y T T"]:
    """s_t . s_t' of every completion of one target, in the order of ``completions``."""
    task = policy.task
    levels = prefix_levels(task, target, prune=False)
    tree, parts = walk(policy, replica, target, levels), []
    for t in range(task.seq_len if task.variable_length else 0):
        nodes = torch.arange(task.digits**t)
        parts.append(_gram(tree, levels, t, nodes, torch.full_like(nodes, task.eos), task.seq_len))
    nodes = torch.arange(task.digits ** (task.seq_len - 1)).repeat_interleave(task.digits)
    last = torch.arange(task.digits).repeat(len(nodes) // task.digits)
    return torch.cat([*parts, _gram(tree, levels, task.seq_len - 1, nodes, last, task.seq_len)])


def _gram(tree: Walk, levels: list[Level], t: int, nodes: Tensor, tokens: Tensor, T: int) -> Float[Tensor, "M T T"]:
    """By polarisation, 2 a . b = |a + b|^2 - |a|^2 - |b|^2."""
    one = torch.eye(t + 1, dtype=tree.initial.dtype)

    def norm(weight: Tensor) -> Tensor:
        return squared_norms(tree, levels, t, nodes, tokens, weight.expand(len(nodes), -1))

    gram = tree.initial.new_zeros(len(nodes), T, T)
    for i in range(t + 1):
        gram[:, i, i] = norm(one[i])
    for i in range(t + 1):
        for j in range(i):
            inner = (norm(one[i] + one[j]) - gram[:, i, i] - gram[:, j, j]) / 2
            gram[:, i, j] = gram[:, j, i] = inner
    return gram


def critic_point(
    policy: Policy,
    paths: Trajectories,
    targets: Int[Tensor, "P"],
    baseline: str,
    gamma: float,
    lam: float,
    error: float,
    replica: int = 0,
) -> Point:
    """Bias and variance of the gradient with this critic: exact, over every target and completion.

    Args:
        baseline: ``prompt`` or ``prefix``, see ``Point``.
        error: V is off by it, in the directions ``paths.wrong``; 0 is the exact V (of gamma = 1).
    """
    values = paths.values + error * paths.wrong
    if baseline == "prompt":
        discount = gamma ** torch.arange(paths.rewards.shape[-1], dtype=values.dtype)
        G = (discount * paths.rewards).sum(-1, keepdim=True)
        A = torch.where(paths.mask, G - values[..., :1], 0)
    else:
        A = gae(paths.rewards, values, paths.mask.expand_as(values), gamma, lam)
    draw = policy.task.target_weights().to(A.dtype)[targets]
    draw = draw / draw.sum()
    chance = draw.unsqueeze(1) * paths.pi
    surrogate = _expected_surrogate(policy, paths, targets, chance.unsqueeze(-1) * A)
    mean = value_and_gradient(policy, surrogate).gradient[replica]
    second = (chance * torch.einsum("pyt,pytu,pyu->py", A, paths.gram, A)).sum()
    truth = paths.truth
    bias = (mean - truth).norm()
    trace = second - mean.square().sum()
    return Point(baseline, gamma, lam, error, bias.item(), (bias / truth.norm()).item(), trace.item())


def _expected_surrogate(
    policy: Policy, paths: Trajectories, targets: Int[Tensor, "P"], weights: Float[Tensor, "P Y T"]
) -> Float[Tensor, "K"]:
    """sum over y and t of weight log pi(a_t | s_t), with gradient; weights of completions that share a token add up."""
    levels, total = prefix_levels(policy.task, targets, prune=False), torch.zeros(())
    for t, states in enumerate(expand(policy, targets, levels)):
        log_pi = states.log_pi.unflatten(2, (len(targets), -1)).permute(0, 2, 3, 1).flatten(2)  # (K, P, prefix token)
        at = paths.slot[:, t].expand(len(targets), -1)
        total = total + (torch.zeros_like(log_pi[0]).scatter_add(1, at, weights[..., t]) * log_pi).sum((1, 2))
    return total
