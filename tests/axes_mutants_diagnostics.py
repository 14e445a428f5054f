"""Faults planted in the instruments and the warnings, in the form of ``mutants.py`` and run by its runner.

python tests/axes_mutants_diagnostics.py [WORD ...]
"""

import sys

import mutants
from mutants import Mutant

DIAGNOSTICS, WATCH, LOOP = "algorithms/diagnostics.py", "experiment/watch.py", "experiment/loop.py"
INSTRUMENTS, UPDATE = "experiment/instruments.py", "algorithms/update.py"
TESTS = "test_diagnostics.py"

DIAGNOSTIC_MUTANTS = [
    Mutant(
        "many silent groups are always unequal prompts", WATCH, "silent - alike > UNEQUAL", "silent > UNEQUAL", TESTS
    ),
    Mutant("a short run waits for a whole window", WATCH, ">= self.facts.first_look", ">= WINDOW", TESTS),
    Mutant(
        "empty slots of a filter count",
        DIAGNOSTICS,
        "    if valid is None:\n        return x.mean",
        "    if True:\n        return x.mean",
        TESTS,
    ),
    # ---- formulas ----
    Mutant(
        "signal holds the noise of the mean",
        DIAGNOSTICS,
        "torch.stack(squared_mean).sum(0) - noise, ",
        "torch.stack(squared_mean).sum(0), ",
        TESTS,
    ),
    Mutant(
        "noise of a part taken for that of the batch",
        DIAGNOSTICS,
        "torch.stack(S).sum(0) / M",
        "torch.stack(S).sum(0)",
        TESTS,
    ),
    Mutant("microbatches with ddof 0", DIAGNOSTICS, ".sum((1, 2)) / (M - 1))", ".sum((1, 2)) / M)", TESTS),
    Mutant("left-over prompts forgotten", DIAGNOSTICS, "share=M * size / P", "share=1.0", TESTS),
    Mutant("weights of the parts not scaled", DIAGNOSTICS, "cut(weights) * (P / size)", "cut(weights)", TESTS, "A1"),
    Mutant(
        "parts see the whole gradient through old numbers", DIAGNOSTICS, ".repeat_interleave(M))", ".repeat(M))", TESTS
    ),
    Mutant("ess without n", DIAGNOSTICS, "(n * w.square()", "(w.square()", TESTS),
    Mutant(
        "ess counts what is masked",
        DIAGNOSTICS,
        "log_w = log_weights.masked_fill(~counted, -torch.inf)",
        "log_w, counted = log_weights, torch.ones_like(counted)",
        TESTS,
        "D3",
    ),
    Mutant(
        "kl with its arguments swapped",
        DIAGNOSTICS,
        "kl_estimate(sampled_by, other, k)",
        "kl_estimate(other, sampled_by, k)",
        TESTS,
        "E3",
    ),
    Mutant(
        "quantiles over padding",
        DIAGNOSTICS,
        "quantiles(ratio.flatten(-3), RATIO_QUANTILES, mask.flatten(-3))",
        "quantiles(ratio.flatten(-3), RATIO_QUANTILES)",
        TESTS,
        "D3",
    ),
    Mutant(
        "ratio upside down",
        DIAGNOSTICS,
        "torch.where(mask, logprobs - old_logprobs, 0).clamp",
        "torch.where(mask, old_logprobs - logprobs, 0).clamp",
        TESTS,
        "C5",
    ),
    Mutant(
        "explained variance is an explained second moment",
        DIAGNOSTICS,
        "(both - both.mean(-1, keepdim=True)).square()",
        "both.square()",
        TESTS,
    ),
    Mutant(
        "explained variance of equal returns",
        DIAGNOSTICS,
        "torch.where(total > 0, 1 - left / total, torch.nan)",
        "1 - left / (total + 1e-5)",
        TESTS,
    ),
    Mutant(
        "critic held against r and not the reward to go",
        DIAGNOSTICS,
        "paid, mask = reward_to_go(batch.token_rewards, batch.mask), batch.mask",
        "paid, mask = batch.token_rewards, batch.mask",
        TESTS,
        "G2",
    ),
    Mutant(
        "lengths of right and wrong swapped",
        DIAGNOSTICS,
        "torch.stack([success, ~success])",
        "torch.stack([~success, success])",
        TESTS,
    ),
    Mutant("what a filter took out is an answer", DIAGNOSTICS, "(of & (length > 0)).sum", "of.sum", TESTS, "A3"),
    Mutant(
        "group std with ddof 0",
        DIAGNOSTICS,
        "(rewards.shape[-1] - 1)).sqrt()",
        "rewards.shape[-1]).sqrt()",
        TESTS,
        "B9",
    ),
    Mutant("std of equal rewards is a residue", DIAGNOSTICS, ".sqrt().masked_fill(equal, 0)", ".sqrt()", TESTS, "B5"),
    Mutant(
        "smallest group without the solved ones",
        DIAGNOSTICS,
        "G * math.log1p(-q)) - q**G",
        "G * math.log1p(-q))",
        TESTS,
        "B8",
    ),
    # ---- where they are read ----
    Mutant(
        "ratio of a fresh step is reported",
        UPDATE,
        "step_metrics(part, logprobs, moved=moved)",
        "step_metrics(part, logprobs, moved=True)",
        TESTS,
    ),
    Mutant(
        "ratio of the first step, not the last",
        UPDATE,
        "step_metrics(part, logprobs,",
        "step_metrics(part, batch.logprobs,",
        TESTS,
        "C4",
    ),
    Mutant(
        "ess of old weights where another policy sampled",
        DIAGNOSTICS,
        "came_from = sampler if sampler is not None else old if moved else None",
        "came_from = old if moved else None",
        TESTS,
    ),
    Mutant(
        "a reading leaves its gradient behind",
        DIAGNOSTICS,
        "each = replicas_of(policy, torch.arange(policy.replicas).repeat_interleave(M))",
        "each = replicas_of(policy, torch.arange(policy.replicas).repeat_interleave(M))\n"
        "    for p in policy.parameters():\n        p.grad = torch.ones_like(p)",
        TESTS,
    ),
    Mutant(
        "a reading changes the advantage",
        INSTRUMENTS,
        "        return A\n",
        "        return A * (1 + 1e-15) + 1e-15\n",
        TESTS,
    ),
    Mutant(
        "exact values of the first replica for all",
        INSTRUMENTS,
        ".gather(1, place)",
        "[:1].expand(len(place), -1).gather(1, place)",
        TESTS,
    ),
    Mutant(
        "readings one step late",
        LOOP,
        "progress.step % instruments_every == 0",
        "(progress.step + 1) % instruments_every == 0",
        TESTS,
    ),
    Mutant("undefined values are written", LOOP, "if x == x or name not in MAY_BE_UNDEFINED", "if True", TESTS),
    # ---- warnings ----
    Mutant("solved groups are a failure", WATCH, "silent >= SILENT and p < SOLVED", "silent >= SILENT", TESTS),
    Mutant("a warning is said again and again", WATCH, "if kind not in known}", "}", TESTS),
    Mutant("ratios of one are warned of on fresh data", WATCH, "facts.stale and low and", "low and", TESTS, "C1"),
    Mutant("collapse by nats and not by tokens", WATCH, "math.exp(H) <= COLLAPSED", "H <= COLLAPSED", TESTS),
    Mutant(
        "signal to noise is a mean of ratios over few readings",
        WATCH,
        "len(signal) < FEW_READINGS or not",
        "not",
        TESTS,
    ),
    Mutant("an empty batch is a collapse", WATCH, 'if row.get("length") != 0]', "]", TESTS),
    Mutant(
        "a filter may draw one batch", WATCH, "config.most_rollouts_per_step if", "config.rollouts_per_step if", TESTS
    ),
]

if __name__ == "__main__":
    mutants.MUTANTS[:] = DIAGNOSTIC_MUTANTS
    sys.exit(mutants.main(sys.argv[1:]))
