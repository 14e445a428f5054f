"""Faults planted in ``pgprog plan``, in the form of ``mutants.py`` and run by its runner.

python tests/axes_mutants_plan.py [WORD ...]
"""

import sys

import mutants
from mutants import Mutant

PLAN, COMMAND, TABLES, TESTS = "plan.py", "plan_command.py", "report/plan_tables.py", "test_plan.py"

PLAN_MUTANTS = [
    Mutant(
        "plan: a model is trained without its moments", PLAN, "optimizer: float = 12.0", "optimizer: float = 4.0", TESTS
    ),
    Mutant(
        "plan: the critic only infers", PLAN, '("critic", True, sizes.critic)', '("critic", False, sizes.critic)', TESTS
    ),
    Mutant(
        "plan: no recipe holds a reference",
        PLAN,
        "    if recipe.reference or sizes.reference:\n        held",
        "    if sizes.reference:\n        held",
        TESTS,
    ),
    Mutant("plan: GPUs are rounded down", PLAN, "math.ceil(gigabytes /", "math.floor(gigabytes /", TESTS),
    Mutant(
        "plan: a Beta's variance is that of its concentration alone", PLAN, "(S**2 * (S + 1))]", "(S**2 * S)]", TESTS
    ),
    Mutant("plan: solved groups count as informative", PLAN, "1 - all_right - all_wrong", "1 - all_wrong", TESTS),
    Mutant("plan: the smallest group is one too small", PLAN, "    return high\n", "    return low\n", TESTS),
    Mutant(
        "plan: noise of scores only with success",
        PLAN,
        "unsqueeze(-1), q * (1 - p) + (kappa - 1) * p * q, kappa * q)",
        "unsqueeze(-1), q * (1 - p) + (kappa - 1) * p * q, q + (kappa - 1) * p * q)",
        TESTS,
    ),
    Mutant(
        "plan: signal to noise of a group, not of a rollout",
        PLAN,
        "mean / trace / G * kept",
        "mean / trace * kept",
        TESTS,
    ),
    Mutant("plan: signal to noise over the second moment", PLAN, "trace = second - mean", "trace = second", TESTS),
    Mutant("plan: the filter's rollouts are free", PLAN, "mean / trace / G * kept", "mean / trace / G", TESTS),
    Mutant(
        "plan: h given a filter keeps its length",
        PLAN,
        "mean / kept**2, second / kept",
        "mean / kept, second / kept",
        TESTS,
    ),
    Mutant(
        "plan: the batch is a group of one prompt",
        PLAN,
        "pooled(scores, prompts.draw) if of_batch else scores",
        "scores",
        TESTS,
    ),
    Mutant(
        "plan: the critic knows the prompt whatever is said",
        PLAN,
        "V = (J + critic_quality * (prompts.p - J))",
        "V = prompts.p",
        TESTS,
    ),
    Mutant(
        "plan: minibatches are passes", PLAN, '"policy": 3.0 * s.epochs', '"policy": 3.0 * recipe.gradient_steps', TESTS
    ),
    Mutant(
        "plan: a reward model scores what is kept",
        PLAN,
        "F * (reward + kept * sum(passes(recipe, sizes).values()))",
        "F * kept * (reward + sum(passes(recipe, sizes).values()))",
        TESTS,
    ),
    Mutant(
        "plan: the share of generation is that of training",
        PLAN,
        "(1 - pace.generation_share) / pace.generation_share / 3",
        "pace.generation_share / (1 - pace.generation_share) / 3",
        TESTS,
    ),
    Mutant(
        "plan: a critic needs no lead",
        PLAN,
        "every.score >= LEAD * without.score",
        "every.score >= without.score",
        TESTS,
    ),
    Mutant("plan: what does not fit is chosen", PLAN, "[c for c in candidates if c.fits]", "list(candidates)", TESTS),
    Mutant("plan: filtered batches without end", PLAN, "prompts * min(1.0, D * share)", "float(prompts)", TESTS),
    Mutant(
        "plan: gradients in half precision always",
        COMMAND,
        "4.0 if args.float32_gradients else args.weight_bytes",
        "args.weight_bytes",
        TESTS,
    ),
    Mutant(
        "plan: NaN is in range",
        COMMAND,
        "value is not None and not low <= value <= high",
        "value is not None and (value < low or value > high)",
        TESTS,
    ),
    Mutant(
        "plan: one recipe twice",
        COMMAND,
        'refuse_twice("--recipes", args.recipes)',
        "pass",
        TESTS,
    ),
    Mutant("plan: groups of one are planned", COMMAND, "if G == 1 and grouped:", "if False:", TESTS),
    Mutant("plan: a budget under one step is taken", COMMAND, "if least > args.rollout_budget:", "if False:", TESTS),
    Mutant("plan: without rollouts it plans all the same", COMMAND, "if args.rollout_budget == 0:", "if False:", TESTS),
    Mutant(
        "plan: only the first row's assumptions are printed",
        TABLES,
        'for text in row["figures"][name]["assumptions"]]',
        'for text in row["figures"][name]["assumptions"][:1]]',
        TESTS,
    ),
]

if __name__ == "__main__":
    mutants.MUTANTS[:] = PLAN_MUTANTS
    sys.exit(mutants.main(sys.argv[1:]))
