"""``pgprog foundations`` and ``pgprog exact``: typed arguments, free of torch, and what they do."""

import dataclasses
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from pgprog.algorithms.recipes import RECIPES, Recipe, find
from pgprog.errors import UsageError, choose, refuse_twice
from pgprog.experiment.config import GROUP_METHODS, LADDER, TITLES, RunConfig, from_json, validate

if TYPE_CHECKING:
    from rich.progress import Progress

    from pgprog.exact.critic import Point
    from pgprog.exact.estimators import Estimator, Row, Setting
    from pgprog.exact.recipes import Problem, RecipeRow
    from pgprog.policy import Critic, Policy

FAILED = 1  # the exit code where an identity does not hold
CRITIC_LAMBDAS = (0.0, 0.5, 0.8, 0.9, 0.95, 1.0)
CRITIC_ERRORS = (0.0, 0.05, 0.2)
CRITIC_GAMMAS = (1.0, 0.9)
MOST_BATCHES = 2_000_000  # of --recipes; pgprog.exact.blackbox has the same, and brings torch


@dataclass(frozen=True, kw_only=True)
class Foundations:
    """Show the identities on which the family rests, by exact enumeration; exits 1 if one does not hold.

    Example: pgprog foundations
    """

    samples: int = 200_000
    """Samples of the estimators whose exact variance stands beside them."""
    seed: int = 0
    """Decides the samples."""
    json: bool = False
    """Print JSON, in place of text."""


@dataclass(frozen=True, kw_only=True)
class Exact:
    """Bias and variance of each estimator at a policy, computed and not sampled, with the sampled figures beside them.

    Example: pgprog exact --algos reinforce rloo grpo
    """

    algos: tuple[str, ...] = LADDER
    """Which estimators, of reinforce, actor_critic, ppo, rloo, grpo."""
    recipes: tuple[str, ...] = ()
    """In place of --algos: recipes, or "all", over every batch of a tiny problem, with fresh and with stale data."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Change one choice of the --recipes, as in constraint.clip_high=0.28; may be given several times."""
    stale_step: float = 0.05
    """With --recipes: how far that update moved a parameter at most, Adam's learning rate."""
    advantage: str | None = None
    """FILE.py:function, one row more: a function of rewards (P, G), or of rewards and values (P,)."""
    run: Path | None = None
    """Directory of a run, whose policy is measured [default: an untrained policy]."""
    algo: str | None = None
    """Which run, if --run is a comparison."""
    seed: int | None = None
    """Which policy [default: 0, or the run's first]."""

    seq_len: int | None = None
    """Tokens of a completion [default: 3, or the run's, 2 with --recipes]. 5 takes some minutes."""
    digits: int | None = None
    """How many digits there are [default: 10, or the run's, 2 with --recipes]."""
    variable_length: bool = False
    """EOS is a token of the policy, and a completion may end early: always with --recipes."""
    targets: Literal["uniform", "sum"] | None = None
    """Targets uniform over 0..9L, or the sum of L random digits [default: uniform, or the run's]."""
    prompt_form: Literal["state", "tokens"] | None = None
    """The target as the policy's initial state, or as digit tokens that it reads [default: state, or the run's]."""
    hidden: int | None = None
    """Hidden units of the policy, and of the critic [default: 64, or the run's, 4 with --recipes]."""

    group_size: int | None = None
    """Completions of each prompt, for rloo, grpo and your own function [default: 8, 4 with --recipes]."""
    rollouts: int = 64
    """What every estimator pays: so many prompts, or rollouts / G prompts with G completions each."""
    resamples: int = 400
    """Independent resamples for the sampled figures; 0 leaves them out."""
    critic_curves: bool = False
    """Bias and variance of GAE over lambda, gamma and the critic's error, as well."""
    out: Path | None = None
    """Directory for the figures and exact.json [default: none is written]."""
    overwrite: bool = False
    """Replace what an earlier call left in --out."""
    json: bool = False
    """Print JSON, in place of tables."""

    @property
    def G(self) -> int:
        """Completions of each prompt."""
        default = 4 if self.recipes else 8
        return default if self.group_size is None else self.group_size


def foundations(args: Foundations) -> int:
    """Run ``pgprog foundations``."""
    if args.samples < 2:
        raise UsageError(f"--samples {args.samples} is too few: give 2 or more")
    if not 0 <= args.seed < 2**63:
        raise UsageError(f"--seed {args.seed} is out of range: give an integer in [0, 2**63)")
    import torch
    from rich.console import Console

    from pgprog.exact import foundations as identities
    from pgprog.report.exact_tables import print_identities

    torch.set_num_threads(1)
    found = identities.foundations(args.samples, args.seed)
    failed = [identity.number for identity in found if not identity.holds]
    if args.json:
        print(json.dumps({"holds": not failed, "identities": [identity.as_dict() for identity in found]}))
    else:
        print_identities(Console(), found)
    if failed:
        which = ("identity" if len(failed) == 1 else "identities") + " " + ", ".join(map(str, failed))
        Console(stderr=True).print(f"pgprog: FAILED: {which} did not hold", style="bold red")
        return FAILED
    return 0


def exact(args: Exact) -> int:
    """Run ``pgprog exact``."""
    if args.recipes or args.set:
        return exact_recipes(args)
    check(args)
    import torch
    from rich.console import Console

    from pgprog.commands import progress_bars
    from pgprog.exact.estimators import users_estimator
    from pgprog.experiment import rundir
    from pgprog.experiment.user_advantage import load_advantage
    from pgprog.report.exact_figures import draw
    from pgprog.report.exact_tables import print_exact

    torch.set_num_threads(1)
    config = configuration(args)
    rows_of = [ladder_estimator(algo, args.G) for algo in args.algos]
    if args.advantage is not None:
        rows_of.append(users_estimator(args.advantage, load_advantage(args.advantage), args.G))
    policy, critic, seed = subject(args, config)
    directory = None if args.out is None else output_directory(args.out, args.overwrite)
    console = Console(stderr=args.json)
    started = time.perf_counter()
    with progress_bars(console) as bars:
        setting = exact_setting(policy, critic, args.rollouts, bars)
        rows = [measured(e, setting, policy, critic, args.resamples, bars) for e in rows_of]
        points = critic_curves(policy, bars) if args.critic_curves else []
    found = {
        "command": rundir.command(),
        "created": rundir.now(),
        "environment": rundir.environment(),
        "run": None if args.run is None else str(args.run),
        "seed": seed,
        "task": asdict(policy.task),
        "hidden": config.hidden,
        "success": setting.success,
        "success_by_target": setting.scores.p.tolist(),
        "gradient_norm": setting.gradient.norm().item(),
        "rollouts": args.rollouts,
        "group_size": args.G,
        "estimators": [asdict(row) for row in rows],
        "curves": curves(rows_of, setting),
        "critic": [point._asdict() for point in points],
        "explanations": explanations(rows, args.G)
        + note_on_critic(rows, args.run is not None and config.choices.critic == "prompt"),
        "wall_seconds": time.perf_counter() - started,
    }
    figures = []
    if directory is not None:
        rundir.write_json(directory / OUTPUT, found)
        figures = draw(directory, found)
    if args.json:
        print(json.dumps(found, allow_nan=False))
    else:
        print_exact(console, found)
        if directory is not None:
            shown = ", ".join(path.name for path in figures)
            console.print(f"Saved in {directory}: {OUTPUT}, {shown} (and .svg)", soft_wrap=True)
    return 0


def exact_recipes(args: Exact) -> int:
    """Run ``pgprog exact --recipes``."""
    recipes = check_recipes(args)
    import torch
    from rich.console import Console

    from pgprog.commands import progress_bars
    from pgprog.exact.recipes import tempered, tiny_problem
    from pgprog.experiment import rundir
    from pgprog.report.exact_tables import print_recipes

    torch.set_num_threads(1)
    sizes = {name: value for name in PROBLEM_OPTIONS if (value := getattr(args, name)) is not None}
    problem = tiny_problem(args.seed or 0, group_size=args.G, step=args.stale_step, **sizes)
    directory = None if args.out is None else output_directory(args.out, args.overwrite)
    console = Console(stderr=args.json)
    started = time.perf_counter()
    with progress_bars(console) as bars:
        rows = [recipe_row(recipe, problem, bars) for recipe in recipes]
    found = {
        "command": rundir.command(),
        "created": rundir.now(),
        "environment": rundir.environment(),
        **described(tempered(problem, recipes[0].sampling.temperature)),  # --set gives all of them the same
        "seed": args.seed or 0,
        "stale_step": args.stale_step,
        "set": list(args.set),
        "recipes": [asdict(row) for row in rows],
        "wall_seconds": time.perf_counter() - started,
    }
    if directory is not None:
        rundir.write_json(directory / OUTPUT, found)
    if args.json:
        print(json.dumps(found, allow_nan=False))
    else:
        print_recipes(console, found)
        if directory is not None:
            console.print(f"Saved in {directory}: {OUTPUT}", soft_wrap=True)
    return 0


def recipe_row(recipe: Recipe, problem: "Problem", bars: "Progress") -> "RecipeRow":
    """One row of --recipes, behind a bar."""
    from pgprog.exact.recipes import measure

    bar = bars.add_task(f"batches of {recipe.title}", total=2, success="")
    return measure(recipe, problem, lambda: bars.advance(bar))


def described(problem: "Problem") -> dict[str, Any]:
    """What the numbers of --recipes are of."""
    from pgprog.exact.recipes import outcome_probabilities, rewards_of, true_gradient

    def success(policy: "Policy") -> list[float]:
        return (outcome_probabilities(policy, problem) * rewards_of(problem)).sum(1).tolist()

    return {
        "task": asdict(problem.policy.task),
        "hidden": problem.policy.head_weight.shape[1],
        "targets": problem.targets.tolist(),
        "group_size": problem.group_size,
        "completions": len(problem.targets) * problem.group_size,
        "success_by_target": success(problem.policy),
        "success_by_target_one_update_ago": success(problem.old),
        "kl_of_the_update": problem.distance,
        "gradient_norm": true_gradient(problem).norm().item(),
    }


PROBLEM_OPTIONS = ("seq_len", "digits", "hidden", "prompt_form")
NOT_WITH_RECIPES = {
    "algos": "name a rung among the recipes",
    "advantage": "measure it beside --algos",
    "run": "all batches are tried at a tiny policy, not at that of a run",
    "algo": "all batches are tried at a tiny policy, not at that of a run",
    "critic_curves": "ask for them alone",
    "targets": "the prompts are given, the least and the largest target",
    "rollouts": "a batch is two prompts with --group-size completions each",
    "resamples": "nothing is sampled",
}


def check_recipes(args: Exact) -> list[Recipe]:
    """The recipes that --recipes names, with --set; raises UsageError for what can be seen without work."""
    if not args.recipes:
        raise UsageError(f"--set {args.set[0]} changes a recipe: name one or more with --recipes")
    for name, instead in NOT_WITH_RECIPES.items():
        if getattr(args, name) != getattr(Exact, name):
            raise UsageError(f"--{name.replace('_', '-')} with --recipes: {instead}")
    names = tuple(RECIPES) if args.recipes == ("all",) else args.recipes
    refuse_twice("--recipes", names)
    for name, least in {"seq_len": 1, "digits": 2, "hidden": 1, "group_size": 2}.items():
        if (value := getattr(args, name)) is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')} {value} is too small: give {least} or more")
    if not 0 <= args.stale_step <= 10:
        raise UsageError(f"--stale-step {args.stale_step:g} is out of range: give 0 (no update) to 10")
    if args.seed is not None and not 0 <= args.seed < 2**63 - 1:
        raise UsageError(f"--seed {args.seed} is out of range: give an integer in [0, 2**63 - 1)")
    refuse_too_many_batches(args)
    return [find(name, args.set) for name in names]


def refuse_too_many_batches(args: Exact) -> None:
    """Raise UsageError where the batches of --recipes are more than can be tried."""
    L, digits = args.seq_len or 2, args.digits or 2
    Y = sum(digits**t for t in range(min(L, 64) + 1))
    batches = math.comb(Y + args.G - 1, args.G) ** 2 if args.G <= 64 else math.inf
    if batches > MOST_BATCHES:
        raise UsageError(
            f"--seq-len {L}, --digits {digits} and --group-size {args.G} with --recipes make {float(batches):.3g} "
            f"batches of {Y:,} completions, over the limit of {MOST_BATCHES:,}: give less of one"
        )


OUTPUT = "exact.json"
TASK_OPTIONS = ("seq_len", "digits", "targets", "prompt_form", "hidden")


def check(args: Exact) -> None:
    """Raise UsageError for what can be seen without work."""
    for algo in args.algos:
        choose("algorithm", algo, LADDER)
    refuse_twice("--algos", args.algos)
    if not args.algos and args.advantage is None:
        raise UsageError(f"--algos names no algorithm: give one or more of {', '.join(LADDER)}, or --advantage")
    if args.resamples < 0 or args.resamples == 1:
        raise UsageError(f"--resamples {args.resamples}: give 2 or more, for error bars, or 0 for none")
    if args.G < 2:
        raise UsageError(f"--group-size {args.G}: completions of one prompt are compared, give 2 or more")
    if not args.G <= args.rollouts <= 1000 or args.rollouts % args.G:
        raise UsageError(
            f"--rollouts {args.rollouts} with --group-size {args.G}: give a multiple of the group size, "
            "at most 1000, so that every estimator pays the same"
        )
    if args.seed is not None and not 0 <= args.seed < 2**63:
        raise UsageError(f"--seed {args.seed} is out of range: give an integer in [0, 2**63)")
    if args.run is None and args.algo is not None:
        raise UsageError(f"--algo {args.algo} names a run of a comparison: give its directory with --run")
    given = [name for name in TASK_OPTIONS if getattr(args, name) is not None]
    given += ["variable_length"] * args.variable_length
    if args.run is not None and given:
        raise UsageError(f"--{given[0].replace('_', '-')} with --run: the task and the policy are those of the run")


def configuration(args: Exact) -> RunConfig:
    """The run whose policy is measured, or that of an untrained one; in float64."""
    from pgprog.experiment import rundir

    if args.run is None:
        chosen = {name: getattr(args, name) for name in TASK_OPTIONS if getattr(args, name) is not None}
        base = RunConfig(seq_len=3, variable_length=args.variable_length, dtype="float64", group_size=args.G)
        return validate(dataclasses.replace(base, **chosen))
    path = run_directory(args) / rundir.CONFIG
    config = validate(from_json(RunConfig, rundir.read_json(path), path))
    if config.reward_form != "outcome":
        raise UsageError(
            f"{path}: reward_form {config.reward_form} pays more than 0 or 1: moments by counting successes need "
            "outcome rewards; enumerate all groups of a tiny problem with pgprog.exact.blackbox"
        )
    return config


def run_directory(args: Exact) -> Path:
    """The run, or the one of a comparison that --algo names."""
    assert args.run is not None
    if not (args.run / "runs").is_dir():
        if args.algo is not None:
            raise UsageError(f"--algo {args.algo} names a run of a comparison, and --run {args.run} is none")
        return args.run
    algos = sorted(path.name for path in (args.run / "runs").iterdir())
    if args.algo is None:
        raise UsageError(f"--run {args.run} is a comparison: name a run of it with --algo, one of {', '.join(algos)}")
    return args.run / "runs" / choose("run", args.algo, algos)


def subject(args: Exact, config: RunConfig) -> "tuple[Policy, Critic, int]":
    """The policy and the critic that are measured, one replica in float64, and their seed.

    A run without a critic gets an untrained one of the same seed.
    """
    from pgprog.exact.blackbox import replicated
    from pgprog.experiment.learner import load_checked, load_policy, make_learner
    from pgprog.noise import ReplicaGenerator
    from pgprog.policy import Critic

    if args.run is None:
        seed = args.seed or 0
        learner = make_learner(dataclasses.replace(config, algo="actor_critic"), [seed])
        assert isinstance(learner.critic, Critic)
        return learner.policy, learner.critic, seed
    directory = run_directory(args)
    policy, seeds = load_policy(directory, config)
    seed = seeds[0] if args.seed is None else args.seed
    if seed not in seeds:
        raise UsageError(f"--seed {seed} was not trained in {directory}: choose one of {', '.join(map(str, seeds))}")
    critic = Critic(policy.task, ReplicaGenerator(seeds, "critic"), config.hidden)
    tensors, _ = load_checked(directory, config, None)
    trained = {name.removeprefix("critic."): t for name, t in tensors.items() if name.startswith("critic.")}
    if trained and config.choices.critic == "prompt":
        critic.load_state_dict(trained)
    k = seeds.index(seed)
    return replicated(policy, k, 1).double(), replicated(critic, k, 1).double(), seed


def ladder_estimator(algo: str, group_size: int) -> "Estimator":
    """The row of a rung."""
    from pgprog.exact.estimators import ADVANTAGES, WITH_CRITIC, Estimator

    G = group_size if algo in GROUP_METHODS else 1
    return Estimator(algo, TITLES[algo], ADVANTAGES[algo], G, algo in WITH_CRITIC)


def exact_setting(policy: "Policy", critic: "Critic", rollouts: int, bars: "Progress") -> "Setting":
    """The moments that every row is made of; most of the time is spent here."""
    import torch

    from pgprog.exact.enumeration import every_target, refuse_what_is_too_large
    from pgprog.exact.estimators import Setting
    from pgprog.exact.scores import ScoreMoments, score_moments

    targets = every_target(policy.task)
    refuse_what_is_too_large(policy, [0], prune=False)  # a whole tree has as many prefixes for every target
    bar = bars.add_task("moments of the scores", total=len(targets), success="")
    scores = score_moments(policy, targets, lambda n: bars.update(bar, completed=n))
    with torch.no_grad():
        values = critic(targets.unsqueeze(0))[0]
    return Setting(ScoreMoments(*(part[0] for part in scores)), policy.task.target_weights(), values, rollouts)


def measured(
    estimator: "Estimator", setting: "Setting", policy: "Policy", critic: "Critic", resamples: int, bars: "Progress"
) -> "Row":
    """One row, with its sampled figures if there are to be any."""
    from pgprog.exact.estimators import measure, sample_gradients

    row, mean = measure(estimator, setting)
    if not resamples:
        return row
    bar = bars.add_task(f"resamples of {estimator.title}", total=resamples, success="")
    sampled = sample_gradients(
        estimator, policy, critic, setting.rollouts, resamples, mean, lambda n: bars.update(bar, completed=n)
    )
    return dataclasses.replace(row, sampled=sampled)


def critic_curves(policy: "Policy", bars: "Progress") -> "list[Point]":
    """GAE over lambda and gamma with a right and a wrong critic, and the two ways to use V of the prompt alone."""
    from pgprog.exact.critic import critic_point, trajectories
    from pgprog.exact.enumeration import every_target

    targets = every_target(policy.task)
    choices = [
        ("prefix", gamma, lam, error) for gamma in CRITIC_GAMMAS for error in CRITIC_ERRORS for lam in CRITIC_LAMBDAS
    ]
    choices += [("prompt", 1.0, 1.0, error) for error in CRITIC_ERRORS]
    bar = bars.add_task("critics", total=len(choices) + 1, success="")
    paths = trajectories(policy, targets)
    bars.advance(bar)
    points = []
    for choice in choices:
        points.append(critic_point(policy, paths, targets, *choice))
        bars.advance(bar)
    return points


def curves(estimators: "list[Estimator]", setting: "Setting") -> list[dict[str, Any]]:
    """w(p) and its integral, of the estimators that have one."""
    from pgprog.exact.estimators import weight_curve

    found = [weight_curve(estimator, setting) for estimator in estimators]
    return [asdict(curve) for curve in found if curve is not None]


def explanations(rows: "list[Row]", G: int) -> list[str]:
    """What the table says, in words, with its own numbers."""
    by_name, said = {row.name: row for row in rows}, []
    if {"rloo", "grpo"} <= by_name.keys():
        rloo, grpo = by_name["rloo"], by_name["grpo"]
        said.append(
            f"GRPO's gradient is {(grpo.second / rloo.second) ** 0.5:.3f} times as long as RLOO's (root of E|g|^2): it "
            f"divides by the group's std, which weighs a prompt with success p by w(p), here {grpo.weight:.3f} at the "
            f"mean success and (G - 1) / sqrt(G) = {(G - 1) / G**0.5:.3f} as p -> 0. It is a length, not an advantage: "
            f"signal to noise per rollout is {grpo.signal_to_noise_per_rollout:.3g} against "
            f"{rloo.signal_to_noise_per_rollout:.3g}."
        )
    if {"reinforce", "rloo"} <= by_name.keys():
        reinforce, rloo = by_name["reinforce"], by_name["rloo"]
        ratio = rloo.squared_advantage / reinforce.squared_advantage
        said.append(
            f"RLOO's E[A^2] is {ratio - 1:+.1%} against REINFORCE's at equal rollouts: a baseline of G - 1 = {G - 1} "
            f"others has a variance of its own, a factor G / (G - 1) = {G / (G - 1):.3f}, where the mean of a whole "
            "batch has almost none; that pays only where success differs much between prompts."
        )
    return said


def note_on_critic(rows: "list[Row]", trained: bool) -> list[str]:
    """Whose critic stands behind the rows that have one, where it is nobody's."""
    if trained or not {"actor_critic", "ppo"} & {row.name for row in rows}:
        return []
    return [
        "The critic behind Actor-Critic and PPO (and a function that takes values) is untrained here: a random number "
        "at each prompt, which no run of theirs keeps for long. --run with a run of theirs brings a trained one."
    ]


def output_directory(out: Path, overwrite: bool) -> Path:
    """Make --out; what an earlier call left there is replaced with --overwrite, anything else is refused."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            if not (out / OUTPUT).is_file():
                raise UsageError(f"--out {out} is not empty and holds no {OUTPUT}: give another directory")
            if not overwrite:
                raise UsageError(f"--out {out} holds an {OUTPUT}: give another, or --overwrite to replace it")
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written ({error.strerror}): give a directory that can") from error
    return out
