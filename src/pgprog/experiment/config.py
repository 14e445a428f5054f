"""What a run is made from, as typed data; free of torch, so that ``--help`` answers at once."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pgprog.errors import UsageError, choose

LADDER = ("reinforce", "actor_critic", "ppo", "rloo", "grpo")
TITLES = {"reinforce": "REINFORCE", "actor_critic": "Actor-Critic", "ppo": "PPO", "rloo": "RLOO", "grpo": "GRPO"}
GROUP_METHODS = ("rloo", "grpo")
CRITIC_METHODS = ("actor_critic", "ppo")


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
    """Completions of each prompt, for rloo and grpo."""
    hidden: int = 64
    """Hidden units of the policy, and of the critic."""
    lr: float = 6e-3
    """Learning rate of Adam, decayed linearly to 0; ppo divides it by its epochs."""
    group_lr_factor: float = 5 / 3
    """rloo and grpo multiply --lr by it: their batches are larger and fewer."""
    critic_lr: float = 1e-2
    """Learning rate of the critic, decayed likewise."""
    entropy_coef: float = 0.02
    """Weight of the entropy bonus, annealed linearly to 0. Lesson: 0 takes the cure away."""
    max_grad_norm: float = 1.0
    """Each replica's gradient is scaled down to this norm."""

    ppo_epochs: int = 4
    """Gradient steps of ppo on each batch."""
    ppo_entropy_factor: float = 2.5
    """ppo multiplies --entropy-coef by it: its advantages are z-scored, so several times larger."""
    clip: float = 0.2
    """ppo keeps its ratio within 1 - clip and 1 + clip."""
    raw_advantages: bool = False
    """Lesson: ppo without the z-score of its advantages."""
    ratio_level: Literal["token", "sequence"] = "token"
    """Lesson: "sequence" clips the product of a completion's ratios."""
    undivided_lr: bool = False
    """Lesson: ppo at the full learning rate in each of its epochs."""

    dtype: Literal["float32", "float64"] = "float32"
    """Floating point of parameters and rewards."""


@dataclass(frozen=True, kw_only=True)
class Which:
    """What one run trains."""

    algo: str = "grpo"
    """One of reinforce, actor_critic, ppo, rloo, grpo."""
    steps: int = 400
    """Batches to learn from."""
    advantage: str | None = None
    """FILE.py:function, in place of the algorithm's A: a function of rewards (P, G), or of rewards and values (P,)."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings, Which):
    """One run: everything that its result depends on, but for its seeds."""

    @property
    def completions(self) -> int:
        """G, completions per prompt."""
        return self.group_size if self.algo in GROUP_METHODS else 1

    @property
    def rollouts_per_step(self) -> int:
        return self.prompts * self.completions

    @property
    def policy_lr(self) -> float:
        """The learning rate that this algorithm starts with."""
        if self.algo in GROUP_METHODS:
            return self.lr * self.group_lr_factor
        return self.lr / self.ppo_epochs if self.algo == "ppo" and not self.undivided_lr else self.lr

    @property
    def policy_entropy_coef(self) -> float:
        """The entropy coefficient that this algorithm starts with."""
        return self.entropy_coef * self.ppo_entropy_factor if self.algo == "ppo" else self.entropy_coef

    def exceptions(self) -> list[str]:
        """Where this run departs from the shared settings, each with its reason."""
        said = []
        if self.algo == "ppo" and not self.undivided_lr:
            said.append(f"lr {self.lr:g} / {self.ppo_epochs} epochs = {self.policy_lr:g}: k epochs move k steps")
        if self.algo == "ppo" and self.policy_entropy_coef != self.entropy_coef:
            said.append(
                f"entropy coefficient {self.entropy_coef:g} x {self.ppo_entropy_factor:g} = "
                f"{self.policy_entropy_coef:g}: z-scored advantages are several times larger"
            )
        if self.algo in GROUP_METHODS and self.group_lr_factor != 1:
            said.append(
                f"lr {self.lr:g} x {self.group_lr_factor:.3g} = {self.policy_lr:g}: "
                f"{self.group_size} times the rollouts in a batch, and fewer batches"
            )
        return said

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Contenders:
    """What a comparison trains."""

    algos: tuple[str, ...] = LADDER
    """Which algorithms, in the order of the ladder."""
    seeds: int = 5
    """How many: seeds 0, 1, ... are trained side by side."""
    first_seed: int = 0
    """Begin at another seed, to see whether a result holds."""
    steps: int = 1500
    """Batches of the algorithms with one completion per prompt."""
    group_steps: int | None = None
    """Batches of rloo and grpo, which sample more per batch [default: 4/15 of --steps]."""
    equal_rollouts: int | None = None
    """Rollouts of the second comparison, where all pay the same [default: those of the cheapest algorithm]."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Settings, Contenders):
    """A comparison."""

    def steps_of(self, algo: str) -> int:
        """How many batches an algorithm gets."""
        if algo not in GROUP_METHODS:
            return self.steps
        return max(1, round(self.steps * 4 / 15)) if self.group_steps is None else self.group_steps

    def run_config(self, algo: str, steps: int) -> RunConfig:
        """The run of one algorithm; raises UsageError where it cannot be."""
        shared = {name: getattr(self, name) for name in Settings.__dataclass_fields__}
        return validate(RunConfig(**shared, algo=algo, steps=steps))


def validate(config: RunConfig) -> RunConfig:
    """Return the configuration, or raise UsageError for the first value that cannot be run."""
    choose("algorithm", config.algo, LADDER)
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
    if config.algo in GROUP_METHODS and config.group_size < 2:
        raise UsageError(
            f"--group-size {config.group_size} with {config.algo}: it compares completions of one prompt, "
            "give 2 or more, or take reinforce"
        )
    if config.algo in ("reinforce", "ppo") and config.prompts < 2 and config.advantage is None:
        raise UsageError(
            f"--prompts 1 with {config.algo}: its advantage is measured against the batch, and 0 in a batch of one; "
            "give 2 or more"
        )
    if (largest := (config.digits - 1) * config.seq_len) > MAX_TARGET:
        raise UsageError(
            f"--digits {config.digits} with --seq-len {config.seq_len}: a target up to {largest} is over {MAX_TARGET}, "
            "give less of either"
        )
    if config.hidden > 8192:
        raise UsageError(f"--hidden {config.hidden} is too large: give 8192 or less")
    if (states := config.rollouts_per_step * config.seq_len * config.hidden) > MAX_HIDDEN_STATES:
        raise UsageError(
            f"a step of {config.prompts} prompts x {config.completions} completions x {config.seq_len} tokens x "
            f"{config.hidden} hidden units is {states:.3g} numbers, over {MAX_HIDDEN_STATES:.3g}: give less of one"
        )
    return config


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
