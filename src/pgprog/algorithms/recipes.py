"""Named algorithms and library defaults, as points in one space of choices; data alone, free of torch.

    grad J = E[ sum_t psi_t grad log pi(a_t | s_t) ]

Four axes, each a frozen record: the advantage psi, the constraint (with its KL penalty), the aggregation of tokens to
a scalar, and the sampling. A recipe is one choice on each. ``from_recipe`` makes the call of ``update`` from it; any
choice can be changed (``--set constraint.clip_high=0.28``), and ``refuse`` names the combinations without meaning.
"""

import dataclasses
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pgprog.errors import UsageError, choose


@dataclass(frozen=True, kw_only=True)
class AdvantageChoice:
    """psi, how good was this."""

    baseline: Literal["none", "batch_mean", "group_mean", "leave_one_out", "value", "gae", "optimal_constant"] = "none"
    """What is taken off the return; ``value`` is a critic's V(prompt), ``gae`` needs a critic of every prefix."""
    scale: Literal["none", "group_std", "batch_std"] = "none"
    """What r less its group's mean is divided by."""
    ddof: int = 1
    """Of that std, 0 or 1."""
    eps: float = 1e-6
    """Added to that std."""
    credit: Literal["sequence", "to_go"] = "sequence"
    """A token is credited with all that its sequence is paid, or with what is paid from it on."""
    whiten: Literal["none", "sequences", "tokens", "tokens_floor"] = "none"
    """Standardise A over the batch: each sequence counting once, or each token (then long sequences weigh more).
    ``tokens_floor`` divides by sqrt(max(var, 1e-8)) with ddof 0, as OpenRLHF does."""
    gamma: float = 1.0
    """Discount, in (0, 1], of ``gae`` and ``to_go``."""
    lam: float = 1.0
    """lambda of ``gae``, in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class ConstraintChoice:
    """How far the step may go."""

    kind: Literal["none", "clip", "cispo", "trust_region"] = "none"
    """``clip`` takes the gradient away outside the bounds, ``cispo`` bounds the weight of a gradient that stays."""
    ratio: Literal["token", "sequence", "sequence_mean"] = "token"
    """Of each token; of the whole sequence, the product; or its geometric mean, as in GSPO."""
    clip_low: float = 0.2
    """The ratio is bounded below by 1 - clip_low: 1 for no bound."""
    clip_high: float = 0.2
    """The ratio is bounded above by 1 + clip_high."""
    dual_clip: float | None = None
    """Where A < 0 the objective is no less than this times A."""
    log_ratio_limit: float | None = None
    """The log-ratio is clamped to +- this, without gradient beyond."""
    max_kl: float = 0.01
    """Of ``trust_region``: hard bound on the KL per sequence between the old policy and the new, in nats."""


@dataclass(frozen=True, kw_only=True)
class KLChoice:
    """A penalty for leaving the frozen initial policy, coef KL(pi || ref)."""

    place: Literal["none", "reward", "loss"] = "none"
    """Taken off the reward, as a constant; or added to the loss, with gradient."""
    level: Literal["sequence", "token"] = "sequence"
    """In the reward: the sum over the sequence, before any baseline; or each token's own, credited from it on."""
    estimator: Literal["k1", "k2", "k3", "k3_ratio"] = "k1"
    """Of a token, with x = log pi - log ref: x, x^2/2, exp(-x) + x - 1, and that times the ratio of new to old."""
    coef: float = 0.0
    limit: float | None = None
    """Each token's estimate is clamped to +- this."""


@dataclass(frozen=True, kw_only=True)
class AggregationChoice:
    """What the denominator is."""

    denominator: Literal["sequence_sum", "sequence_mean", "token_mean", "prompt_token_mean", "constant_length"] = (
        "sequence_sum"
    )
    length: int | None = None
    """Of ``constant_length``, in tokens [default: the longest completion that the task allows]."""


@dataclass(frozen=True, kw_only=True)
class SamplingChoice:
    """Which data."""

    group: bool = False
    """Several completions of each prompt (``--group-size``), or one."""
    epochs: int = 1
    """Passes over each batch."""
    minibatches: int = 1
    """Parts of the batch, a gradient step each."""
    dynamic: int = 1
    """Batches drawn, at most, until there are enough groups of unequal rewards; 1 takes what comes."""
    temperature: float = 1.0
    """Of the policy itself, in sampling and scoring alike."""
    age: int = 0
    """The data come from the policy of so many updates ago."""
    sampler_dtype: Literal["same", "bfloat16"] = "same"
    """Precision of the sampler's copy of the parameters."""
    sampler_temperature: float | None = None
    """Of the sampler alone, so that it disagrees with the policy [default: the policy's]."""
    sampler_top_p: float = 1.0
    """The sampler draws from the likeliest tokens of so much mass."""
    correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "none"
    """Importance weight pi / sampler, of a token or of the sequence, truncated at the cap or 0 above it."""
    cap: float = 2.0
    """Of that weight."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One point."""

    name: str
    title: str
    paper: str
    """Where it comes from, with the equation; or the library and its version."""
    equals: str = ""
    """The settings of a library that compute the same."""
    bias: str
    """Of its first gradient, from fresh data, against grad J."""
    notes: str = ""
    """Where it departs from what it is named after."""
    rollouts: int = 1
    """Completions per prompt in the paper, or by the library's default."""
    advantage: AdvantageChoice = field(default_factory=AdvantageChoice)
    constraint: ConstraintChoice = field(default_factory=ConstraintChoice)
    kl: KLChoice = field(default_factory=KLChoice)
    aggregation: AggregationChoice = field(default_factory=AggregationChoice)
    sampling: SamplingChoice = field(default_factory=SamplingChoice)

    @property
    def critic(self) -> Literal["none", "prompt", "prefix"]:
        """What a learned critic must value."""
        return {"value": "prompt", "gae": "prefix"}.get(self.advantage.baseline, "none")  # type: ignore[return-value]

    @property
    def reference(self) -> bool:
        """Whether a frozen copy of the initial policy scores every batch."""
        return self.kl.place != "none"

    @property
    def gradient_steps(self) -> int:
        """On each batch."""
        return self.sampling.epochs * self.sampling.minibatches

    @property
    def other_sampler(self) -> bool:
        """Whether the data do not come from the policy that is trained."""
        s = self.sampling
        return s.age > 0 or s.sampler_dtype != "same" or s.sampler_temperature is not None or s.sampler_top_p < 1

    @property
    def extra_models(self) -> tuple[str, ...]:
        """Beside the policy."""
        held = ["critic"] if self.critic != "none" else []
        held += ["reference"] if self.reference else []
        return (*held, *(["sampler"] if self.other_sampler else []))

    @property
    def extra_passes(self) -> tuple[str, ...]:
        """Beside one sampling, one scoring and one backward pass per batch."""
        made = [f"{self.gradient_steps - 1} x score and backward"] if self.gradient_steps > 1 else []
        made += ["reference scores"] if self.reference else []
        made += ["sampler scores"] if self.other_sampler else []
        made += ["critic"] if self.critic != "none" else []
        made += ["a gradient per completion"] if self.advantage.baseline == "optimal_constant" else []
        made += ["Fisher products, line search"] if self.constraint.kind == "trust_region" else []
        return (*made, *([f"up to {self.sampling.dynamic} samplings"] if self.sampling.dynamic > 1 else []))


Axis = AdvantageChoice | ConstraintChoice | KLChoice | AggregationChoice | SamplingChoice
AXES = ("advantage", "constraint", "kl", "aggregation", "sampling")

_group_z = AdvantageChoice(baseline="group_mean", scale="group_std")
_group = SamplingChoice(group=True)
_clip = ConstraintChoice(kind="clip")
_tokens = AggregationChoice(denominator="token_mean")
_sequences = AggregationChoice(denominator="sequence_mean")

GRPO_BIAS = (
    "for rewards in {0, 1}, w(p) grad p with p the prompt's success probability: the gradient of another objective"
)
LENGTH_BIAS = "; a sequence is divided by the length that it chose: another direction, however large the batch"
TOKEN_BIAS = "; the token mean divides by lengths that hold the sample's own: a scale only as the batch grows"

LADDER_RECIPES = (
    Recipe(
        name="reinforce",
        title="REINFORCE",
        paper="Williams 1992",
        bias="(1 - 1/N) grad J for a batch of N completions: a scale, no more",
        advantage=AdvantageChoice(baseline="batch_mean"),
    ),
    Recipe(
        name="actor_critic",
        title="Actor-Critic",
        paper="Sutton et al. 1999",
        bias="none, whatever V is",
        advantage=AdvantageChoice(baseline="value"),
    ),
    Recipe(
        name="ppo",
        title="PPO",
        paper="arXiv:1707.06347, eq. 7",
        bias="the batch's mean and std hold the sample: a direction that is right only as the batch grows",
        notes="The first gradient is not clipped; later epochs follow a surrogate.",
        advantage=AdvantageChoice(baseline="value", whiten="sequences"),
        constraint=_clip,
        sampling=SamplingChoice(epochs=4),
    ),
    Recipe(
        name="rloo",
        title="RLOO",
        paper="arXiv:2402.14740, eq. 8",
        bias="none",
        rollouts=4,
        advantage=AdvantageChoice(baseline="leave_one_out"),
        sampling=_group,
    ),
    Recipe(
        name="grpo",
        title="GRPO",
        paper="arXiv:2402.03300, section 4.1.2",
        bias=GRPO_BIAS,
        notes="The advantage alone: the paper's clip, 1/|o| and KL are in grpo_kl.",
        rollouts=64,
        advantage=_group_z,
        sampling=_group,
    ),
)

PAPERS = (
    Recipe(name="vpg", title="VPG", paper="Williams 1992; no baseline", bias="none"),
    Recipe(
        name="ppo_gae",
        title="PPO with GAE",
        paper="arXiv:1707.06347, eq. 7 and 11; arXiv:1506.02438, eq. 16",
        bias="the critic's where lambda < 1; the whitening holds the sample" + TOKEN_BIAS,
        advantage=AdvantageChoice(baseline="gae", lam=0.95, whiten="tokens"),
        constraint=_clip,
        aggregation=_tokens,
        sampling=SamplingChoice(epochs=4),
    ),
    Recipe(
        name="rloo_kl",
        title="RLOO + KL",
        paper="arXiv:2402.14740, eq. 1 and 8",
        bias="none for the gradient of J - coef KL(pi || ref)",
        rollouts=4,
        advantage=AdvantageChoice(baseline="leave_one_out"),
        kl=KLChoice(place="reward", estimator="k1", coef=0.05),
        sampling=_group,
    ),
    Recipe(
        name="grpo_kl",
        title="GRPO + KL",
        paper="arXiv:2402.03300, eq. 3 and 4",
        bias=GRPO_BIAS + "; k3 in the loss follows each token's KL(ref || pi), at prefixes of pi" + LENGTH_BIAS,
        equals='TRL: loss_type="grpo", beta=0.04, use_bias_correction_kl=False, but for eps 1e-4',
        rollouts=64,
        advantage=_group_z,
        constraint=_clip,
        kl=KLChoice(place="loss", estimator="k3", coef=0.04),
        aggregation=_sequences,
        sampling=_group,
    ),
    Recipe(
        name="dr_grpo",
        title="Dr. GRPO",
        paper="arXiv:2503.20783, section 3.2",
        bias="(1 - 1/G) / length times grad J: a scale, no more",
        equals='TRL: loss_type="dr_grpo", scale_rewards="none"; verl: norm_adv_by_std_in_grpo=False, '
        "seq-mean-token-sum-norm with loss_scale_factor",
        rollouts=8,
        advantage=AdvantageChoice(baseline="group_mean"),
        constraint=_clip,
        aggregation=AggregationChoice(denominator="constant_length"),
        sampling=_group,
    ),
    Recipe(
        name="dapo",
        title="DAPO",
        paper="arXiv:2503.14476, eq. 8 to 11",
        bias="conditional on acceptance: the filter takes prompts by P(I) = 1 - p^G - (1 - p)^G and weighs each by "
        "w(p) / P(I), so GRPO's direction at another length" + TOKEN_BIAS,
        notes="The token mean is over the batch, as most code has it; eq. 8 takes it prompt by prompt: --set "
        "aggregation.denominator=prompt_token_mean. No soft penalty for length: no completion here is cut off.",
        rollouts=16,
        advantage=_group_z,
        constraint=ConstraintChoice(kind="clip", clip_high=0.28),
        aggregation=_tokens,
        sampling=SamplingChoice(group=True, dynamic=3),
    ),
    Recipe(
        name="gspo",
        title="GSPO",
        paper="arXiv:2507.18071, eq. 5 and 7",
        bias=GRPO_BIAS + LENGTH_BIAS,
        notes="The first gradient is that of GRPO with a sequence mean; the ratio acts with stale data.",
        rollouts=16,
        advantage=_group_z,
        constraint=ConstraintChoice(kind="clip", ratio="sequence_mean", clip_low=3e-4, clip_high=4e-4),
        aggregation=_sequences,
        sampling=SamplingChoice(group=True, minibatches=4),
    ),
    Recipe(
        name="cispo",
        title="CISPO",
        paper="arXiv:2506.13585, eq. 4 and 5",
        bias=GRPO_BIAS + TOKEN_BIAS,
        notes="The paper names no bound: 5 is what TRL recommends.",
        equals='TRL: loss_type="cispo", epsilon_high=5.0, but for eps 1e-4',
        rollouts=16,
        advantage=_group_z,
        constraint=ConstraintChoice(kind="cispo", clip_low=1.0, clip_high=4.0),
        aggregation=_tokens,
        sampling=_group,
    ),
    Recipe(
        name="reinforce_plus_plus",
        title="REINFORCE++",
        paper="arXiv:2501.03262",
        bias="for J - coef KL: the whitening holds the sample" + TOKEN_BIAS,
        equals="verl: adv_estimator=reinforce_plus_plus, use_kl_in_reward; OpenRLHF: reinforce, but for ddof 0",
        advantage=AdvantageChoice(credit="to_go", whiten="tokens"),
        constraint=_clip,
        kl=KLChoice(place="reward", level="token", estimator="k1", coef=0.01),
        aggregation=_tokens,
    ),
    Recipe(
        name="reinforce_plus_plus_baseline",
        title="REINFORCE++ baseline",
        paper="arXiv:2501.03262",
        bias="a scale of the group's mean, 1 - 1/G; the whitening holds the sample" + TOKEN_BIAS,
        equals="verl: adv_estimator=reinforce_plus_plus_baseline; OpenRLHF: reinforce_baseline, but for ddof 0",
        notes="Without a KL term: add one with --set kl.place=loss --set kl.coef=0.001.",
        rollouts=8,
        advantage=AdvantageChoice(baseline="group_mean", whiten="tokens"),
        constraint=_clip,
        aggregation=_tokens,
        sampling=_group,
    ),
    Recipe(
        name="trpo",
        title="TRPO",
        paper="arXiv:1502.05477, eq. 14 and appendix C",
        bias="none in the gradient, nor in F^-1 g with the exact F; the step has its batch's F, right as that grows",
        advantage=AdvantageChoice(baseline="value"),
        constraint=ConstraintChoice(kind="trust_region"),
    ),
    Recipe(
        name="optimal_baseline",
        title="Optimal baseline",
        paper="Greensmith, Bartlett & Baxter 2004",
        bias="none: each sample's constant is estimated from the others",
        advantage=AdvantageChoice(baseline="optimal_constant"),
    ),
)

_VERL_CLIP = ConstraintChoice(kind="clip", dual_clip=3.0, log_ratio_limit=20.0)
_OPENRLHF_CLIP = ConstraintChoice(kind="clip", log_ratio_limit=20.0)
_OPENRLHF_KL = KLChoice(place="reward", level="token", estimator="k1", coef=0.01, limit=10.0)

LIBRARIES = (
    Recipe(
        name="trl:grpo",
        title="TRL GRPO",
        paper="TRL 1.16.0, GRPOTrainer, defaults",
        equals='loss_type="dapo", scale_rewards="group", beta=0, epsilon=0.2',
        bias=GRPO_BIAS + TOKEN_BIAS,
        rollouts=8,
        advantage=AdvantageChoice(baseline="group_mean", scale="group_std", eps=1e-4),
        constraint=_clip,
        aggregation=_tokens,
        sampling=_group,
    ),
    Recipe(
        name="trl:rloo",
        title="TRL RLOO",
        paper="TRL 1.16.0, RLOOTrainer, defaults",
        equals="beta=0.05, epsilon=0.2, normalize_advantages=False",
        bias="none for the gradient of J - coef KL(pi || ref)",
        notes="The ratio is the product over the sequence, clipped as one.",
        rollouts=2,
        advantage=AdvantageChoice(baseline="leave_one_out"),
        constraint=ConstraintChoice(kind="clip", ratio="sequence"),
        kl=KLChoice(place="reward", estimator="k1", coef=0.05),
        aggregation=_sequences,
        sampling=_group,
    ),
    Recipe(
        name="verl:grpo",
        title="verl GRPO",
        paper="verl 0.9.1, adv_estimator=grpo, else defaults",
        equals="norm_adv_by_std_in_grpo=True, loss_agg_mode=token-mean, clip_ratio=0.2, clip_ratio_c=3.0",
        bias=GRPO_BIAS + TOKEN_BIAS,
        notes="rollout.n is 1 by default, where verl returns the raw reward: give 2 or more.",
        rollouts=1,
        advantage=_group_z,
        constraint=_VERL_CLIP,
        aggregation=_tokens,
        sampling=SamplingChoice(group=True, minibatches=4),
    ),
    Recipe(
        name="verl:rloo",
        title="verl RLOO",
        paper="verl 0.9.1, adv_estimator=rloo, else defaults",
        equals="loss_agg_mode=token-mean, clip_ratio=0.2, clip_ratio_c=3.0",
        bias="none but for the denominator" + TOKEN_BIAS,
        notes="rollout.n is 1 by default, where verl returns the raw reward: give 2 or more.",
        rollouts=1,
        advantage=AdvantageChoice(baseline="leave_one_out"),
        constraint=_VERL_CLIP,
        aggregation=_tokens,
        sampling=SamplingChoice(group=True, minibatches=4),
    ),
    Recipe(
        name="verl:gae",
        title="verl PPO",
        paper="verl 0.9.1, defaults",
        equals="adv_estimator=gae, gamma=1, lam=1, loss_agg_mode=token-mean, clip_ratio=0.2, clip_ratio_c=3.0",
        bias="the whitening holds the sample" + TOKEN_BIAS,
        notes="verl clips the critic's step, and halves its loss; here it is plain regression.",
        advantage=AdvantageChoice(baseline="gae", whiten="tokens"),
        constraint=_VERL_CLIP,
        aggregation=_tokens,
        sampling=SamplingChoice(minibatches=4),
    ),
    Recipe(
        name="openrlhf:gae",
        title="OpenRLHF PPO",
        paper="OpenRLHF 0.11.2, defaults",
        equals="advantage.estimator=gae, gamma=1, lambd=1, loss_agg_mode=token-mean, kl.init_coef=0.01",
        bias="for J - coef KL: the whitening holds the sample" + TOKEN_BIAS,
        notes="OpenRLHF clips the critic's step, and halves its loss; here it is plain regression.",
        advantage=AdvantageChoice(baseline="gae", whiten="tokens_floor"),
        constraint=_OPENRLHF_CLIP,
        kl=_OPENRLHF_KL,
        aggregation=_tokens,
        sampling=SamplingChoice(minibatches=8),
    ),
    Recipe(
        name="openrlhf:grpo",
        title="OpenRLHF GRPO",
        paper="OpenRLHF 0.11.2, advantage.estimator=group_norm, else defaults",
        equals="loss_agg_mode=token-mean, kl.init_coef=0.01 in the reward of each token",
        bias=GRPO_BIAS + ", less coef grad KL" + TOKEN_BIAS,
        notes="rollout.n_samples_per_prompt is 1 by default, which OpenRLHF refuses here: give 2 or more.",
        rollouts=1,
        advantage=AdvantageChoice(baseline="group_mean", scale="group_std", eps=1e-9),
        constraint=_OPENRLHF_CLIP,
        kl=_OPENRLHF_KL,
        aggregation=_tokens,
        sampling=SamplingChoice(group=True, minibatches=8),
    ),
    Recipe(
        name="openrlhf:rloo",
        title="OpenRLHF RLOO",
        paper="OpenRLHF 0.11.2, advantage.estimator=rloo, else defaults",
        equals="loss_agg_mode=token-mean, kl.init_coef=0.01 in the reward of each token",
        bias="for J - coef KL: none but for the denominator" + TOKEN_BIAS,
        notes="rollout.n_samples_per_prompt is 1 by default, which OpenRLHF refuses here: give 2 or more.",
        rollouts=1,
        advantage=AdvantageChoice(baseline="leave_one_out"),
        constraint=_OPENRLHF_CLIP,
        kl=_OPENRLHF_KL,
        aggregation=_tokens,
        sampling=SamplingChoice(group=True, minibatches=8),
    ),
    Recipe(
        name="slime:grpo",
        title="slime GRPO",
        paper="slime at 624b824, defaults; read in its source, not run",
        equals="advantage-estimator grpo, eps-clip 0.2, mean per sample",
        bias=GRPO_BIAS + LENGTH_BIAS,
        notes="n-samples-per-prompt is 1 by default, and a group of one has no std: give 2 or more.",
        advantage=_group_z,
        constraint=_clip,
        aggregation=_sequences,
        sampling=_group,
    ),
    Recipe(
        name="slime:gspo",
        title="slime GSPO",
        paper="slime at 624b824, advantage-estimator gspo, else defaults; read in its source, not run",
        equals="advantage-estimator gspo, eps-clip 0.2, mean per sample",
        bias=GRPO_BIAS + LENGTH_BIAS,
        notes="n-samples-per-prompt is 1 by default, and a group of one has no std: give 2 or more.",
        advantage=_group_z,
        constraint=ConstraintChoice(kind="clip", ratio="sequence_mean"),
        aggregation=_sequences,
        sampling=_group,
    ),
)

RECIPES = {recipe.name: recipe for recipe in (*LADDER_RECIPES, *PAPERS, *LIBRARIES)}


def find(name: str, changes: tuple[str, ...] = ()) -> Recipe:
    """A recipe by name, with choices changed.

    Args:
        changes: ``axis.choice=value``, later ones win.

    Raises: UsageError where a name, a choice or a value is unknown, or the combination has no meaning.
    """
    recipe = RECIPES[choose("recipe", name, RECIPES)]
    for change in changes:
        recipe = _changed(recipe, change)
    refuse(recipe)
    return recipe


def _changed(recipe: Recipe, change: str) -> Recipe:
    path, equals, text = change.partition("=")
    axis, dot, name = path.partition(".")
    if not (equals and dot):
        raise UsageError(f"--set {change}: give axis.choice=value, such as constraint.clip_high=0.28")
    record = getattr(recipe, choose("axis", axis, AXES))
    hints = get_type_hints(type(record))
    choose(f"choice of {axis}", name, hints)
    return replace(recipe, **{axis: replace(record, **{name: _parsed(change, text, hints[name])})})


def _parsed(change: str, text: str, hint: Any) -> Any:
    """A value of the type that the choice has; UsageError where it is none."""
    options = get_args(hint)
    if get_origin(hint) is Literal:
        if text not in options:
            raise UsageError(f"--set {change}: choose one of {', '.join(options)}")
        return text
    if type(None) in options:
        if text.lower() == "none":
            return None
        hint = Union[tuple(o for o in options if o is not type(None))]  # noqa: UP007 (built at run time)
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise UsageError(f"--set {change}: give true or false")
        return text.lower() == "true"
    try:
        return hint(text)
    except ValueError:
        raise UsageError(f"--set {change}: {text!r} is no {'number' if hint is float else 'integer'}") from None


def refuse(recipe: Recipe) -> None:
    """Raise UsageError, with the reason, where a combination has no meaning or a value is out of range."""
    for wrong, reason in (*_out_of_range(recipe), *_meaningless(recipe)):
        if wrong:
            raise UsageError(f"{recipe.name}: {reason}")


def _out_of_range(recipe: Recipe) -> list[tuple[bool, str]]:
    a, c, kl, agg, s = (getattr(recipe, axis) for axis in AXES)
    small = 0 < c.clip_low <= 1
    return [
        (a.ddof not in (0, 1), f"advantage.ddof {a.ddof}: give 0 or 1"),
        (not 0 <= a.eps < 1, f"advantage.eps {a.eps:g}: give 0 <= eps < 1"),
        (not 0 < a.gamma <= 1, f"advantage.gamma {a.gamma:g}: give 0 < gamma <= 1"),
        (not 0 <= a.lam <= 1, f"advantage.lam {a.lam:g}: give 0 <= lam <= 1"),
        (not small, f"constraint.clip_low {c.clip_low:g}: the lower bound is 1 - clip_low, give 0 < clip_low <= 1"),
        (not -1 < c.clip_high < 1e6, f"constraint.clip_high {c.clip_high:g}: the upper bound is 1 + clip_high, over 0"),
        (
            c.kind == "clip" and not c.clip_high > 0,
            f"constraint.clip_high {c.clip_high:g}: a clip's upper bound is over 1, give a positive number",
        ),
        (c.dual_clip is not None and not 1 < c.dual_clip < 1e6, f"constraint.dual_clip {c.dual_clip}: give over 1"),
        (
            c.log_ratio_limit is not None and not 0 < c.log_ratio_limit < 1e3,
            f"constraint.log_ratio_limit {c.log_ratio_limit}: give a positive number",
        ),
        (not 0 < c.max_kl < 1e3, f"constraint.max_kl {c.max_kl:g}: a bound in nats, give a positive number"),
        (not 0 <= kl.coef < 1e6, f"kl.coef {kl.coef:g}: give 0 or more"),
        (kl.limit is not None and not 0 < kl.limit < 1e6, f"kl.limit {kl.limit}: give a positive number"),
        (agg.length is not None and not 1 <= agg.length <= 10**6, f"aggregation.length {agg.length}: give 1 or more"),
        (not 1 <= s.epochs <= 100, f"sampling.epochs {s.epochs}: give 1 to 100"),
        (not 1 <= s.minibatches <= 1000, f"sampling.minibatches {s.minibatches}: give 1 to 1000"),
        (not 1 <= s.dynamic <= 100, f"sampling.dynamic {s.dynamic}: give 1 (off) to 100 batches"),
        (not 0.01 <= s.temperature <= 100, f"sampling.temperature {s.temperature:g}: give 0.01 to 100"),
        (not 0 <= s.age <= 100, f"sampling.age {s.age}: give 0 (fresh) to 100 updates"),
        (
            s.sampler_temperature is not None and not 0.01 <= s.sampler_temperature <= 100,
            f"sampling.sampler_temperature {s.sampler_temperature}: give 0.01 to 100",
        ),
        (not 0 < s.sampler_top_p <= 1, f"sampling.sampler_top_p {s.sampler_top_p:g}: give 0 < top_p <= 1"),
        (not 1 <= s.cap < 1e6, f"sampling.cap {s.cap:g}: a weight is 1 where nothing differs, give 1 or more"),
    ]


def _meaningless(recipe: Recipe) -> list[tuple[bool, str]]:
    a, c, kl, agg, s = (getattr(recipe, axis) for axis in AXES)
    grouped = a.baseline in ("group_mean", "leave_one_out")
    per_token = a.baseline == "gae" or a.credit == "to_go" or a.whiten.startswith("tokens")
    per_token = per_token or (kl.place == "reward" and kl.level == "token")
    trust = c.kind == "trust_region"
    return [
        (grouped and not s.group, f"{a.baseline} compares completions of one prompt: set sampling.group=true"),
        (
            a.scale != "none" and a.baseline != "group_mean",
            f"{a.scale} is the spread around the group's mean: set advantage.baseline=group_mean",
        ),
        (
            a.scale != "none" and a.whiten != "none",
            f"{a.scale} and whitening both divide by a std: leave one out",
        ),
        (
            a.credit == "to_go" and a.baseline not in ("none", "gae"),
            f"a return to go with {a.baseline}: what is left to be paid after a token is not compared with whole "
            "sequences, set advantage.baseline=none, or gae for a critic of prefixes",
        ),
        (
            a.lam < 1 and a.baseline != "gae",
            "advantage.lam weighs the values of prefixes: it needs advantage.baseline=gae",
        ),
        (
            a.gamma < 1 and a.baseline != "gae" and a.credit != "to_go",
            "advantage.gamma discounts what is paid later: it needs advantage.baseline=gae or credit=to_go",
        ),
        (
            a.baseline == "optimal_constant" and s.group,
            "optimal_constant is one number for the whole batch: set sampling.group=false",
        ),
        (
            per_token and c.ratio != "token" and c.kind in ("clip", "cispo"),
            f"the advantage differs from token to token, and constraint.ratio={c.ratio} has one for the sequence: "
            "set constraint.ratio=token",
        ),
        (c.kind == "cispo" and c.ratio != "token", "cispo weights tokens: set constraint.ratio=token"),
        (
            c.kind != "clip" and c.dual_clip is not None,
            f"dual_clip bounds a clipped objective, and constraint.kind is {c.kind}: set constraint.kind=clip",
        ),
        (
            trust and recipe.gradient_steps > 1,
            "a trust region makes one step on the whole batch: set sampling.epochs=1 and sampling.minibatches=1",
        ),
        (trust and kl.place == "loss", "a trust region bounds the KL already: set kl.place=none or reward"),
        (
            trust and (recipe.other_sampler or s.dynamic > 1),
            "a trust region's bound holds for the states of its own policy: take fresh data, without a filter",
        ),
        (
            kl.place == "none" and kl.coef > 0,
            f"kl.coef {kl.coef:g} with kl.place=none does nothing: set kl.place=reward or loss",
        ),
        (
            kl.place != "none" and kl.coef == 0,
            f"kl.place={kl.place} with kl.coef=0 scores a reference for nothing: set kl.coef, or kl.place=none",
        ),
        (
            kl.place == "reward" and kl.estimator == "k3_ratio",
            "k3_ratio corrects a gradient, and in the reward there is none: set kl.place=loss or kl.estimator=k1",
        ),
        (
            kl.place == "reward" and kl.level == "sequence" and a.baseline == "gae",
            "a critic of prefixes is paid token by token: set kl.level=token",
        ),
        (
            kl.place == "reward" and kl.level == "sequence" and a.credit == "to_go",
            "a return to go is paid token by token: set kl.level=token",
        ),
        (
            agg.length is not None and agg.denominator != "constant_length",
            f"aggregation.length belongs to constant_length, and the denominator is {agg.denominator}",
        ),
        (s.dynamic > 1 and not s.group, "dynamic sampling filters groups: set sampling.group=true"),
        (
            s.correction != "none" and not recipe.other_sampler,
            "the sampler is the policy, so there is nothing to correct: set sampling.sampler_temperature or age",
        ),
        (
            s.correction != "none" and s.age > 0 and c.kind in ("clip", "cispo"),
            f"the ratio of {c.kind} accounts for stale data already: set sampling.correction=none",
        ),
        (
            s.age > 0 and (s.sampler_dtype != "same" or s.sampler_temperature is not None or s.sampler_top_p < 1),
            "stale data and another sampler at once cannot be told apart: set one of them",
        ),
    ]


def at_first_gradient(recipe: Recipe) -> Recipe:
    """The recipe with one plain gradient on the whole batch: where every ratio starts, and a natural step from."""
    constraint = recipe.constraint
    if constraint.kind == "trust_region":
        constraint = replace(constraint, kind="none")
    return replace(recipe, constraint=constraint, sampling=replace(recipe.sampling, epochs=1, minibatches=1))


def differences(a: Recipe, b: Recipe) -> list[tuple[str, Any, Any]]:
    """Every choice on which two recipes differ, as (axis.choice, of a, of b)."""
    found = []
    for axis in AXES:
        one, other = getattr(a, axis), getattr(b, axis)
        for f in dataclasses.fields(one):
            if (x := getattr(one, f.name)) != (y := getattr(other, f.name)):
                found.append((f"{axis}.{f.name}", x, y))
    return found


def described(recipe: Recipe) -> dict[str, str]:
    """Each axis in a few words."""
    return {
        "advantage": advantage_words(recipe),
        "constraint": _constraint_words(recipe.constraint),
        "kl": _kl_words(recipe.kl),
        "aggregation": _aggregation_words(recipe.aggregation),
        "sampling": _sampling_words(recipe.sampling),
    }


def advantage_words(recipe: Recipe) -> str:
    """A in a few words, or letters."""
    a = recipe.advantage
    words = {
        "none": "r to go" if a.credit == "to_go" else "r",
        "batch_mean": "r - mean(r), batch",
        "group_mean": "r - mean, group",
        "leave_one_out": "r - mean of the others",
        "value": "r - V(prompt)",
        "gae": f"GAE({a.gamma:g}, {a.lam:g})",
        "optimal_constant": "r - b*",
    }[a.baseline]
    if a.scale == "group_std":
        words = "(r - mean) / std, group"
    elif a.scale == "batch_std":
        words = "(r - mean, group) / std, batch"
    if a.credit == "to_go" and a.gamma < 1:
        words += f", gamma {a.gamma:g}"
    return words + {"none": "", "sequences": ", z-scored"}.get(a.whiten, ", whitened over tokens")


def _constraint_words(c: ConstraintChoice) -> str:
    if c.kind == "none":
        return "none"
    if c.kind == "trust_region":
        return f"KL <= {c.max_kl:g}"
    level = {"token": "token", "sequence": "sequence, product", "sequence_mean": "sequence, mean"}[c.ratio]
    low = "0" if c.clip_low == 1 else f"{1 - c.clip_low:g}"
    words = f"{c.kind} [{low}, {1 + c.clip_high:g}], {level}"
    return words + (f", dual {c.dual_clip:g}" if c.dual_clip is not None else "")


def _kl_words(kl: KLChoice) -> str:
    if kl.place == "none":
        return "none"
    level = f" of the {kl.level}" if kl.place == "reward" else ""
    return f"{kl.coef:g} {kl.estimator} in the {kl.place}{level}"


def _aggregation_words(agg: AggregationChoice) -> str:
    words = {
        "sequence_sum": "sum per sequence, mean over sequences",
        "sequence_mean": "mean per sequence, mean over sequences",
        "token_mean": "mean over tokens",
        "prompt_token_mean": "mean over tokens of a prompt, then prompts",
        "constant_length": "sum per sequence / constant",
    }[agg.denominator]
    return words + (f" {agg.length}" if agg.length is not None else "")


def _sampling_words(s: SamplingChoice) -> str:
    words = ["G per prompt" if s.group else "1 per prompt"]
    words += [f"{s.epochs} epochs"] if s.epochs > 1 else []
    words += [f"{s.minibatches} minibatches"] if s.minibatches > 1 else []
    words += ["dynamic"] if s.dynamic > 1 else []
    words += [f"temperature {s.temperature:g}"] if s.temperature != 1 else []
    words += [f"{s.age} updates old"] if s.age else []
    words += [s.sampler_dtype] if s.sampler_dtype != "same" else []
    words += [f"sampler at {s.sampler_temperature:g}"] if s.sampler_temperature is not None else []
    words += [f"top-p {s.sampler_top_p:g}"] if s.sampler_top_p < 1 else []
    return ", ".join(words + ([f"{s.correction} at {s.cap:g}"] if s.correction != "none" else []))
