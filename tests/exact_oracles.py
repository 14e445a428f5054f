"""Truth for ``exact``: plain loops over completions and groups, sharing no code with ``src/``; on ``oracles``."""

import itertools
import math

import torch

import oracles


def starts(task, prefix):
    """Completions that begin with these digits, as rows of tokens."""
    n = len(prefix)
    return [y for y in oracles.completions(task) if y[:n] == tuple(prefix)]


def prefix_logprob(w, task, target, prefix):
    hidden, total = oracles.first_state(w, task, target), 0.0
    for token in prefix:
        total = total + oracles.next_token(w, hidden)[token]
        hidden = oracles.read(w, token, hidden)
    return total


def discounted_return(task, target, tokens, start, gamma):
    """sum over t >= start of gamma^(t - start) r_t."""
    rewards = oracles.token_rewards(task, target, tokens)
    return sum(gamma ** (t - start) * r for t, r in enumerate(rewards) if t >= start)


def value_of(w, task, target, prefix, gamma):
    """E[discounted return from here | prefix], over every completion that goes on from it; no Bellman equation."""
    logs = [(oracles.log_pi(w, task, target, y).item(), y) for y in starts(task, prefix)]
    mass = math.fsum(math.exp(log) for log, _ in logs)
    t = len(prefix)
    return math.fsum(math.exp(log) * discounted_return(task, target, y, t, gamma) for log, y in logs) / mass


def entropy_of(w, task, target):
    """-sum pi log pi over whole completions."""
    return -sum(oracles.log_pi(w, task, target, y).exp() * oracles.log_pi(w, task, target, y) for y in all_of(task))


def kl_of(w, v, task, target):
    return sum(
        oracles.log_pi(w, task, target, y).exp()
        * (oracles.log_pi(w, task, target, y) - oracles.log_pi(v, task, target, y))
        for y in all_of(task)
    )


def all_of(task):
    return oracles.completions(task)


def scores(w, task, target):
    """grad log pi of every completion, (Y, D), in the order of ``oracles.completions``."""
    return torch.stack([oracles.gradient(oracles.log_pi(w, task, target, y), w) for y in all_of(task)])


def groups(probabilities, size):
    """Every group of outcomes, by index, with its probability."""
    for group in itertools.product(range(len(probabilities)), repeat=size):
        yield group, math.prod(probabilities[i] for i in group)


def moments(weighted):
    """Mean and covariance of (probability, vector) pairs."""
    weighted = list(weighted)
    mean = sum(p * g for p, g in weighted)
    second = sum(p * torch.outer(g, g) for p, g in weighted)
    return mean, second - torch.outer(mean, mean)
