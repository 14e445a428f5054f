"""Faults that only the libraries' own numbers show, in the form of ``mutants.py`` and run by its runner.

python tests/axes_mutants_parity.py [WORD ...]
"""

import sys

import mutants
from mutants import ADVANTAGES, OBJECTIVES, Mutant

RECIPES, FROM_RECIPE = "algorithms/recipes.py", "algorithms/from_recipe.py"


def planted(name: str, file: str, old: str, new: str, seen: str = "") -> Mutant:
    return Mutant(name, file, old, new, "test_parity_recipes.py", seen)


PARITY_MUTANTS: list[Mutant] = [
    # ---- numbers of a library ----
    planted("TRL's eps is verl's", RECIPES, 'scale="group_std", eps=1e-4)', 'scale="group_std", eps=1e-6)', "B9"),
    planted("OpenRLHF's eps is ten times as large", RECIPES, "eps=1e-9", "eps=1e-8", "B9"),
    planted("verl's dual clip is at 4", RECIPES, "dual_clip=3.0, log", "dual_clip=4.0, log"),
    planted("verl's log-ratio is not limited", RECIPES, "dual_clip=3.0, log_ratio_limit=20.0", "dual_clip=3.0"),
    planted("OpenRLHF's KL is not limited", RECIPES, "coef=0.01, limit=10.0", "coef=0.01"),
    planted(
        "OpenRLHF's KL is charged to the whole sequence",
        RECIPES,
        'level="token", estimator="k1", coef=0.01, limit',
        'level="sequence", estimator="k1", coef=0.01, limit',
    ),
    planted(
        "TRL RLOO has a geometric mean of ratios",
        RECIPES,
        'ConstraintChoice(kind="clip", ratio="sequence")',
        'ConstraintChoice(kind="clip", ratio="sequence_mean")',
    ),
    planted("TRL RLOO draws four", RECIPES, "rollouts=2,", "rollouts=4,"),
    planted(
        "OpenRLHF's batch is cut in four", RECIPES, "SamplingChoice(minibatches=8)", "SamplingChoice(minibatches=4)"
    ),
    # ---- what a choice means ----
    planted("the floor has ddof 1", FROM_RECIPE, "ddof=0 if floor else 1", "ddof=1", "B9"),
    planted(
        "the sampler is corrected by the policy of now",
        FROM_RECIPE,
        "before = batch.logprobs.detach()",
        "before = logprobs.detach()",
    ),
    planted(
        "the KL in the reward has no limit",
        FROM_RECIPE,
        "ref_logprobs, kl.estimator, limit=kl.limit)",
        "ref_logprobs, kl.estimator)",
    ),
    planted("cispo's upper bound is a distance from 0", FROM_RECIPE, "high=1 + c.clip_high", "high=c.clip_high"),
    # ---- denominators where a row is empty, limits ----
    planted(
        "sequence_sum does not count empty rows",
        OBJECTIVES,
        "return m / (P * G)",
        "return m / mask.any(-1, keepdim=True).sum((-3, -2), keepdim=True)",
    ),
    planted(
        "the sum per sequence does not count empty rows",
        OBJECTIVES,
        "_unmasked(per_token, mask).sum(-1).mean((-2, -1))",
        "torch.where(mask, per_token, 0).sum((-3, -2, -1)) / mask.any(-1).sum((-2, -1)).clamp(min=1)",
    ),
    planted(
        "sequence_mean does not count empty rows",
        OBJECTIVES,
        "clamp(min=1) * (P * G))",
        "clamp(min=1) * mask.any(-1, keepdim=True).sum((-3, -2), keepdim=True))",
    ),
    planted(
        "constant_length does not count empty rows",
        OBJECTIVES,
        "return m / (P * G * length)",
        "return m / (mask.any(-1, keepdim=True).sum((-3, -2), keepdim=True) * length)",
    ),
    planted("limits act from above alone", OBJECTIVES, "x.clamp(-limit, limit)", "x.clamp(max=limit)"),
    planted(
        "a weight over the cap is cut under mode mask",
        OBJECTIVES,
        "& (ratio <= cap), ratio, 0)",
        "& (ratio <= cap), ratio, cap)",
    ),
    planted(
        "the batch's std is that of the groups",
        ADVANTAGES,
        "_variance(_centred(r, valid, (-2, -1)), valid",
        "_variance(_centred(r, valid, (-1,)), valid",
    ),
]

if __name__ == "__main__":
    mutants.MUTANTS[:] = PARITY_MUTANTS
    sys.exit(mutants.main(sys.argv[1:]))
