"""Recipes: the ladder's points are the ladder, every point can be trained, and what makes no sense is refused."""

import dataclasses
import math
from functools import partial

import pytest
import torch

from oracles import close, same
from pgprog.algorithms import from_recipe
from pgprog.algorithms.from_recipe import aggregation_of, objective_of
from pgprog.algorithms.ladder import TRAIN_STEPS
from pgprog.algorithms.objectives import Surrogate, aggregate
from pgprog.algorithms.recipes import AXES, LADDER_RECIPES, RECIPES, Recipe, described, differences, find, refuse
from pgprog.errors import UsageError
from pgprog.experiment import rundir
from pgprog.experiment.config import RunConfig, validate
from pgprog.experiment.learner import make_learner
from pgprog.experiment.loop import run, step_options, train_step_of
from pgprog.noise import ReplicaGenerator
from pgprog.policy import rollout

NAMES = list(RECIPES)
LADDER = [recipe.name for recipe in LADDER_RECIPES]
STALE = ("sampling.age=2",)
BFLOAT = ("sampling.sampler_dtype=bfloat16", "sampling.correction=token_truncate")
POINTS = [*((name, ()) for name in NAMES), ("grpo_kl", STALE), ("dapo", STALE), ("vpg", BFLOAT), ("gspo", BFLOAT)]


def config_of(name, changes=(), **more):
    sizes = {"seq_len": 3, "digits": 3, "variable_length": True, "prompts": 8, "group_size": 4, "hidden": 8}
    return validate(
        RunConfig(**(sizes | {"recipe": name, "set": changes, "steps": 6, "dtype": "float64", "lr": 0.05} | more))
    )


def steps(config, seeds, count):
    """The metrics of ``count`` steps, and the learner after them."""
    learner, generator = make_learner(config, seeds), ReplicaGenerator(seeds, "train")
    step, options, metrics = train_step_of(config), step_options(config, learner), []
    for number in range(count):
        generator.seek(number)
        metrics.append(step(learner.policy, learner.optimizer, generator, entropy_coef=0.02, **options))
    return metrics, learner


def test_a_library_that_samples_one_completion_where_groups_are_compared_is_noted():
    ones = [recipe for recipe in RECIPES.values() if recipe.sampling.group and recipe.rollouts == 1]
    assert {recipe.name.split(":")[0] for recipe in ones} == {"verl", "openrlhf", "slime"}
    for recipe in ones:
        assert "is 1 by default" in recipe.notes and recipe.notes.endswith("give 2 or more."), recipe.name


@pytest.mark.parametrize("name", LADDER)
def test_the_recipe_of_a_rung_is_the_rung_bit_for_bit(name):
    seeds = [0, 7]
    by_recipe = config_of(name)
    rung = dataclasses.replace(by_recipe, recipe=None, algo=name)
    (theirs, first), (mine, second) = steps(rung, seeds, 3), steps(by_recipe, seeds, 3)
    assert rung.policy_lr == by_recipe.policy_lr and rung.policy_entropy_coef == by_recipe.policy_entropy_coef
    assert rung.exceptions() == by_recipe.exceptions()
    for a, b in zip(theirs, mine, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    for p, q in zip(first.policy.parameters(), second.policy.parameters(), strict=True):
        same(p, q)


@pytest.mark.parametrize(("name", "changes"), POINTS)
def test_every_recipe_trains_and_a_replica_is_the_same_alone(name, changes):
    together, many = steps(config_of(name, changes), [0, 1, 2], 3)
    alone, one = steps(config_of(name, changes), [1], 3)
    start = make_learner(config_of(name, changes), [1]).policy
    for p, q, r in zip(many.policy.parameters(), one.policy.parameters(), start.parameters(), strict=True):
        close(p[1:2], q, rtol=1e-7, atol=1e-9)
        assert q.isfinite().all() and (q != r).any()
    for a, b in zip(together, alone, strict=True):
        close(a["loss"][1:2], b["loss"], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("name", "changes"), [p for p in POINTS if p[1] or ":" not in p[0]])
def test_a_stopped_run_of_a_recipe_goes_on_to_the_same_bits(name, changes, tmp_path):
    config, seeds = config_of(name, changes, steps=7), [0, 3]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    expected = run(config, seeds, whole)
    run(config, seeds, parts, should_stop=iter([False] * 4 + [True]).__next__)
    result = run(config, seeds, parts)
    assert dataclasses.replace(result, wall_seconds=0.0) == dataclasses.replace(expected, wall_seconds=0.0)
    saved = [rundir.load_checkpoint(directory)[0] for directory in (whole, parts)]
    assert saved[0].keys() == saved[1].keys()
    for key in saved[0]:
        assert torch.equal(saved[0][key], saved[1][key]), key


@pytest.mark.parametrize("name", [n for n in NAMES if RECIPES[n].constraint.kind in ("clip", "cispo")])
@pytest.mark.parametrize("changes", [(), ("sampling.temperature=0.6",)])
def test_with_a_learning_rate_of_0_every_ratio_stays_1(name, changes):
    """F2: the cheapest check of a pipeline; at another temperature too, F1."""
    config = config_of(name, changes)
    learner, generator = make_learner(config, [0, 1]), ReplicaGenerator([0, 1], "train")
    held = [p for group in learner.optimizer.param_groups for p in group["params"]]
    still = torch.optim.SGD(held, lr=0.0)
    for step in range(2):
        generator.seek(step)
        metrics = from_recipe.train_step(learner.policy, still, generator, **step_options(config, learner))
        # Products over a part of the batch round otherwise than over the whole.
        equal = same if config.choices.sampling.minibatches == 1 else partial(close, rtol=1e-13, atol=0)
        equal(metrics["ratio_min"], torch.ones(2))
        equal(metrics["ratio_max"], torch.ones(2))
        same(metrics["clip_frac"], torch.zeros(2))


def test_stale_data_have_ratios_off_1():
    config = config_of("grpo_kl", STALE)
    metrics, _ = steps(config, [0], 4)
    assert metrics[0]["ratio_max"] == 1
    assert (metrics[3]["ratio_max"] > 1.001).all() and (metrics[3]["ratio_min"] < 0.999).all()


def generic_batch(recipe):
    """A rollout with unequal lengths and ratios off 1, and a generic advantage of the kind that the recipe has."""
    config = config_of(recipe.name)
    learner = make_learner(config, [0, 1])
    batch = rollout(learner.policy, ReplicaGenerator([0, 1], "train"), 6, 4)
    noise = [torch.sin(i * torch.arange(batch.tokens.numel(), dtype=torch.float64)) for i in (1.3, 2.7, 0.9)]
    old, ref, A = (x.view(batch.tokens.shape) for x in noise)
    per_token = recipe.advantage.baseline == "gae" or recipe.advantage.credit == "to_go"
    A = torch.where(batch.mask, A, 0) if per_token else A[..., 0]
    logprobs = batch.logprobs.detach()
    batch = batch._replace(
        old_logprobs=logprobs + 0.4 * old, ref_logprobs=logprobs + 0.3 * ref, sampler_logprobs=logprobs + 0.1 * old
    )
    return batch, A


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_cut_in_parts_has_the_gradient_of_the_whole(name):
    """A1, A2: the denominator is that of the whole batch, whichever way it is cut; and over ranks likewise."""
    recipe = RECIPES[name]
    batch, A = generic_batch(recipe)
    weights, objective = aggregation_of(recipe.aggregation)(batch.mask), objective_of(recipe)
    if weights is None:
        weights = aggregation_of(dataclasses.replace(recipe.aggregation))(batch.mask)
    if weights is None:  # the sum per sequence, spelt out
        weights = batch.mask.double() / (batch.mask.shape[1] * batch.mask.shape[2])
    gradients = []
    for cuts in ([6], [3, 3], [1, 4, 1], [1] * 6):
        logprobs = batch.logprobs.detach().requires_grad_()
        start = 0
        for size in cuts:
            at = slice(start, start + size)
            part = batch._replace(
                mask=batch.mask[:, at],
                logprobs=batch.logprobs[:, at],
                old_logprobs=batch.old_logprobs[:, at],
                ref_logprobs=batch.ref_logprobs[:, at],
                sampler_logprobs=batch.sampler_logprobs[:, at],
            )
            objective(logprobs[:, at], part, A[:, at], weights[:, at]).loss.sum().backward()
            start += size
        gradients.append(logprobs.grad)
    assert gradients[0].abs().max() > 1e-4
    for gradient in gradients[1:]:
        close(gradient, gradients[0], rtol=1e-13, atol=1e-16)


@pytest.mark.parametrize("name", [n for n in NAMES if RECIPES[n].kl.place == "loss"])
def test_the_derivative_of_the_loss_by_the_coefficient_is_the_kl(name):
    """E5: configured, and used."""
    recipe = RECIPES[name]
    batch, A = generic_batch(recipe)
    weights = aggregation_of(recipe.aggregation)(batch.mask)
    losses = [
        objective_of(dataclasses.replace(recipe, kl=dataclasses.replace(recipe.kl, coef=coef)))(
            batch.logprobs, batch, A, weights
        ).loss
        for coef in (0.1, 0.3)
    ]
    x = batch.logprobs - batch.ref_logprobs
    close((losses[1] - losses[0]) / 0.2, aggregate((-x).exp() + x - 1, weights), rtol=1e-10, atol=1e-12)


def test_a_kl_in_the_reward_is_taken_off_before_the_baseline():
    config = config_of("rloo_kl", ("kl.coef=0.7",))
    learner = make_learner(config, [0])
    with torch.no_grad():
        for p in learner.reference.parameters():
            p.add_(0.3 * torch.sin(torch.arange(p.numel(), dtype=p.dtype)).view(p.shape))
    draw = from_recipe.draw_of(config.choices, learner.reference)
    batch = draw(learner.policy, ReplicaGenerator([0], "train"), 5, 4)
    batch = batch._replace(logprobs=batch.logprobs.detach())
    assert not batch.rewards.requires_grad and not batch.ref_logprobs.requires_grad
    A = from_recipe.advantage_of(config.choices)(batch)
    for p in range(5):
        paid = []
        for g in range(4):
            kl = sum(
                float(batch.logprobs[0, p, g, t] - batch.ref_logprobs[0, p, g, t])
                for t in range(3)
                if batch.mask[0, p, g, t]
            )
            paid.append(float(batch.success[0, p, g]) - 0.7 * kl)
        for g in range(4):
            close(A[0, p, g], paid[g] - (sum(paid) - paid[g]) / 3, rtol=1e-12, atol=1e-12)


def test_a_kl_of_tokens_charges_each_token_for_what_comes_from_it_on():
    config = config_of("openrlhf:rloo", ("kl.coef=0.5", "sampling.minibatches=1"))
    learner = make_learner(config, [0])
    with torch.no_grad():
        for p in learner.reference.parameters():
            p.add_(0.3 * torch.sin(torch.arange(p.numel(), dtype=p.dtype)).view(p.shape))
    recipe = config.choices
    batch = from_recipe.draw_of(recipe, learner.reference)(learner.policy, ReplicaGenerator([0], "train"), 5, 4)
    batch = batch._replace(logprobs=batch.logprobs.detach())
    A = from_recipe.advantage_of(recipe)(batch)
    r = batch.success.double()
    for p in range(5):
        for g in range(4):
            base = float(r[0, p, g]) - (float(r[0, p].sum()) - float(r[0, p, g])) / 3
            length = int(batch.mask[0, p, g].sum())
            kl = [float(batch.logprobs[0, p, g, t] - batch.ref_logprobs[0, p, g, t]) for t in range(length)]
            for t in range(3):
                expected = base - 0.5 * sum(kl[t:]) if t < length else 0.0
                close(A[0, p, g, t], expected, rtol=1e-12, atol=1e-12)


def test_a_recipe_without_what_it_wants_says_so():
    config = config_of("grpo_kl")
    learner = make_learner(config, [0])
    step = partial(
        from_recipe.train_step, learner.policy, learner.optimizer, ReplicaGenerator([0], "train"), group_size=2
    )
    with pytest.raises(ValueError, match="grpo_kl measures its KL from a frozen policy: give reference"):
        step(recipe=RECIPES["grpo_kl"])
    with pytest.raises(ValueError, match="actor_critic wants a critic of kind 'prompt', and got NoneType"):
        step(recipe=RECIPES["actor_critic"])
    with pytest.raises(ValueError, match="samples from the policy of 2 updates ago: give past"):
        step(recipe=find("rloo", STALE))


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("grpo", "sampling.group=false", "group_mean compares completions of one prompt"),
        ("rloo", "advantage.scale=group_std", "set advantage.baseline=group_mean"),
        ("grpo", "advantage.whiten=tokens", "both divide by a std"),
        ("rloo", "advantage.credit=to_go", "a return to go with leave_one_out"),
        ("rloo", "advantage.lam=0.9", "needs advantage.baseline=gae"),
        ("rloo", "advantage.gamma=0.9", "needs advantage.baseline=gae or credit=to_go"),
        ("optimal_baseline", "sampling.group=true", "one number for the whole batch"),
        ("ppo_gae", "constraint.ratio=sequence", "the advantage differs from token to token"),
        ("cispo", "constraint.ratio=sequence_mean", "cispo weights tokens"),
        ("rloo", "constraint.dual_clip=3", "dual_clip bounds a clipped objective"),
        ("trpo", "sampling.epochs=2", "one step on the whole batch"),
        ("trpo", "sampling.age=1", "fresh data"),
        ("rloo", "kl.coef=0.1", "with kl.place=none does nothing"),
        ("rloo", "kl.place=loss", "with kl.coef=0 scores a reference for nothing"),
        ("rloo_kl", "kl.estimator=k3_ratio", "in the reward there is none"),
        ("reinforce_plus_plus", "kl.level=sequence", "paid token by token"),
        ("dapo", "aggregation.length=5", "belongs to constant_length"),
        ("vpg", "sampling.dynamic=2", "dynamic sampling filters groups"),
        ("rloo", "sampling.correction=token_mask", "nothing to correct"),
        ("rloo", "constraint.clip_low=0", "give 0 < clip_low <= 1"),
        ("dapo", "constraint.clip_high=-0.5", "a clip's upper bound is over 1"),
        ("dapo", "constraint.dual_clip=0.5", "give over 1"),
        ("rloo", "advantage.ddof=2", "give 0 or 1"),
        ("rloo", "sampling.temperature=0", "give 0.01 to 100"),
        ("rloo", "sampling.epochs=0", "give 1 to 100"),
        ("rloo", "advantage.eps=nan", "give 0 <= eps < 1"),
        ("rloo", "kl.coef=inf", "give 0 or more"),
        ("rloo", "sampling.epochs=two", "'two' is no integer"),
        ("rloo", "sampling.group=maybe", "give true or false"),
        ("rloo", "advantage.baseline=mean", "choose one of none, batch_mean"),
        ("rloo", "advantage.baselin=none", "did you mean 'baseline'"),
        ("rloo", "advantages.baseline=none", "did you mean 'advantage'"),
        ("rloo", "baseline", "give axis.choice=value"),
    ],
)
def test_a_combination_without_meaning_is_refused_with_the_reason(name, change, reason):
    with pytest.raises(UsageError) as refused:
        find(name, (change,))
    assert reason in str(refused.value)


def test_an_unknown_recipe_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match="unknown recipe 'dr_gpro': did you mean 'dr_grpo'"):
        find("dr_gpro")


def test_changes_are_typed_and_the_last_one_wins():
    changed = find("dapo", ("constraint.clip_high=0.5", "constraint.clip_high=0.3", "constraint.dual_clip=3"))
    assert changed.constraint == dataclasses.replace(RECIPES["dapo"].constraint, clip_high=0.3, dual_clip=3.0)
    assert find("verl:grpo", ("constraint.dual_clip=none",)).constraint.dual_clip is None
    assert RECIPES["dapo"].constraint.clip_high == 0.28


def test_differences_name_every_choice_that_differs_and_no_other():
    found = {name: pair for name, *pair in differences(RECIPES["trl:grpo"], RECIPES["verl:grpo"])}
    assert found == {
        "advantage.eps": [1e-4, 1e-6],
        "constraint.dual_clip": [None, 3.0],
        "constraint.log_ratio_limit": [None, 20.0],
        "sampling.minibatches": [1, 4],
    }
    for recipe in RECIPES.values():
        assert differences(recipe, recipe) == []


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_is_described_and_has_meaning(name):
    recipe = RECIPES[name]
    refuse(recipe)
    assert isinstance(recipe, Recipe) and recipe.paper and recipe.bias and recipe.title
    assert list(described(recipe)) == list(AXES)
    assert all(described(recipe).values())


def test_the_words_of_a_point_change_with_its_choices():
    words = {name: described(recipe) for name, recipe in RECIPES.items()}
    assert words["dapo"]["constraint"] == "clip [0.8, 1.28], token"
    assert words["cispo"]["constraint"] == "cispo [0, 5], token"
    assert words["ppo"]["advantage"] == "r - V(prompt), z-scored"
    assert words["ppo_gae"]["advantage"] == "GAE(1, 0.95), whitened over tokens"
    assert words["trl:rloo"]["kl"] == "0.05 k1 in the reward of the sequence"
    assert described(find("rloo", ("sampling.age=3",)))["sampling"] == "G per prompt, 3 updates old"


def test_flags_of_ppo_are_refused_beside_a_recipe():
    with pytest.raises(UsageError, match=r"--ppo-epochs is of --algo ppo: with --recipe, --set sampling.epochs"):
        config_of("ppo", ppo_epochs=2)
    with pytest.raises(UsageError, match=r"--set sampling.epochs=2 changes a recipe: give --recipe ppo"):
        validate(RunConfig(algo="ppo", set=("sampling.epochs=2",)))


def test_a_users_advantage_stands_in_for_that_of_a_recipe(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def plain(rewards):\n    return rewards - rewards.mean(-1, keepdim=True)\n")
    mine = config_of("grpo_kl", advantage=f"{path}:plain")
    dr = config_of("grpo_kl", ("advantage.scale=none",))
    (a, first), (b, second) = steps(mine, [0], 2), steps(dr, [0], 2)
    assert len(a) == len(b)
    for p, q in zip(first.policy.parameters(), second.policy.parameters(), strict=True):
        close(p, q, rtol=1e-9, atol=1e-12)


def test_an_objective_is_a_surrogate_and_its_metrics_carry_no_gradient():
    for name in NAMES:
        batch, A = generic_batch(RECIPES[name])
        found = objective_of(RECIPES[name])(
            batch.logprobs, batch, A, aggregation_of(RECIPES[name].aggregation)(batch.mask)
        )
        assert isinstance(found, Surrogate) and found.loss.requires_grad and found.loss.shape == (2,)
        assert not any(value.requires_grad for value in found.metrics.values())


def test_every_rung_has_a_recipe():
    assert list(TRAIN_STEPS) == LADDER
    assert math.isclose(RECIPES["dapo"].constraint.clip_high, 0.28)
