"""Every completion of the task, by a tree of prefixes that advances level by level.

Level t holds the prefixes of t digits that have not ended, those of all prompts side by side; their states are one
batch. The last level, t = L - 1, is never expanded: what its tokens lead to is known without a state. Where only
success is asked for, a prefix stays in the tree as long as its target can still be reached.
Shapes: K replicas, P prompts, N prefixes of a level, T tokens, V tokens to choose from, H hidden units, Y completions,
D numbers in a replica's parameters. Everything here is a function of the policy's parameters, with gradient.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pgprog.env import DigitSum
from pgprog.errors import UsageError
from pgprog.policy import Policy

MEMORY_LIMIT = 2 * 2**30  # bytes


class Level(NamedTuple):
    """The prefixes of one length; those of a parent stand together, digits ascending."""

    prompt: Int[Tensor, "N"]
    """Which of the P prompts."""
    parent: Int[Tensor, "N"]
    """Place in the level before."""
    token: Int[Tensor, "N"]
    """The last digit; at level 0, where there is none, 0."""
    missing: Int[Tensor, "N"]
    """Target less the digits so far."""


class States(NamedTuple):
    """What the policy is at each prefix of a level; with gradient."""

    hidden: Float[Tensor, "K N H"]
    log_pi: Float[Tensor, "K V N"]
    """log pi(token | prefix)."""
    logprob: Float[Tensor, "K N"]
    """log pi(prefix)."""


class Completions(NamedTuple):
    """Every completion of every prompt."""

    tokens: Int[Tensor, "Y T"]
    """Those that end early first, shortest first, padded with EOS; then, in counting order, those of L digits."""
    mask: Bool[Tensor, "Y T"]
    logprobs: Float[Tensor, "K P Y"]
    """log pi(completion | prompt), with gradient."""


class ValueAndGradient(NamedTuple):
    """A number of each replica, or of each replica and prompt, and its gradient; both without graph."""

    value: Float[Tensor, "*K"]
    gradient: Float[Tensor, "*K D"]
    """In the order of ``policy.parameters()``, each flattened."""


def every_target(task: DigitSum) -> Int[Tensor, "P"]:
    """0 .. (digits - 1) L."""
    return torch.arange(task.max_target + 1)


def prefix_levels(task: DigitSum, targets: Int[Tensor, "P"], prune: bool) -> list[Level]:
    """The tree of each target, levels 0 .. L - 1; with ``prune``, without prefixes that cannot reach it any more.

    A prefix of t digits with sum s stays where 0 <= T - s <= (digits - 1)(L - t). Without ``prune`` level t has
    digits^t prefixes of each target, in counting order.
    """
    start = torch.zeros_like(targets)
    levels = [Level(torch.arange(len(targets)), start, start, targets)]
    digits = torch.arange(task.digits)
    for t in range(1, task.seq_len):
        before = levels[-1]
        missing = before.missing[:, None] - digits
        keep = torch.ones_like(missing, dtype=torch.bool)
        if prune:
            keep = (missing >= 0) & (missing <= (task.digits - 1) * (task.seq_len - t))
        parent, token = keep.nonzero(as_tuple=True)
        levels.append(Level(before.prompt[parent], parent, token, missing[keep]))
    return levels


def count_prefixes(task: DigitSum, targets: Sequence[int], prune: bool) -> float:
    """How many prefixes the trees of these targets have, found without building them."""
    total, ways = 0.0, np.ones(1)  # of t digits, by their sum
    for t in range(task.seq_len):
        if prune:
            below = np.concatenate([[0.0], np.cumsum(ways)])
            first = np.clip(np.asarray(targets) - (task.digits - 1) * (task.seq_len - t), 0, len(ways))
            total += float((below[np.clip(np.asarray(targets) + 1, 0, len(ways))] - below[first]).sum())
        else:
            total += len(targets) * float(task.digits) ** t
        if total > 1e18:
            break
        ways = np.convolve(ways, np.ones(task.digits))
    return total


def refuse_what_is_too_large(policy: Policy, targets: Sequence[int], prune: bool, copies: int = 1) -> None:
    """Raise UsageError, before anything is tried, where ``copies`` trees of these targets exceed the memory limit."""
    task, H = policy.task, policy.head_weight.shape[1]
    prefixes = count_prefixes(task, targets, prune) * copies
    # Measured: the graph keeps about 22 tensors of the hidden width of each prefix, and 5 of the vocabulary's.
    needed = prefixes * policy.replicas * (22 * H + 5 * task.vocab_size) * policy.head_weight.element_size()
    if needed > MEMORY_LIMIT:
        raise UsageError(
            f"exact enumeration at seq_len {task.seq_len}, {task.digits} digits, needs {prefixes:,.0f} prefixes x "
            f"{policy.replicas} replicas x {H} hidden units at once, about {needed / 2**30:,.1f} GiB, over the limit "
            f"of {MEMORY_LIMIT / 2**30:.1f} GiB: give a shorter --seq-len, fewer --digits or a smaller --hidden"
        )


def expand(policy: Policy, targets: Int[Tensor, "P"], levels: list[Level]) -> Iterator[States]:
    """Walk down the tree and give the states of each level; with gradient."""
    K = policy.replicas
    hidden = policy.read_prompts(targets.expand(K, -1))
    log_pi = policy.log_pi(hidden)
    logprob = hidden.new_zeros(hidden.shape[:2])
    yield States(hidden, log_pi, logprob)
    for level in levels[1:]:
        logprob = logprob.index_select(1, level.parent) + of_tokens(log_pi, level.parent, level.token)
        hidden = policy.read(level.token.expand(K, -1), hidden.index_select(1, level.parent))
        log_pi = policy.log_pi(hidden)
        yield States(hidden, log_pi, logprob)


def of_tokens(
    log_pi: Float[Tensor, "K V N"], nodes: Int[Tensor, "M"], tokens: Int[Tensor, "M"]
) -> Float[Tensor, "K M"]:
    """log pi(token | prefix) of M pairs; with gradient."""
    return log_pi.flatten(1).index_select(1, tokens * log_pi.shape[-1] + nodes)


def winning_tokens(task: DigitSum, level: Level, t: int) -> tuple[Int[Tensor, "M"], Int[Tensor, "M"]]:
    """The last tokens of the successful completions at level t, as (place of the prefix, token).

    The last digit is what is missing; in the variable-length form EOS wins where nothing is, at any level.
    """
    nodes, tokens = [], []
    if t == task.seq_len - 1:
        nodes.append(((level.missing >= 0) & (level.missing < task.digits)).nonzero().squeeze(1))
        tokens.append(level.missing[nodes[0]])
    if task.variable_length:
        nodes.append((level.missing == 0).nonzero().squeeze(1))
        tokens.append(torch.full_like(nodes[-1], task.eos))
    if not nodes:
        return level.token[:0], level.token[:0]
    return torch.cat(nodes), torch.cat(tokens)


def success_probabilities(policy: Policy, targets: Int[Tensor, "P"]) -> Float[Tensor, "K P"]:
    """The probability of success at each target, over all completions; with gradient.

        p(T) = sum over completions y with sum T of pi(y | T)

    Raises: UsageError where the pruned trees of these targets, all held at once, exceed the memory limit.
    """
    refuse_what_is_too_large(policy, targets.tolist(), prune=True)
    levels = prefix_levels(policy.task, targets, prune=True)
    p = policy.head_weight.new_zeros(policy.replicas, len(targets))
    for t, (level, states) in enumerate(zip(levels, expand(policy, targets, levels), strict=True)):
        nodes, tokens = winning_tokens(policy.task, level, t)
        logprob = states.logprob.index_select(1, nodes) + of_tokens(states.log_pi, nodes, tokens)
        p = p.index_add(1, level.prompt[nodes], logprob.exp())
    return p


def success_gradients(policy: Policy, targets: Int[Tensor, "P"]) -> ValueAndGradient:
    """p(T) and grad p(T) of each target, (K, P) and (K, P, D); one target after the other, so in little memory.

    Raises: UsageError where the pruned tree of one target exceeds the memory limit.
    """
    for target in targets.tolist():
        refuse_what_is_too_large(policy, [target], prune=True)
    each = [value_and_gradient(policy, success_probabilities(policy, target)[:, 0]) for target in targets.split(1)]
    return ValueAndGradient(torch.stack([p for p, _ in each], 1), torch.stack([g for _, g in each], 1))


def value_and_gradient(policy: Policy, value: Float[Tensor, "K"]) -> ValueAndGradient:
    """A number of each replica and its gradient, (K,) and (K, D), from its graph. Replicas never mix, so one pass."""
    gradients = torch.autograd.grad(value.sum(), list(policy.parameters()), materialize_grads=True)
    return ValueAndGradient(value.detach(), torch.cat([g.flatten(1) for g in gradients], dim=1))


def completions(policy: Policy, targets: Int[Tensor, "P"]) -> Completions:
    """Every completion and its log-probability at every target; with gradient.

    Raises: UsageError where the whole trees exceed the memory limit.
    """
    refuse_what_is_too_large(policy, targets.tolist(), prune=False)
    task, P = policy.task, len(targets)
    levels = prefix_levels(task, targets, prune=False)
    ended, logprobs = [], []
    for t, states in enumerate(expand(policy, targets, levels)):
        logprob = (states.logprob.unsqueeze(1) + states.log_pi).unflatten(2, (P, -1))  # (K, V, P, n)
        if task.variable_length:
            ended.append(padded(task, counting(task, t)))
            logprobs.append(logprob[:, task.eos])
    ended.append(counting(task, task.seq_len))
    logprobs.append(logprob[:, : task.digits].permute(0, 2, 3, 1).flatten(2))
    tokens = torch.cat(ended)
    return Completions(tokens, task.mask(tokens), torch.cat(logprobs, dim=2))


def counting(task: DigitSum, t: int) -> Int[Tensor, "N t"]:
    """Every row of t digits, in counting order."""
    powers = task.digits ** torch.arange(t - 1, -1, -1)
    return torch.arange(task.digits**t).unsqueeze(1) // powers % task.digits


def padded(task: DigitSum, prefixes: Int[Tensor, "N t"], token: int | None = None) -> Int[Tensor, "N T"]:
    """Fill up to L tokens, with EOS if nothing else is said."""
    fill = task.eos if token is None else token
    return torch.nn.functional.pad(prefixes, (0, task.seq_len - prefixes.shape[1]), value=fill)
