"""Faults planted in the doctor's modes of samplers, stale data, lengths and lessons, in the form of ``mutants.py``.

python tests/axes_mutants_doctor_more.py [WORD ...]
"""

import sys

import mutants
from mutants import Mutant

TESTS = "test_doctor_more.py"
SAMPLER, STALE, LENGTH, LESSONS = (f"doctor/{name}.py" for name in ("sampler", "stale", "length", "lessons"))


def planted(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name, file, old, new, TESTS)


DOCTOR_MORE_MUTANTS: list[Mutant] = [
    planted(
        "a sampler's correction is left out",
        SAMPLER,
        "return changes + correction if",
        "return changes if",
    ),
    planted(
        "KL the other way round",
        SAMPLER,
        "torch.xlogy(mu, mu) - torch.xlogy(mu, pi)",
        "torch.xlogy(pi, pi) - torch.xlogy(pi, mu)",
    ),
    planted(
        "the sample size of equal weights", SAMPLER, "(mu * w.square()).sum() * len(mu)", "(mu * w).sum() * len(mu)"
    ),
    planted(
        "what a nucleus leaves out is covered",
        SAMPLER,
        "torch.where(mu > 0, pi, 0).sum(1)",
        "torch.where(mu >= 0, pi, 0).sum(1)",
    ),
    planted(
        "the two policies are one",
        STALE,
        "tiny_problem(group_size=3, step=step)",
        "tiny_problem(group_size=3, step=0.0)",
    ),
    planted("data at work are one update old at any age", STALE, 'f"sampling.age={d}"', 'f"sampling.age={min(d, 1)}"'),
    planted(
        "right answers are called wrong",
        LENGTH,
        "return of(~right), of(right)",
        "return of(right), of(~right)",
    ),
    planted(
        "the formula divides by no length", LENGTH, "(r - p) / found.mask.sum(-1) * logprobs", "(r - p) * logprobs"
    ),
    planted(
        "lengths are read on every target",
        LENGTH,
        "[: int(REACH * policy.task.max_target) + 1]",
        "",
    ),
    planted(
        "a length is read after the level",
        LENGTH,
        "return v + (LEVEL - s) / (s_next - s) * (v_next - v)",
        "return v_next",
    ),
    planted("the denominator is not set", LENGTH, 'return (f"aggregation.denominator={name}",)', "return ()"),
    planted("a difference counts as sure", LENGTH, 'score["mean"] > 2 * score["standard error"]', 'score["mean"] > 0'),
    planted(
        "the bonus of the other rungs", LESSONS, "config.policy_entropy_coef * value", "config.entropy_coef * value"
    ),
    planted("raw advantages are z-scored in the proof", LESSONS, '"none" if whitened else "sequences"', '"sequences"'),
    planted("what is lost bites though unsure", LESSONS, "effect > max(BITES, 2 * error)", "effect > BITES"),
    planted("what is lost bites however small", LESSONS, "effect > max(BITES, 2 * error)", "effect > 2 * error"),
    planted(
        "a gain is called a loss", LESSONS, "lost.mean().item(), (lost.std()", "lost.abs().mean().item(), (lost.std()"
    ),
    planted("V is shifted at every step", LESSONS, "        self.shift = 0.0\n", ""),
    planted("V is not shifted", LESSONS, "critic.value_bias.add_(self.shift)", "pass"),
    planted(
        "the sweep's cured runs are sick",
        LESSONS,
        "(replace(at, **fault), at) for value",
        "(replace(at, **fault), replace(at, **fault)) for value",
    ),
    planted(
        "the sweep stays at the first setting",
        LESSONS,
        "for at in (replace(base, **{axis: value}),)",
        "for at in (replace(base, **{axis: values[0]}),)",
    ),
    planted("a boundary where none is", LESSONS, 'if row["bites"]]', "]"),
]

if __name__ == "__main__":
    mutants.MUTANTS[:] = DOCTOR_MORE_MUTANTS
    sys.exit(mutants.main(sys.argv[1:]))
