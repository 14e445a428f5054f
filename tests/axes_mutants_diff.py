"""Faults planted in ``pgprog recipes``, one at a time, in the form of ``mutants.py`` and run by its runner.

python tests/axes_mutants_diff.py [WORD ...]
"""

import sys

import mutants
from mutants import Mutant

DIFF, COMMAND, TABLES = "exact/diff.py", "recipes_command.py", "report/recipe_tables.py"


def planted(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name, file, old, new, "test_recipes_command.py")


DIFF_MUTANTS: list[Mutant] = [
    # ---- the batch ----
    planted(
        "the exact gradient is that of the policy that sampled",
        DIFF,
        "success_probabilities(policy, targets[0])",
        "success_probabilities(fresh, targets[0])",
    ),
    planted("J is a sum over the prompts", DIFF, "targets[0]).mean(-1)", "targets[0]).sum(-1)"),
    planted(
        "prompts of one in the wrong order",
        DIFF,
        "targets.repeat_interleave(GROUP_SIZE, dim=1)",
        "targets.repeat(1, 4)",
    ),
    planted(
        "old log-probabilities are the present policy's",
        DIFF,
        "    logprobs, _ = policy.score(batch.targets, batch.tokens)\n",
        "    logprobs, _ = policy.score(batch.targets, batch.tokens)\n"
        "    batch = batch._replace(old_logprobs=logprobs.detach())\n",
    ),
    planted(
        "A is computed anew on stale data",
        DIFF,
        'advantage_of(recipe, w.policies["fresh"])',
        "advantage_of(recipe, policy)",
    ),
    planted(
        "groups without signal stay in the denominator", DIFF, "batch.mask & batch.valid.unsqueeze(-1)", "batch.mask"
    ),
    planted(
        "the reference is the policy itself",
        DIFF,
        "w.reference.score(targets, tokens)",
        "policy.score(targets, tokens)",
    ),
    planted("the sampler's temperature is forgotten", DIFF, "temperature=s.sampler_temperature, ", ""),
    planted("the gradient points down", DIFF, "-gradient[0], None if", "gradient[0], None if"),
    planted("token weights in float32", "algorithms/objectives.py", "mask.double()", "mask.float()"),
    # ---- what is made of it ----
    planted("half the angle", DIFF, "math.degrees(2 * math.atan2", "math.degrees(math.atan2"),
    planted(
        "an angle by arc cosine",
        DIFF,
        "2 * math.atan2((u - v).norm().item(), (u + v).norm().item())",
        "math.acos(min(1.0, (u @ v).item()))",
    ),
    planted("relative to itself", DIFF, "(g - other).norm() / norm", "(g - other).norm() / g.norm()"),
    planted("the second recipe against itself", DIFF, "b_against_a=effect(b, g)", "b_against_a=effect(a, g)"),
    planted(
        "a choice of the first recipe is given to it",
        DIFF,
        "name: getattr(getattr(b, axis), name)",
        "name: getattr(getattr(a, axis), name)",
    ),
    planted("combinations without meaning are measured", DIFF, "    refuse(replace(a,", "    (replace(a,"),
    planted("least first", DIFF, "key=size, reverse=True", "key=size"),
    planted("minibatches are counted in", DIFF, "        if path in NOT_HERE:", "        if False:"),
    # ---- the command and its tables ----
    planted("--set on the first recipe alone", COMMAND, "find(names[1], args.set)", "find(names[1])"),
    planted("torch for a list", COMMAND, "import dataclasses\n", "import dataclasses\nimport torch\n"),
    planted("both rows are the first recipe's", TABLES, '((a, "a"), (b, "b"))', '((a, "a"), (b, "a"))'),
    planted("a small angle is shown as none", TABLES, "if angle >= 0.01 or", "if angle >= 0 or"),
    planted("a small effect is called the same", TABLES, "NOTHING = 1e-12", "NOTHING = 1e-3"),
    planted("what is not the default is not marked", TABLES, 'shown(value) + ("" if usual else " *")', "shown(value)"),
    planted("a name loses its second line", TABLES, 'return "\\n".join(', 'return "".join('),
]

if __name__ == "__main__":
    mutants.MUTANTS[:] = DIFF_MUTANTS
    sys.exit(mutants.main(sys.argv[1:]))
