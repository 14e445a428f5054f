"""The modes, and a tour of them."""

import time
from collections.abc import Callable, Iterator

from pgprog.doctor import baseline, critic, groups, length, lessons, live, noise, sampler, stale, tokens
from pgprog.doctor.mode import Effort, Finding

MODES: dict[str, Callable[[Effort], Finding]] = {
    "live-advantage": live.live_advantage,
    "live-kl": live.live_kl,
    "action-baseline": baseline.action_baseline,
    "lagging-critic": critic.lagging_critic,
    "shift": tokens.shift,
    "prompt-loss": tokens.prompt_loss,
    "sparse": noise.sparse,
    "variance-for-bias": noise.variance_for_bias,
    "empty-groups": groups.empty_groups,
    "sampler-mismatch": sampler.sampler_mismatch,
    "stale": stale.stale,
    "length-bias": length.length_bias,
    "no-entropy-bonus": lessons.no_entropy_bonus,
    "raw-advantages": lessons.raw_advantages,
    "long-steps": lessons.long_steps,
}
"""The names and their order are those of ``pgprog.doctor_command.TITLES``."""


def tour(names: tuple[str, ...], effort: Effort) -> Iterator[tuple[Finding, float]]:
    """Each mode's finding and the seconds that it took, one after the other."""
    for name in names:
        started = time.perf_counter()
        finding = MODES[name](effort)
        yield finding, time.perf_counter() - started
