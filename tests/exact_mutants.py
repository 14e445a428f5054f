"""Faults planted in ``exact``, one at a time, in the form of ``mutants.py`` and run by its runner.

python tests/exact_mutants.py [WORD ...]
"""

import sys

import mutants
from mutants import ADVANTAGES, Mutant

ENUMERATION, VALUES, SCORES = (f"exact/{name}.py" for name in ("enumeration", "values", "scores"))
WEIGHT, MOMENTS, BLACKBOX = (f"exact/{name}.py" for name in ("weight", "moments", "blackbox"))
CRITIC, FOUNDATIONS, ESTIMATORS = (f"exact/{name}.py" for name in ("critic", "foundations", "estimators"))
COMMANDS = "exact/commands.py"

EXACT_MUTANTS = [
    # ---- enumeration and values ----
    Mutant(
        "pruning forgets what the rest can add",
        ENUMERATION,
        "missing <= (task.digits - 1) * (task.seq_len - t)",
        "missing <= (task.digits - 1) * (task.seq_len - t - 1)",
        "test_exact_values.py",
    ),
    Mutant(
        "pruning keeps what has overshot",
        ENUMERATION,
        "keep = (missing >= 0) & (",
        "keep = (missing >= -1) & (",
        "test_exact_values.py",
    ),
    Mutant(
        "EOS wins with something missing",
        ENUMERATION,
        "nodes.append((level.missing == 0)",
        "nodes.append((level.missing <= 1)",
        "test_exact_values.py",
    ),
    Mutant(
        "EOS does not win at all",
        ENUMERATION,
        "    if task.variable_length:\n        nodes",
        "    if False:\n        nodes",
        "test_exact_values.py",
    ),
    Mutant(
        "a prefix's probability leaves out its last token",
        ENUMERATION,
        "logprob.index_select(1, level.parent) + of_tokens(log_pi, level.parent, level.token)",
        "logprob.index_select(1, level.parent) + 0 * of_tokens(log_pi, level.parent, level.token)",
        "test_exact_values.py",
    ),
    Mutant(
        "token and prefix swapped in the table",
        ENUMERATION,
        "tokens * log_pi.shape[-1] + nodes",
        "tokens + nodes * log_pi.shape[1]",
        "test_exact_values.py",
    ),
    Mutant(
        "targets weighted alike whatever the task draws",
        "env.py",
        'if self.targets == "uniform":\n            return torch.full',
        "if True:\n            return torch.full",
        "test_exact_values.py",
    ),
    Mutant("too large is tried", ENUMERATION, "if needed > MEMORY_LIMIT:", "if needed > 1e30:", "test_exact_values.py"),
    Mutant(
        "the size ignores the replicas",
        ENUMERATION,
        "prefixes * policy.replicas *",
        "prefixes *",
        "test_exact_values.py",
    ),
    Mutant("Q is not discounted", VALUES, "Q = Q + gamma * torch", "Q = Q + torch", "test_exact_values.py"),
    Mutant(
        "V forgets what follows",
        VALUES,
        "V = V_next = (",
        "V_next, V = 0 * states.logprob.unflatten(1, (P, -1)), (",
        "test_exact_values.py",
    ),
    Mutant("A is Q", VALUES, "Q - V.unsqueeze(-1)", "Q - 0 * V.unsqueeze(-1)", "test_exact_values.py"),
    Mutant("V by the mean over tokens", VALUES, "(log_pi.exp() * Q).sum(-1)", "Q.mean(-1)", "test_exact_values.py"),
    Mutant(
        "entropy with the other sign", VALUES, "-(states.log_pi.exp()", "(states.log_pi.exp()", "test_exact_values.py"
    ),
    Mutant(
        "KL of the other sampler", VALUES, "(pi.log_pi.exp() * (pi", "(ref.log_pi.exp() * (pi", "test_exact_values.py"
    ),
    Mutant(
        "KL weighs prefixes by the reference",
        VALUES,
        "_expected(pi.logprob",
        "_expected(ref.logprob",
        "test_exact_values.py",
    ),
    Mutant(
        "entropy of all prefixes alike",
        VALUES,
        "(logprob.exp() * per_prefix)",
        "(logprob.exp().mean() * per_prefix)",
        "test_exact_values.py",
    ),
    Mutant(
        "J with the pruned tree whatever is paid",
        VALUES,
        'policy.task.reward_form == "outcome", policy',
        'policy.task.reward_form != "", policy',
        "test_exact_values.py",
    ),
    # ---- scores ----
    Mutant(
        "the bias of the products is left out",
        SCORES,
        "(before @ before.mT + 1)",
        "(before @ before.mT)",
        "test_exact_moments.py",
    ),
    Mutant(
        "the bias of the head is left out",
        SCORES,
        "(hidden @ hidden.mT + 1)",
        "(hidden @ hidden.mT)",
        "test_exact_moments.py",
    ),
    Mutant(
        "tree: the bias is left out",
        SCORES,
        "a.before.unsqueeze(2)) + 1",
        "a.before.unsqueeze(2))",
        "test_exact_moments.py",
    ),
    Mutant("tree: pairs count once", SCORES, "* (1 if a is b else 2)", "* 1", "test_exact_moments.py"),
    Mutant(
        "tree: tokens never meet again",
        SCORES,
        "(token == a.token.view(N, 1, 1)) * x",
        "0 * x",
        "test_exact_moments.py",
    ),
    Mutant(
        "rows: tokens never meet again",
        SCORES,
        "same * (by_x @ by_x.mT)",
        "0 * (by_x @ by_x.mT)",
        "test_exact_moments.py",
    ),
    Mutant(
        "the reset gate's derivative", SCORES, "by_n * u_n * r * (1 - r)", "by_n * r * (1 - r)", "test_exact_moments.py"
    ),
    Mutant(
        "the prompt has no part in the score",
        SCORES,
        "(tree.features.square().sum() + 1)",
        "0",
        "test_exact_moments.py",
    ),
    Mutant(
        "many rows: no way through the state itself",
        SCORES,
        "+ torch.diag_embed(reading.by_h)",
        "+ 0 * torch.diag_embed(reading.by_h)",
        "test_exact_moments.py",
    ),
    Mutant(
        "scores of failures counted as successes",
        SCORES,
        "pi = tree.probability[t][nodes] * tree.pi",
        "pi = tree.pi",
        "test_exact_moments.py",
    ),
    Mutant(
        "weights of tokens are ignored",
        SCORES,
        "e if weights is None else e * weights[:, i : i + 1]",
        "e",
        "test_exact_moments.py",
    ),
    # ---- weight and moments ----
    Mutant(
        "w is the mean of A given success",
        WEIGHT,
        "p) * (table.success - table.failure)).sum(-1)",
        "p) * table.success).sum(-1)",
        "test_exact_moments.py",
    ),
    Mutant(
        "binomial over all G",
        WEIGHT,
        "binomial(table.success.shape[-1] - 1, p)",
        "binomial(table.success.shape[-1], p)[..., 1:]",
        "test_exact_moments.py",
    ),
    Mutant(
        "objective divides by G - 1",
        WEIGHT,
        "(b.cumsum(-1), (1, 0)) / G",
        "(b.cumsum(-1), (1, 0)) / (G - 1)",
        "test_exact_moments.py",
    ),
    Mutant(
        "an advantage by place passes",
        WEIGHT,
        "if (found - wanted).abs().max() > TOLERANCE",
        "if (found - wanted).abs().max() > 1e9",
        "test_exact_moments.py",
    ),
    Mutant("a live gradient passes", "foreign.py", "if result.requires_grad:", "if False:", "test_exact_moments.py"),
    Mutant("NaN passes", "foreign.py", "if not result.isfinite().all():", "if False:", "test_exact_moments.py"),
    Mutant(
        "unconditional second moment of A",
        MOMENTS,
        "squared_1 * scores.second_success + squared_0 * (scores.second - scores.second_success)",
        "(p * squared_1 + (1 - p) * squared_0) * scores.second",
        "test_exact_moments.py",
    ),
    Mutant(
        "pairs over G - 1 others",
        MOMENTS,
        "rest = binomial(G - 2, p)\n",
        "rest = binomial(G - 1, p)[..., 1:]\n",
        "test_exact_moments.py",
    ),
    Mutant(
        "pairs see one success too few",
        MOMENTS,
        "A1[..., 1:].square(), A1[..., :-1] * A0[..., 1:]",
        "A1[..., :-1].square(), A1[..., :-1] * A0[..., 1:]",
        "test_exact_moments.py",
    ),
    Mutant(
        "completions of a group taken as uncorrelated",
        MOMENTS,
        "second = second + (G - 1) * q *",
        "second = second + 0 * q *",
        "test_exact_moments.py",
    ),
    Mutant(
        "no variance between prompts",
        MOMENTS,
        "((groups.second * draw).sum(-1) - squared_mean)",
        "((groups.second - groups.mean.square().sum(-1)) * draw).sum(-1)",
        "test_exact_moments.py",
    ),
    Mutant(
        "a batch of prompts counted as binomial",
        MOMENTS,
        "poisson_binomial(p[torch.arange(N) != i])",
        "binomial(N - 1, p.mean())",
        "test_exact_moments.py",
    ),
    Mutant(
        "Poisson-binomial of all pairs with i and j in it",
        MOMENTS,
        "kept = (place != i.unsqueeze(1)) & (place != j.unsqueeze(1))",
        "kept = (place != i.unsqueeze(1)) & (place != (i.unsqueeze(1) + 1) % N)",
        "test_exact_moments.py",
    ),
    Mutant(
        "sampled: scores without spread",
        MOMENTS,
        "(A.square() * spread).sum((-2, -1)) / N**2",
        "0 * (A.square() * spread).sum((-2, -1)) / N**2",
        "test_exact_moments.py",
    ),
    Mutant(
        "sampled: the mean square of c is not the square of its mean",
        MOMENTS,
        "squared_mean = mean.square().sum() - excess",
        "squared_mean = mean.square().sum() + batches * excess",
        "test_exact_moments.py",
    ),
    Mutant(
        "matrix: pairs uncorrelated", MOMENTS, "* (1 - 1 / G)\n    return", "* 0\n    return", "test_exact_moments.py"
    ),
    # ---- black box, critic, foundations ----
    Mutant(
        "batches weighted alike",
        BLACKBOX,
        "mean + chance @ g",
        "mean + chance.mean() * g.sum(0)",
        "test_exact_blackbox.py",
    ),
    Mutant(
        "slots all with the first slot's probabilities",
        BLACKBOX,
        "pi[torch.arange(S), outcomes]",
        "pi[0, outcomes]",
        "test_exact_blackbox.py",
    ),
    Mutant(
        "the black box gives the gradient of the loss",
        BLACKBOX,
        "return -torch.cat([p.grad",
        "return torch.cat([p.grad",
        "test_exact_blackbox.py",
    ),
    Mutant("copies of the wrong replica", BLACKBOX, "[replica : replica + 1]", "[0:1]", "test_exact_blackbox.py"),
    Mutant("too many batches are tried", BLACKBOX, "> MOST_BATCHES:", "> 10 * MOST_BATCHES:", "test_exact_blackbox.py"),
    Mutant(
        "the black box's live gradient passes",
        "foreign.py",
        "if result.requires_grad:",
        "if False:",
        "test_exact_blackbox.py",
    ),
    Mutant(
        "GAE bootstraps past the end",
        ADVANTAGES,
        "torch.where(mask[..., t], V[..., t], after)",
        "values[..., t]",
        "test_exact_critic.py",
    ),
    Mutant("GAE does not discount lambda", ADVANTAGES, "mask, gamma * lam)", "mask, lam)", "test_exact_critic.py"),
    Mutant("GAE's TD error without gamma", ADVANTAGES, "+ gamma * after -", "+ after -", "test_exact_critic.py"),
    Mutant(
        "tokens of a completion taken as orthogonal",
        CRITIC,
        "gram[:, i, j] = gram[:, j, i] = inner",
        "gram[:, i, j] = 0 * inner",
        "test_exact_critic.py",
    ),
    Mutant(
        "a wrong critic is right",
        CRITIC,
        "paths.values + error * paths.wrong",
        "paths.values + 0 * error * paths.wrong",
        "test_exact_critic.py",
    ),
    Mutant(
        "the trace is the second moment",
        CRITIC,
        "trace = second - mean.square().sum()",
        "trace = second",
        "test_exact_critic.py",
    ),
    Mutant(
        "NaN holds",
        FOUNDATIONS,
        "return all(abs(a - b) <= self.tolerance for a, b in pairs)",
        "return not any(abs(a - b) > self.tolerance for a, b in pairs)",
        "test_exact_foundations.py",
    ),
    Mutant(
        "in float32 unless told",
        FOUNDATIONS,
        "rewards[:, -1] = 0.7 * x.success.double()\n    to_go",
        "rewards[:, -1] = 0.7 * x.success\n    to_go",
        "test_exact_foundations.py",
    ),
    Mutant("a failure exits 0", COMMANDS, "return FAILED", "return 0", "test_exact_foundations.py"),
    Mutant(
        "a failure of one identity is overlooked",
        FOUNDATIONS,
        "return all(n.holds for n in self.numbers)",
        "return any(n.holds for n in self.numbers)",
        "test_exact_foundations.py",
    ),
    # ---- the table ----
    Mutant(
        "everything is local",
        ESTIMATORS,
        "            return False\n    return True",
        "            return True\n    return True",
        "test_exact_command.py",
    ),
    Mutant(
        "prompts are not divided by G",
        ESTIMATORS,
        "max(1, setting.rollouts // estimator.group_size)",
        "setting.rollouts",
        "test_exact_command.py",
    ),
    Mutant(
        "signal over the second moment",
        ESTIMATORS,
        "mean.square().sum() / moments.trace",
        "mean.square().sum() / moments.second",
        "test_exact_command.py",
    ),
    Mutant(
        "the bias is against itself",
        ESTIMATORS,
        "bias=float((mean - truth).norm())",
        "bias=float((mean - mean).norm())",
        "test_exact_command.py",
    ),
    Mutant(
        "resamples of the training's prompts",
        ESTIMATORS,
        'ReplicaGenerator(seeds, "resample")',
        'ReplicaGenerator(seeds, "train")',
        "test_exact_command.py",
    ),
    Mutant(
        "the run's critic is forgotten",
        COMMANDS,
        '    if trained and config.choices.critic == "prompt":\n',
        "    if False:\n",
        "test_exact_command.py",
    ),
    Mutant(
        "process rewards on the binary path",
        COMMANDS,
        'if config.reward_form != "outcome":',
        "if False:",
        "test_exact_command.py",
    ),
    Mutant(
        "another's directory is written to",
        COMMANDS,
        "if not (out / OUTPUT).is_file():",
        "if False:",
        "test_exact_command.py",
    ),
]

if __name__ == "__main__":
    mutants.MUTANTS[:] = EXACT_MUTANTS
    sys.exit(mutants.main(sys.argv[1:]))
