"""``pgprog plan``: its arguments, and what it says; free of torch until figures are wanted."""

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pgprog.algorithms.recipes import Recipe, find
from pgprog.errors import UsageError, refuse_twice

if TYPE_CHECKING:
    from pgprog.plan import Bytes, Candidate, Pace, Signal, Sizes, Step

RECIPES = ("reinforce", "ppo_gae", "openrlhf:gae", "rloo", "grpo", "grpo_kl", "dr_grpo", "dapo")
FEW = 100  # informative groups in the whole budget
HALF = 0.5  # of the groups
ARTEFACT = (
    "an artefact, not to be compared: the filter fixes how many groups are informative, which takes away noise of the "
    "gradient's length alone, and one logit has little other. Compare efficiency; a larger --score-noise adds noise of "
    "direction"
)
"""S/N of a recipe that draws until groups are informative, where the filter alone makes it much larger."""
OF_SIGNAL = (
    "signal to noise per rollout",
    "rollouts for S/N 1",
    "signal to noise per step",
    "signal to noise per GPU hour",
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which estimator fits a budget: memory, groups with a signal, signal to noise, GPU hours; before any run.

    Example: pgprog plan --params-b 7 --success-rate 0.05 --group-size 8 16 --generation-share 0.7

    Example: pgprog plan --recipes ppo_gae rloo --reward model --concentration 2 --json
    """

    recipes: tuple[str, ...] = RECIPES
    """Which to compare; pgprog recipes lists them."""
    params_b: float = 7.0
    """Parameters of the policy, in billions."""
    success_rate: tuple[float, ...] = (0.1,)
    """Of the starting policy, in (0, 1), the mean over prompts; several are planned one after the other."""
    concentration: float | None = None
    """k: success differs between prompts, p ~ Beta(mean k, (1 - mean) k); small k, more spread [default: all alike]."""
    group_size: tuple[int, ...] = (8,)
    """G, completions of each prompt, for recipes with groups; several are compared."""
    prompts: int = 64
    """In a step. Recipes without groups sample one completion of each."""
    rollout_budget: int = 100_000
    """Completions that can be sampled in all; 0 for none."""
    gpus: int = 8
    """How many there are."""
    gpu_memory_gb: float = 80.0
    """Of one GPU, decimal."""

    reward: Literal["verifier", "model"] = "verifier"
    """A check that needs no GPU, or a model that scores each completion."""
    reward_params_b: float | None = None
    """Parameters of the reward model, in billions [default: the policy's]."""
    critic_params_b: float | None = None
    """Parameters of the critic, in billions [default: the policy's]."""
    reference: bool = False
    """Hold a reference for every recipe, as when a KL penalty is added [default: where the recipe has one]."""
    weight_bytes: float = 2.0
    """Per parameter: 2 in half precision."""
    float32_gradients: bool = False
    """Gradients in 4 bytes, in place of as many as a weight has."""
    optimizer_bytes: float = 12.0
    """Per trained parameter: AdamW's float32 master weights and two moments, 4 + 4 + 4."""
    train_overhead: float = 0.4
    """Share of a training GPU's memory that is kept for activations."""
    rollout_overhead: float = 0.5
    """Share of a generating GPU's memory that is kept for the cache of keys and values."""

    generation_share: float | None = None
    """Of the wall clock of a plain step (one forward and backward pass of the policy) [default: no GPU hours]."""
    tokens: float = 1000.0
    """Of a completion."""
    tokens_per_second: float = 2000.0
    """That one GPU generates. A placeholder: measure yours."""
    rollouts_per_gpu_hour: float | None = None
    """Completions that one GPU generates in an hour [default: 3600 tokens_per_second / tokens]."""
    score_noise: float | None = None
    """kappa = E|s|^2 p (1 - p) / |grad p|^2, 1 or more, of your policy [default: 1 for S/N, and rank by efficiency]."""
    critic_quality: float = 1.0
    """How much a critic knows of the prompt: 0 for the mean success alone, 1 for the exact V."""
    json: bool = False
    """Print JSON, in place of tables."""


@dataclass(frozen=True)
class Figure:
    """A number, and what it assumes, with the flags that change that."""

    value: int | float | None
    """None: there is none, or it is infinite, as the assumptions say."""
    unit: str
    assumptions: tuple[str, ...]


def plan(args: Plan) -> int:
    """Run ``pgprog plan``."""
    recipes = check(args)
    if args.rollout_budget == 0:
        found = without_rollouts(args)
    else:
        import torch

        torch.set_num_threads(1)
        found = with_rollouts(args, recipes)
    if args.json:
        print(json.dumps(found, allow_nan=False))
    else:
        from rich.console import Console

        from pgprog.report.plan_tables import print_plan

        print_plan(Console(), found)
    return 0


# ---- bad input ----

LARGEST = 1e6
RAREST = 1e-9
RAREST_OF_BETA = 0.01
LARGEST_GROUP = 1000  # pgprog.exact.weight has the same, and brings torch
RANGES: dict[str, tuple[float, float, str]] = {
    "params_b": (1e-6, LARGEST, "billions of parameters"),
    "reward_params_b": (1e-6, LARGEST, "billions of parameters"),
    "critic_params_b": (1e-6, LARGEST, "billions of parameters"),
    "gpu_memory_gb": (1e-3, LARGEST, "decimal gigabytes of one GPU"),
    "weight_bytes": (0.1, 16, "bytes per parameter"),
    "optimizer_bytes": (0, 64, "bytes per trained parameter"),
    "tokens": (1, 1e9, "tokens of a completion"),
    "tokens_per_second": (1e-6, 1e9, "tokens of one GPU"),
    "rollouts_per_gpu_hour": (1e-6, 1e12, "completions of one GPU"),
    "score_noise": (1, 1e12, "kappa; no policy has less than 1"),
    "critic_quality": (0, 1, "0 for the mean success, 1 for the exact V"),
    "concentration": (0.1, 1000, "k of the Beta; leave it out for prompts that are all alike"),
    "gpus": (1, LARGEST, "GPUs"),
    "prompts": (1, 10**6, "prompts in a step"),
    "rollout_budget": (0, 10**15, "completions in all; 0 for none"),
}
"""Both ends are allowed."""
SHARES = {"generation_share": "above 0", "train_overhead": "from 0", "rollout_overhead": "from 0"}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check(args: Plan) -> list[Recipe]:
    """The recipes that are named; raises UsageError for what is impossible, with the reason."""
    if not args.recipes:
        raise UsageError("--recipes without a name: give one or more, as in --recipes rloo grpo")
    recipes = [find(name) for name in args.recipes]
    refuse_twice("--recipes", args.recipes)
    for name, (low, high, what) in RANGES.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise UsageError(f"{flag(name)} {value} is out of range: give {low:g} to {high:g} ({what})")
    for name, least in SHARES.items():
        value = getattr(args, name)
        if value is not None and not (0 < value < 1 or (value == 0 and least == "from 0")):
            raise UsageError(f"{flag(name)} {value} is out of range: give a share {least}, below 1")
    check_prompts(args, recipes)
    if args.reward_params_b is not None and args.reward == "verifier":
        raise UsageError(
            f"--reward-params-b {args.reward_params_b:g} with --reward verifier: a verifier has no parameters, give "
            "--reward model"
        )
    if args.rollout_budget:
        check_budget(args, recipes)
    return recipes


def check_prompts(args: Plan, recipes: list[Recipe]) -> None:
    """Raise UsageError for success rates and group sizes that have no meaning."""
    if not (args.success_rate and args.group_size):
        raise UsageError("--success-rate and --group-size need a value each, as in --success-rate 0.1 --group-size 8")
    for p in args.success_rate:
        if not 0 < p < 1:
            reason = "all rewards would be equal, and no group ever differs" if p in (0, 1) else "it is no probability"
            raise UsageError(f"--success-rate {p}: {reason}; give a number between 0 and 1")
        if not RAREST <= p <= 1 - RAREST:
            raise UsageError(f"--success-rate {p}: no budget sees both rewards; give {RAREST:g} to 1 - {RAREST:g}")
        least = min(p, 1 - p) * (args.concentration or 1)
        if args.concentration is not None and least < RAREST_OF_BETA:
            raise UsageError(
                f"--concentration {args.concentration:g} with --success-rate {p:g} is Beta({p * args.concentration:g}, "
                f"{(1 - p) * args.concentration:g}): give more, so that both are {RAREST_OF_BETA:g} or more"
            )
    grouped = [recipe.name for recipe in recipes if recipe.sampling.group]
    for G in args.group_size:
        if G == 1 and grouped:
            raise UsageError(
                f"--group-size 1 with {grouped[0]}: one completion has no others to be compared with; give 2 or more, "
                "or a recipe without groups"
            )
        if not 1 <= G <= LARGEST_GROUP:
            raise UsageError(f"--group-size {G} is out of range: give 2 to {LARGEST_GROUP}")


def check_budget(args: Plan, recipes: list[Recipe]) -> None:
    """Raise UsageError where the rollouts are not enough for one step."""
    for recipe in recipes:
        for G in sizes_of(recipe, args):
            least = args.prompts * G
            if least > args.rollout_budget:
                each = f"{args.prompts} x {G} = {least}" if recipe.sampling.group else f"{least}"
                raise UsageError(
                    f"--rollout-budget {args.rollout_budget} is less than one step of {recipe.name}, {each} "
                    "completions: give a larger one, fewer --prompts, or 0 to hear what needs none"
                )


def sizes_of(recipe: Recipe, args: Plan) -> tuple[int, ...]:
    """The group sizes at which a recipe is planned: 1 where it has no groups."""
    return tuple(dict.fromkeys(args.group_size)) if recipe.sampling.group else (1,)


# ---- figures ----


def having(args: Plan, *names: str) -> str:
    """Flags with their values, as they would be typed."""
    return ", ".join(having_one(flag(name), getattr(args, name)) for name in names)


def having_one(flag: str, value: Any) -> str:
    """A flag and its value; one without a value is there or not."""
    if isinstance(value, bool):
        return flag if value else f"{flag} not given"
    return f"{flag} {words(value)}"


def words(value: Any) -> str:
    """A flag's value as it is typed."""
    match value:
        case tuple():
            return " ".join(map(words, value))
        case float():
            return f"{value:g}"
        case None:
            return "not given"
    return str(value)


def model_sizes(args: Plan) -> "Sizes":
    from pgprog.plan import Sizes

    reward = None if args.reward == "verifier" else args.reward_params_b or args.params_b
    return Sizes(args.params_b, args.critic_params_b or args.params_b, reward, args.reference)


def bytes_each(args: Plan) -> "Bytes":
    from pgprog.plan import Bytes

    return Bytes(args.weight_bytes, 4.0 if args.float32_gradients else args.weight_bytes, args.optimizer_bytes)


def pace(args: Plan) -> "Pace | None":
    """None where nothing is said of how time divides."""
    from pgprog.plan import Pace

    if args.generation_share is None:
        return None
    return Pace(args.rollouts_per_gpu_hour or 3600 * args.tokens_per_second / args.tokens, args.generation_share)


def finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is None or math.isfinite(value) else None


def memory_of(recipe: Recipe, args: Plan) -> dict[str, Figure]:
    """A recipe's models, and the GPUs that hold them."""
    from pgprog.plan import gpus_for, roles

    held = roles(recipe, model_sizes(args), bytes_each(args))
    total, copy = sum(role.gigabytes for role in held), args.params_b * bytes_each(args).weights
    trained, frozen = bytes_in_words(args)
    sized = {
        "policy": having(args, "params_b"),
        "critic": having(args, "critic_params_b") + ", else the policy's size",
        "reference": "the policy's size: " + having(args, "params_b"),
        "reward model": having(args, "reward_params_b") + ", else the policy's size",
    }
    figures = {
        f"{role.name} memory": Figure(role.gigabytes, "GB", (sized[role.name], trained if role.trained else frozen))
        for role in held
    }
    return figures | {
        "models": Figure(
            len(held),
            "models",
            (
                f"a verifier needs no model: {having(args, 'reward')}",
                f"a reference where the recipe has a KL term, or for all: {having(args, 'reference')}",
            ),
        ),
        "total memory": Figure(total, "GB", ("all models on the training GPUs, none offloaded", trained, frozen)),
        "training GPUs": Figure(
            gpus_for(total, args.gpu_memory_gb, args.train_overhead),
            "GPUs",
            (
                "the least that hold all, evenly sharded, with a share left for activations: "
                + having(args, "gpu_memory_gb", "train_overhead"),
            ),
        ),
        "rollout copy memory": Figure(copy, "GB", ("the policy again, in the inference engine", frozen)),
        "rollout GPUs": Figure(
            gpus_for(copy, args.gpu_memory_gb, args.rollout_overhead),
            "GPUs",
            (
                "the least that hold one copy, with a share left for keys and values: "
                + having(args, "gpu_memory_gb", "rollout_overhead"),
            ),
        ),
    }


def bytes_in_words(args: Plan) -> tuple[str, str]:
    """Of a model that is trained, and of one that is not."""
    each = bytes_each(args)
    return (
        f"trained by AdamW, per parameter {each.weights:g} bytes of weights + {each.gradients:g} of gradients + "
        f"{each.optimizer:g} of master weights and moments = {each.trained:g}, activations aside: "
        + having(args, "weight_bytes", "float32_gradients", "optimizer_bytes"),
        f"inference only, {each.weights:g} bytes per parameter: {having(args, 'weight_bytes')}",
    )


def prompts_in_words(args: Plan, p: float) -> str:
    if args.concentration is None:
        return f"every prompt succeeds with p = {p:g}: --success-rate {p:g}, --concentration not given"
    a, b = p * args.concentration, (1 - p) * args.concentration
    return f"p ~ Beta({a:g}, {b:g}) over prompts: --success-rate {p:g}, {having(args, 'concentration')}"


def group_in_words(args: Plan) -> str:
    return f"G completions of a prompt, one where a recipe has no groups: {having(args, 'group_size')}"


def groups_of(args: Plan, p: float, G: int) -> dict[str, Figure]:
    """How many groups teach something."""
    from pgprog.plan import informative, smallest_group

    share, least = informative(p, args.concentration, G), smallest_group(p, args.concentration)
    given = prompts_in_words(args, p)
    exact = "exact, 1 - p^G - (1 - p)^G: rewards are 0 or 1, completions independent"
    both = (exact, given, group_in_words(args))
    return {
        "informative share": Figure(share, "of the groups", both),
        "share without signal": Figure(1 - share, "of the groups", both),
        "informative groups per step": Figure(
            args.prompts * share, "groups", (*both, f"without a filter: {having(args, 'prompts')}")
        ),
        "smallest G with half informative": Figure(least, "completions", (exact, given)),
    }


def model_in_words(recipe: Recipe, args: Plan) -> tuple[str, ...]:
    """What S/N is exact for."""
    said = [
        "exact for the first gradient from fresh data; rewards 0 or 1, lengths equal, no KL term, all prompts move one "
        "logit",
        "the least noise of scores, kappa = 1: at one p no policy has a higher S/N: --score-noise not given"
        if args.score_noise is None
        else f"noise of scores that knows nothing of the reward: {having(args, 'score_noise')}",
        "what divides the whole batch's A by one number is left out",
    ]
    return tuple(said) + critic_in_words(recipe, args)


def critic_in_words(recipe: Recipe, args: Plan) -> tuple[str, ...]:
    if recipe.critic == "none":
        return ()
    return (
        f"a critic's V is learned already, and GAE is r - V(prompt), one decision: {having(args, 'critic_quality')}",
    )


def signal_of(recipe: Recipe, args: Plan, p: float, G: int) -> dict[str, Figure]:
    """What a recipe's rollouts are worth at this success, and what the budget buys."""
    from pgprog.plan import informative, signal, spread, step

    share = informative(p, args.concentration, G) if recipe.sampling.group else 1.0
    made = step(recipe, args.prompts, G, share)
    found = signal(
        recipe,
        spread(p, args.concentration, G),
        G,
        args.prompts,
        kappa=args.score_noise or 1.0,
        critic_quality=args.critic_quality,
    )
    ratio, steps = found.signal_to_noise, int(args.rollout_budget // made.rollouts)
    given = (prompts_in_words(args, p), group_in_words(args))
    model = (*model_in_words(recipe, args), *given)
    noisy = "scores are mostly noise whose size does not depend on the reward; at one p it is w^2 p (1 - p) / E[A^2]"
    sampled: tuple[str, ...] = (having(args, "prompts"), given[1])
    if recipe.sampling.dynamic > 1:
        most = f"{recipe.name} draws until its groups are informative, {recipe.sampling.dynamic} batches at most"
        sampled = (*sampled, most, given[0])
    budget = (having(args, "rollout_budget"), *sampled)
    figures = {
        "signal to noise per rollout": Figure(finite(ratio), "|E g|^2 / tr Cov(g)", model),
        "rollouts for S/N 1": Figure(1 / ratio if ratio else None, "completions", model),
        "efficiency": Figure(
            found.efficiency,
            "of A = r - p",
            ("S/N against an exact baseline", noisy, *critic_in_words(recipe, args), *given),
        ),
        "effective weight": Figure(found.weight, "|E g| / |grad J|", model),
        "E[A^2]": Figure(found.squared_advantage, "reward^2", model),
        "rollouts per step": Figure(made.rollouts, "completions", sampled),
        "steps": Figure(steps, "steps", budget),
        "signal to noise per step": Figure(finite(ratio * made.rollouts), "|E g|^2 / tr Cov(g)", (*model, sampled[0])),
    }
    if made.informative is not None:
        stays = "success stays where it starts"
        figures["informative groups per step"] = Figure(made.informative, "groups", (*sampled, given[0]))
        figures["informative groups in all"] = Figure(made.informative * steps, "groups", (*budget, given[0], stays))
    return figures | time_of(recipe, args, found, made, model, given)


def time_of(
    recipe: Recipe, args: Plan, found: "Signal", made: "Step", model: tuple[str, ...], given: tuple[str, ...]
) -> dict[str, Figure]:
    """What a GPU hour is worth; nothing where it is not said how time divides."""
    from pgprog.plan import hours, passes, rollout_gpus

    speed, sizes = pace(args), model_sizes(args)
    if speed is None:
        return {}
    spent = hours(recipe, sizes, speed, made.kept / made.groups)
    each = ", ".join(f"{name} {n:g}" for name, n in passes(recipe, sizes).items())
    each += "" if sizes.reward is None else f", reward model {sizes.reward / sizes.policy:g} (of all that is sampled)"
    rate = ("rollouts_per_gpu_hour",) if args.rollouts_per_gpu_hour else ("tokens_per_second", "tokens")
    clock = (
        f"one GPU generates {speed.per_gpu_hour:g} completions an hour: {having(args, *rate)}",
        "a plain step divides so, and three forward passes of the policy are its training: "
        + having(args, "generation_share"),
        f"{recipe.name}, forward passes per completion that is trained on: {each}",
        "nothing waits, and nothing is overlapped",
    )
    memory = memory_of(recipe, args)
    least, replica = (int(memory[name].value or 1) for name in ("training GPUs", "rollout GPUs"))
    total, budget = args.rollout_budget * spent.total, having(args, "rollout_budget")
    pairs = rollout_gpus(least, replica, spent) if spent.training else None
    return {
        "GPU seconds per rollout": Figure(3600 * spent.total, "s", clock),
        "generation": Figure(spent.generation / spent.total, "of the GPU hours", clock),
        "signal to noise per GPU hour": Figure(
            finite(found.signal_to_noise / spent.total), "|E g|^2 / tr Cov(g)", (*model, *clock)
        ),
        "efficient rollouts per GPU hour": Figure(
            found.efficiency / spent.total, "rollouts of A = r - p", (*clock, *critic_in_words(recipe, args), *given)
        ),
        "GPU hours in all": Figure(total, "h", (budget, *clock)),
        "wall hours": Figure(total / args.gpus, "h", (budget, having(args, "gpus") + ", all busy", *clock)),
        "rollout GPUs that keep pace": Figure(
            pairs, "GPUs", ("beside the least training GPUs, in whole copies of the policy", *clock)
        ),
    }


def remarks(
    recipe: Recipe, args: Plan, p: float, G: int, memory: dict[str, Figure], figures: dict[str, Figure]
) -> dict[str, str]:
    """By figure, what a reader must know before comparing it with the others."""
    said = {}
    if is_artefact(recipe, args, p, G):
        said = {name: ARTEFACT for name in OF_SIGNAL if name in figures}
    pace = "rollout GPUs that keep pace"
    train, sample = memory["training GPUs"].value or 0, figures[pace].value if pace in figures else None
    if sample is not None and train + sample > args.gpus:
        said[pace] = (
            f"with the GPUs to train, more than --gpus {args.gpus}: apart, training would wait for samples. On the "
            f"{args.gpus} both take turns, as wall h has it"
        )
    return said


def is_artefact(recipe: Recipe, args: Plan, p: float, G: int) -> bool:
    """Whether a filter alone makes S/N ``LEAD`` times what it is without, though efficiency stays the same."""
    from pgprog.plan import LEAD, signal, spread

    if recipe.sampling.dynamic == 1:
        return False
    plain = replace(recipe, sampling=replace(recipe.sampling, dynamic=1))
    with_filter, without = (
        signal(one, spread(p, args.concentration, G), G, args.prompts, kappa=args.score_noise or 1.0).signal_to_noise
        for one in (recipe, plain)
    )
    return with_filter > LEAD * without


# ---- all of it ----


def with_rollouts(args: Plan, recipes: list[Recipe]) -> dict[str, Any]:
    """Every figure, and which recipe they speak for."""
    memory = {recipe.name: memory_of(recipe, args) for recipe in recipes}
    grouped = any(recipe.sampling.group for recipe in recipes)
    sizes = tuple(dict.fromkeys(args.group_size)) if grouped else ()
    rates = tuple(dict.fromkeys(args.success_rate))
    groups = {(p, G): groups_of(args, p, G) for p in rates for G in sizes}
    signals = {(p, r.name, G): signal_of(r, args, p, G) for p in rates for r in recipes for G in sizes_of(r, args)}
    return {
        "inputs": asdict(args),
        "fits": any(fits(m, args) for m in memory.values()),
        "memory": [
            {"recipe": r.name, "title": r.title, "fits": fits(memory[r.name], args), "figures": as_data(memory[r.name])}
            for r in recipes
        ],
        "groups": [{"success_rate": p, "group_size": G, "figures": as_data(f)} for (p, G), f in groups.items()],
        "signal": [
            {
                "success_rate": p,
                "recipe": name,
                "group_size": G,
                "figures": as_data(f),
                "remarks": remarks(find(name), args, p, G, memory[name], f),
            }
            for (p, name, G), f in signals.items()
        ],
        "recommendations": [
            recommend(args, p, recipes, memory, groups, {key[1:]: f for key, f in signals.items() if key[0] == p})
            for p in rates
        ],
    }


def as_data(figures: dict[str, Figure]) -> dict[str, dict[str, Any]]:
    return {name: asdict(figure) for name, figure in figures.items()}


def fits(memory: dict[str, Figure], args: Plan) -> bool:
    """Whether the GPUs hold training, and one copy to generate with, at least in turns."""
    return max(memory[name].value or 0 for name in ("training GPUs", "rollout GPUs")) <= args.gpus


def score_name(args: Plan) -> str:
    """What recipes are ranked by."""
    if args.score_noise is None:
        return "efficiency" if args.generation_share is None else "efficient rollouts per GPU hour"
    return "signal to noise per rollout" if args.generation_share is None else "signal to noise per GPU hour"


def recommend(
    args: Plan,
    p: float,
    recipes: list[Recipe],
    memory: dict[str, dict[str, Figure]],
    groups: dict[tuple[float, int], dict[str, Figure]],
    signals: dict[tuple[str, int], dict[str, Figure]],
) -> dict[str, Any]:
    """The recipe that fits, and why, in words; the rules are those of ``plan.choose_recipe``."""
    from pgprog.plan import Candidate, choose_recipe, other_objective

    by_name = {recipe.name: recipe for recipe in recipes}
    score = score_name(args)

    def candidate(name: str, G: int) -> "Candidate":
        value, recipe = signals[name, G][score].value, by_name[name]
        return Candidate(
            name=name,
            group_size=G,
            score=math.inf if value is None else value,
            critic=recipe.critic != "none",
            models=int(memory[name]["models"].value or 0),
            biased=other_objective(recipe),
            fits=fits(memory[name], args),
        )

    candidates = [candidate(*key) for key in signals]
    chosen = choose_recipe(candidates)
    said = [chosen_words(args, chosen, candidates, score)] if chosen else [nothing_fits(args, memory)]
    said += [too_large(args, name, memory) for name in by_name if not fits(memory[name], args)] if chosen else []
    said += few_signals(args, p, groups)
    if chosen and args.score_noise is not None and is_artefact(by_name[chosen.name], args, p, chosen.group_size):
        said.append(f"But the S/N of {chosen.name} is {ARTEFACT}.")
    if chosen and not by_name[chosen.name].sampling.group and args.concentration is None:
        said.append(
            "A baseline that all prompts share is as good as one of a prompt's own only because all have the same p: "
            "give --concentration 2, say, where yours differ."
        )
    return {
        "success_rate": p,
        "recipe": chosen.name if chosen else None,
        "group_size": chosen.group_size if chosen else None,
        "ranked_by": score,
        "reasons": said,
    }


def chosen_words(args: Plan, chosen: "Candidate", candidates: "list[Candidate]", score: str) -> str:
    from pgprog.plan import LEAD

    size = f" with G = {chosen.group_size}" if chosen.group_size > 1 else ""
    text = f"{chosen.name}{size}: {score} {chosen.score:.3g}"
    rest = [c for c in candidates if c.fits and c is not chosen]
    if not rest:
        return text + ", the only one that fits."
    best = max(rest, key=lambda c: c.score)
    other = f"{best.name}{f' with G = {best.group_size}' if best.group_size > 1 else ''} has {best.score:.3g}"
    if best.score <= chosen.score:
        return f"{text}, the highest of those that fit; {other}."
    if best.critic and not chosen.critic:
        return (
            f"{text}; {other}, but with a critic whose V has to be learned and is assumed here (--critic-quality "
            f"{args.critic_quality:g}): it must lead by {LEAD:g} times."
        )
    return f"{text}; {other}, within 2%, but for another objective or with more models."


def nothing_fits(args: Plan, memory: dict[str, dict[str, Figure]]) -> str:
    least = min(memory, key=lambda name: memory[name]["total memory"].value or 0)
    need = max(int(memory[least][name].value or 0) for name in ("training GPUs", "rollout GPUs"))
    return (
        f"None fits in {args.gpus} x {args.gpu_memory_gb:g} GB: {least}, the smallest, holds "
        f"{memory[least]['total memory'].value:.4g} GB and needs {need}. Take a smaller model or more GPUs, train "
        "adapters of low rank, or offload the optimizer."
    )


def too_large(args: Plan, name: str, memory: dict[str, dict[str, Figure]]) -> str:
    m = memory[name]
    critic = "critic memory" in m
    return (
        f"{name} does not fit: {m['total memory'].value:.4g} GB need {m['training GPUs'].value:g} GPUs, and there are "
        f"{args.gpus}" + ("; a group method has no critic." if critic else ".")
    )


def few_signals(args: Plan, p: float, groups: dict[tuple[float, int], dict[str, Figure]]) -> list[str]:
    """Warnings where groups teach little."""
    said = []
    for (rate, G), figures in groups.items():
        share, least = figures["informative share"].value, figures["smallest G with half informative"].value
        if rate != p or share is None or share >= HALF:
            continue
        cure = f"take {'harder' if p > 0.5 else 'easier'} prompts, or pay for steps on the way (a process reward)"
        if least is None:
            which = "no G up to 2^50 has half of them informative: most prompts are hopeless or solved"
        elif least > LARGEST_GROUP:
            which = f"no practical G ({least:,.0f}) has half of them informative: most prompts are hopeless or solved"
        else:
            which, cure = f"the smallest G with half the groups informative is {least:.0f}", f"raise G, {cure}"
        said.append(
            f"{1 - share:.0%} of the groups carry no signal: success is {p:g} and G = {G}; {which}. What helps: "
            f"{cure}. A larger learning rate does not."
        )
        total = share * args.rollout_budget / G
        if total < FEW:
            said.append(
                f"The whole budget holds {total:.3g} informative groups at G = {G}: too few to learn from. "
                + ("Take other prompts." if p > 0.5 else "First raise success, by fine-tuning on worked answers.")
            )
    return said


def without_rollouts(args: Plan) -> dict[str, Any]:
    """What is left where nothing can be sampled: a preference method."""
    from pgprog.plan import gpus_for

    each, size = bytes_each(args), having(args, "params_b")
    policy, reference = args.params_b * each.trained, args.params_b * each.weights
    trained, frozen = bytes_in_words(args)
    hold = "the least that hold both, evenly sharded: " + having(args, "gpu_memory_gb", "train_overhead")
    figures = {
        "models": Figure(2, "models", ("no critic, no reward model, no copy to sample from",)),
        "policy memory": Figure(policy, "GB", (size, trained)),
        "reference memory": Figure(reference, "GB", (size, frozen)),
        "total memory": Figure(policy + reference, "GB", (size, trained, frozen)),
        "training GPUs": Figure(gpus_for(policy + reference, args.gpu_memory_gb, args.train_overhead), "GPUs", (hold,)),
    }
    need = figures["training GPUs"].value or 0
    reasons = [
        "No method of this family fits without rollouts: each step weighs completions of the present policy by their "
        "reward, and none can be sampled (--rollout-budget 0).",
        "A preference method such as DPO does: it trains on pairs of a better and a worse answer that exist already, "
        "with the policy and a frozen reference, and samples nothing. It learns no more than the pairs hold.",
    ]
    if need > args.gpus:
        reasons.append(
            f"It needs {need:g} GPUs of {args.gpu_memory_gb:g} GB, and there are {args.gpus}: take a smaller model."
        )
    return {
        "inputs": asdict(args),
        "fits": False,
        "memory": [{"recipe": "dpo", "title": "DPO", "fits": need <= args.gpus, "figures": as_data(figures)}],
        "groups": [],
        "signal": [],
        "recommendations": [
            {"success_rate": None, "recipe": "dpo", "group_size": None, "ranked_by": None, "reasons": reasons}
        ],
    }
