"""Faults planted in the doctor, one at a time, in the form of ``mutants.py`` and run by its runner.

python tests/axes_mutants_doctor.py [WORD ...]
"""

import sys

import mutants
from mutants import Mutant

TESTS = "test_doctor_exact.py"
LIVE, BASELINE, CRITIC, TOKENS = (f"doctor/{name}.py" for name in ("live", "baseline", "critic", "tokens"))
GROUPS, NOISE, MODE = (f"doctor/{name}.py" for name in ("groups", "noise", "mode"))


def planted(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(f"doctor: {name}", file, old, new, TESTS)


DOCTOR_MUTANTS: list[Mutant] = [
    planted("the live path is detached all the same", LIVE, "    return A\n", "    return A.detach()\n"),
    planted("the live KL has no reference", LIVE, "coef * (log_pi - log_ref))", "coef * log_pi)"),
    planted(
        "the sick optimum without its root",
        LIVE,
        "(power * (found.logprobs + r / beta))",
        "(found.logprobs + r / beta)",
    ),
    planted(
        "the baseline by length adds", BASELINE, "batch.rewards - LENGTH_PRICE *", "batch.rewards + LENGTH_PRICE *"
    ),
    planted(
        "a lag is read the wrong way round", BASELINE, '"below" if mean_advantage > 0', '"below" if mean_advantage < 0'
    ),
    planted(
        "the running mean sees the batch", BASELINE, "return batch.rewards - b\n", "return batch.rewards - self.b\n"
    ),
    planted("the critic never stops", CRITIC, "return 0.0 if done >= STOP else 1.0", "return 1.0"),
    planted("the policy stops instead", CRITIC, 'param_groups[1]["lr"] *=', 'param_groups[0]["lr"] *='),
    planted("a failure's advantage ignores V", CRITIC, "GroupAdvantage(1 - V, -V)", "GroupAdvantage(1 - V, 0 * V)"),
    planted("unshifted is shifted", TOKENS, "longer)[..., 1:, :]", "longer)[..., :-1, :]"),
    planted(
        "a late mask loses the last token",
        TOKENS,
        "torch.cat([torch.zeros_like(batch.logprobs[..., :1]), batch.logprobs[..., 1:]], dim=-1)",
        "torch.cat([batch.logprobs[..., :-1], torch.zeros_like(batch.logprobs[..., :1])], dim=-1)",
    ),
    planted(
        "a prompt's token scored before it is read",
        TOKENS,
        "gather(1, token.unsqueeze(1))",
        "gather(1, before.unsqueeze(1))",
    ),
    planted("a language model of all prompts alike", TOKENS, "(p - p.mean()) * prompt", "p * prompt"),
    planted(
        "empty groups are all wrong ones", GROUPS, "p**group_size + (1 - p) ** group_size", "(1 - p) ** group_size"
    ),
    planted("the smallest group is one too large", GROUPS, "    return G\n", "    return G + 1\n"),
    planted("errors as of one group", GROUPS, "(share * (1 - share) / groups)", "(share * (1 - share))"),
    planted(
        "noise of a batch, not of a rollout",
        NOISE,
        "signal / (group_size * found.trace.item())",
        "signal / found.trace.item()",
    ),
    planted("stale data drawn by the present policy", MODE, 'options.get("old", problem.policy)', "problem.policy"),
    planted("curves by the first of each block", MODE, "part.mean(0) for part in parts", "part[0] for part in parts"),
    planted("effort forgets its least", MODE, "max(least, round(number * self.scale))", "round(number * self.scale)"),
]

if __name__ == "__main__":
    mutants.MUTANTS[:] = DOCTOR_MUTANTS
    sys.exit(mutants.main(sys.argv[1:]))
