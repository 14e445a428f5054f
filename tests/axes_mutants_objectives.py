"""Faults planted in the axes of ``objectives``, one at a time, in the form of ``mutants.py`` and run by its runner.

python tests/axes_mutants_objectives.py [WORD ...]
"""

import sys

import mutants
from mutants import OBJECTIVES, Mutant

TESTS = "test_objectives.py"


def planted(name: str, old: str, new: str, seen: str = "") -> Mutant:
    return Mutant(name, OBJECTIVES, old, new, TESTS, seen)


OBJECTIVE_MUTANTS: list[Mutant] = [
    # ---- token weights ----
    planted(
        "sequence_sum over what is not masked away",
        "return m / (P * G)",
        "return mask / mask.any(-1).sum((-2, -1), keepdim=True).unsqueeze(-1).clamp(min=1)",
    ),
    planted(
        "sequence_sum over the whole batch of replicas", "return m / (P * G)", "return mask / mask[..., 0].numel()"
    ),
    planted(
        "sequence_mean over the padded width",
        "mask.sum(-1, keepdim=True).clamp(min=1) * (P * G)",
        "(mask.shape[-1] * P * G)",
        "A3",
    ),
    planted(
        "sequence_mean is NaN where a row is masked",
        "mask.sum(-1, keepdim=True).clamp(min=1) * (P * G)",
        "mask.sum(-1, keepdim=True) * (P * G)",
        "A3",
    ),
    planted(
        "sequence_mean forgets the sequences",
        "mask.sum(-1, keepdim=True).clamp(min=1) * (P * G)",
        "mask.sum(-1, keepdim=True).clamp(min=1)",
        "A2",
    ),
    planted(
        "token_mean over all replicas",
        "mask.sum((-3, -2, -1), keepdim=True).clamp(min=1)",
        "mask.sum().clamp(min=1)",
    ),
    planted(
        "token_mean counts what is masked",
        "mask.sum((-3, -2, -1), keepdim=True).clamp(min=1)",
        "mask[0].numel()",
        "A3, G5",
    ),
    planted(
        "token_mean per prompt, not divided by prompts",
        "mask.sum((-3, -2, -1), keepdim=True).clamp(min=1)",
        "mask.sum((-2, -1), keepdim=True).clamp(min=1)",
        "A1",
    ),
    planted(
        "token_mean of nothing is NaN",
        "mask.sum((-3, -2, -1), keepdim=True).clamp(min=1)",
        "mask.sum((-3, -2, -1), keepdim=True)",
        "A3",
    ),
    planted(
        "prompt_token_mean of nothing is NaN",
        "mask.sum((-2, -1), keepdim=True).clamp(min=1) * P",
        "mask.sum((-2, -1), keepdim=True) * P",
        "A3",
    ),
    planted(
        "prompt_token_mean is the batch's",
        "m / (mask.sum((-2, -1), keepdim=True).clamp(min=1) * P)",
        "mask / mask.sum((-3, -2, -1), keepdim=True).max().clamp(min=1)",
        "A5, A7",
    ),
    planted("constant_length is a sum over sequences", "m / (P * G * length)", "mask / length", "M6"),
    planted("constant_length takes the padded width", "m / (P * G * length)", "mask / (P * G * mask.shape[-1])"),
    planted(
        "an unknown aggregation is constant_length", "if aggregation not in get_args", "if False and () in get_args"
    ),
    planted(
        "a length without meaning is ignored",
        '(length is not None) != (aggregation == "constant_length")',
        'length is None and aggregation == "constant_length"',
        "M10",
    ),
    planted("a length of zero", "not 0 < length < math.inf:", "not 0 <= length < math.inf:"),
    # ---- aggregate ----
    planted(
        "NaN where the weight is 0",
        "weights.to(per_token.dtype) * torch.where(weights != 0, per_token, 0)",
        "weights * per_token",
        "D3",
    ),
    planted(
        "NaN weights are silent", "torch.where(weights != 0, per_token, 0)", "torch.where(weights > 0, per_token, 0)"
    ),
    planted(
        "aggregate divides again", "per_token, 0)).sum(-1).sum((-2, -1))", "per_token, 0)).sum(-1).mean((-2, -1))", "A2"
    ),
    planted("weights broadcast", '    _same_shape("values", per_token, weights, "weights")\n', "", "M8"),
    planted("weights may carry a gradient", "if weights.requires_grad:", "if False:", "M9"),
    planted(
        "weights are ignored",
        "    if weights is None:\n        return seq",
        "    if True:\n        return seq",
        "A7, M10",
    ),
    planted(
        "weights count at masked places",
        "aggregate(torch.where(mask, per_token, 0), weights)",
        "aggregate(per_token.expand_as(mask), weights)",
    ),
    planted(
        "weights of the whole batch are made anew from the micro-batch",
        "aggregate(torch.where(mask, per_token, 0), weights)",
        'aggregate(torch.where(mask, per_token, 0), token_weights(mask, "token_mean") * (weights != 0))',
        "A1, M5",
    ),
    # ---- clipped surrogate ----
    planted("low and high swapped", "low, high = clip\n", "high, low = clip\n"),
    planted("high for both sides", "low, high = clip\n", "low = high = clip[1]\n"),
    planted("high may not pass 1", "0 < low <= 1 and 0 < high < math.inf", "0 < low <= 1 and 0 < high < 1"),
    planted("low may pass 1", "0 < low <= 1 and 0 < high < math.inf", "0 < low and 0 < high < math.inf"),
    planted(
        "mean ratio over the padded width",
        "log_ratio / mask.sum(-1, keepdim=True).clamp(min=1)",
        "log_ratio / mask.shape[-1]",
        "C5",
    ),
    planted("mean ratio is the product", 'if ratio_level == "sequence_mean":', "if False:", "C6, A7"),
    planted(
        "dual clip where A > 0 too",
        "torch.where(A < 0, torch.maximum(objective, dual_clip * A), objective)",
        "torch.maximum(objective, dual_clip * A)",
    ),
    planted(
        "dual clip the wrong way",
        "torch.maximum(objective, dual_clip * A)",
        "torch.minimum(objective, dual_clip * A)",
        "M15",
    ),
    planted(
        "dual clip forgets A",
        "torch.maximum(objective, dual_clip * A)",
        "torch.maximum(objective, -dual_clip + 0 * A)",
        "C3",
    ),
    planted("dual clip is not in clip_frac", "        clipped = clipped | ((A < 0) & (ratio > dual_clip))\n", "", "C2"),
    planted("dual clip in clip_frac whatever the sign", "((A < 0) & (ratio > dual_clip))", "(ratio > dual_clip)", "C2"),
    planted(
        "dual clip overflows to NaN",
        "(torch.where(A < 0, log_ratio, capped) if dual_clip is None else capped)",
        "torch.where(A < 0, log_ratio, capped)",
    ),
    planted("dual clip of 1 or less", "not 1 < dual_clip < math.inf", "not 0 < dual_clip < math.inf"),
    planted("the limit is ignored", "if log_ratio_limit is not None:", "if False:", "M10"),
    planted("the limit on one side", "return x.clamp(-limit, limit)", "return x.clamp(max=limit)"),
    planted("a negative limit", "if not 0 < limit < math.inf:", "if not abs(limit) < math.inf:"),
    planted(
        "a sequence counts once per token without weights",
        "_weighted(objective, kept if weights is None else mask, weights)",
        "_weighted(objective.expand_as(mask), mask, weights)",
    ),
    planted(
        "a sequence counts at its first token alone",
        "_weighted(objective, kept if weights is None else mask, weights)",
        "_weighted(objective, kept, weights if weights is None else weights[..., : kept.shape[-1]])",
    ),
    planted("clip_frac of sequences over tokens", "clipped, kept)\n", "clipped, mask)\n"),
    planted("no minimum over all replicas", "amin(tokens).where(some, 1)", "amin().where(some, 1)"),
    planted(
        "extremes over what is masked",
        "torch.where(kept, ratio, -torch.inf)",
        "torch.where(ratio > 0, ratio, -torch.inf)",
    ),
    # ---- cispo ----
    planted(
        "cispo: gradient through the ratio",
        "_log_ratio(logprobs.detach(), old_logprobs, mask).exp()",
        "_log_ratio(logprobs, old_logprobs, mask).exp()",
    ),
    planted(
        "cispo: bounds are distances from 1",
        "ratio.clamp(low, high) * A * logprobs",
        "ratio.clamp(None if low is None else 1 - low, 1 + high) * A * logprobs",
    ),
    planted(
        "cispo: no lower bound at all", "ratio.clamp(low, high) * A * logprobs", "ratio.clamp(max=high) * A * logprobs"
    ),
    planted(
        "cispo: what is clipped loses its gradient",
        "ratio.clamp(low, high) * A * logprobs",
        "ratio.clamp(low, high) * ~clipped * A * logprobs",
    ),
    planted("cispo: clip_frac without low", "(ratio > high) | (ratio < low)", "(ratio > high)"),
    planted(
        "cispo: the value is the ratio's",
        "ratio.clamp(low, high) * A * logprobs",
        "ratio.clamp(low, high) * A * (logprobs - old_logprobs.detach())",
    ),
    # ---- KL ----
    planted(
        "KL(ref || pi)",
        "log_ratio = logprobs - ref_logprobs.detach()",
        "log_ratio = ref_logprobs.detach() - logprobs",
        "E2, E3, M1, M2",
    ),
    planted(
        "k3 with its arguments swapped",
        "torch.expm1((-log_ratio).clamp(max=largest)) + log_ratio",
        "torch.expm1(log_ratio.clamp(max=largest)) - log_ratio",
        "E3, M1",
    ),
    planted(
        "k3 by exp: digits lost",
        "torch.expm1((-log_ratio).clamp(max=largest)) + log_ratio",
        "(-log_ratio).clamp(max=largest).exp() - 1 + log_ratio",
    ),
    planted("k2 without the half", "kl = log_ratio.square() / 2", "kl = log_ratio.square()", "E1"),
    planted("k1 is an absolute value", "kl = log_ratio\n", "kl = log_ratio.abs()\n", "E4"),
    planted("the reference is not detached", "logprobs - ref_logprobs.detach()", "logprobs - ref_logprobs"),
    planted(
        "the ratio of k3_ratio has no gradient",
        "kl = (logprobs - old_logprobs.detach())",
        "kl = (logprobs.detach() - old_logprobs.detach())",
        "E1",
    ),
    planted("the ratio of k3_ratio is ignored", 'if estimator == "k3_ratio":', "if False:", "E1, M10"),
    planted(
        "the old log-probabilities of k3_ratio are today's",
        "kl = (logprobs - old_logprobs.detach())",
        "kl = (logprobs - logprobs.detach())",
        "C4",
    ),
    planted(
        "the old log-probabilities of k3_ratio have a gradient",
        "kl = (logprobs - old_logprobs.detach())",
        "kl = (logprobs - old_logprobs)",
    ),
    planted("k3's limit overflows to NaN", "math.inf if limit is None else MAX_LOG_RATIO", "math.inf"),
    planted("the KL limit is ignored", 'kl if limit is None else _limited(kl, limit, "limit")', "kl", "M10"),
    planted("kl_penalty drops its limit", "old_logprobs, limit=limit), mask", "old_logprobs), mask", "M10"),
    planted(
        "NaN in masked log-probabilities reaches the KL's gradient",
        "logprobs, ref_logprobs = _unmasked(logprobs, mask), _unmasked(ref_logprobs, mask)",
        "ref_logprobs = _unmasked(ref_logprobs, mask)",
        "A3",
    ),
    planted("the KL's weights are dropped", "limit=limit), mask, weights)", "limit=limit), mask, None)", "E5, M10"),
    # ---- mismatch weights ----
    planted(
        "sampler over policy",
        'log_ratio = _log_ratio(old_logprobs.detach(), sampler_logprobs, mask, "sampler_logprobs")',
        'log_ratio = -_log_ratio(old_logprobs.detach(), sampler_logprobs, mask, "sampler_logprobs")',
        "F1",
    ),
    planted(
        "the sequence's ratio is a mean",
        "        log_ratio = log_ratio.sum(-1, keepdim=True)\n",
        "        log_ratio = log_ratio.mean(-1, keepdim=True)\n",
        "C5",
    ),
    planted("mismatch level is ignored", 'if level == "sequence":', "if False:", "A7"),
    planted("mismatch mode is ignored", 'if mode == "truncate":', "if True:", "A7"),
    planted("truncate ignores its floor", "ratio = ratio.clamp(floor, cap)", "ratio = ratio.clamp(max=cap)", "M10"),
    planted("mask ignores its floor", "(ratio >= (floor or 0)) & (ratio <= cap)", "ratio <= cap", "M10"),
    planted(
        "mask caps, too",
        "(ratio >= (floor or 0)) & (ratio <= cap), ratio, 0)",
        "ratio >= (floor or 0), ratio.clamp(max=cap), 0)",
    ),
    planted(
        "mismatch weights carry a gradient",
        "log_ratio = _log_ratio(old_logprobs.detach(), sampler",
        "log_ratio = _log_ratio(old_logprobs, sampler",
        "M9",
    ),
    planted("mismatch weights at masked places", "return torch.where(mask, ratio, 0)", "return ratio.expand_as(mask)"),
    planted("a floor above its cap", "not 0 <= low < high:", "not 0 <= low:"),
    planted("a cap of infinity", "if not 0 < high < math.inf:", "if not 0 < high:"),
    # ---- the value of tokens ----
    planted(
        "NaN in masked values reaches the gradient",
        "error = _unmasked(returns.detach() - values, mask).square()",
        "error = (returns.detach() - values).square()",
        "A3",
    ),
    planted(
        "the value of tokens moves the returns", "returns.detach() - values, mask)", "returns - values, mask)", "G3"
    ),
    planted(
        "half a square", "returns.detach() - values, mask).square()", "returns.detach() - values, mask).square() / 2"
    ),
    planted("returns broadcast", '    _like("returns", returns, values)\n', "", "B10, M8"),
    planted(
        "the value of tokens drops its weights",
        "return token_mean(error, mask) if weights is None else",
        "return token_mean(error, mask) if True else",
        "M10",
    ),
]

if __name__ == "__main__":
    mutants.MUTANTS[:] = OBJECTIVE_MUTANTS
    sys.exit(mutants.main(sys.argv[1:]))
