"""Advantages in plain Python, on nested lists of one replica, sharing no code with ``src/``."""

import itertools
import math
import statistics

flatten = itertools.chain.from_iterable


def spread(numbers, ddof):
    return 0.0 if len(set(numbers)) < 2 else (statistics.stdev(numbers) if ddof == 1 else statistics.pstdev(numbers))


def batch_scaled(groups, ddof=1, eps=1e-4):
    """Groups of one or none are allowed: what is alone gets 0."""
    std = spread(list(flatten(groups)), ddof)
    return [
        [(r - statistics.fmean(row)) / (std + eps) if len(row) > 1 and len(set(row)) > 1 else 0.0 for r in row]
        for row in groups
    ]


def optimal_constant(groups, norms, leave_own_out=False):
    places = [(p, g) for p, row in enumerate(groups) for g in range(len(row))]
    A = [[0.0] * len(row) for row in groups]
    for p, g in places:
        used = [at for at in places if not leave_own_out or at != (p, g)]
        weights = [norms[i][j] for i, j in used]
        if not used or len({groups[i][j] for i, j in places}) == 1:
            continue
        if not any(weights):
            weights = [1.0] * len(used)
        b = math.fsum(x * groups[i][j] for x, (i, j) in zip(weights, used, strict=True)) / math.fsum(weights)
        A[p][g] = groups[p][g] - b
    return A


def kept(mask):
    return [t for t, m in enumerate(mask) if m]


def reward_to_go(rewards, mask, gamma=1.0):
    """Of one completion."""
    steps, G = kept(mask), [0.0] * len(rewards)
    for i, t in enumerate(steps):
        G[t] = math.fsum(gamma ** (j - i) * rewards[steps[j]] for j in range(i, len(steps)))
    return G


def gae(rewards, values, mask, gamma, lam, bootstrap=0.0):
    """Of one completion, as a double sum."""
    steps, A = kept(mask), [0.0] * len(rewards)
    V = [values[t] for t in steps] + [bootstrap]
    delta = [rewards[t] + gamma * V[i + 1] - V[i] for i, t in enumerate(steps)]
    for i, t in enumerate(steps):
        A[t] = math.fsum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(steps)))
    return A


def at_last_token(reward, mask):
    out = [0.0] * len(mask)
    if any(mask):
        out[kept(mask)[-1]] = reward
    return out


def whiten(A, mask, ddof=1, eps=1e-8, floor=False):
    """A and mask as [P][G][T]."""
    counted = [a for row, m in zip(flatten(A), flatten(mask), strict=True) for a, x in zip(row, m, strict=True) if x]
    if len(set(counted)) < 2:
        return [[[0.0] * len(row) for row in group] for group in A]
    mean, var = statistics.fmean(counted), spread(counted, ddof) ** 2
    scale = math.sqrt(max(var, eps) if floor else var + eps)
    return [
        [[(a - mean) / scale if x else 0.0 for a, x in zip(row, m, strict=True)] for row, m in zip(*both, strict=True)]
        for both in zip(A, mask, strict=True)
    ]


def over_tokens(groups, mask):
    """A number per completion, at each of its tokens."""
    return [[[a] * len(m) for a, m in zip(*both, strict=True)] for both in zip(groups, mask, strict=True)]


def prompt_weights(ps, G, advantage):
    """w of each prompt, E[A | r = 1] - E[A | r = 0], from every batch of Bernoulli rewards; advantage of [P][G]."""
    w = [0.0] * len(ps)
    for flat in itertools.product([0.0, 1.0], repeat=len(ps) * G):
        rows = [list(flat[p * G : (p + 1) * G]) for p in range(len(ps))]
        chance = math.prod(q if r else 1 - q for row, q in zip(rows, ps, strict=True) for r in row)
        A = advantage(rows)
        for p, q in enumerate(ps):
            w[p] += chance * A[p][0] * (1 / q if rows[p][0] else -1 / (1 - q))
    return w
