"""Truth for ``exact/recipes``: every batch by plain loops, coefficients of tokens' scores by hand; on ``oracles``.

A gradient is sum over tokens of c s, s = grad log pi(token | prefix) by autograd, c a number: what the formula of the
paper gives when it is differentiated on paper. Nothing of ``src`` is called.
"""

import itertools
import math
import statistics

import torch

import oracles


def prefix_value(w, task, target, tokens):
    """V of each prefix of a completion, by its critic."""
    hidden, values = oracles.first_state(w, task, target), []
    for token in tokens[: oracles.length(task, tokens)]:
        values.append((hidden @ w["value_weight"].flatten() + w["value_bias"].flatten()[0]).item())
        hidden = oracles.read(w, token, hidden)
    return values


class Tables:
    """What a completion y of a prompt T is, by (T, y): lists over its tokens, and the scores."""

    def __init__(self, problem):
        self.task = task = problem.policy.task
        self.targets, self.ys = problem.targets.tolist(), oracles.completions(task)
        now, old, ref = (oracles.weights(p) for p in (problem.policy, problem.old, problem.reference))
        critic, prefix = oracles.weights(problem.critic), oracles.weights(problem.prefix_critic)
        self.now, self.old, self.ref, self.values, self.place, scores = {}, {}, {}, {}, {}, []
        self.reward, self.V = {}, {T: oracles.value(critic, task, T).item() for T in self.targets}
        for T, y in itertools.product(sorted(set(self.targets)), self.ys):
            logprobs = oracles.score(now, task, T, y)[0]
            self.place[T, y] = range(len(scores), len(scores) + len(logprobs))
            scores += [oracles.gradient(logprob, now) for logprob in self._separate(now, T, y)]
            self.now[T, y] = [x.item() for x in logprobs]
            self.old[T, y] = [x.item() for x in oracles.score(old, task, T, y)[0]]
            self.ref[T, y] = [x.item() for x in oracles.score(ref, task, T, y)[0]]
            self.values[T, y] = prefix_value(prefix, task, T, y)
            self.reward[T, y] = float(oracles.success(task, T, y))
        self.scores = torch.stack(scores)

    def _separate(self, w, T, y):
        """A graph for each token, for autograd frees it."""
        return [oracles.score(w, self.task, T, y)[0][t] for t in range(oracles.length(self.task, y))]

    def moments(self, coefficients, size, stale=False):
        """Mean and covariance over every batch of ``size`` completions of each prompt."""
        sampler = self.old if stale else self.now
        owners = [T for T in self.targets for _ in range(size)]
        mean, second = torch.zeros(len(self.scores)), torch.zeros(len(self.scores), len(self.scores))
        for ys in itertools.product(self.ys, repeat=len(owners)):
            batch = list(zip(owners, ys, strict=True))
            chance = math.exp(sum(sum(sampler[key]) for key in batch))
            c = torch.zeros(len(self.scores))
            for key, row in zip(batch, coefficients(self, batch, stale), strict=True):
                for place, x in zip(self.place[key], row, strict=True):
                    c[place] += x
            mean, second = mean + chance * c, second + chance * torch.outer(c, c)
        E, S = mean @ self.scores, self.scores
        return E, S.T @ second @ S - torch.outer(E, E)


# ---- pieces ----


def ratios(tables, key, stale):
    old = tables.old[key] if stale else tables.now[key]
    return [math.exp(a - b) for a, b in zip(tables.now[key], old, strict=True)]


def slope(ratio, a, low, high):
    """d min(ratio a, clip(ratio) a) / d log pi."""
    return 0.0 if (a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - low) else ratio * a


def lengths(tables, batch):
    return [len(tables.now[key]) for key in batch]


def by_group(rewards, size, advantage):
    return [a for i in range(0, len(rewards), size) for a in advantage(rewards[i : i + size])]


def rewards_to_go(paid):
    return [sum(paid[t:]) for t in range(len(paid))]


def whitened(rows, eps=1e-8):
    flat = [x for row in rows for x in row]
    mean = statistics.fmean(flat)
    var = sum((x - mean) ** 2 for x in flat) / (len(flat) - 1)
    return [[0.0 if var == 0 else (x - mean) / math.sqrt(var + eps) for x in row] for row in rows]


def clipped_tokens(tables, batch, rows, stale, low=0.2, high=0.2):
    """A clipped ratio of each token, a mean over all tokens of the batch."""
    total = sum(lengths(tables, batch))
    return [
        [slope(ratio, a, low, high) / total for ratio, a in zip(ratios(tables, key, stale), row, strict=True)]
        for key, row in zip(batch, rows, strict=True)
    ]


def per_token(tables, batch, A):
    return [[a] * len(tables.now[key]) for key, a in zip(batch, A, strict=True)]


def paid_less_kl(tables, key, coef, stale):
    """The outcome at the last token, less coef k1 of each: the present policy's, as it is what scores."""
    paid = [-coef * (a - b) for a, b in zip(tables.now[key], tables.ref[key], strict=True)]
    paid[-1] += tables.reward[key]
    return paid


# ---- recipes, P = 2 prompts; those of groups with G = 2 ----


def vpg(tables, batch, stale):
    return [[tables.reward[key] / len(batch)] * n for key, n in zip(batch, lengths(tables, batch), strict=True)]


def ppo(tables, batch, stale):
    A = oracles.z_score([tables.reward[key] - tables.V[key[0]] for key in batch], eps=1e-8)
    rows = per_token(tables, batch, A)
    return [
        [slope(ratio, a, 0.2, 0.2) / len(batch) for ratio, a in zip(ratios(tables, key, stale), row, strict=True)]
        for key, row in zip(batch, rows, strict=True)
    ]


def ppo_gae(tables, batch, stale, lam=0.95):
    rows = []
    for key in batch:
        V, paid, after, row = tables.values[key], [0.0] * len(tables.now[key]), 0.0, []
        paid[-1] = tables.reward[key]
        for t in reversed(range(len(V))):
            delta = paid[t] + (V[t + 1] if t + 1 < len(V) else 0.0) - V[t]
            after = delta + lam * after
            row.insert(0, after)
        rows.append(row)
    return clipped_tokens(tables, batch, whitened(rows), stale)


def reinforce_plus_plus(tables, batch, stale):
    rows = [rewards_to_go(paid_less_kl(tables, key, 0.01, stale)) for key in batch]
    return clipped_tokens(tables, batch, whitened(rows), stale)


def z_scores(tables, batch, eps):
    return by_group([tables.reward[key] for key in batch], 2, lambda r: oracles.z_score(r, eps=eps))


def trl_grpo(tables, batch, stale):
    return clipped_tokens(tables, batch, per_token(tables, batch, z_scores(tables, batch, 1e-4)), stale)


def dapo(tables, batch, stale):
    return clipped_tokens(tables, batch, per_token(tables, batch, z_scores(tables, batch, 1e-6)), stale, high=0.28)


def grpo_kl(tables, batch, stale):
    """1 / |o| of the clipped ratio, less 0.04 (1 - ref / pi), the slope of k3."""
    rows = []
    for key, a in zip(batch, z_scores(tables, batch, 1e-6), strict=True):
        share = 1 / len(batch) / len(tables.now[key])
        k3 = [1 - math.exp(r - p) for p, r in zip(tables.now[key], tables.ref[key], strict=True)]
        gains = [slope(ratio, a, 0.2, 0.2) for ratio in ratios(tables, key, stale)]
        rows.append([share * (gain - 0.04 * x) for gain, x in zip(gains, k3, strict=True)])
    return rows


def gspo(tables, batch, stale):
    """One ratio per sequence, the geometric mean: its slope is 1 / |o| at each token."""
    rows = []
    for key, a in zip(batch, z_scores(tables, batch, 1e-6), strict=True):
        n = len(tables.now[key])
        ratio = math.prod(ratios(tables, key, stale)) ** (1 / n)
        rows.append([slope(ratio, a, 3e-4, 4e-4) / n / len(batch)] * n)
    return rows


def cispo(tables, batch, stale):
    total = sum(lengths(tables, batch))
    A = z_scores(tables, batch, 1e-6)
    return [
        [min(ratio, 5.0) * a / total for ratio in ratios(tables, key, stale)] for key, a in zip(batch, A, strict=True)
    ]


def openrlhf_rloo(tables, batch, stale):
    """The baseline is of the reward alone; each token is charged for the KL from it on."""
    A = by_group([tables.reward[key] for key in batch], 2, oracles.leave_one_out)
    rows = []
    for key, a in zip(batch, A, strict=True):
        charge = [-0.01 * (p - r) for p, r in zip(tables.now[key], tables.ref[key], strict=True)]
        rows.append([a + x for x in rewards_to_go(charge)])
    return clipped_tokens(tables, batch, rows, stale)


def trl_rloo(tables, batch, stale):
    """The KL in the reward before the baseline; the product of the ratios, clipped as one."""
    r = [
        tables.reward[key] - 0.05 * sum(p - q for p, q in zip(tables.now[key], tables.ref[key], strict=True))
        for key in batch
    ]
    rows = []
    for key, a in zip(batch, by_group(r, 2, oracles.leave_one_out), strict=True):
        ratio = math.prod(ratios(tables, key, stale))
        rows.append([slope(ratio, a, 0.2, 0.2) / len(batch)] * len(tables.now[key]))
    return rows


RECIPES = {
    "vpg": vpg,
    "ppo": ppo,
    "ppo_gae": ppo_gae,
    "reinforce_plus_plus": reinforce_plus_plus,
    "trl:grpo": trl_grpo,
    "grpo_kl": grpo_kl,
    "gspo": gspo,
    "cispo": cispo,
    "openrlhf:rloo": openrlhf_rloo,
    "trl:rloo": trl_rloo,
}


def filtered(tables, coefficients, size, stale):
    """E[g | all groups informative], P prompts drawn alike and drawn again until they are; P = 2, by every batch."""
    sampler = tables.old if stale else tables.now
    mean, second, total = torch.zeros(len(tables.scores)), torch.zeros(len(tables.scores), len(tables.scores)), 0.0
    for owners in itertools.product(tables.targets, repeat=2):
        for ys in itertools.product(tables.ys, repeat=2 * size):
            batch = [(owners[i // size], y) for i, y in enumerate(ys)]
            r = [tables.reward[key] for key in batch]
            if any(len(set(r[i : i + size])) == 1 for i in (0, size)):
                continue
            chance = math.exp(sum(sum(sampler[key]) for key in batch))
            total += chance
            c = torch.zeros(len(tables.scores))
            for key, row in zip(batch, coefficients(tables, batch, stale), strict=True):
                for place, x in zip(tables.place[key], row, strict=True):
                    c[place] += x
            mean, second = mean + chance * c, second + chance * torch.outer(c, c)
    E, S = mean @ tables.scores / total, tables.scores
    return E, S.T @ (second / total) @ S - torch.outer(E, E)
