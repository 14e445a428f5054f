"""Squared norms of scores, s = grad log pi(y | T), without ever making one.

A parameter U that is used at steps i = 1 .. S has gradient sum_i b_i x d_i, an outer product of what the step reads and
of the derivative of what it computes, so the squared norm needs inner products alone (Goodfellow 2015,
arXiv:1510.01799, for one layer):

    |sum_i b_i x d_i|^2 = sum_ij (b_i . b_j) (d_i . d_j)

A step of the GRU is elementwise in its two products u = h U + b and x, so d_i = v_i * du_i with v_i the derivative by
the step's new state, and v goes down a path by one product with U per step. Scores of the tokens of one completion are
orthogonal in expectation, E[s_t . s_t'] = 0, so E|s|^2 is a sum over single tokens of the whole tree.
Letters as in ``enumeration``; a batch of rows is M. No gradient flows through anything here.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pgprog.errors import UsageError
from pgprog.exact.enumeration import (
    Level,
    prefix_levels,
    refuse_what_is_too_large,
    success_gradients,
    winning_tokens,
)
from pgprog.gru import gather_inputs, step
from pgprog.policy import Policy

SUBTREE = 1000  # prefixes of the last level that are taken together, so that they fit the processor's cache


class ScoreMoments(NamedTuple):
    """The moments of s = grad log pi(y | T) that binary rewards need; no graph."""

    p: Float[Tensor, "K P"]
    """Success probability."""
    gradient: Float[Tensor, "K P D"]
    """grad p: E[s; r = 1], and - E[s; r = 0]."""
    second_success: Float[Tensor, "K P"]
    """E[|s|^2; r = 1] = sum over successful y of pi(y) |s(y)|^2."""
    second: Float[Tensor, "K P"]
    """E|s|^2."""


class Reading(NamedTuple):
    """One token read at each of N places, and the derivatives of the new state, all diagonal."""

    token: Int[Tensor, "N"]
    before: Float[Tensor, "N H"]
    by_u: Float[Tensor, "N 3 H"]
    """dh' / du for u = h U + b, by gate."""
    by_x: Float[Tensor, "N 3 H"]
    by_h: Float[Tensor, "N H"]
    """dh' / dh apart from the way through u."""


class Walk(NamedTuple):
    """The tree of one target and one replica, as the derivative of log pi needs it."""

    features: Float[Tensor, "F"] | None
    """What the initial state is a layer of; None where the prompt is read as tokens."""
    initial: Float[Tensor, "H"]
    readings: list[Reading]
    """Of the prompt's tokens (N = 1), then of each level but the first."""
    prompt_length: int
    hidden: list[Float[Tensor, "N H"]]
    pi: list[Float[Tensor, "N V"]]
    probability: list[Float[Tensor, "N"]]
    """Of each prefix."""
    U: Float[Tensor, "3 H H"]
    """Gate, new unit, old unit."""
    W: Float[Tensor, "V H"]


def score_moments(
    policy: Policy, targets: Int[Tensor, "P"], on_target: Callable[[int], None] = lambda n: None
) -> ScoreMoments:
    """p, grad p, E[|s|^2; r = 1] and E|s|^2 of each target; ``on_target`` is told how many are done.

    Raises: UsageError where rewards are not 0 or 1, or the whole tree of one target exceeds the memory limit.
    """
    if policy.task.reward_form != "outcome":
        raise UsageError(
            f"reward_form {policy.task.reward_form}: moments by counting successes need rewards in {{0, 1}}, those of "
            "the outcome; for any others enumerate all groups of a tiny problem with pgprog.exact.blackbox"
        )
    for target in targets.tolist():
        refuse_what_is_too_large(policy, [target], prune=False)
    p, gradient = success_gradients(policy, targets)
    winning, total = torch.empty_like(p), torch.empty_like(p)
    for i, target in enumerate(targets.split(1)):
        winning[:, i] = success_second_moment(policy, target)
        total[:, i] = second_moment(policy, target)
        on_target(i + 1)
    return ScoreMoments(p, gradient, winning, total)


@torch.no_grad()
def success_second_moment(policy: Policy, target: Int[Tensor, "1"]) -> Float[Tensor, "K"]:
    """E[|s|^2; r = 1], the sum over the successful completions of pi(y) |s(y)|^2."""
    levels = prefix_levels(policy.task, target, prune=True)
    totals = []
    for k in range(policy.replicas):
        tree = walk(policy, k, target, levels)
        total = tree.initial.new_zeros(())
        for t, level in enumerate(levels):
            nodes, tokens = winning_tokens(policy.task, level, t)
            pi = tree.probability[t][nodes] * tree.pi[t][nodes, tokens]
            total += (pi * squared_norms(tree, levels, t, nodes, tokens)).sum()
        totals.append(total)
    return torch.stack(totals)


@torch.no_grad()
def second_moment(policy: Policy, target: Int[Tensor, "1"]) -> Float[Tensor, "K"]:
    """E|s|^2 = sum over prefixes of pi(prefix) sum over tokens a of pi(a) |grad log pi(a | prefix)|^2."""
    levels = prefix_levels(policy.task, target, prune=False)
    totals = []
    for k in range(policy.replicas):
        tree, digits, L = walk(policy, k, target, levels), policy.task.digits, policy.task.seq_len
        cut = next(c for c in range(L) if digits ** (L - 1 - c) <= SUBTREE)
        total = _tree_norms(tree, 0, 0, range(cut), digits)
        for root in range(digits**cut):
            total = total + _tree_norms(tree, cut, root, range(cut, L), digits)
        totals.append(total)
    return torch.stack(totals)


@torch.no_grad()
def squared_norms(
    tree: Walk,
    levels: list[Level],
    t: int,
    nodes: Int[Tensor, "M"],
    tokens: Int[Tensor, "M"],
    weights: Float[Tensor, "M t1"] | None = None,
) -> Float[Tensor, "M"]:
    """|sum_i w_i grad log pi(a_i | s_i)|^2 of M completions whose last tokens follow these prefixes of level t.

    Args:
        weights: w of each of the t + 1 tokens, an advantage say; 1 if not given.
    """
    path, actions = [nodes], [tokens]
    for level in reversed(levels[1 : t + 1]):
        actions.insert(0, level.token[path[0]])
        path.insert(0, level.parent[path[0]])
    error = []  # derivative of the weighted log-probability by the logits
    for i, (place, action) in enumerate(zip(path, actions, strict=True)):
        e = -tree.pi[i][place]
        e = e.scatter_add(1, action.unsqueeze(1), torch.ones_like(e[:, :1]))
        error.append(e if weights is None else e * weights[:, i : i + 1])
    hidden = torch.stack([tree.hidden[i][place] for i, place in enumerate(path)], 1)
    errors = torch.stack(error, 1)
    total = ((hidden @ hidden.mT + 1) * (errors @ errors.mT)).sum((1, 2))

    places = [torch.zeros_like(nodes)] * tree.prompt_length + path[1:]
    readings = [Reading(*(part[at] for part in r)) for r, at in zip(tree.readings, places, strict=False)]
    vs: list[Tensor] = []
    v = torch.zeros_like(hidden[:, 0])
    for i in reversed(range(len(readings))):
        if i >= tree.prompt_length - 1:
            v = v + error[i - tree.prompt_length + 1] @ tree.W
        vs.insert(0, v)
        v = _back(readings[i], tree.U, v.unsqueeze(1)).squeeze(1)
    before = torch.stack([r.before for r in readings], 1)
    by_u = torch.stack([(r.by_u * v.unsqueeze(1)).flatten(1) for r, v in zip(readings, vs, strict=True)], 1)
    by_x = torch.stack([(r.by_x * v.unsqueeze(1)).flatten(1) for r, v in zip(readings, vs, strict=True)], 1)
    token = torch.stack([r.token for r in readings], 1)
    same = (token.unsqueeze(1) == token.unsqueeze(2)).to(by_x.dtype)
    total = total + ((before @ before.mT + 1) * (by_u @ by_u.mT) + same * (by_x @ by_x.mT)).sum((1, 2))
    return total + _prompt_norm(tree, v)


@torch.no_grad()
def walk(policy: Policy, k: int, target: Int[Tensor, "1"], levels: list[Level]) -> Walk:
    """Go down the tree of one target with replica k's parameters."""
    table, U, b = policy.input_gates[k : k + 1], policy.recurrent_weight[k : k + 1], policy.recurrent_bias[k : k + 1]
    H = U.shape[1]
    features, h = None, U.new_zeros(1, H)
    if policy.task.prompt_form == "state":
        features = policy.get_buffer("prompt_features")[int(target)]
        h = torch.tanh(features @ policy.prompt_weight[k] + policy.prompt_bias[k])
    initial, readings = h[0], []

    def read(token: Tensor, h: Tensor) -> Tensor:
        x = gather_inputs(table, token.unsqueeze(0))
        new, rz, n, u_n = (part[0] for part in step(x, h.unsqueeze(0), U, b))
        r, z = rz.chunk(2, dim=-1)
        by_n = (1 - z) * (1 - n.square())  # of the argument of tanh
        by_r, by_z = by_n * u_n * r * (1 - r), (h - n) * z * (1 - z)
        by_u, by_x = torch.stack([by_r, by_z, by_n * r], 1), torch.stack([by_r, by_z, by_n], 1)
        readings.append(Reading(token, h, by_u, by_x, z))
        return new

    prompt = policy.task.prompt_tokens(target)[0]
    for token in prompt.split(1):
        h = read(token, h)
    hidden, probability, pi = [h], [h.new_ones(1)], []
    for level in levels[1:]:
        pi.append(_pi(policy, k, h))
        probability.append(probability[-1][level.parent] * pi[-1][level.parent, level.token])
        h = read(level.token, h[level.parent])
        hidden.append(h)
    pi.append(_pi(policy, k, h))
    by_gate = U[0].unflatten(1, (3, H)).permute(1, 2, 0)
    return Walk(features, initial, readings, len(prompt), hidden, pi, probability, by_gate, policy.head_weight[k].mT)


def _pi(policy: Policy, k: int, h: Float[Tensor, "N H"]) -> Float[Tensor, "N V"]:
    return (h @ policy.head_weight[k] + policy.head_bias[k]).softmax(-1)


def _tree_norms(tree: Walk, cut: int, root: int, starts: range, digits: int) -> Float[Tensor, ""]:
    """The part of E|s|^2 that comes from tokens after the prefixes of levels ``starts`` below one node of level cut."""

    def below(t: int) -> slice:
        if t < cut:
            return slice(root // digits ** (cut - t), root // digits ** (cut - t) + 1)
        return slice(root * digits ** (t - cut), (root + 1) * digits ** (t - cut))

    first = tree.prompt_length - 1
    used = tree.readings[: first + max(1, starts.stop)]
    readings = [Reading(*(part[below(max(0, i - first))] for part in r)) for i, r in enumerate(used)]
    shared = [[_shared(a, b) for a in readings[: j + 1]] for j, b in enumerate(readings)]
    total = tree.initial.new_zeros(())
    for t in starts:
        pi, h = tree.pi[t][below(t)], tree.hidden[t][below(t)]
        weight = tree.probability[t][below(t)]
        total = total + (weight * (1 - pi.square().sum(1)) * (h.square().sum(1) + 1)).sum()
        root_weight = (weight.unsqueeze(1) * pi).sqrt().unsqueeze(2)
        vs: list[Tensor] = []
        v = root_weight * (tree.W - (pi @ tree.W).unsqueeze(1))
        for reading in reversed(readings[: first + 1 + t]):
            v = v.reshape(len(reading.token), -1, v.shape[-1])
            vs.insert(0, v)
            v = _back(reading, tree.U, v)
        for j, b in enumerate(vs):
            for a, inner in zip(vs[: j + 1], shared[j], strict=True):
                moved = (a.reshape(b.shape) * b).sum(1)
                total = total + (moved * inner).sum() * (1 if a is b else 2)
        total = total + _prompt_norm(tree, v.flatten(0, 1)).sum()
    return total


def _shared(a: Reading, b: Reading) -> Float[Tensor, "N H"]:
    """For a step ``a`` above step ``b``: what turns v_a * v_b into the inner product of their parts of the score."""
    N, M = len(a.token), len(b.token)
    before, token = b.before.view(N, M // N, -1), b.token.view(N, -1, 1)
    by_u, by_x = b.by_u.unflatten(0, (N, -1)), b.by_x.unflatten(0, (N, -1))
    inner = (before @ a.before.unsqueeze(2)) + 1
    u = (by_u * a.by_u.unsqueeze(1)).sum(2)
    x = (by_x * a.by_x.unsqueeze(1)).sum(2)
    return (inner * u + (token == a.token.view(N, 1, 1)) * x).flatten(0, 1)


def _back(reading: Reading, U: Float[Tensor, "3 H H"], v: Float[Tensor, "N M H"]) -> Float[Tensor, "N M H"]:
    """From the derivative by the new state to that by the old: v' = v * by_h + sum over gates of (v * by_u) U^T."""
    if v.shape[1] > 32:  # one matrix for all rows of a node
        back = (reading.by_u.unsqueeze(3) * U).sum(1) + torch.diag_embed(reading.by_h)
        return torch.bmm(v, back)
    gates = (v.unsqueeze(2) * reading.by_u.unsqueeze(1)).flatten(2)
    return v * reading.by_h.unsqueeze(1) + gates @ U.flatten(0, 1)


def _prompt_norm(tree: Walk, v: Float[Tensor, "M H"]) -> Float[Tensor, "M"]:
    """The squared norm of the part of the initial state's layer, tanh(features W + b)."""
    if tree.features is None:
        return torch.zeros_like(v[:, 0])
    d = v * (1 - tree.initial.square())
    return (tree.features.square().sum() + 1) * d.square().sum(1)
