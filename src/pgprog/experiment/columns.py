"""Which columns a run's metrics hold, since which version of the package, and in which runs."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from pgprog.errors import UsageError, said
from pgprog.experiment import rundir


class Column(NamedTuple):
    """A metric of ``metrics.jsonl``."""

    since: str
    """The first version that writes it."""
    where: str = "in every run"
    """In which runs, and at which steps."""


_GROUPS = "in runs with more than one completion of a prompt"
_CRITIC = "in runs with a critic"
_RATIO = "in runs with more than one step on a batch, or stale data"
_CLIP = "in runs with a clip"
_READING = "at every --instruments-every'th step, unless it is 0"
_NEW = "0.2.0"

COLUMNS: dict[str, Column] = {
    **dict.fromkeys(("seed", "step", "rollouts", "success", "reward", "entropy", "length"), Column("0.1.0")),
    **dict.fromkeys(("advantage_mean", "advantage_std", "frac_zero_advantage", "loss", "grad_norm"), Column("0.1.0")),
    **dict.fromkeys(("frac_reward_zero_std", "frac_all_wrong", "frac_all_right"), Column("0.1.0", _GROUPS)),
    **dict.fromkeys(("clip_frac", "ratio_min", "ratio_max"), Column("0.1.0", _CLIP)),
    "value_loss": Column("0.1.0", _CRITIC),
    "sampled": Column("0.2.0", "in runs with dynamic sampling"),
    "kl_penalty": Column("0.2.0", "in runs with a KL penalty in the loss"),
    "length_right": Column(_NEW, "where an answer is right"),
    "length_wrong": Column(_NEW, "where an answer is wrong"),
    **{f"group_{what}_q{q}": Column(_NEW, _GROUPS) for what in ("mean", "std") for q in (10, 50, 90)},
    "explained_variance": Column(_NEW, _CRITIC + ", where returns are not all equal"),
    **{f"token_ratio_{name}": Column(_NEW, _RATIO) for name in ("min", "q01", "q50", "q99", "max")},
    **dict.fromkeys(("kl_old_k1", "kl_old_k3"), Column(_NEW, _RATIO)),
    **dict.fromkeys(("kl_sampler_k1", "kl_sampler_k3"), Column(_NEW, "in runs whose sampler is another policy")),
    "ess": Column(_NEW, _RATIO + ", or another sampler"),
    **dict.fromkeys(("kl_ref_k1", "kl_ref_k3"), Column(_NEW, "in runs with a reference policy")),
    **dict.fromkeys(("grad_signal", "grad_noise", "grad_snr"), Column(_NEW, _READING)),
    "value_error": Column(_NEW, _CRITIC + " and --exact-critic, " + _READING),
}
"""By name; a trust region writes columns of its own beside them."""


def rows_with(directory: Path, names: Iterable[str]) -> list[dict[str, Any]]:
    """The rows of a run that hold all of these columns, in order.

    Raises: UsageError where the directory holds no metrics, where they cannot be read, or where no row has a column:
    it is named, with the version that writes it first, the runs that do, and the version that made this one.
    """
    path = directory / rundir.METRICS
    try:
        rows = rundir.read_rows(path)
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: give the directory of a run that has made a step") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({said(error)}): give a file that can") from error
    names = tuple(names)
    for name in names:
        if not any(isinstance(row, dict) and name in row for row in rows):
            raise UsageError(f"{path} has no {name}: {written(name)}; {made_by(directory)}")
    return [row for row in rows if all(name in row for name in names)]


def written(name: str) -> str:
    """Since when a column is written, and where."""
    if name not in COLUMNS:
        return "no version of pgprog writes it"
    return f"written since pgprog {COLUMNS[name].since}, {COLUMNS[name].where}"


def made_by(directory: Path) -> str:
    """The version that made a run, as far as its configuration says so."""
    try:
        version = rundir.read_json(directory / rundir.CONFIG)["environment"]["pgprog"]
    except (UsageError, KeyError, TypeError):
        return "this run does not say which version made it"
    return f"this run was made by {version}"
