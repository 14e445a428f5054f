"""What a run is made from, as typed data; free of torch, so that ``--help`` answers at once."""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from pgprog.algorithms.recipes import LADDER_RECIPES, RECIPES, Recipe, find
from pgprog.errors import UsageError, choose

LADDER = tuple(recipe.name for recipe in LADDER_RECIPES)
TITLES = {name: recipe.title for name, recipe in RECIPES.items()}
GROUP_METHODS = tuple(name for name in LADDER if RECIPES[name].sampling.group)
CRITIC_METHODS = tuple(name for name in LADDER if RECIPES[name].critic != "none")
INSTRUMENTS_EVERY = 100
"""A reading costs about a training step; so all instruments stay under 5% of a run: benchmarks/instruments.py."""
PPO_ONLY = {
    "ppo_epochs": "sampling.epochs",
    "clip": "constraint.clip_low and constraint.clip_high",
    "raw_advantages": "advantage.whiten",
    "ratio_level": "constraint.ratio",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What train and compare share; every algorithm gets the same."""

    seq_len: int = 5
    """Tokens of a completion (at most, with --variable-length)."""
    digits: int = 10
    """How many digits there are."""
    variable_length: bool = False
    """EOS is a token of the policy, and a completion may end early."""
    targets: Literal["uniform", "sum"] = "uniform"
    """Targets uniform over 0..9L, or the sum of L random digits."""
    prompt_form: Literal["state", "tokens"] = "state"
    """The target as the policy's initial state, or as digit tokens that it reads."""
    reward_form: Literal["outcome", "halfway", "potential"] = "outcome"
    """Paid at the end, or per token: 0.3 past half way, or for keeping the target in reach."""

    prompts: int = 64
    """Prompts drawn per step, the same number for every algorithm."""
    group_size: int = 8
    """Completions of each prompt, where completions of one prompt are compared (rloo, grpo, ...)."""
    hidden: int = 64
    """Hidden units of the policy, and of the critic."""
    lr: float = 6e-3
    """Learning rate of Adam, decayed linearly to 0; divided by the gradient steps on each batch (ppo: its epochs)."""
    group_lr_factor: float = 5 / 3
    """Group methods (rloo, grpo, ...) multiply --lr by it: their batches are larger and fewer."""
    critic_lr: float = 1e-2
    """Learning rate of the critic, decayed likewise."""
    entropy_coef: float = 0.02
    """Weight of the entropy bonus, annealed linearly to 0. Lesson: 0 takes the cure away."""
    max_grad_norm: float = 1.0
    """Each replica's gradient is scaled down to this norm."""

    ppo_epochs: int = 4
    """Gradient steps of ppo on each batch."""
    ppo_entropy_factor: float = 2.5
    """Multiplies --entropy-coef where advantages are standardised over the batch (ppo, ...): they are larger."""
    clip: float = 0.2
    """ppo keeps its ratio within 1 - clip and 1 + clip."""
    raw_advantages: bool = False
    """Lesson: ppo without the z-score of its advantages."""
    ratio_level: Literal["token", "sequence"] = "token"
    """Lesson: "sequence" clips the product of a completion's ratios."""
    undivided_lr: bool = False
    """Lesson: ppo at the full learning rate in each of its epochs."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Change one choice of the recipe, as in constraint.clip_high=0.28; may be given several times."""

    dtype: Literal["float32", "float64"] = "float32"
    """Floating point of parameters and rewards."""


@dataclass(frozen=True, kw_only=True)
class Which:
    """What one run trains."""

    algo: str = "grpo"
    """One of reinforce, actor_critic, ppo, rloo, grpo."""
    recipe: str | None = None
    """Any named algorithm or library default, in place of --algo: see pgprog recipes."""
    steps: int = 400
    """Batches to learn from."""
    advantage: str | None = None
    """FILE.py:function, in place of the algorithm's A: a function of rewards (P, G), or of rewards and values (P,)."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings, Which):
    """One run: everything that its result depends on, but for its seeds."""

    @property
    def name(self) -> str:
        """Of the recipe, or of the rung."""
        return self.recipe or self.algo

    @property
    def title(self) -> str:
        """As it is shown; a user's advantage makes it another algorithm."""
        return f"{self.advantage} in {TITLES[self.name]}" if self.advantage else TITLES[self.name]

    @property
    def choices(self) -> Recipe:
        """The point of the design space that is trained; raises UsageError where there is none."""
        if self.recipe is not None:
            return find(self.recipe, self.set)
        rung = find(choose("algorithm", self.algo, LADDER))
        return replace(rung, sampling=replace(rung.sampling, epochs=self.ppo_epochs)) if self.algo == "ppo" else rung

    @property
    def completions(self) -> int:
        """G, completions per prompt."""
        return self.group_size if self.choices.sampling.group else 1

    @property
    def rollouts_per_step(self) -> int:
        return self.prompts * self.completions

    @property
    def most_rollouts_per_step(self) -> int:
        """What a step may cost, where a filter draws again."""
        return self.rollouts_per_step * self.choices.sampling.dynamic

    @property
    def policy_lr(self) -> float:
        """The learning rate that this algorithm starts with."""
        lr = self.lr * self.group_lr_factor if self.choices.sampling.group else self.lr
        return lr if self.undivided_lr else lr / self.choices.gradient_steps

    @property
    def policy_entropy_coef(self) -> float:
        """The entropy coefficient that this algorithm starts with."""
        standardised = self.choices.advantage.whiten != "none"
        return self.entropy_coef * self.ppo_entropy_factor if standardised else self.entropy_coef

    def exceptions(self) -> list[str]:
        """Where this run departs from the shared settings, each with its reason."""
        said, recipe, lr = [], self.choices, self.lr
        if recipe.sampling.group and self.group_lr_factor != 1:
            lr *= self.group_lr_factor
            said.append(
                f"lr {self.lr:g} x {self.group_lr_factor:.3g} = {lr:g}: "
                f"{self.group_size} times the rollouts in a batch, and fewer batches"
            )
        if (steps := recipe.gradient_steps) > 1 and not self.undivided_lr:
            kind = "epochs" if recipe.sampling.minibatches == 1 else "gradient steps on a batch"
            said.append(f"lr {lr:g} / {steps} {kind} = {self.policy_lr:g}: k {kind.split(' on')[0]} move k steps")
        if self.policy_entropy_coef != self.entropy_coef:
            said.append(
                f"entropy coefficient {self.entropy_coef:g} x {self.ppo_entropy_factor:g} = "
                f"{self.policy_entropy_coef:g}: z-scored advantages are several times larger"
            )
        return said

    def as_dict(self) -> dict[str, Any]:
        """As it is written to JSON."""
        return asdict(self) | {"set": list(self.set)}


@dataclass(frozen=True, kw_only=True)
class Contenders:
    """What a comparison trains."""

    algos: tuple[str, ...] = LADDER
    """Which algorithms, in the order of the ladder."""
    recipes: tuple[str, ...] = ()
    """Named algorithms and library defaults, in place of --algos: see pgprog recipes."""
    seeds: int = 5
    """How many: seeds 0, 1, ... are trained side by side."""
    first_seed: int = 0
    """Begin at another seed, to see whether a result holds."""
    steps: int = 1500
    """Batches of the algorithms with one completion per prompt."""
    group_steps: int | None = None
    """Batches of group methods (rloo, grpo, ...), which sample more per batch [default: 4/15 of --steps]."""
    equal_rollouts: int | None = None
    """Rollouts of the second comparison, where all pay the same [default: those of the cheapest algorithm]."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Settings, Contenders):
    """A comparison."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of what is compared."""
        return self.recipes or self.algos

    def steps_of(self, name: str) -> int:
        """How many batches an algorithm gets."""
        return self.group_steps_planned if self.run_config(name, 1).choices.sampling.group else self.steps

    @property
    def group_steps_planned(self) -> int:
        """How many batches a group method gets."""
        return max(1, round(self.steps * 4 / 15)) if self.group_steps is None else self.group_steps

    def run_config(self, name: str, steps: int) -> RunConfig:
        """The run of one algorithm; raises UsageError where it cannot be."""
        shared = {field: getattr(self, field) for field in Settings.__dataclass_fields__}
        which: dict[str, Any] = {"recipe": name} if self.recipes else {"algo": name}
        return validate(RunConfig(**shared, **which, steps=steps))


def validate(config: RunConfig) -> RunConfig:
    """Return the configuration, or raise UsageError for the first value that cannot be run."""
    recipe = config.choices
    if config.recipe is not None and config.algo != RunConfig.algo:
        raise UsageError(
            f"--algo {config.algo} and --recipe {config.recipe}: give one of them, the rungs are recipes too"
        )
    if config.recipe is None and config.set:
        raise UsageError(f"--set {config.set[0]} changes a recipe: give --recipe {config.algo} in place of --algo")
    for name, choice in PPO_ONLY.items() if config.recipe is not None else ():
        if getattr(config, name) != getattr(RunConfig, name):
            raise UsageError(f"{_flag(name)} is of --algo ppo: with --recipe, --set {choice} does that")
    at_least = {"steps": 1, "seq_len": 1, "digits": 2, "prompts": 1, "hidden": 1, "ppo_epochs": 1}
    for name, least in at_least.items():
        if (value := getattr(config, name)) < least:
            raise UsageError(f"{_flag(name)} {value} is too small: give {least} or more")
    for name in ("lr", "critic_lr", "group_lr_factor", "max_grad_norm"):
        most = math.inf if name == "max_grad_norm" else 1e6
        if not 0 < (value := getattr(config, name)) <= most:
            bound = f", at most {most:g}" if most < math.inf else ""
            raise UsageError(f"{_flag(name)} {value:g} is out of range: give a positive number{bound}")
    if not 0 <= config.entropy_coef < math.inf:
        raise UsageError(f"--entropy-coef {config.entropy_coef:g} is out of range: give 0 (no bonus) or more")
    if not 0 <= config.ppo_entropy_factor < math.inf:
        raise UsageError(f"--ppo-entropy-factor {config.ppo_entropy_factor:g} is out of range: give 0 or more")
    if not 0 < config.clip < 1:
        raise UsageError(f"--clip {config.clip:g} is out of range: the ratio is kept near 1, give 0 < clip < 1")
    if recipe.sampling.group and config.group_size < 2:
        raise UsageError(
            f"--group-size {config.group_size} with {config.name}: it compares completions of one prompt, "
            "give 2 or more, or take reinforce"
        )
    against_batch = recipe.advantage.baseline in ("batch_mean", "optimal_constant")
    against_batch = against_batch or recipe.advantage.whiten == "sequences"
    if against_batch and config.rollouts_per_step < 2 and config.advantage is None:
        raise UsageError(
            f"--prompts 1 with {config.name}: its advantage is measured against the batch, and 0 in a batch of one; "
            "give 2 or more"
        )
    if recipe.sampling.minibatches > config.prompts:
        raise UsageError(
            f"sampling.minibatches {recipe.sampling.minibatches} of {config.name} with --prompts {config.prompts}: "
            "a part holds one prompt at least, give more prompts"
        )
    if (largest := (config.digits - 1) * config.seq_len) > MAX_TARGET:
        raise UsageError(
            f"--digits {config.digits} with --seq-len {config.seq_len}: a target up to {largest} is over {MAX_TARGET}, "
            "give less of either"
        )
    if config.hidden > 8192:
        raise UsageError(f"--hidden {config.hidden} is too large: give 8192 or less")
    states = config.most_rollouts_per_step * config.seq_len * config.hidden
    if states > MAX_HIDDEN_STATES:
        raise UsageError(
            f"a step of {config.prompts} prompts x {config.completions} completions x {config.seq_len} tokens x "
            f"{config.hidden} hidden units is {states:.3g} numbers, over {MAX_HIDDEN_STATES:.3g}: give less of one"
        )
    return config


def seeds_of(count: int, first: int) -> tuple[int, ...]:
    """The seeds of --seeds and --first-seed, or UsageError."""
    if count < 1:
        raise UsageError(f"--seeds {count} is too few: give how many seeds to train, 1 or more")
    if count > 1000:
        raise UsageError(f"--seeds {count} is too many at once: give 1000 or fewer")
    if not 0 <= first < 2**62:
        raise UsageError(f"--first-seed {first} is out of range: give an integer in [0, 2**62)")
    return tuple(range(first, first + count))


C = TypeVar("C", bound=Settings)


def from_json(kind: type[C], content: Any, path: Path) -> C:
    """A saved configuration, every field checked; raises UsageError, naming the file, where it is none."""
    if not isinstance(content, dict):
        raise UsageError(f"{path} is no run's configuration: an object was expected, not {type(content).__name__}")
    values = {}
    for name, hint in get_type_hints(kind).items():
        if name not in content:
            raise UsageError(f"{path} is no run of this version: {name} is missing")
        value = content[name]
        if get_origin(hint) is Literal:
            fits = value in get_args(hint)
        elif get_origin(hint) is tuple:
            fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
            value = tuple(value) if fits else value
        else:
            fits = isinstance(value, (int, float) if hint is float else hint)
            fits = fits and isinstance(value, bool) == (hint is bool)
        if not fits:
            raise UsageError(f"{path}: {name} is {value!r}, which is no {getattr(hint, '__name__', hint)}")
        if hint is float:
            try:
                value = float(value)
            except OverflowError:
                raise UsageError(f"{path}: {name} is no number that a float can hold") from None
        values[name] = value
    return kind(**values)


MAX_HIDDEN_STATES = 2**27  # of one seed's batch: half a gigabyte in float32, of which a step holds some twenty
MAX_TARGET = 5_000  # a target has a feature per other target: their table would be the first to outgrow memory


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
