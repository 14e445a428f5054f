"""Faults planted one at a time: each must turn a test red, or the suite proves nothing.

    python tests/mutants.py [WORD ...]        all of them, or those whose name holds one of the words

Each mutant is one patch of a copy of ``src``; the tree itself is never touched. The suite must be green on the
unpatched copy. Most of them are kinds of faults that public code has had: ``seen`` says which (M: found in published
code, A scale and aggregation, B groups and advantages, C ratio and clip, D masks and shifts, E KL, F sampler, G
critic). Exits 1 if one survives, does not apply, or breaks the import.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 2


class Mutant(NamedTuple):
    name: str
    file: str  # in src/pgprog
    old: str  # occurs once
    new: str
    test: str  # the file of tests that must go red
    seen: str = ""


ADVANTAGES, OBJECTIVES, UPDATE, DIAGNOSTICS = (
    f"algorithms/{name}.py" for name in ("advantages", "objectives", "update", "diagnostics")
)
SUM_MEAN = "_unmasked(per_token, mask).sum(-1).mean((-2, -1))"

MUTANTS = [
    # ---- advantages ----
    Mutant(
        "rloo baseline holds the sample itself",
        ADVANTAGES,
        "sum(-1, keepdim=True) - r) / (n - 1).clamp(min=1)",
        "sum(-1, keepdim=True)) / n.clamp(min=1)",
        "test_ladder.py",
        "B11",
    ),
    Mutant(
        "rloo divides by all",
        ADVANTAGES,
        "- r) / (n - 1).clamp(min=1)",
        "- r) / n.clamp(min=1)",
        "test_ladder.py",
        "B9",
    ),
    Mutant(
        "grpo ddof 0",
        ADVANTAGES,
        "ddof: int = 1, eps: float = 1e-6",
        "ddof: int = 0, eps: float = 1e-6",
        "test_ladder.py",
        "B9",
    ),
    Mutant("grpo eps of another library", ADVANTAGES, "eps: float = 1e-6", "eps: float = 1e-4", "test_ladder.py"),
    Mutant(
        "ppo ddof ignored", ADVANTAGES, "(n - ddof).clamp(min=1)", "(n - 1).clamp(min=1)", "test_advantages.py", "M9"
    ),
    Mutant(
        "grpo takes the statistics of the batch",
        ADVANTAGES,
        "_z_score(r, valid, (-1,), ddof, eps)",
        "_z_score(r, valid, (-2, -1), ddof, eps)",
        "test_ladder.py",
        "B4",
    ),
    Mutant(
        "standardize takes the statistics of the group",
        ADVANTAGES,
        "_z_score(a, valid, (-2, -1), ddof, eps)",
        "_z_score(a, valid, (-1,), ddof, eps)",
        "test_ladder.py",
        "B4",
    ),
    Mutant("batch mean is the mean of the group", ADVANTAGES, "batch = (-2, -1)", "batch = (-1,)", "test_ladder.py"),
    Mutant(
        "batch mean over all replicas",
        ADVANTAGES,
        "batch = (-2, -1)",
        "batch = tuple(range(-rewards.dim(), 0))",
        "test_ladder.py",
    ),
    Mutant(
        "eps inside the root",
        ADVANTAGES,
        "centred / (std + eps)",
        "centred / (std.square() + eps).sqrt()",
        "test_advantages.py",
    ),
    Mutant(
        "whitening adds the mean again",
        ADVANTAGES,
        "centred / (std + eps), 0)",
        "centred / (std + eps) + _mean(r, valid, dims), 0)",
        "test_advantages.py",
        "M3",
    ),
    Mutant(
        "z-score of equal rewards is a residue over eps",
        ADVANTAGES,
        "r = _from_smallest(r, valid, dims)",
        "r = torch.where(valid, r, 0)",
        "test_advantages.py",
        "B5",
    ),
    Mutant(
        "rloo of equal rewards is a residue",
        ADVANTAGES,
        "r = _from_smallest(r, valid, (-1,))",
        "r = torch.where(valid, r, 0)",
        "test_advantages.py",
        "B5",
    ),
    Mutant(
        "batch mean of equal rewards is a residue",
        ADVANTAGES,
        "r = _from_smallest(r, valid, batch)",
        "r = torch.where(valid, r, 0)",
        "test_advantages.py",
        "B5",
    ),
    Mutant(
        "a group of one passes",
        ADVANTAGES,
        "rewards.shape[-1] < 2",
        "rewards.shape[-1] < 1",
        "test_advantages.py",
        "M4, B6",
    ),
    Mutant(
        "values broadcast over the batch",
        ADVANTAGES,
        "if values.shape != rewards.shape[:-1]:",
        "if False:",
        "test_advantages.py",
        "M8, B10",
    ),
    Mutant(
        "values not detached",
        ADVANTAGES,
        "values.detach().unsqueeze(-1)",
        "values.unsqueeze(-1)",
        "test_advantages.py",
        "M9, G3",
    ),
    Mutant(
        "what is invalid enters the mean's denominator",
        ADVANTAGES,
        "valid.sum(dims, keepdim=True).clamp(min=1)",
        "torch.ones_like(valid).sum(dims, keepdim=True)",
        "test_advantages.py",
        "A3",
    ),
    Mutant(
        "what is invalid enters the std's denominator",
        ADVANTAGES,
        "(n - ddof).clamp(min=1)",
        "(torch.ones_like(valid).sum(dims, keepdim=True) - ddof)",
        "test_advantages.py",
        "A3",
    ),
    Mutant(
        "what is invalid enters the smallest",
        ADVANTAGES,
        "torch.where(valid, r, torch.inf).amin",
        "torch.where(valid, r, 0).amin",
        "test_advantages.py",
    ),
    Mutant(
        "NaN goes unmarked",
        ADVANTAGES,
        "if finite and not rewards.isfinite().all():",
        "if False:",
        "test_advantages.py",
    ),
    Mutant(
        "every row its own group",
        ADVANTAGES,
        "groups.setdefault(group, [])",
        "groups.setdefault(len(groups), [])",
        "test_advantages.py",
        "B3",
    ),
    Mutant(
        "unscorable rewards count as 0",
        ADVANTAGES,
        'float("nan") if reward is None',
        "0.0 if reward is None",
        "test_advantages.py",
    ),
    # ---- objectives ----
    Mutant(
        "policy gradient descends",
        OBJECTIVES,
        "return -_weighted(logprobs",
        "return _weighted(logprobs",
        "test_ladder.py",
    ),
    Mutant(
        "each sequence is divided by its length",
        OBJECTIVES,
        SUM_MEAN,
        "(torch.where(mask, per_token, 0).sum(-1) / mask.sum(-1).clamp(min=1)).mean((-2, -1))",
        "test_ladder.py",
        "M6, M14, A6",
    ),
    Mutant(
        "mean over the tokens of the batch",
        OBJECTIVES,
        SUM_MEAN,
        "torch.where(mask, per_token, 0).sum((-3, -2, -1)) / mask.sum((-3, -2, -1)).clamp(min=1)",
        "test_ladder.py",
        "A5",
    ),
    Mutant(
        "each sequence is divided by T",
        OBJECTIVES,
        SUM_MEAN,
        SUM_MEAN.replace(".sum(-1)", ".mean(-1)"),
        "test_ladder.py",
        "A2",
    ),
    Mutant(
        "mean over sequences that are not masked away",
        OBJECTIVES,
        SUM_MEAN,
        "torch.where(mask, per_token, 0).sum((-3, -2, -1)) / mask.any(-1).sum((-2, -1)).clamp(min=1)",
        "test_objectives.py",
    ),
    Mutant(
        "loss is a mean over replicas",
        OBJECTIVES,
        SUM_MEAN,
        SUM_MEAN + " / max(1, mask.shape[0] * (mask.dim() > 3))",
        "test_objectives.py",
    ),
    Mutant(
        "mask ignored in the sum", OBJECTIVES, SUM_MEAN, "per_token.sum(-1).mean((-2, -1))", "test_objectives.py", "D2"
    ),
    Mutant(
        "mask shifted", OBJECTIVES, SUM_MEAN, SUM_MEAN.replace("mask)", "mask.roll(1, -1))"), "test_ladder.py", "D1"
    ),
    Mutant(
        "mask multiplied: NaN comes through",
        OBJECTIVES,
        SUM_MEAN,
        "(per_token * mask).sum(-1).mean((-2, -1))",
        "test_objectives.py",
        "A3",
    ),
    Mutant(
        "masked tokens in the denominator",
        OBJECTIVES,
        "mask.sum(tokens).clamp(min=1)",
        "torch.ones_like(mask).sum(tokens)",
        "test_update.py",
        "A3, G5",
    ),
    Mutant(
        "everything masked is NaN",
        OBJECTIVES,
        "mask.sum(tokens).clamp(min=1)",
        "mask.sum(tokens)",
        "test_objectives.py",
        "A3",
    ),
    Mutant(
        "clip: min and max swapped",
        OBJECTIVES,
        "torch.minimum(ratio",
        "torch.maximum(ratio",
        "test_objectives.py",
        "M15",
    ),
    Mutant(
        "clip: min before A",
        OBJECTIVES,
        "torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)",
        "torch.minimum(ratio, ratio.clamp(1 - low, 1 + high)) * A",
        "test_objectives.py",
        "C3",
    ),
    Mutant(
        "clip: no min",
        OBJECTIVES,
        "torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)",
        "ratio.clamp(1 - low, 1 + high) * A",
        "test_objectives.py",
    ),
    Mutant(
        "clip: one side only",
        OBJECTIVES,
        "ratio.clamp(1 - low, 1 + high) * A",
        "ratio.clamp(max=1 + high) * A",
        "test_objectives.py",
    ),
    Mutant(
        "ratio old over new",
        OBJECTIVES,
        "logprobs - other.detach(), mask)",
        "other.detach() - logprobs, mask)",
        "test_objectives.py",
    ),
    Mutant(
        "old log-probabilities not detached",
        OBJECTIVES,
        "logprobs - other.detach(), mask)",
        "logprobs - other, mask)",
        "test_objectives.py",
    ),
    Mutant(
        "clipped objective ascends",
        OBJECTIVES,
        "loss = -_weighted(objective",
        "loss = _weighted(objective",
        "test_ladder.py",
    ),
    Mutant(
        "clip fraction inverted",
        OBJECTIVES,
        "((A > 0) & (ratio > 1 + high)) | ((A < 0) & (ratio < 1 - low))",
        "((A < 0) & (ratio > 1 + high)) | ((A > 0) & (ratio < 1 - low))",
        "test_objectives.py",
        "C2",
    ),
    Mutant(
        "clip fraction without the sign of A",
        OBJECTIVES,
        "((A > 0) & (ratio > 1 + high)) | ((A < 0) & (ratio < 1 - low))",
        "(ratio > 1 + high) | (ratio < 1 - low)",
        "test_objectives.py",
        "C2",
    ),
    Mutant(
        "clip fraction over masked tokens too",
        OBJECTIVES,
        "kept.sum(tokens).clamp(min=1)",
        "torch.ones_like(kept).sum(tokens)",
        "test_objectives.py",
        "A3",
    ),
    Mutant(
        "sequence ratio is a mean",
        OBJECTIVES,
        "log_ratio.sum(-1, keepdim=True), A",
        "log_ratio.mean(-1, keepdim=True), A",
        "test_objectives.py",
        "C5, C6",
    ),
    Mutant(
        "masked tokens move the sequence ratio",
        OBJECTIVES,
        "_unmasked(logprobs - other.detach(), mask)",
        "logprobs - other.detach()",
        "test_objectives.py",
        "C5",
    ),
    Mutant(
        "advantage may carry a gradient",
        OBJECTIVES,
        "if advantages.requires_grad:",
        "if False:",
        "test_objectives.py",
        "M9, G3",
    ),
    Mutant(
        "value loss broadcasts",
        OBJECTIVES,
        "if values.shape != rewards.shape[:-1]:",
        "if False:",
        "test_objectives.py",
        "M8",
    ),
    Mutant("value loss is a sum", OBJECTIVES, ".square().mean((-2, -1))", ".square().sum((-2, -1))", "test_ladder.py"),
    Mutant(
        "value loss moves the rewards, not the values",
        OBJECTIVES,
        "rewards.detach() - values.unsqueeze(-1)",
        "rewards - values.detach().unsqueeze(-1)",
        "test_objectives.py",
        "G3",
    ),
    # ---- update ----
    Mutant(
        "advantage not detached",
        UPDATE,
        "A = advantage(batch).detach()",
        "A = advantage(batch)",
        "test_update.py",
        "G3",
    ),
    Mutant("loss averaged over replicas", UPDATE, ".sum().backward()", ".mean().backward()", "test_ladder.py", "A2"),
    Mutant(
        "old log-probabilities recomputed",
        UPDATE,
        "objective(logprobs, part, A_part, weights)",
        "objective(logprobs, part._replace(old_logprobs=logprobs.detach()), A_part, weights)",
        "test_ladder.py",
        "C4",
    ),
    Mutant(
        "entropy is punished",
        UPDATE,
        "surrogate.loss - entropy_coef",
        "surrogate.loss + entropy_coef",
        "test_ladder.py",
        "G5",
    ),
    Mutant(
        "entropy is a mean over tokens",
        UPDATE,
        "bonus = sequence_sum_mean(",
        "bonus = token_mean(",
        "test_ladder.py",
        "M13, G5",
    ),
    Mutant(
        "clip of gradients over all replicas together",
        UPDATE,
        "max_norm / norm.clamp(min=max_norm)",
        "max_norm / norm.norm().expand_as(norm).clamp(min=max_norm)",
        "test_update.py",
    ),
    Mutant(
        "small gradients are scaled up",
        UPDATE,
        "max_norm / norm.clamp(min=max_norm)",
        "max_norm / norm",
        "test_update.py",
    ),
    Mutant(
        "critic's values carry a gradient",
        UPDATE,
        "batch._replace(values=values.detach().clone())",
        "batch._replace(values=values)",
        "test_update.py",
        "G3",
    ),
    Mutant(
        "an advantage in place changes what the critic learns",
        UPDATE,
        "batch._replace(values=values.detach().clone())",
        "batch._replace(values=values.detach())",
        "test_update.py",
    ),
    Mutant(
        "critic's gradient is in the norm",
        UPDATE,
        "clip_grad_norm(policy.parameters(), max_grad_norm)",
        "clip_grad_norm([*policy.parameters(), *([critic.hidden_weight] if critic else [])], max_grad_norm)",
        "test_update.py",
    ),
    Mutant("gradients pile up", UPDATE, "optimizer.zero_grad()", "pass", "test_update.py", "A2"),
    Mutant(
        "bound of gradients not passed on",
        "algorithms/rloo.py",
        "max_grad_norm=max_grad_norm,",
        "max_grad_norm=1.0,",
        "test_ladder.py",
        "M10",
    ),
    Mutant(
        "all right and all wrong by the wrong quantifier",
        DIAGNOSTICS,
        "~success.any(-1), success.all(-1)",
        "~success.all(-1), success.any(-1)",
        "test_update.py",
    ),
    Mutant(
        "equal rewards by the batch",
        DIAGNOSTICS,
        "rewards.amax(-1) == rewards.amin(-1)",
        "(rewards.amax((-2, -1)) == rewards.amin((-2, -1)))[..., None].expand(rewards.shape[:-1])",
        "test_update.py",
        "B7",
    ),
    Mutant(
        "entropy metric over padding too",
        DIAGNOSTICS,
        "token_mean(batch.entropies, batch.mask)",
        "batch.entropies.mean((-3, -2, -1))",
        "test_update.py",
        "D3, G5",
    ),
    Mutant(
        "length counts padding",
        DIAGNOSTICS,
        "batch.mask.sum(-1).to(A.dtype)",
        "torch.ones_like(batch.mask).sum(-1).to(A.dtype)",
        "test_update.py",
        "D2",
    ),
    Mutant("negative advantages count as none", DIAGNOSTICS, "= A, A == 0", "= A, A <= 0", "test_update.py"),
    # ---- the ladder ----
    Mutant(
        "ppo without its z-score",
        "algorithms/ppo.py",
        "return standardize(raw_advantage(batch))",
        "return raw_advantage(batch)",
        "test_ladder.py",
    ),
    Mutant("ppo's epochs not passed on", "algorithms/ppo.py", "epochs=epochs,", "epochs=1,", "test_ladder.py", "M10"),
    Mutant(
        "ppo's clip not passed on",
        "algorithms/ppo.py",
        "partial(clipped, clip=clip,",
        "partial(clipped, clip=0.2,",
        "test_ladder.py",
        "M10",
    ),
    Mutant(
        "ppo's ratio level not passed on",
        "algorithms/ppo.py",
        "partial(clipped, clip=clip, ratio_level=ratio_level)",
        'partial(clipped, clip=clip, ratio_level="token")',
        "test_ladder.py",
        "M10, A7",
    ),
    Mutant(
        "grpo's entropy bonus not passed on",
        "algorithms/grpo.py",
        "entropy_coef=entropy_coef,",
        "entropy_coef=0.0,",
        "test_ladder.py",
        "M10, E5",
    ),
    Mutant(
        "actor-critic learns from its return",
        "algorithms/actor_critic.py",
        "value_baseline(batch.rewards, batch.values)",
        "batch.rewards",
        "test_ladder.py",
        "G2",
    ),
    # ---- the task ----
    Mutant(
        "EOS is not in the mask",
        "env.py",
        "return (ended == 0) | ((ended == 1) & (tokens == self.eos))",
        "return ended == 0",
        "test_env.py",
        "D2",
    ),
    Mutant(
        "one token of padding is in the mask",
        "env.py",
        "((ended == 1) & (tokens == self.eos))",
        "(ended == 1)",
        "test_env.py",
        "D2",
    ),
    Mutant(
        "digits after EOS count",
        "env.py",
        "counts = self.mask(tokens) & (tokens != self.eos)",
        "counts = tokens != self.eos",
        "test_env.py",
    ),
    Mutant("halfway at half", "env.py", "(2 * sums > goal)", "(2 * sums >= goal)", "test_env.py"),
    Mutant("halfway at every token past half", "env.py", "(past & (past.cumsum(-1) == 1))", "past", "test_env.py"),
    Mutant(
        "potential with the other sign", "env.py", "(phi - before) * mask", "(before - phi) * mask", "test_env.py", "E2"
    ),
    Mutant(
        "potential starts at 0",
        "env.py",
        "torch.ones_like(phi[..., :1])",
        "torch.zeros_like(phi[..., :1])",
        "test_env.py",
    ),
    Mutant(
        "EOS does not end what can be reached",
        "env.py",
        "left = torch.where(last, 0, left)",
        "left = left.expand_as(sums)",
        "test_env.py",
        "G1",
    ),
    Mutant(
        "the largest target is never drawn",
        "env.py",
        "(self.max_target + 1)).long()",
        "self.max_target).long()",
        "test_env.py",
    ),
    Mutant(
        "the largest digit is never in a target",
        "env.py",
        "self.seq_len) * self.digits)",
        "self.seq_len) * (self.digits - 1))",
        "test_env.py",
    ),
    Mutant(
        "targets are written backwards",
        "env.py",
        "in reversed(range(self.target_width))",
        "in range(self.target_width)",
        "test_env.py",
    ),
    # ---- noise ----
    Mutant(
        "replicas share their noise",
        "noise.py",
        "np.stack([bits.random(shape) for bits in self._bits])",
        "np.stack([self._bits[0].random(shape)] * len(self._bits))",
        "test_noise.py",
    ),
    Mutant(
        "noise depends on the place of a replica",
        "noise.py",
        "for seed in self.seeds]",
        "for seed in range(len(self.seeds))]",
        "test_noise.py",
    ),
    Mutant("every step draws the same", "noise.py", "[3] = step", "[3] = 0", "test_noise.py"),
    Mutant("steps overlap", "noise.py", "[3] = step", "[0] = step", "test_noise.py"),
    Mutant("streams are one", "noise.py", "STREAMS[stream]]", "0]", "test_noise.py"),
    Mutant("float32 noise reaches 1", "noise.py", ".clamp_(max=1 - torch.finfo(dtype).eps / 2)", "", "test_noise.py"),
    # ---- the policy ----
    Mutant(
        "score reads the token that it scores",
        "policy.py",
        "tokens.reshape(K, P * G, T)[..., :-1].mT",
        "tokens.reshape(K, P * G, T).roll(-1, -1)[..., :-1].mT",
        "test_policy.py",
        "D1",
    ),
    Mutant(
        "sampler has a temperature",
        "policy.py",
        "cdf = self.log_pi(hidden).exp()",
        "cdf = (self.log_pi(hidden) / 0.7).exp()",
        "test_policy.py",
        "M7, F1",
    ),
    Mutant(
        "sampler takes the two likeliest",
        "policy.py",
        "cdf = self.log_pi(hidden).exp()",
        "cdf = (x := self.log_pi(hidden)).masked_fill(x < x.topk(2, 1).values[:, -1:], -torch.inf).exp()",
        "test_policy.py",
        "M7",
    ),
    Mutant(
        "a token of probability 0 at noise 0",
        "policy.py",
        "(cdf[:, :-1] <= (noise",
        "(cdf[:, :-1] < (noise",
        "test_policy.py",
    ),
    Mutant(
        "one number for all tokens of a completion",
        "policy.py",
        "noise[..., t] * cdf",
        "noise[..., 0] * cdf",
        "test_policy.py",
    ),
    Mutant(
        "no padding after EOS",
        "policy.py",
        "tokens[..., t].masked_fill_(",
        "tokens[..., t].masked_fill(",
        "test_policy.py",
        "D2",
    ),
    Mutant(
        "score is not masked",
        "policy.py",
        "return logprobs.where(mask, 0), entropies.where(mask, 0)",
        "return logprobs, entropies",
        "test_policy.py",
        "D2",
    ),
    Mutant(
        "entropy has the other sign",
        "gru.py",
        "entropies = -(pi * log_pi",
        "entropies = (pi * log_pi",
        "test_policy.py",
    ),
    Mutant(
        "prompts tiled, completions repeated",
        "gru.py",
        "h.repeat_interleave(rows // h.shape[1], dim=1)",
        "h.repeat(1, rows // h.shape[1], 1)",
        "test_gru.py",
        "B1",
    ),
    Mutant(
        "sampler's prompts tiled",
        "policy.py",
        "cdf.repeat_interleave(group_size, dim=2)",
        "cdf.repeat(1, 1, group_size)",
        "test_policy.py",
        "B1",
    ),
    Mutant(
        "GRU keeps the new where it should keep the old",
        "gru.py",
        "torch.lerp(n, per_row(h, rows), z)",
        "torch.lerp(per_row(h, rows), n, z)",
        "test_gru.py",
    ),
    Mutant(
        "GRU resets the state before its product",
        "gru.py",
        "torch.addcmul(x[..., 2 * H :], r, u_n)",
        "(x[..., 2 * H :] + u_n)",
        "test_gru.py",
    ),
    Mutant(
        "sampled steps are handed over before the state moves",
        "policy.py",
        "trace.steps.append(made)",
        "trace.steps.append(made._replace(h=made.n))",
        "test_policy.py",
    ),
    Mutant(
        "the head loses its bias", "gru.py", "torch.baddbmm(b.mT, W.mT, h.mT)", "torch.bmm(W.mT, h.mT)", "test_gru.py"
    ),
    Mutant(
        "the entropy's gradient forgets the entropy",
        "gru.py",
        "(log_pi + entropies.unsqueeze(1)).mul_",
        "log_pi.clone().mul_",
        "test_gru.py",
    ),
    Mutant(
        "the first states of groups stand in another order than their rows",
        "gru.py",
        "torch.stack([per_row(after, tokens.shape[2]), *others]",
        "torch.stack([after.repeat(1, tokens.shape[2] // after.shape[1], 1), *others]",
        "test_gru.py",
    ),
    Mutant(
        "the prompt is not in the gradient",
        "gru.py",
        "in reversed(range(len(steps)))",
        "in reversed(range(S0, len(steps)))",
        "test_gru.py",
    ),
    Mutant(
        "losses of states stand a prompt too late",
        "gru.py",
        "d_states[:, i - S0]",
        "d_states[:, i - S0 - 1]",
        "test_gru.py",
    ),
    Mutant(
        "what was watched is of the first epoch",
        "algorithms/update.py",
        "| surrogate.metrics |",
        "| objective(batch.logprobs, batch, A, aggregation(batch.mask)).metrics |",
        "test_update.py",
    ),
    Mutant(
        "a group's first state gets the gradient of one of its rows",
        "gru.py",
        ".unflatten(1, (states, -1)).sum(2)",
        ".unflatten(1, (states, -1))[:, :, 0]",
        "test_gru.py",
    ),
    Mutant("Adam without its correction", "optimizer.py", ".div_((1 - BETA2**t) ** 0.5)", "", "test_optimizer.py"),
    Mutant(
        "Adam moves the first group alone",
        "optimizer.py",
        "for i, vector in enumerate(self._vectors):",
        "for i, vector in enumerate(self._vectors[:1]):",
        "test_optimizer.py",
    ),
    Mutant(
        "a gradient put elsewhere is not fetched", "optimizer.py", "view.copy_(p.grad)", "pass", "test_optimizer.py"
    ),
    Mutant(
        "a missing gradient is that of the step before",
        "optimizer.py",
        "                view.zero_()",
        "                pass",
        "test_optimizer.py",
    ),
    Mutant("the temperature is not in the gradient", "gru.py", "d /= ctx.temperature", "pass", "test_gru.py"),
    Mutant(
        "the prompt's gradient is lost with the trace",
        "policy.py",
        "trace.start = start\n",
        "trace.start = start.detach()\n",
        "test_ladder.py",
    ),
    Mutant(
        "the input table's gradient overwrites",
        "gru.py",
        "d_x += torch.bmm(one_hots[i], d)",
        "d_x = torch.bmm(one_hots[i], d)",
        "test_gru.py",
    ),
    Mutant("features are narrower", "policy.py", "(2 * PROMPT_WIDTH**2)", "PROMPT_WIDTH**2", "test_policy.py"),
    Mutant(
        "entropies carry no gradient",
        "policy.py",
        "entropies=entropies,",
        "entropies=entropies.detach(),",
        "test_ladder.py",
        "E5",
    ),
    Mutant(
        "success is reward",
        "policy.py",
        "success=policy.task.success(targets, tokens)",
        "success=policy.task.reward(targets, tokens) > 0",
        "test_policy.py",
        "M11",
    ),
    Mutant(
        "GRU backward forgets the losses of earlier states",
        "gru.py",
        "d_h = kept.add_(d_states[:, i - S0]) if i >= S0 else kept",
        "d_h = kept",
        "test_gru.py",
    ),
    Mutant(
        "GRU backward forgets the kept state",
        "gru.py",
        "d_h = kept.add_(d_states[:, i - S0])",
        "d_h = kept.copy_(d_states[:, i - S0])",
        "test_gru.py",
    ),
    Mutant(
        "GRU backward: the reset gate is not in the chain",
        "gru.py",
        "torch.mul(d_n, r, out=d_un)",
        "d_un.copy_(d_n)",
        "test_gru.py",
    ),
    Mutant(
        "GRU backward: the reset gate's own gradient",
        "gru.py",
        "torch.mul(d_n, u_n, out=d_r)",
        "d_r.copy_(d_n)",
        "test_gru.py",
    ),
    Mutant(
        "GRU backward: states shifted by one",
        "gru.py",
        "d_U.baddbmm_(h.mT",
        "d_U.baddbmm_(per_state(states[i + 1], h.shape[1]).mT",
        "test_gru.py",
    ),
    Mutant(
        "GRU backward: the table gets U's share",
        "gru.py",
        "d_x[..., J:]], dim=-1)",
        "d_x[..., 2 * H : J]], dim=-1)",
        "test_gru.py",
    ),
    Mutant(
        "GRU backward: the update gate's sign",
        "gru.py",
        "torch.sub(per_row(h, rows), n, out=d_z)",
        "torch.sub(n, per_row(h, rows), out=d_z)",
        "test_gru.py",
    ),
    Mutant(
        "replicas read the first one's table",
        "gru.py",
        "offsets = torch.arange(0, K * inputs, inputs,",
        "offsets = torch.arange(0, K, 1,",
        "test_gru.py",
    ),
    Mutant(
        "an unknown ratio level is read as token",
        OBJECTIVES,
        'if ratio_level not in ("token", "sequence", "sequence_mean"):',
        "if False:",
        "test_objectives.py",
        "A7",
    ),
    Mutant(
        "masked advantages of NaN reach the gradient",
        OBJECTIVES,
        "return _unmasked(advantages, mask)",
        "return advantages",
        "test_objectives.py",
    ),
    Mutant(
        "a ratio that overflows has a gradient of NaN",
        OBJECTIVES,
        "(torch.where(A < 0, log_ratio, capped) if dual_clip is None else capped).exp()",
        "log_ratio.exp()",
        "test_objectives.py",
    ),
    Mutant(
        "old log-probabilities broadcast",
        OBJECTIVES,
        "if other.shape != logprobs.shape:",
        "if False:",
        "test_objectives.py",
        "M8",
    ),
    Mutant(
        "one diverged critic stops all replicas",
        ADVANTAGES,
        "_check(advantages, valid, finite=False)",
        "_check(advantages, valid)",
        "test_ladder.py",
    ),
    Mutant(
        "a diverged replica looks like one without signal",
        ADVANTAGES,
        "valid & (std != 0)",
        "valid & (std > 0)",
        "test_advantages.py",
    ),
    # ---- runs and reports ----
    Mutant(
        "report: 90% called 95%", "stats.py", "confidence_level=CONFIDENCE", "confidence_level=0.9", "test_stats.py"
    ),
    Mutant(
        "report: interval turned round",
        "report/tables.py",
        "[{low:.3f}, {high:.3f}]",
        "[{high:.3f}, {low:.3f}]",
        "test_tables.py",
    ),
    Mutant(
        "report: plain success as sum-drawn",
        "report/tables.py",
        "entry['success_sum_targets']['mean']",
        "entry['success']['mean']",
        "test_tables.py",
    ),
    Mutant(
        "report: gradient noise in the order of arrival",
        "experiment/compare.py",
        "[algo for algo in config.names if algo in outcome.noise]",
        "list(outcome.noise)",
        "test_compare.py",
    ),
    Mutant(
        "report: a run without a step is a result",
        "experiment/compare.py",
        "if result.steps > 0:  #",
        "if True:  #",
        "test_compare.py",
    ),
    Mutant(
        "report: gradient noise measured last",
        "experiment/executor.py",
        "return math.inf",
        "return 0",
        "test_compare.py",
    ),
    Mutant(
        "report: rows past the checkpoint stay",
        "experiment/rundir.py",
        "            file.truncate(kept)",
        "            pass",
        "test_resume.py",
    ),
    Mutant(
        "report: a resumed run counts its rollouts from zero",
        "experiment/learner.py",
        "return Progress(step, rollouts, tokens, float(wall))",
        "return Progress(step, [0] * len(rollouts), tokens, float(wall))",
        "test_resume.py",
    ),
    Mutant(
        "report: what did not fit is left there",
        "experiment/rundir.py",
        "partial.unlink()  #",
        "pass  #",
        "test_resume.py",
    ),
    Mutant(
        "report: rows are written again after a torn line",
        "experiment/rundir.py",
        "rows, self._rows = self._rows, []",
        "rows = self._rows",
        "test_resume.py",
    ),
    Mutant(
        "report: rows are cut by a copy",
        "experiment/rundir.py",
        "            file.truncate(kept)",
        "            file.seek(0)\n            write_bytes(path, file.read(kept))",
        "test_resume.py",
    ),
    Mutant(
        "report: lost rows are not missed",
        "experiment/rundir.py",
        "if reached != last_step:",
        "if False:",
        "test_damage.py",
    ),
    Mutant(
        "report: SIGTERM unheard",
        "experiment/executor.py",
        "STOPS = (signal.SIGINT, signal.SIGTERM)",
        "STOPS = (signal.SIGINT,)",
        "test_run.py",
    ),
    Mutant("report: every signal ends with 130", "experiment/executor.py", "128 + came[0]", "130", "test_run.py"),
    Mutant(
        "report: a second signal is only noted",
        "experiment/executor.py",
        "            signal.signal(stop, act)",
        "            pass",
        "test_run.py",
    ),
    Mutant(
        "report: a worker dies of a signal to all",
        "experiment/executor.py",
        "signal.SIG_BLOCK, STOPS",
        "signal.SIG_BLOCK, ()",
        "test_compare.py",
    ),
    Mutant(
        "report: workers of a broken pool are waited for",
        "experiment/executor.py",
        "worker.kill()  # the pool sends",
        "pass  # the pool sends",
        "test_compare.py",
    ),
    Mutant(
        "report: workers that are done with are waited for",
        "experiment/executor.py",
        "worker.kill()  # they have nothing",
        "pass  # they have nothing",
        "test_damage.py",
    ),
    Mutant(
        "report: any number is a result",
        "experiment/loop.py",
        "        refuse_other_result(result, len(seeds), make_task(config).max_target + 1)\n",
        "",
        "test_damage.py",
    ),
    Mutant(
        "report: the end of the command takes a user's open files along",
        "__main__.py",
        'name.startswith("pgprog_user_")',
        "False",
        "test_damage.py",
    ),
    Mutant("report: nothing is flushed at the end", "__main__.py", "stream.flush()", "pass", "test_damage.py"),
    Mutant(
        "report: divergence seen in the loss alone",
        "experiment/loop.py",
        'in ("loss", "grad_norm", "value_loss")',
        'in ("loss",)',
        "test_damage.py",
    ),
    Mutant(
        "report: a user's function works on the rewards themselves",
        "experiment/user_advantage.py",
        "batch.rewards.clone()",
        "batch.rewards",
        "test_user_advantage.py",
    ),
    Mutant(
        "report: a checkpoint of NaN is taken",
        "experiment/learner.py",
        "if not tensor.isfinite().all()",
        "if False",
        "test_damage.py",
    ),
    Mutant(
        "a directory where no run has begun is occupied",
        "experiment/rundir.py",
        '(LOCK, CONFIG + ".partial")',
        "(LOCK,)",
        "test_damage.py",
    ),
    Mutant(
        "part of a main run stands at equal rollouts",
        "experiment/compare.py",
        "== budget and complete(config, outcome, job.name):",
        "== budget and job.name in outcome.main:",
        "test_compare.py",
    ),
    Mutant(
        "part of a run at equal rollouts is shown",
        "experiment/compare.py",
        "elif result.steps == done.config.steps:",
        "else:",
        "test_compare.py",
    ),
    Mutant("a filter that spent less is not told", "experiment/compare.py", "< 0.95:", "< 0.0:", "test_compare.py"),
    Mutant("a warning is of one seed", "experiment/compare.py", '["seeds"] += 1', '["seeds"] = 1', "test_compare.py"),
    Mutant(
        "workers import from the working directory",
        "experiment/executor.py",
        "with _safe_path():",
        "if True:",
        "test_compare.py",
    ),
    Mutant(
        "a folder is emptied as if no run had begun",
        "experiment/rundir.py",
        " and not p.is_dir()",
        "",
        "test_damage.py",
    ),
    Mutant(
        "train goes on with a comparison",
        "commands.py",
        'if kind is RunConfig and (args.resume / "runs").is_dir():',
        "if False:",
        "test_damage.py",
    ),
    Mutant(
        "a user's advantage goes by the rung's name",
        "experiment/config.py",
        "if self.advantage else TITLES",
        "if False else TITLES",
        "test_run.py",
    ),
    Mutant(
        "differences of runs that were stopped",
        "experiment/compare.py",
        "if complete(config, outcome, a) and complete(config, outcome, b)",
        "",
        "test_compare.py",
    ),
    Mutant(
        "report: a foreign file is removed",
        "experiment/rundir.py",
        "if path.is_symlink() or not",
        "if False and not",
        "test_damage.py",
    ),
    Mutant(
        "report: any folder called runs is a grid's",
        "experiment/rundir.py",
        'run.parent.name == "runs" and _is_ours(whole / CONFIG)',
        'run.parent.name == "runs"',
        "test_damage.py",
    ),
    Mutant("one token kept, all kept", OBJECTIVES, "if mask.all() else", "if mask.any() else", "test_objectives.py"),
    Mutant(
        "later epochs learn from the values of the first",
        UPDATE,
        "values = None if critic is None else values_of(critic, part)",
        "pass",
        "test_ladder.py",
    ),
    Mutant(
        "report: rows of a finished run are not looked at",
        "experiment/loop.py",
        "steps = progress.step if finished is None else finished.steps",
        "steps = 0 if finished is not None else progress.step",
        "test_damage.py",
    ),
    Mutant("report: any row will do", "experiment/rundir.py", "!= (step, seed):", "== ():", "test_damage.py"),
    Mutant(
        "report: a row need not be of numbers",
        "experiment/rundir.py",
        "if not isinstance(row, dict) or not all(isinstance(value, (int, float)) for value in row.values()):",
        "if not isinstance(row, dict):",
        "test_damage.py",
    ),
    Mutant(
        "report: a row need not have what figures draw",
        "experiment/rundir.py",
        'if missing := {"rollouts", "success"} - row.keys():',
        "if missing := set():",
        "test_damage.py",
    ),
    Mutant(
        "report: a checkpoint that must not be read is called missing",
        "experiment/rundir.py",
        'with open(path, "rb"):  #',
        "if False:  #",
        "test_damage.py",
    ),
    Mutant(
        "report: curves go through a link",
        "experiment/compare.py",
        "rundir.write_bytes(path, file.getvalue().encode())",
        "path.write_text(file.getvalue())",
        "test_damage.py",
    ),
    Mutant(
        "report: figures go through a link",
        "report/figures.py",
        'write_bytes(directory / f"{name}.{kind}", drawn.getvalue())',
        '(directory / f"{name}.{kind}").write_bytes(drawn.getvalue())',
        "test_damage.py",
    ),
    Mutant(
        "report: workers run the program again",
        "experiment/executor.py",
        "with _main_left_out(), _signals_held():",
        "with _signals_held():",
        "test_damage.py",
    ),
    Mutant("report: the last of two flags wins", "cli.py", "    refuse_repeated_flags(arguments)\n", "", "test_run.py"),
    Mutant("report: --set is one flag", "cli.py", 'if flag == "--set":', "if False:", "test_run.py"),
]

# Runs pytest on the copy, and says with a code of its own if another pgprog was imported.
RUN = """
import importlib.util, sys
copy, *arguments = sys.argv[1:]
if not importlib.util.find_spec("pgprog").origin.startswith(copy):
    sys.exit(99)
import pytest
code = pytest.main(arguments)
ours = [m.__file__ for name, m in sys.modules.items() if name.split(".")[0] == "pgprog" and m.__file__]
sys.exit(code if ours and all(file.startswith(copy) for file in ours) else 99)
"""


def patched(mutant: Mutant, root: Path = ROOT / "src") -> str:
    """The file's text with the fault in it. Raises ValueError where the old text is not there exactly once."""
    text = (root / "pgprog" / mutant.file).read_text()
    if (n := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.name}: old text occurs {n} times in {mutant.file}")
    return text.replace(mutant.old, mutant.new)


def run_tests(copy: Path, files: list[str]) -> tuple[int, str]:
    """Pytest's exit code on these test files with ``copy`` imported as pgprog, and its output."""
    env = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    options = ["-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(copy), *options, *(str(ROOT / "tests" / file) for file in files)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def try_mutant(mutant: Mutant, source: Path) -> str:
    """``killed``, or what is wrong."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder).resolve()
        shutil.copytree(source, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        try:
            text = patched(mutant, copy)
        except ValueError as error:
            return f"DOES NOT APPLY: {error}"
        (copy / "pgprog" / mutant.file).write_text(text)
        code, output = run_tests(copy, [mutant.test])
    if code == 1:
        red = [line.split(" - ")[0] for line in output.splitlines() if line.startswith("FAILED")]
        return f"killed by {red[0].split('::')[-1]}" if red else "BROKEN: no test is named\n" + output[-2000:]
    return "SURVIVED" if code == 0 else f"BROKEN: exit code {code}\n{output[-2000:]}"


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="unpatched-") as folder, ThreadPoolExecutor(WORKERS) as pool:
        source = Path(folder).resolve()  # one snapshot: the tree may be edited meanwhile
        shutil.copytree(ROOT / "src", source, dirs_exist_ok=True)
        code, output = run_tests(source, sorted({m.test for m in chosen}))
        if code != 0:
            print(f"the suite is not green without a mutant (exit code {code})\n{output[-3000:]}")
            return 1
        verdicts = pool.map(lambda mutant: try_mutant(mutant, source), chosen)
        bad = 0
        for mutant, verdict in zip(chosen, verdicts, strict=True):
            bad += not verdict.startswith("killed")
            print(f"{mutant.name} [{mutant.file}]: {verdict}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} mutants killed")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
