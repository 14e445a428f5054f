"""Faults planted in the sampling axis and the trust region, in the form of ``mutants.py`` and run by its runner.

python tests/axes_mutants_sampling.py [WORD ...]
"""

import sys

import mutants
from mutants import Mutant

POLICY, SAMPLING, TRUST_REGION = "policy.py", "algorithms/sampling.py", "algorithms/trust_region.py"
S_TESTS, T_TESTS = "test_sampling.py", "test_trust_region.py"

SAMPLING_MUTANTS = [
    # ---- temperature and nucleus ----
    Mutant(
        "logits times the temperature",
        POLICY,
        "logits = logits / self.temperature",
        "logits = logits * self.temperature",
        S_TESTS,
        "F1",
    ),
    Mutant(
        "temperature on the sampler's side only",
        POLICY,
        "token_scores(states, self.head_weight, self.head_bias, by_step, self.temperature)",
        "token_scores(states, self.head_weight, self.head_bias, by_step)",
        S_TESTS,
        "F1, F2",
    ),
    Mutant(
        "temperature on the trainer's side only",
        POLICY,
        "return self.log_softmax(torch.baddbmm(self.head_bias.mT, self.head_weight.mT, hidden.mT))",
        "return torch.baddbmm(self.head_bias.mT, self.head_weight.mT, hidden.mT).log_softmax(1)",
        S_TESTS,
        "F1, F2",
    ),
    Mutant(
        "the nucleus is not renormalised",
        POLICY,
        "self.top_p), -torch.inf).log_softmax(1)",
        "self.top_p), -torch.inf)",
        S_TESTS,
    ),
    Mutant(
        "the token that reaches top_p is left out",
        POLICY,
        "(ranked.cumsum(1)[:, :-1], (0, 0, 1, 0))",
        "(ranked.cumsum(1)[:, 1:], (0, 0, 1, 0))",
        S_TESTS,
    ),
    Mutant("one token more than reaches top_p", POLICY, "before < top_p", "before <= top_p", S_TESTS),
    Mutant(
        "of equals the last token first",
        POLICY,
        "ranked, order = pi.sort(dim=1, descending=True, stable=True)",
        "ranked, order = (x.flip(1) for x in pi.sort(dim=1, stable=True))",
        S_TESTS,
    ),
    Mutant(
        "the nucleus is of the first tokens",
        POLICY,
        ".scatter(1, order, before < top_p)",
        ".copy_(before < top_p)",
        S_TESTS,
    ),
    Mutant(
        "0 log 0 is NaN",
        POLICY,
        "log_pi.clamp(min=torch.finfo(log_pi.dtype).min)",
        "log_pi",
        S_TESTS,
    ),
    Mutant(
        "distributions after the token",
        POLICY,
        "for read in tokens.flatten(1, 2).unbind(-1)[:-1]:",
        "for read in tokens.flatten(1, 2).unbind(-1)[1:]:",
        S_TESTS,
        "D1",
    ),
    Mutant(
        "distributions of tiled prompts",
        POLICY,
        ".unsqueeze(2).expand(-1, -1, groups[1], -1).flatten(1, 2)",
        ".unsqueeze(1).expand(-1, groups[1], -1, -1).flatten(1, 2)",
        S_TESTS,
        "B1",
    ),
    # ---- another sampler ----
    Mutant("a copy that follows", SAMPLING, "copy.deepcopy(policy).requires_grad_(False)", "policy", S_TESTS),
    Mutant("a copy is not rounded", SAMPLING, "p.copy_(p.to(dtype).to(p.dtype))", "p.copy_(p)", S_TESTS),
    Mutant(
        "tokens of the policy itself",
        SAMPLING,
        "tokens = sampler.sample(targets, group_size, generator)",
        "tokens = policy.sample(targets, group_size, generator)",
        S_TESTS,
    ),
    Mutant(
        "the sampler's log-probabilities are the policy's",
        SAMPLING,
        "sampler_logprobs, _ = sampler.score(targets, tokens)",
        "sampler_logprobs, _ = policy.score(targets, tokens)",
        S_TESTS,
        "C4",
    ),
    # ---- stale data ----
    Mutant(
        "old log-probabilities from present weights",
        SAMPLING,
        "batch._replace(old_logprobs=batch.sampler_logprobs)",
        "batch._replace(old_logprobs=batch.logprobs.detach())",
        S_TESTS,
        "C4",
    ),
    Mutant(
        "no denominator at all",
        SAMPLING,
        "return batch._replace(old_logprobs=batch.sampler_logprobs)",
        "return batch",
        S_TESTS,
        "C4",
    ),
    Mutant("data one update younger", SAMPLING, "range(age + 1 if age else 0)", "range(age)", S_TESTS),
    Mutant(
        "the present policy samples",
        SAMPLING,
        "sampled_by(self._kept[0], policy",
        "sampled_by(self._kept[-1], policy",
        S_TESTS,
    ),
    Mutant(
        "the past does not move on",
        SAMPLING,
        "self._kept = [*others, oldest]",
        "self._kept = [oldest, *others]",
        S_TESTS,
    ),
    Mutant(
        "a past without its oldest",
        SAMPLING,
        "for i, kept in enumerate(self._kept) for",
        "for i, kept in enumerate(self._kept[1:]) for",
        S_TESTS,
    ),
    # ---- dynamic sampling ----
    Mutant(
        "a batch of no prompts is drawn",
        SAMPLING,
        "one(prompts=prompts, group_size=group_size, attempts",
        "one(group_size=group_size, attempts",
        S_TESTS,
    ),
    Mutant("every attempt draws the same", SAMPLING, "each.jumped(attempt)", "each.jumped(1)", S_TESTS),
    Mutant(
        "attempts go on with the generator",
        SAMPLING,
        "draw(policy, _branch(generator, attempt), prompts",
        "draw(policy, generator, prompts",
        S_TESTS,
    ),
    Mutant(
        "uninformative groups first",
        SAMPLING,
        "argsort(dim=1, descending=True, stable=True)",
        "argsort(dim=1, descending=False, stable=True)",
        S_TESTS,
    ),
    Mutant(
        "the last informative groups",
        SAMPLING,
        "_chosen(_joined(batch, more), first), found.gather(1, first)",
        "_chosen(_joined(batch, more), first.flip(1)), found.gather(1, first.flip(1))",
        S_TESTS,
    ),
    Mutant(
        "all that is drawn is valid",
        SAMPLING,
        "valid=valid if batch.valid is None else valid & batch.valid",
        "valid=torch.ones_like(valid)",
        S_TESTS,
    ),
    Mutant("what others drew is counted", SAMPLING, "drawn = drawn + ~found.all(-1)", "drawn = drawn + 1", S_TESTS),
    Mutant(
        "completions counted as prompts",
        SAMPLING,
        "drawn * prompts * group_size",
        "drawn * prompts",
        S_TESTS,
    ),
    Mutant(
        "sampling carries a graph",
        SAMPLING,
        "    with torch.no_grad():\n        batch = draw",
        "    with torch.enable_grad():\n        batch = draw",
        S_TESTS,
    ),
    Mutant(
        "the choice is the first replica's",
        SAMPLING,
        "x[k, which]",
        "x[k, which[:1]]",
        S_TESTS,
    ),
    Mutant(
        "only groups with a success inform",
        SAMPLING,
        "return r.amax(-1) > r.amin(-1)",
        "return r.amax(-1) > 0",
        S_TESTS,
    ),
    Mutant(
        "informative in spite of what does not count",
        SAMPLING,
        "if batch.valid is None:\n        return",
        "if True:\n        return",
        S_TESTS,
    ),
    Mutant(
        "the chance loses its digits",
        SAMPLING,
        "-torch.expm1(group_size * torch.log1p(-q))",
        "1 - (1 - q) ** group_size",
        S_TESTS,
        "B8",
    ),
    Mutant("solved groups count as informative", SAMPLING, " - q**group_size)", ")", S_TESTS, "B8"),
    # ---- norms of scores ----
    Mutant(
        "norms of the first replica's parameters",
        SAMPLING,
        "nn.Parameter(p.detach()[of])",
        "nn.Parameter(p.detach()[0 * of])",
        S_TESTS,
    ),
    Mutant("norms, not squared", SAMPLING, "for g in s]).sum(0))", "for g in s]).sum(0).sqrt())", S_TESTS),
    Mutant(
        "prompts of norms tiled",
        SAMPLING,
        "targets.repeat_interleave(G, dim=1)",
        "targets.repeat(1, G)",
        S_TESTS,
        "B1",
    ),
    # ---- the trust region ----
    Mutant("a step down", TRUST_REGION, "b = -_flat(", "b = _flat(", T_TESTS),
    Mutant(
        "Fisher matrix without probabilities", TRUST_REGION, "log_pi.detach().exp() * (mask", "1.0 * (mask", T_TESTS
    ),
    Mutant(
        "Fisher matrix of all tokens, masked or not",
        TRUST_REGION,
        "(mask / _sequences(mask)",
        "(torch.ones_like(mask) / _sequences(mask)",
        T_TESTS,
        "D2",
    ),
    Mutant(
        "a mean over tokens",
        TRUST_REGION,
        "mask.any(-1).sum((-2, -1)).clamp(min=1)",
        "mask.sum((-3, -2, -1)).clamp(min=1)",
        T_TESTS,
        "A5",
    ),
    Mutant(
        "masked rows in the denominator",
        TRUST_REGION,
        "mask.any(-1).sum((-2, -1))",
        "mask.any(-1).ge(0).sum((-2, -1))",
        T_TESTS,
        "A3",
    ),
    Mutant("damping is forgotten", TRUST_REGION, "lambda v: F(v) + damping * v,", "lambda v: F(v),", T_TESTS),
    Mutant("the length is not damped", TRUST_REGION, "(F(x) + damping * x)", "F(x)", T_TESTS),
    Mutant("the length misses a factor of 2", TRUST_REGION, "(2 * max_kl / ", "(max_kl / ", T_TESTS),
    Mutant(
        "the bound is not looked at", TRUST_REGION, "(kl <= max_kl) & (improvement > 0)", "improvement > 0", T_TESTS
    ),
    Mutant(
        "the surrogate is not looked at", TRUST_REGION, "(kl <= max_kl) & (improvement > 0)", "kl <= max_kl", T_TESTS
    ),
    Mutant(
        "KL with its arguments swapped",
        TRUST_REGION,
        "old.exp() * (old - new)",
        "new.exp() * (new - old)",
        T_TESTS,
        "E3",
    ),
    Mutant(
        "KL is not masked",
        TRUST_REGION,
        "torch.where(mask, per_action.sum(-1), 0)",
        "per_action.sum(-1)",
        T_TESTS,
        "D2",
    ),
    Mutant(
        "0 times infinity in the KL",
        TRUST_REGION,
        "torch.where(old > -torch.inf, old.exp() * (old - new), 0)",
        "old.exp() * (old - new)",
        T_TESTS,
    ),
    Mutant(
        "replicas that are done go on halving",
        TRUST_REGION,
        "fraction = torch.where(done, fraction, fraction / 2)",
        "fraction = fraction / 2",
        T_TESTS,
    ),
    Mutant(
        "a step that fails is made all the same",
        TRUST_REGION,
        "    fraction = torch.where(done, fraction, 0)\n",
        "",
        T_TESTS,
    ),
    Mutant("one halving less", TRUST_REGION, "range(backtracks + 1)", "range(max(backtracks, 1))", T_TESTS),
    Mutant(
        "shrinks by another factor",
        TRUST_REGION,
        "torch.where(done, fraction, fraction / 2)",
        "torch.where(done, fraction, fraction / 4)",
        T_TESTS,
    ),
    Mutant(
        "what stays is rounded, or NaN",
        TRUST_REGION,
        "torch.where(fraction > 0, start + fraction * step, start)",
        "start + fraction * step",
        T_TESTS,
    ),
    Mutant(
        "a NaN gradient is let in",
        TRUST_REGION,
        "b = torch.where(b.isfinite().all(-1, keepdim=True), b, 0)",
        "b = torch.where(b.isfinite().all(), b, 0)",
        T_TESTS,
    ),
    Mutant(
        "the denominator is forgotten",
        TRUST_REGION,
        "1.0 if batch.old_logprobs is None else",
        "1.0 if True else",
        T_TESTS,
        "C4",
    ),
    Mutant(
        "what is not valid improves the surrogate",
        TRUST_REGION,
        "batch.mask if batch.valid is None else",
        "batch.mask if True else",
        T_TESTS,
    ),
    # ---- conjugate gradients ----
    Mutant(
        "directions are not conjugate",
        TRUST_REGION,
        "r + (squared / before).unsqueeze(-1) * p",
        "r",
        T_TESTS,
    ),
    Mutant(
        "the inverse of the ratio of residuals",
        TRUST_REGION,
        "(squared / before).unsqueeze(-1)",
        "(before / squared).unsqueeze(-1)",
        T_TESTS,
    ),
    Mutant(
        "the tolerance is absolute",
        TRUST_REGION,
        "goal = tolerance**2 * squared",
        "goal = tolerance**2 + 0 * squared",
        T_TESTS,
    ),
    Mutant(
        "the tolerance is of the square",
        TRUST_REGION,
        "goal = tolerance**2 * squared",
        "goal = tolerance * squared",
        T_TESTS,
    ),
    Mutant(
        "replicas that are done iterate on",
        TRUST_REGION,
        "active = (active & (curvature > 0)).unsqueeze(-1)",
        "active = (curvature == curvature).unsqueeze(-1)",
        T_TESTS,
    ),
    Mutant(
        "a negative curvature is followed",
        TRUST_REGION,
        "(active & (curvature > 0))",
        "(active & (curvature != 0))",
        T_TESTS,
    ),
    Mutant(
        "the residual is not relative",
        TRUST_REGION,
        "(squared / size).sqrt()",
        "squared.sqrt()",
        T_TESTS,
    ),
]

if __name__ == "__main__":
    mutants.MUTANTS[:] = SAMPLING_MUTANTS
    sys.exit(mutants.main(sys.argv[1:]))
