"""What a prefix is worth, and what a policy is: V, Q, A, J, entropy and KL, exactly.

Prefixes of t digits stand in counting order, N = digits^t of each prompt. Letters as in ``enumeration``.
Rewards are those of the task, outcome or per token; everything carries gradient to the policy.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pgprog.env import DigitSum
from pgprog.exact.enumeration import (
    ValueAndGradient,
    count_prefixes,
    counting,
    expand,
    padded,
    prefix_levels,
    refuse_what_is_too_large,
    success_probabilities,
    value_and_gradient,
)
from pgprog.policy import Policy

PREFIXES_AT_ONCE = 4096


class PrefixValues(NamedTuple):
    """All prefixes of t digits, t being the place in the list that ``prefix_values`` returns; with gradient."""

    logprob: Float[Tensor, "K P N"]
    """log pi(prefix | prompt)."""
    log_pi: Float[Tensor, "K P N V"]
    """log pi(token | prefix)."""
    rewards: Float[Tensor, "P N V"]
    """What the token is paid."""
    V: Float[Tensor, "K P N"]
    Q: Float[Tensor, "K P N V"]
    A: Float[Tensor, "K P N V"]


class Sequential(NamedTuple):
    """A quantity that is a sum over tokens; in nats, with gradient."""

    per_token: Float[Tensor, "K P T"]
    """The expected share of token t; a completion that has ended gives none."""
    whole: Float[Tensor, "K P"]
    """Of the completion: the sum over t."""


def prefix_values(policy: Policy, targets: Int[Tensor, "P"], gamma: float = 1.0) -> list[PrefixValues]:
    """V, Q and A of every prefix of 0 .. L - 1 digits, under the task's rewards; a list over the length.

        Q(s, a) = r(s, a) + gamma V(s a), V of a completion that has ended being 0
        V(s)    = sum over a of pi(a | s) Q(s, a)
        A(s, a) = Q(s, a) - V(s)

    Args:
        gamma: discount per token; 1 gives the return that J is the mean of.

    Source: Sutton & Barto 2018, section 3.5. Raises: UsageError where the whole trees exceed the memory limit.
    Edge: EOS ends a completion, so its Q is its reward; a prefix that is never sampled has values too.
    """
    refuse_what_is_too_large(policy, targets.tolist(), prune=False)
    task, P = policy.task, len(targets)
    levels = prefix_levels(task, targets, prune=False)
    values: list[PrefixValues] = []
    V_next: Tensor | None = None
    for t, states in reversed(list(enumerate(expand(policy, targets, levels)))):
        log_pi = states.log_pi.unflatten(2, (P, -1)).permute(0, 2, 3, 1)
        rewards = token_rewards(task, targets, t, log_pi.dtype)
        Q = rewards.expand_as(log_pi)
        if V_next is not None:
            follows = V_next.unflatten(2, (-1, task.digits))
            Q = Q + gamma * torch.nn.functional.pad(follows, (0, task.vocab_size - task.digits))
        V = V_next = (log_pi.exp() * Q).sum(-1)
        logprob = states.logprob.unflatten(1, (P, -1))
        values.insert(0, PrefixValues(logprob, log_pi, rewards, V, Q, Q - V.unsqueeze(-1)))
    return values


def token_rewards(task: DigitSum, targets: Int[Tensor, "P"], t: int, dtype: torch.dtype) -> Float[Tensor, "P N V"]:
    """What every token after every prefix of t digits is paid; no gradient.

    A reward depends on nothing that comes later, so each pair of prefix and token is scored in one completion of it.
    """
    prefixes = counting(task, t)
    token = torch.arange(task.vocab_size)
    rows = torch.cat([prefixes.repeat_interleave(len(token), 0), token.repeat(len(prefixes)).unsqueeze(1)], dim=1)
    tokens = padded(task, rows, task.eos if task.variable_length else 0)
    rewards = task.process_rewards(targets, tokens.expand(len(targets), -1, -1), dtype)[..., t]
    return rewards.unflatten(1, (-1, len(token)))


def expected_return(policy: Policy, targets: Int[Tensor, "P"]) -> Float[Tensor, "K P"]:
    """J(T) = E[sum of the rewards | T], with gradient: V of the empty prefix at gamma = 1."""
    return prefix_values(policy, targets)[0].V[..., 0]


def objective_gradient(policy: Policy) -> ValueAndGradient:
    """J and grad J, (K,) and (K, D), over the task's own distribution of targets; J(T) of many targets at a time.

        J = sum over T of P(T) J(T),        J(T) = p(T) with the outcome reward, else V(T)

    Raises: UsageError where the tree of one target exceeds the memory limit.
    """
    outcome, weights = policy.task.reward_form == "outcome", policy.task.target_weights().to(policy.head_weight.dtype)
    parts = []
    for targets in _batches(policy.task, prune=outcome):
        J_T = success_probabilities(policy, targets) if outcome else expected_return(policy, targets)
        parts.append(value_and_gradient(policy, J_T @ weights[targets]))
    values, gradients = zip(*parts, strict=True)
    return ValueAndGradient(torch.stack(values).sum(0), torch.stack(gradients).sum(0))


def _batches(task: DigitSum, prune: bool) -> list[Int[Tensor, "P"]]:
    """Targets in order, as many together as have few enough prefixes for the processor's cache."""
    batches: list[list[int]] = [[]]
    size = 0.0
    for target in range(task.max_target + 1):
        prefixes = count_prefixes(task, [target], prune)
        if batches[-1] and size + prefixes > PREFIXES_AT_ONCE:
            batches.append([])
            size = 0.0
        batches[-1].append(target)
        size += prefixes
    return [torch.tensor(batch) for batch in batches]


def entropy(policy: Policy, targets: Int[Tensor, "P"]) -> Sequential:
    """The entropy of the policy's completions, with gradient.

    H(pi) = - E[log pi(y)] = sum_t E[H(pi(. | s_t))]
    """
    refuse_what_is_too_large(policy, targets.tolist(), prune=False)
    levels = prefix_levels(policy.task, targets, prune=False)
    parts = [
        _expected(states.logprob, -(states.log_pi.exp() * states.log_pi).sum(1), len(targets))
        for states in expand(policy, targets, levels)
    ]
    return _sequential(parts)


def kl(policy: Policy, other: Policy, targets: Int[Tensor, "P"]) -> Sequential:
    """KL(policy || other) of completions: the first argument samples; with gradient to both.

        KL(pi || ref) = E_pi[log pi(y) - log ref(y)] = sum_t E_pi[KL(pi(. | s_t) || ref(. | s_t))]

    Raises: ValueError where the two are policies of different tasks, or of different numbers of replicas.
    """
    if policy.task != other.task or policy.replicas != other.replicas:
        raise ValueError(
            f"KL between policies of {policy.task} and {other.task}, {policy.replicas} and {other.replicas} replicas: "
            "both must be the same"
        )
    refuse_what_is_too_large(policy, targets.tolist(), prune=False, copies=2)
    levels = prefix_levels(policy.task, targets, prune=False)
    pairs = zip(expand(policy, targets, levels), expand(other, targets, levels), strict=True)
    parts = [
        _expected(pi.logprob, (pi.log_pi.exp() * (pi.log_pi - ref.log_pi)).sum(1), len(targets)) for pi, ref in pairs
    ]
    return _sequential(parts)


def _expected(logprob: Float[Tensor, "K N"], per_prefix: Float[Tensor, "K N"], P: int) -> Float[Tensor, "K P"]:
    """The sum over the prefixes of each prompt, weighted by the probability to come there."""
    return (logprob.exp() * per_prefix).unflatten(1, (P, -1)).sum(-1)


def _sequential(parts: list[Tensor]) -> Sequential:
    per_token = torch.stack(parts, dim=-1)
    return Sequential(per_token, per_token.sum(-1))
