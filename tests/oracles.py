"""Truth by enumeration: plain Python loops over ``itertools.product``, sharing no code with ``src/``.

Of a task only its fields are read (never its methods), of a policy only the numbers in its parameters; the GRU is
``torch.nn.GRUCell``. Everything is in float64, one prompt and one completion at a time. ``test_oracles.py`` tests it.
"""

import contextlib
import functools
import itertools
import math
import statistics

import jaxtyping
import torch

from pgprog.policy import PROMPT_WIDTH as WIDTH  # a number, as those in the parameters

HALFWAY = 0.3


def close(actual, expected, rtol=1e-12, atol=1e-14):
    """Equal as numbers, shape and dtype to rounding; NaN equals nothing."""
    if not isinstance(expected, torch.Tensor):
        expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=rtol, atol=atol)


def same(actual, expected):
    """Equal bit for bit; NaN equals NaN."""
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=0, atol=0, equal_nan=True)


@contextlib.contextmanager
def as_users_run_it():
    """Without the shape annotations that tests enforce: what a function says for itself."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


# ---- the task ----


def tokens_to_choose_from(task):
    return task.digits + 1 if task.variable_length else task.digits


def largest_target(task):
    return (task.digits - 1) * task.seq_len


def content(task, tokens):
    """The digits before EOS."""
    digits = []
    for token in tokens:
        if task.variable_length and token == task.digits:
            break
        digits.append(token)
    return digits


def length(task, tokens):
    """How many tokens count: the digits, and the EOS that ends them early."""
    n = len(content(task, tokens))
    return n + 1 if n < len(tokens) else n


def all_sequences(task):
    """Every row of tokens, whatever stands after EOS included."""
    return list(itertools.product(range(tokens_to_choose_from(task)), repeat=task.seq_len))


def completions(task):
    """Every completion once: after EOS, EOS."""
    return [s for s in all_sequences(task) if all(token == task.digits for token in s[length(task, s) :])]


def success(task, target, tokens):
    return sum(content(task, tokens)) == target


def reachable(task, target, prefix):
    """Whether any way to go on from these digits ends at the target."""
    left = task.seq_len - len(prefix)
    lengths = range(left + 1) if task.variable_length else [left]
    return any(
        sum(prefix) + sum(rest) == target for n in lengths for rest in itertools.product(range(task.digits), repeat=n)
    )


def potential(task, target, tokens, t):
    """Phi after t tokens of the completion."""
    if t == length(task, tokens):
        return float(success(task, target, tokens))
    return float(reachable(task, target, list(tokens[:t])))


def token_rewards(task, target, tokens):
    """What each token is paid, by the words of the task."""
    n = length(task, tokens)
    rewards = [0.0] * len(tokens)
    if task.reward_form == "potential":
        for t in range(n):
            rewards[t] = potential(task, target, tokens, t + 1) - potential(task, target, tokens, t)
        return rewards
    if success(task, target, tokens):
        rewards[n - 1] = 1.0
    if task.reward_form == "halfway":
        for t in range(n):
            if sum(content(task, tokens[: t + 1])) > target / 2:
                rewards[t] += HALFWAY
                break
    return rewards


def reward(task, target, tokens):
    return sum(token_rewards(task, target, tokens))


def prompt(task, target):
    """The tokens that precede a completion."""
    bos = tokens_to_choose_from(task)
    if task.prompt_form == "state":
        return [bos]
    written = []
    largest = largest_target(task)
    while largest:
        target, digit = divmod(target, task.digits)
        written.insert(0, digit)
        largest //= task.digits
    return [*written, bos]


# ---- the policy and the critic, one replica ----


def weights(module, k=0):
    """Replica k's parameters, as leaves."""
    return {name: p[k].detach().clone().requires_grad_() for name, p in module.named_parameters()}


@functools.cache
def gru_cell(inputs, hidden):
    return torch.nn.GRUCell(inputs, hidden, dtype=torch.float64)


def read(w, token, hidden):
    """One step of torch.nn.GRUCell."""
    table = w["input_gates"]
    one_hot = torch.tensor([float(i == token) for i in range(len(table))], dtype=torch.float64)
    state = {
        "weight_ih": table.T,
        "weight_hh": w["recurrent_weight"].T,
        "bias_ih": torch.zeros(table.shape[1], dtype=torch.float64),
        "bias_hh": w["recurrent_bias"][0],
    }
    return torch.func.functional_call(gru_cell(len(table), len(hidden)), state, (one_hot, hidden))


def features(task, target):
    return [math.exp(-((target - c) ** 2) / (2 * WIDTH**2)) for c in range(largest_target(task) + 1)]


def first_state(w, task, target):
    """The state before the first token of a completion."""
    if task.prompt_form == "state":
        hidden = torch.tanh(
            w["prompt_bias"][0]
            + sum(f * row for f, row in zip(features(task, target), w["prompt_weight"], strict=True))
        )
    else:
        hidden = torch.zeros(len(w["recurrent_weight"]), dtype=torch.float64)
    for token in prompt(task, target):
        hidden = read(w, token, hidden)
    return hidden


def next_token(w, hidden):
    """The log-probabilities of the next token."""
    logits = hidden @ w["head_weight"] + w["head_bias"][0]
    return logits - logits.exp().sum().log()


def score(w, task, target, tokens):
    """The log-probability and the entropy at each token that counts, as lists."""
    hidden = first_state(w, task, target)
    logprobs, entropies = [], []
    for t in range(length(task, tokens)):
        log_pi = next_token(w, hidden)
        logprobs.append(log_pi[tokens[t]])
        entropies.append(-sum(log_p.exp() * log_p for log_p in log_pi))
        hidden = read(w, tokens[t], hidden)
    return logprobs, entropies


def log_pi(w, task, target, tokens):
    return sum(score(w, task, target, tokens)[0])


def probabilities(w, task, target):
    """pi of every completion, in the order of ``completions``; no gradient."""
    with torch.no_grad():
        return [math.exp(log_pi(w, task, target, tokens)) for tokens in completions(task)]


def expected_reward(w, task, target):
    """J of one prompt."""
    return sum(log_pi(w, task, target, tokens).exp() * reward(task, target, tokens) for tokens in completions(task))


def success_probability(w, task, target):
    return sum(log_pi(w, task, target, tokens).exp() for tokens in completions(task) if success(task, target, tokens))


def value(w, task, target):
    """The critic's V of one prompt."""
    hidden = torch.tanh(
        w["hidden_bias"][0] + sum(f * row for f, row in zip(features(task, target), w["hidden_weight"], strict=True))
    )
    return hidden @ w["value_weight"].flatten() + w["value_bias"].flatten()[0]


def gradient(scalar, w):
    """d scalar / d w as one vector, in the order of the parameters."""
    grads = torch.autograd.grad(scalar, list(w.values()), allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(w.values(), grads, strict=True)]
    )


# ---- advantages of one group, as lists ----


def centred(rewards):
    return [r - statistics.fmean(rewards) for r in rewards]


def leave_one_out(rewards):
    return [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]


def z_score(rewards, ddof=1, eps=0.0):
    if len(set(rewards)) == 1:
        return [0.0 for _ in rewards]
    std = statistics.stdev(rewards) if ddof == 1 else statistics.pstdev(rewards)
    return [(r - statistics.fmean(rewards)) / (std + eps) for r in rewards]


def binary_weight(p, group_size, advantage):
    """w(p) = E[A | r = 1] - E[A | r = 0], the others of the group being Bernoulli(p)."""
    w = 0.0
    for n in range(group_size):
        chance = math.comb(group_size - 1, n) * p**n * (1 - p) ** (group_size - 1 - n)
        others = [1.0] * n + [0.0] * (group_size - 1 - n)
        w += chance * (advantage([1.0, *others])[0] - advantage([0.0, *others])[0])
    return w


# ---- losses of one replica, as nested lists [p][g][t] ----


def token_weight(mask, aggregation, length=None):
    """What each token counts, by the words of the aggregation."""
    prompts, group = len(mask), len(mask[0])
    lengths = [[sum(row) for row in rows] for rows in mask]
    total = sum(sum(row) for row in lengths)

    def share(p, g):
        return {
            "sequence_sum": lambda: 1 / (prompts * group),
            "sequence_mean": lambda: 1 / lengths[p][g] / (prompts * group),
            "token_mean": lambda: 1 / total,
            "prompt_token_mean": lambda: 1 / sum(lengths[p]) / prompts,
            "constant_length": lambda: 1 / length / (prompts * group),
        }[aggregation]()

    return [[[share(p, g) if m else 0.0 for m in row] for g, row in enumerate(rows)] for p, rows in enumerate(mask)]


def clipped_objective(log_ratio, a, low, high, dual=None, limit=None):
    """The objective, its slope in the log-ratio, and whether a clip has taken that slope; branch by branch."""
    if limit is not None and abs(log_ratio) > limit:
        still, _, lost = clipped_objective(math.copysign(limit, log_ratio), a, low, high, dual)
        return still, 0.0, lost
    ratio = math.exp(log_ratio)
    if a > 0 and ratio > 1 + high:
        return (1 + high) * a, 0.0, True
    if a < 0 and ratio < 1 - low:
        return (1 - low) * a, 0.0, True
    if a < 0 and dual is not None and ratio > dual:
        return dual * a, 0.0, True
    return ratio * a, ratio * a, False


def clipped_surrogate(logprobs, old, a, mask, weights, level, **bounds):
    """Loss, its gradient, clip fraction, and the ratios that are not masked; ``a`` is [p][g] or [p][g][t]."""
    loss, slopes, lost, ratios = 0.0, [[[0.0 for _ in row] for row in rows] for rows in mask], [], []
    for p, rows in enumerate(mask):
        for g, row in enumerate(rows):
            kept = [t for t, m in enumerate(row) if m]
            log_ratios = {t: logprobs[p][g][t] - old[p][g][t] for t in kept}
            for t in kept:
                advantage = a[p][g][t] if isinstance(a[p][g], list) else a[p][g]
                scale = {"token": 1.0, "sequence": 1.0, "sequence_mean": 1 / len(kept)}[level]
                log_ratio = log_ratios[t] if level == "token" else scale * sum(log_ratios.values())
                objective, slope, clipped = clipped_objective(log_ratio, advantage, **bounds)
                loss -= weights[p][g][t] * objective
                for moved in [t] if level == "token" else kept:
                    slopes[p][g][moved] -= weights[p][g][t] * slope * scale
                if level == "token" or t == kept[0]:
                    lost.append(clipped)
                    ratios.append(math.exp(log_ratio))
    return loss, slopes, sum(lost) / max(len(lost), 1), ratios


def kl_term(estimator, logp, ref, old):
    """A KL estimate of one token and its slope in logp."""
    log_ratio = logp - ref
    k3, k3_slope = math.exp(-log_ratio) - 1 + log_ratio, 1 - math.exp(-log_ratio)
    ratio = math.exp(logp - old)
    return {
        "k1": (log_ratio, 1.0),
        "k2": (log_ratio**2 / 2, log_ratio),
        "k3": (k3, k3_slope),
        "k3_ratio": (ratio * k3, ratio * (k3 + k3_slope)),
    }[estimator]


def mismatch_weight(old, sampler, row, level, mode, cap, floor=None):
    """The weights of one sequence's tokens."""
    ratios = [math.exp(o - s) if m else 1.0 for o, s, m in zip(old, sampler, row, strict=True)]
    if level == "sequence":
        ratios = [math.prod(ratios) for _ in ratios]
    weights = []
    for ratio, m in zip(ratios, row, strict=True):
        if mode == "truncate":
            ratio = min(ratio, cap) if floor is None else max(min(ratio, cap), floor)
        elif ratio > cap or (floor is not None and ratio < floor):
            ratio = 0.0
        weights.append(ratio if m else 0.0)
    return weights
