"""Warnings in words, from the metrics of a run: each a pure function of one seed's last rows.

Most are given the last ``WINDOW`` of them, those that look for something slow or seldom read the last ``LONG``. A
threshold is a named constant, with its reason. What a warning says is what was measured, and what to do about it; a
run that is warned of may still come round.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pgprog.algorithms.diagnostics import smallest_group
from pgprog.experiment.config import RunConfig

Rows = Sequence[dict[str, Any]]

WINDOW = 100  # steps: some hundred batches make shares and means steady, and a start is not taken for a state
LONG = 800  # steps: as many readings as a window can hold of an instrument that is not read every time
CHECK_EVERY = 10  # steps
LEAST = 20  # rows; of fewer nothing is said
SOLVED = 0.5  # success from which on silent groups and a faint gradient are what is left of a task
SILENT = 0.8  # share of groups without signal: a batch is then worth a fifth of what it cost
UNEQUAL = 0.15  # that share above what equal prompts would have; a window of 100 batches is off by far less
COLLAPSED = 1.25  # tokens to choose from, exp(entropy): all but one or two places are decided
CLIPPED = 0.3  # share of tokens without a gradient: beyond, a step is mostly the clip's
TAIL = 5.0  # one token in a hundred that weighs so much more, or less, than when it was drawn
LAGGING = 0.9  # share of steps at which V is worse than a constant; by luck alone it is about half
GROWTH = 1.1  # from the first half of a window to its second
FAINT = 0.05  # |E g|^2 / tr Cov(g): 95 parts of 100 of a step's squared length are then noise
FEW_READINGS = 8  # of signal to noise: one reading is off by some 0.2, the mean of eight by less than 0.1
WORN = 0.3  # of the sample that is left when it is weighted
SPENT = 0.8  # share of steps at which a filter draws all that it may; a run that begins so and learns is under it
DECIDED = "prompts are decided or unequal and a larger G will not help"


@dataclass(frozen=True)
class Facts:
    """What the rows of a run do not say about it."""

    completions: int
    """G."""
    stale: bool
    """Ratios must leave 1: several steps on a batch, or data of an older policy."""
    steps: int = 2 * WINDOW
    """How long the run is meant to be."""
    most_sampled: int | None = None
    """Completions that a filter may draw for a batch, where there is one."""

    @property
    def first_look(self) -> int:
        """Rows before the first look: a window, in a run of less than two windows half of it."""
        return min(WINDOW, max(LEAST, self.steps // 2))


def facts_of(config: RunConfig) -> Facts:
    """The facts of a run."""
    recipe = config.choices
    stale = recipe.gradient_steps > 1 or recipe.sampling.age > 0
    most = config.most_rollouts_per_step if recipe.sampling.dynamic > 1 else None
    return Facts(config.completions, stale, config.steps, most)


def column(rows: Rows, name: str) -> list[float]:
    """The values of one metric, of the rows that have it."""
    return [row[name] for row in rows if name in row]


def mean(values: Sequence[float]) -> float:
    """Of numbers; NaN of none, which is under and over no threshold."""
    return sum(values) / len(values) if values else math.nan


def percent(share: float) -> str:
    """As a reader says it; never 0% or 100% where it is not quite."""
    if 0 < share < 0.001:
        return "under 0.1%"
    return f"{share:.0%}" if 0.0095 <= share <= 0.995 or share in (0, 1) else f"{share:.1%}"


def silent_groups(rows: Rows, facts: Facts) -> str | None:
    """Groups whose rewards are all equal move nothing, and most of them are all wrong.

    The suggested G is the smallest with 1 - p^G - (1 - p)^G >= 1/2, if every prompt has the mean's p. Where the share
    is far above p^G + (1 - p)^G they do not: prompts are decided, right or wrong, and G does not change what they are.
    """
    silent, p = mean(column(rows, "frac_reward_zero_std")), mean(column(rows, "success"))
    if not (silent >= SILENT and p < SOLVED):
        return None
    said = f"{percent(silent)} of groups carry no signal: success is {percent(p)} and G = {facts.completions}; "
    alike = p**facts.completions + (1 - p) ** facts.completions
    if silent - alike > UNEQUAL:
        return (
            f"{said}with equal prompts {percent(alike)} would, so {DECIDED}: keep entropy up, take easier prompts or "
            "mix the difficulties of prompts"
        )
    if (G := smallest_group(p)) is None:
        return said + "without a single success no G helps: begin with easier prompts, or pay for parts of an answer"
    return said + f"the smallest G with half the groups informative is {G}"


def collapsed_entropy(rows: Rows, facts: Facts) -> str | None:
    """A policy that has stopped to choose before it has learned: what is never sampled is never rewarded."""
    recent = [row for row in rows[len(rows) // 2 :] if row.get("length") != 0]  # 0 where a filter has kept nothing
    H, p = mean(column(recent, "entropy")), mean(column(recent, "success"))
    if not (math.exp(H) <= COLLAPSED and p < SOLVED):
        return None
    return (
        f"entropy has collapsed to {H:.2f} nats a token, {math.exp(H):.2f} tokens to choose from, while success is "
        f"{percent(p)}: begin again with a larger entropy coefficient or a lower learning rate"
    )


def clipped_tokens(rows: Rows, facts: Facts) -> str | None:
    """Most of a gradient step is taken by the clip."""
    share = mean(column(rows, "clip_frac"))
    if not share >= CLIPPED:
        return None
    return (
        f"the clip changes {percent(share)} of what it sees at the last step on a batch: the policy moves too far on "
        "each, take fewer epochs or a lower learning rate"
    )


def ratio_tails(rows: Rows, facts: Facts) -> str | None:
    """One token in a hundred whose probability has changed a great deal since it was drawn."""
    low, high = mean(column(rows, "token_ratio_q01")), mean(column(rows, "token_ratio_q99"))
    if not (high >= TAIL or low <= 1 / TAIL):
        return None
    return (
        f"ratios have long tails before the clip: 1% of tokens are under {low:.2g}, 1% over {high:.2g}; the data are "
        "too old, take fewer steps on them, fresher ones or a lower learning rate"
    )


def ratios_of_one(rows: Rows, facts: Facts) -> str | None:
    """Old and new log-probabilities the same though the data are stale: the old ones are not those of the sampler."""
    low, high = column(rows, "token_ratio_min"), column(rows, "token_ratio_max")
    if not (facts.stale and low and all(x == 1 for x in low + high)):
        return None
    return (
        "old and new log-probabilities are the same though the data are stale: every ratio is exactly 1 and the clip "
        "never acts; old ones must be computed by the policy that sampled, before its first step"
    )


def lagging_critic(rows: Rows, facts: Facts) -> str | None:
    """V is worse than a constant for long: A is unbiased still, and noisier than without a critic."""
    explained = column(rows, "explained_variance")
    share = mean([float(x < 0) for x in explained])
    if len(explained) < LEAST or not share >= LAGGING:
        return None
    return (
        f"the baseline lags: the critic explains less than a constant would in {percent(share)} of steps (explained "
        f"variance {mean(explained):.2f} on average); give it a higher learning rate, or updates before the policy's"
    )


def growing_wrong_answers(rows: Rows, facts: Facts) -> str | None:
    """Wrong answers get longer than right ones, and go on growing."""
    half = len(rows) // 2
    before, after = (mean(column(part, "length_wrong")) for part in (rows[:half], rows[half:]))
    right = mean(column(rows[half:], "length_right"))
    if not (after >= GROWTH * before and not after <= right):
        return None
    beside = "" if math.isnan(right) else f", right ones have {right:.1f}"
    return (
        f"wrong answers grow, from {before:.1f} to {after:.1f} tokens{beside}: a denominator of each answer's own "
        "length punishes a long one less per token; aggregate by a constant, or over all tokens"
    )


def faint_gradient(rows: Rows, facts: Facts) -> str | None:
    """Signal to noise of the gradient, the mean signal over the mean noise, is too low for a step to mean much."""
    signal, noise = column(rows, "grad_signal"), column(rows, "grad_noise")
    p = mean(column(rows, "success"))
    if len(signal) < FEW_READINGS or not (mean(noise) > 0 and p < SOLVED):
        return None
    snr = mean(signal) / mean(noise)
    if not snr < FAINT:
        return None
    return (
        f"the gradient is nearly all noise: signal to noise {max(snr, 0):.2g} in {len(signal)} readings, at a success "
        f"of {percent(p)}; more rollouts a step or a better baseline help, a smaller clip or a KL penalty does not"
    )


def worn_sample(rows: Rows, facts: Facts) -> str | None:
    """Importance weights leave little of the sample."""
    share = mean(column(rows, "ess"))
    if not share < WORN:
        return None
    return (
        f"the effective sample size is {percent(share)} of the batch: a few sequences outweigh all others; take "
        "fresher data, or a sampler nearer to the policy"
    )


def spent_filter(rows: Rows, facts: Facts) -> str | None:
    """Dynamic sampling draws all that it may: what it keeps is full at best by the last draw, or empty (length 0)."""
    drawn, kept = column(rows, "sampled"), column(rows, "length")
    spent, nothing = mean([float(n == facts.most_sampled) for n in drawn]), mean([float(x == 0) for x in kept])
    if not spent >= SPENT:
        return None
    return (
        f"the filter draws all that it may, {facts.most_sampled:,} completions, in {percent(spent)} of steps, and "
        f"finds no group of unequal rewards in {percent(nothing)}: a batch is full by the last draw at best, and empty "
        "slots move nothing; take easier prompts (harder ones where nearly all are solved), or a larger G"
    )


CHECKS: dict[str, Callable[[Rows, Facts], str | None]] = {
    "silent_groups": silent_groups,
    "collapsed_entropy": collapsed_entropy,
    "clipped_tokens": clipped_tokens,
    "ratio_tails": ratio_tails,
    "ratios_of_one": ratios_of_one,
    "lagging_critic": lagging_critic,
    "growing_wrong_answers": growing_wrong_answers,
    "faint_gradient": faint_gradient,
    "worn_sample": worn_sample,
    "spent_filter": spent_filter,
}


SEE = {
    "silent_groups": "empty-groups",
    "collapsed_entropy": "no-entropy-bonus",
    "clipped_tokens": "long-steps",
    "ratio_tails": "stale",
    "ratios_of_one": "stale",
    "lagging_critic": "lagging-critic",
    "growing_wrong_answers": "length-bias",
    "faint_gradient": "variance-for-bias",
    "worn_sample": "stale sampler-mismatch",
    "spent_filter": "empty-groups",
}
"""The modes of ``pgprog doctor`` that show it."""
OVER_ALL = (faint_gradient, growing_wrong_answers)
"""They are given all rows that are kept, the others the last ``WINDOW``."""


@dataclass(frozen=True)
class Warned:
    """A warning, and when it was first seen."""

    kind: str
    step: int
    """The last that was read; what it warns of may have begun up to a window before."""
    text: str


class Watch:
    """The rows of one seed as they come; each kind of warning is given at most once."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.given: list[Warned] = []
        self._rows: deque[dict[str, Any]] = deque(maxlen=LONG)

    def see(self, row: dict[str, Any]) -> list[Warned]:
        """Take the next row; return what is new."""
        self._rows.append(row)
        full = len(self._rows) >= self.facts.first_look
        return self.look() if full and row["step"] % CHECK_EVERY == 0 else []

    def look(self) -> list[Warned]:
        """What the window says now that was not said before; at the end of a run, however short it was."""
        if len(self._rows) < LEAST:
            return []
        rows, known = list(self._rows), {warned.kind for warned in self.given}
        checks = {kind: check for kind, check in CHECKS.items() if kind not in known}
        read = {kind: rows if check in OVER_ALL else rows[-WINDOW:] for kind, check in checks.items()}
        found = [(kind, check(read[kind], self.facts)) for kind, check in checks.items()]
        new = [
            Warned(
                kind, (step := rows[-1]["step"]), f"{text} (steps {read[kind][0]['step']} to {step}); {see(kind, text)}"
            )
            for kind, text in found
            if text is not None
        ]
        self.given += new
        return new


def see(kind: str, text: str) -> str:
    """Where a warning is shown; groups that are silent for want of choice are another mode's."""
    return f"see pgprog doctor {'no-entropy-bonus' if DECIDED in text else SEE[kind]}"


def warnings_in(rows: Iterable[dict[str, Any]], facts: Facts) -> list[Warned]:
    """Every warning of one seed's whole run, a function of its rows alone."""
    watch = Watch(facts)
    for row in rows:
        watch.see(row)
    watch.look()
    return watch.given
