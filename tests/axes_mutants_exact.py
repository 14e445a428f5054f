"""Faults planted in the exact moments of recipes, one at a time, in the form of ``mutants.py`` and run by its runner.

python tests/axes_mutants_exact.py [WORD ...]
"""

import sys

import mutants
from mutants import Mutant

TESTS = "test_exact_recipes.py"
RECIPES, BLACKBOX, CHOICES = "exact/recipes.py", "exact/blackbox.py", "algorithms/recipes.py"
COMMANDS, TABLES = "exact/commands.py", "report/exact_tables.py"


def planted(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name, file, old, new, TESTS)


EXACT_RECIPE_MUTANTS: list[Mutant] = [
    # ---- whose batches, with what chance ----
    planted(
        "stale batches with the present policy's probabilities",
        RECIPES,
        "    if s.age:\n        return problem.old\n",
        "",
    ),
    planted("stale data are fresh", RECIPES, "old=problem.old if recipe.sampling.age else None", "old=None"),
    planted(
        "the old policy is the present one", BLACKBOX, 'more["past"] = Past(scripted(old)', 'more["past"] = Past(clone'
    ),
    planted("two updates old", BLACKBOX, "Past(scripted(old), age=1)", "Past(scripted(old), age=0)"),
    planted("one order counts once", BLACKBOX, "* ways.to(pi.dtype)[run].prod(1)", "* 1.0"),
    planted(
        "orders as if all outcomes differed",
        BLACKBOX,
        "// math.prod(math.factorial(run.count(y)) for y in set(run))",
        "// 1",
    ),
    planted(
        "slots that differ pass as alike",
        BLACKBOX,
        "if S % alike or not (pi.unflatten(0, (-1, alike)) == pi[::alike].unsqueeze(1)).all():",
        "if S % alike:",
    ),
    planted("what cannot happen is tried", BLACKBOX, "(chance > 0) & accepted(outcomes)", "accepted(outcomes)"),
    # ---- the filter ----
    planted("joint with acceptance, not conditional", BLACKBOX, "mean, second = mean / total, second / total", "pass"),
    planted(
        "every batch is accepted",
        RECIPES,
        "accepted=partial(all_informative, problem) if recipe.sampling.dynamic > 1 else None",
        "accepted=None",
    ),
    planted(
        "one informative group is enough",
        RECIPES,
        "(r.amax(-1) > r.amin(-1)).all(1)",
        "(r.amax(-1) > r.amin(-1)).any(1)",
    ),
    planted(
        "the filter leaves the prompts as they are",
        RECIPES,
        "weights = ways * (share / share.sum())[prompts].prod(1)",
        "weights = ways * (torch.ones_like(share) / len(share))[prompts].prod(1)",
    ),
    planted("prompts of a batch in one order", RECIPES, "weights = ways * (share", "weights = 1.0 * (share"),
    planted(
        "no spread between prompts",
        RECIPES,
        "(part.covariance + torch.outer(part.mean - mean, part.mean - mean) for part in parts)",
        "(part.covariance for part in parts)",
    ),
    planted(
        "chance of acceptance of the present policy",
        RECIPES,
        "    sampler = sampler_of(recipe, problem)\n    p = (",
        "    sampler = problem.policy\n    p = (",
    ),
    # ---- what is measured ----
    planted(
        "recipes without groups see each prompt once",
        RECIPES,
        "return problem.targets.repeat_interleave(problem.group_size), 1",
        "return problem.targets.repeat_interleave(problem.group_size).flip(0), 1",
    ),
    planted("the reference is the policy", RECIPES, "reference=problem.reference if", "reference=problem.policy if"),
    planted("no temperature", RECIPES, "        policy.temperature = temperature\n", "        pass\n"),
    planted(
        "the caller's policy is heated",
        RECIPES,
        "{name: copy.deepcopy(getattr(problem, name))",
        "{name: (getattr(problem, name))",
    ),
    planted(
        "another sampler's data at the policy's probabilities",
        RECIPES,
        "temperature=s.sampler_temperature, top_p=s.sampler_top_p)",
        "temperature=None, top_p=s.sampler_top_p)",
    ),
    planted(
        "the gradient of the last minibatch",
        CHOICES,
        "sampling=replace(recipe.sampling, epochs=1, minibatches=1))",
        "sampling=replace(recipe.sampling, epochs=1))",
    ),
    planted(
        "the trust region moves",
        CHOICES,
        'constraint = replace(constraint, kind="none")',
        'constraint = replace(constraint, kind="trust_region")',
    ),
    # ---- the truth ----
    planted(
        "KL the other way round, in the truth",
        RECIPES,
        "kl(problem.policy, problem.reference, problem",
        "kl(problem.reference, problem.policy, problem",
    ),
    planted("KL is a reward", RECIPES, "value = value - kl_coef * kl(", "value = value + kl_coef * kl("),
    planted(
        "the truth is summed over prompts",
        RECIPES,
        "expected_return(problem.policy, problem.targets).mean(1)",
        "expected_return(problem.policy, problem.targets).sum(1)",
    ),
    planted(
        "the Fisher matrix of outcomes alike",
        RECIPES,
        "(logprobs.detach().exp().flatten() / len(logprobs)).sqrt()",
        "(logprobs.detach().exp().flatten() * 0 + 1 / logprobs.numel()).sqrt()",
    ),
    planted("singular values once", RECIPES, "/ size[real].square()", "/ size[real]"),
    planted(
        "the natural direction without its covariance",
        RECIPES,
        "F_inverse @ moments.covariance @ F_inverse",
        "moments.covariance",
    ),
    # ---- the problem ----
    planted("the update goes downhill", RECIPES, "parts = (step * g", "parts = (-step * g"),
    planted(
        "the update is a plain gradient step", RECIPES, "(step * g / (g.abs() + ADAM_EPS))", "(step * g / g.norm())"
    ),
    planted(
        "the distance of the other sampler",
        RECIPES,
        "kl(self.old, self.policy, self.targets)",
        "kl(self.policy, self.old, self.targets)",
    ),
    # ---- the numbers ----
    planted(
        "bias against itself", RECIPES, "bias = float((mean - truth).norm())", "bias = float((mean - mean).norm())"
    ),
    planted(
        "the scale is a cosine",
        RECIPES,
        "scale = mean @ truth / size.square()",
        "scale = mean @ truth / size / mean.norm()",
    ),
    planted("rest of the truth", RECIPES, "float(rest / mean.norm())", "float(rest / size)"),
    planted(
        "stale against the penalised objective",
        RECIPES,
        "stale=None if later is None else compared(later, truth)",
        "stale=None if later is None else compared(moments, truth)",
    ),
    # ---- the command ----
    planted(
        "--set is forgotten",
        COMMANDS,
        "return [find(name, args.set) for name in names]",
        "return [find(name) for name in names]",
    ),
    planted("--set without recipes passes", COMMANDS, "    if args.recipes or args.set:\n", "    if args.recipes:\n"),
    planted("too many batches are tried", COMMANDS, "    if batches > MOST_BATCHES:", "    if batches > 1e300:"),
    planted(
        "--run is overlooked",
        COMMANDS,
        "        if getattr(args, name) != getattr(Exact, name):",
        "        if name != 'run' and getattr(args, name) != getattr(Exact, name):",
    ),
    planted("the step of --stale-step is not taken", COMMANDS, "step=args.stale_step, **sizes", "**sizes"),
    planted("a small bias is rounded away", TABLES, "ROUNDING = 1e-9", "ROUNDING = 0.5"),
    planted(
        "the table of stale data shows the fresh",
        TABLES,
        'recipe_table(found, "stale", stale)',
        'recipe_table(found, "fresh", stale)',
    ),
]

if __name__ == "__main__":
    mutants.MUTANTS[:] = EXACT_RECIPE_MUTANTS
    sys.exit(mutants.main(sys.argv[1:]))
