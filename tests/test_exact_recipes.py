"""Every recipe's first gradient: the bias that it states, numbers, an oracle by plain loops, and stale data."""

import ast
import dataclasses
import json
import math
from functools import cache

import pytest
import torch

import axes_oracles_exact as by_loops
import exact_oracles
import oracles
from axes_mutants_exact import EXACT_RECIPE_MUTANTS
from mutants import ROOT, patched
from oracles import close
from pgprog.algorithms.advantages import group_z_score
from pgprog.algorithms.recipes import LENGTH_BIAS, RECIPES, TOKEN_BIAS, find
from pgprog.cli import main
from pgprog.errors import UsageError
from pgprog.exact.blackbox import black_box_moments, one_at_a_time
from pgprog.exact.enumeration import success_gradients
from pgprog.exact.recipes import (
    compared,
    inverse_fisher,
    measure,
    one_update_old,
    outcome_probabilities,
    recipe_moments,
    rewards_of,
    sampler_of,
    tempered,
    tiny_problem,
    true_gradient,
    with_fresh_data,
)
from pgprog.exact.weight import effective_weight, group_advantage

NAMES = list(RECIPES)
DOCS = ROOT / "docs" / "exact.md"


@cache
def problem_of(G=2, prompt=None, step=0.05):
    """All prompts, or one of them."""
    problem = tiny_problem(group_size=G, step=step)
    return problem if prompt is None else dataclasses.replace(problem, targets=problem.targets[prompt : prompt + 1])


@cache
def row_of(name):
    return measure(RECIPES[name], problem_of())


def mean_of(recipe, problem):
    return recipe_moments(recipe, problem).mean


def exactly(actual, expected):
    close(actual, expected, rtol=0, atol=1e-13)


def turned(recipe, problem):
    """How much of E[g] no scale of its own truth takes away."""
    return compared(recipe_moments(recipe, problem), true_gradient(problem, recipe.kl.coef)).rest


def weighted(problem, G, prompts=(0, 1), eps=1e-6, p=None):
    """mean over prompts of w(p) grad p of GRPO, by exact/weight.py; w at other p where they are given."""
    targets = problem.targets[list(prompts)]
    at, gradient = (x[0] for x in success_gradients(problem.policy, targets))
    w = effective_weight(group_advantage(lambda r: group_z_score(r, eps=eps), G), at if p is None else p)
    return (w.unsqueeze(1) * gradient).mean(0)


# ---- numbers: (c, rest, tr Cov) of fresh and of stale data, G = 2 ----

# Golden values that this enumeration gave; those of ten recipes are found again by plain loops further down.
GOLD = {
    "reinforce": ((0.750000000, 0.000000000, 0.062403964), (0.647581212, 0.127847587, 0.065914141)),
    "actor_critic": ((1.000000000, 0.000000000, 0.671519469), (-1.086622245, 0.425610165, 0.714117373)),
    "ppo": ((2.219847348, 0.171178200, 0.288872247), (-0.737109983, 0.858900207, 0.232674369)),
    "rloo": ((1.000000000, 0.000000000, 0.186259395), (0.866076096, 0.126372776, 0.202435044)),
    "grpo": ((0.707105781, 0.000000000, 0.093129434), (0.612407414, 0.126372776, 0.101217236)),
    "vpg": ((1.000000000, 0.000000000, 0.145578444), (0.306111407, 0.451942108, 0.156959599)),
    "ppo_gae": ((1.732319438, 0.164765120, 0.121161514), (-0.506742021, 0.879966227, 0.081536107)),
    "rloo_kl": ((1.015445664, 0.108531943, 0.186865232), (0.887042050, 0.053452025, 0.202959910)),
    "grpo_kl": ((0.567490536, 0.071810906, 0.034788057), (-0.217118246, 0.693177874, 0.023983477)),
    "dr_grpo": ((0.250000000, 0.000000000, 0.011641212), (-0.082333087, 0.734073776, 0.009487439)),
    "dapo": ((1.198788338, 0.030399909, 0.112062747), (1.037140280, 0.177537656, 0.112921748)),
    "gspo": ((0.569065027, 0.135579771, 0.034800873), (-0.592668093, 0.329345256, 0.017091426)),
    "cispo": ((0.451123853, 0.030705964, 0.034350989), (0.406150941, 0.176734291, 0.034710670)),
    "reinforce_plus_plus": ((1.484542697, 0.485073250, 0.146522530), (-0.533117990, 0.942379962, 0.107934561)),
    "reinforce_plus_plus_baseline": ((0.916511802, 0.059866213, 0.108744792), (-0.298557984, 0.715142946, 0.070185354)),
    "trpo": ((1.000000000, 0.000000000, 0.671519469), None),
    "optimal_baseline": ((1.000000000, 0.000000000, 0.117156191), (0.952967150, 0.127216361, 0.117973823)),
    "trl:grpo": ((0.451060701, 0.030705964, 0.034341372), (-0.128475881, 0.740125421, 0.025566834)),
    "trl:rloo": ((1.015445664, 0.108531943, 0.186865232), (-0.447905413, 0.546637258, 0.115801872)),
    "verl:grpo": ((0.451123853, 0.030705964, 0.034350989), (-0.128493869, 0.740125421, 0.025573994)),
    "verl:rloo": ((0.637986373, 0.030705964, 0.068702173), (-0.181718029, 0.740125421, 0.051148132)),
    "verl:gae": ((1.659353533, 0.170343431, 0.124023131), (-0.551400692, 0.859731580, 0.082790397)),
    "openrlhf:gae": ((1.822275454, 0.195534549, 0.148076262), (-0.584580824, 0.877380021, 0.099079702)),
    "openrlhf:grpo": ((0.452658993, 0.015212907, 0.034340616), (-0.126727627, 0.765215472, 0.025563479)),
    "openrlhf:rloo": ((0.639520876, 0.016359837, 0.068687103), (-0.179951605, 0.758008074, 0.051132927)),
    "slime:grpo": ((0.569065027, 0.135579771, 0.034800873), (-0.220206360, 0.599930173, 0.024020022)),
    "slime:gspo": ((0.569065027, 0.135579771, 0.034800873), (-0.093364637, 0.844601376, 0.024462527)),
}


def test_every_recipe_has_its_numbers():
    assert GOLD.keys() == RECIPES.keys()


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_of_a_recipe(name):
    row = row_of(name)
    assert (row.name, row.said) == (name, RECIPES[name].bias)
    for found, gold in zip((row.fresh, row.stale), GOLD[name], strict=True):
        assert (found is None) == (gold is None)
        if found is not None:
            assert (found.scale, found.rest, found.trace) == pytest.approx(gold, abs=2e-9)


# ---- the bias that a recipe states ----


def free_of_lengths(name):
    """The recipe with a sum per sequence, also in place of a geometric mean of ratios, and no KL in the loss."""
    off = ("kl.place=none", "kl.coef=0") if RECIPES[name].kl.place == "loss" else ()
    off += ("constraint.ratio=token",) if RECIPES[name].constraint.ratio == "sequence_mean" else ()
    return find(name, ("aggregation.denominator=sequence_sum", *off))


W_OF_P = "for rewards in {0, 1}, w(p) grad p"


@pytest.mark.parametrize("name", NAMES)
def test_the_stated_bias_is_the_exact_one(name):
    recipe, problem, stated = RECIPES[name], problem_of(), RECIPES[name].bias
    truth, coef, G = true_gradient(problem), recipe.kl.coef, 2
    if stated.startswith("(1 - 1/N) grad J"):
        exactly(mean_of(recipe, problem), (1 - 1 / 4) * truth)
    elif stated.startswith("(1 - 1/G) / length"):
        exactly(mean_of(recipe, problem), (1 - 1 / G) / 2 * truth)
        exactly(mean_of(recipe, problem_of(3)), (1 - 1 / 3) / 2 * truth)
    elif stated.startswith(W_OF_P):
        # Exact where no length divides; G = 4, for with less w is the same at every p.
        charged = recipe.kl.place == "reward"
        assert charged == ("less coef grad KL" in stated)
        for prompt in (0, 1):
            alone = problem_of(4, prompt)
            charge = true_gradient(alone, coef) - true_gradient(alone) if charged else 0
            exactly(mean_of(free_of_lengths(name), alone), weighted(alone, 4, (0,), recipe.advantage.eps) + charge)
    elif stated.startswith("conditional on acceptance"):
        exactly(mean_of(free_of_lengths(name), problem), weighted(problem, G) / row_of(name).acceptance)
        p = success_gradients(problem.policy, problem.targets).value[0]
        assert row_of(name).acceptance == pytest.approx((1 - p**G - (1 - p) ** G).mean().item(), rel=1e-12)
    elif "none" in stated:
        assert ("J - coef KL" in stated) == recipe.reference
        assert ("none but for the denominator" in stated) == (TOKEN_BIAS in stated)
        exactly(mean_of(free_of_lengths(name), problem), true_gradient(problem, coef))
        if TOKEN_BIAS not in stated:
            exactly(mean_of(recipe, problem), true_gradient(problem, coef))
    else:
        assert "hold" in stated


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_of_larger_batches(name):
    stated, recipe = RECIPES[name].bias, RECIPES[name]
    if LENGTH_BIAS in stated:  # of one prompt, so that w(p) is a scale; the KL has another scale of its own
        few, many = (turned(find(name, ("kl.place=none", "kl.coef=0")), problem_of(G, 1)) for G in (3, 6))
        assert few == pytest.approx(many, abs=1e-12) and few > 0.1
    elif TOKEN_BIAS in stated:
        few, many = (turned(recipe, problem_of(G, 1)) for G in (3, 6))
        assert 0.01 < many < 0.9 * few
    elif "hold" in stated:  # of the whole batch: a scale where all prompts are alike
        assert turned(recipe, problem_of(2, 1)) < 1e-12
        few, many = (turned(recipe, problem_of(G)) for G in (2, 3))
        assert 0.01 < many < 0.9 * few
    elif not stated.startswith(W_OF_P):
        assert turned(recipe, problem_of()) < 1e-12
    else:
        assert name == "grpo"


def test_the_token_mean_turns_by_about_one_over_the_batch():
    turns = [G * turned(RECIPES["verl:rloo"], problem_of(G, 1)) for G in (3, 4, 5, 6)]
    assert max(turns) - min(turns) < 0.02 * turns[-1]  # a limit, that these sizes are near


def test_a_group_of_up_to_three_has_the_same_weight_at_every_p():
    p = torch.linspace(0.0, 1.0, 11)
    for G, same in ((2, True), (3, True), (4, False)):
        w = effective_weight(group_advantage(lambda r: group_z_score(r, eps=0.0), G), p)
        assert (float(w.max() - w.min()) < 1e-12) == same


def test_k3_in_the_loss_follows_each_tokens_kl_of_the_reference_at_prefixes_of_the_policy():
    problem = problem_of(2, 1)
    now, ref = oracles.weights(problem.policy), oracles.weights(problem.reference)
    task, T = problem.policy.task, int(problem.targets[0])
    charge = 0.0
    for prefix in [(), (0,), (1,)]:  # in the form that ends: at most two tokens, the second after a digit
        hidden, other = oracles.first_state(now, task, T), oracles.first_state(ref, task, T)
        for token in prefix:
            hidden, other = oracles.read(now, token, hidden), oracles.read(ref, token, other)
        reached = torch.as_tensor(exact_oracles.prefix_logprob(now, task, T, prefix)).detach().exp()
        pi, r = oracles.next_token(now, hidden), oracles.next_token(ref, other).detach()
        charge = charge + reached * (r.exp() * (r - pi)).sum()
    recipe = find("grpo_kl", ("aggregation.denominator=sequence_sum",))
    without = mean_of(free_of_lengths("grpo_kl"), problem)
    exactly(mean_of(recipe, problem), without - 0.04 * oracles.gradient(charge, now))


# ---- an oracle ----


@cache
def tables():
    return by_loops.Tables(problem_of())


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("name", by_loops.RECIPES)
def test_moments_by_every_batch_in_plain_loops(name, stale):
    recipe = one_update_old(RECIPES[name]) if stale else RECIPES[name]
    found = recipe_moments(recipe, problem_of())
    # A recipe without groups sees each prompt twice with one completion: the same batches.
    mean, covariance = tables().moments(by_loops.RECIPES[name], 2, stale)
    close(found.mean, mean, rtol=1e-9, atol=1e-13)
    close(found.covariance, covariance, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("stale", [False, True])
def test_a_filter_by_every_batch_in_plain_loops(stale):
    recipe = one_update_old(RECIPES["dapo"]) if stale else RECIPES["dapo"]
    found = recipe_moments(recipe, problem_of())
    mean, covariance = by_loops.filtered(tables(), by_loops.dapo, 2, stale)
    close(found.mean, mean, rtol=1e-9, atol=1e-13)
    close(found.covariance, covariance, rtol=1e-9, atol=1e-13)


def test_the_truth_is_that_of_the_oracle():
    problem = problem_of()
    w, ref = oracles.weights(problem.policy), oracles.weights(problem.reference)
    task, targets = problem.policy.task, problem.targets.tolist()
    J = sum(oracles.success_probability(w, task, T) for T in targets) / 2
    KL = sum(exact_oracles.kl_of(w, ref, task, T) for T in targets) / 2
    exactly(true_gradient(problem), oracles.gradient(J, w))
    w = oracles.weights(problem.policy)
    J = sum(oracles.success_probability(w, task, T) for T in targets) / 2
    KL = sum(exact_oracles.kl_of(w, ref, task, T) for T in targets) / 2
    exactly(true_gradient(problem, 0.3), oracles.gradient(J - 0.3 * KL, w))


# ---- stale data ----


@pytest.mark.parametrize("name", [name for name in NAMES if one_update_old(RECIPES[name])])
def test_without_an_update_stale_data_are_fresh(name):
    still = problem_of(2, 1, step=0.0)
    fresh, stale = (recipe_moments(recipe, still) for recipe in (RECIPES[name], one_update_old(RECIPES[name])))
    close(stale.mean, fresh.mean, rtol=1e-12, atol=1e-15)
    close(stale.covariance, fresh.covariance, rtol=1e-12, atol=1e-15)


def corrected(name, how, cap="1e5"):
    return find(name, ("sampling.age=1", f"sampling.correction={how}", f"sampling.cap={cap}"))


@pytest.mark.parametrize(("name", "scale"), [("vpg", 1), ("rloo", 1), ("actor_critic", 1), ("reinforce", 1 - 1 / 4)])
def test_weights_of_whole_sequences_make_stale_data_fresh_in_expectation(name, scale):
    """E_old[(pi / old) s r_i] = grad J, and E_old[(pi / old) s] = 0 whatever the others' baseline is."""
    truth = scale * true_gradient(problem_of())
    exactly(mean_of(corrected(name, "sequence_truncate"), problem_of()), truth)
    exactly(mean_of(corrected(name, "sequence_mask"), problem_of()), truth)
    assert (mean_of(find(name, ("sampling.age=1",)), problem_of()) - truth).norm() > 0.1 * truth.norm()
    assert (mean_of(corrected(name, "sequence_truncate", "1.0"), problem_of()) - truth).norm() > 1e-3
    tokens = (mean_of(corrected(name, "token_truncate"), problem_of()) - truth).norm()
    assert tokens > 1e-4  # a token's own ratio leaves out those before it and after it


def test_corrected_grpo_weighs_by_the_success_of_the_policy_that_sampled():
    """w = E[A | r = 1] - E[A | r = 0] over others of the old policy; grad p of the present one."""
    for prompt in (0, 1):
        problem = problem_of(4, prompt)
        p_old = (outcome_probabilities(problem.old, problem) * rewards_of(problem)).sum(1)
        wanted = weighted(problem, 4, (0,), p=p_old)
        exactly(mean_of(corrected("grpo", "sequence_truncate"), problem), wanted)
        assert (wanted - weighted(problem, 4, (0,))).norm() > 1e-4


def test_uncorrected_stale_data_follow_the_old_probabilities():
    problem = problem_of()
    w, v = oracles.weights(problem.policy), oracles.weights(problem.old)
    task, wanted = problem.policy.task, 0.0
    for T in problem.targets.tolist():
        for y, q, s in zip(
            oracles.completions(task), oracles.probabilities(v, task, T), exact_oracles.scores(w, task, T), strict=True
        ):
            wanted = wanted + q * oracles.success(task, T, y) * s / 2
    exactly(mean_of(find("vpg", ("sampling.age=1",)), problem), wanted)


def test_the_update_is_of_the_size_that_is_said():
    problem = problem_of()
    moves = [(a - b).abs() for a, b in zip(problem.policy.parameters(), problem.old.parameters(), strict=True)]
    largest = max(x.max().item() for x in moves)
    assert 0.0499 < largest <= 0.05 + 1e-12
    before, after = (
        (outcome_probabilities(policy, problem) * rewards_of(problem)).sum(1).mean()
        for policy in (problem.old, problem.policy)
    )
    assert after > before + 0.01
    old, new, task = oracles.weights(problem.old), oracles.weights(problem.policy), problem.policy.task
    wanted = sum(exact_oracles.kl_of(old, new, task, T) for T in problem.targets.tolist()) / 2
    assert problem.distance == pytest.approx(wanted.item(), rel=1e-10)
    again = tiny_problem(group_size=2, step=0.1)
    largest = max(
        (a - b).abs().max().item() for a, b in zip(again.policy.parameters(), again.old.parameters(), strict=True)
    )
    assert 0.0999 < largest <= 0.1 + 1e-12


def test_which_data_a_recipe_can_have():
    assert one_update_old(RECIPES["trpo"]) is None
    assert one_update_old(find("rloo", ("sampling.sampler_temperature=2",))) is None
    aged = corrected("rloo", "sequence_truncate")
    fresh = with_fresh_data(aged)
    assert (fresh.sampling.age, fresh.sampling.correction) == (0, "none")
    assert one_update_old(aged) == aged
    row = measure(aged, problem_of())
    assert row.fresh.bias < 1e-13 and row.stale.bias < 1e-13


# ---- natural gradient, temperature, other samplers ----


def test_the_natural_direction_has_the_fisher_matrix_of_the_oracle():
    problem = problem_of()
    w, task = oracles.weights(problem.policy), problem.policy.task
    F = 0.0
    for T in problem.targets.tolist():
        pi, s = torch.tensor(oracles.probabilities(w, task, T)), exact_oracles.scores(w, task, T)
        F = F + (s.T * pi) @ s / 2
    inverse, g = inverse_fisher(problem), true_gradient(problem)
    close(F @ inverse @ g, g, rtol=0, atol=1e-11)
    close(inverse @ F @ inverse, inverse, rtol=1e-6, atol=1e-6 * inverse.abs().max().item())
    row = row_of("trpo")
    assert row.natural.relative_bias < 1e-8 and row.natural.scale == pytest.approx(1, abs=1e-8)
    assert row.natural.norm == pytest.approx((inverse @ g).norm().item(), rel=1e-8)
    moments = recipe_moments(RECIPES["trpo"], problem)
    assert row.natural.trace == pytest.approx((inverse @ moments.covariance @ inverse).trace().item(), rel=1e-8)
    assert row_of("rloo").natural is None and row_of("rloo").penalised is None
    scaled = measure(find("reinforce", ("constraint.kind=trust_region",)), problem)
    assert scaled.natural.scale == pytest.approx(3 / 4, abs=1e-8) and scaled.natural.rest < 1e-8


def cooled(module, temperature):
    """Weights of the policy whose logits are divided."""
    w = oracles.weights(module)
    return w | {name: (w[name] / temperature).detach().requires_grad_() for name in ("head_weight", "head_bias")}


def test_a_tempered_policy_is_held_against_its_own_objective():
    recipe, problem = find("vpg", ("sampling.temperature=0.5",)), problem_of()
    row = measure(recipe, problem)
    w, task = cooled(problem.policy, 0.5), problem.policy.task
    J = sum(oracles.success_probability(w, task, T) for T in problem.targets.tolist()) / 2
    wanted = true_gradient(tempered(problem, 0.5))
    at = dict(problem.policy.named_parameters())
    chain = torch.cat(
        [
            (g / (0.5 if name.startswith("head") else 1)).flatten()
            for name, g in zip(at, torch.autograd.grad(J, list(w.values())), strict=True)
        ]
    )
    exactly(wanted, chain)
    assert row.fresh.bias < 1e-13 and (wanted - true_gradient(problem)).norm() > 0.01
    assert problem.policy.temperature == 1


def test_data_of_another_sampler_are_averaged_by_its_own_probabilities():
    problem = problem_of()
    recipe = find("vpg", ("sampling.sampler_temperature=2",))
    sampler = cooled(problem.policy, 2.0)
    pi = torch.tensor([oracles.probabilities(sampler, problem.policy.task, T) for T in problem.targets.tolist()])
    found = outcome_probabilities(sampler_of(recipe, problem), problem)
    close(found.sort().values, pi.sort().values)  # the orders of completions differ
    w, task, wanted = oracles.weights(problem.policy), problem.policy.task, 0.0
    for T, chances in zip(problem.targets.tolist(), pi, strict=True):
        r = torch.tensor([float(oracles.success(task, T, y)) for y in oracles.completions(task)])
        wanted = wanted + (chances * r) @ exact_oracles.scores(w, task, T) / 2
    exactly(mean_of(recipe, problem), wanted)
    mended = ("sampling.correction=sequence_truncate", "sampling.cap=1e5", "sampling.sampler_temperature=2")
    exactly(mean_of(find("vpg", mended), problem), true_gradient(problem))


def test_a_nucleus_leaves_batches_out_and_is_averaged_all_the_same():
    recipe = find("rloo", ("sampling.sampler_top_p=0.6",))
    problem = problem_of()
    pi = outcome_probabilities(sampler_of(recipe, problem), problem)
    assert (pi == 0).any() and pi.sum(1).tolist() == pytest.approx([1, 1])
    row = measure(recipe, problem)
    assert math.isfinite(row.fresh.trace) and row.fresh.bias > 1e-3 and row.stale is None


def test_a_gradient_of_zero_has_no_direction():
    problem = problem_of()
    with pytest.raises(UsageError, match="grad J is 0 at this policy"):
        compared(recipe_moments(RECIPES["vpg"], problem), 0 * true_gradient(problem))


def test_a_prompt_that_is_read_as_tokens():
    problem = tiny_problem(group_size=2, prompt_form="tokens", seq_len=1, digits=3, hidden=2)
    assert problem.targets.tolist() == [0, 2]
    exactly(mean_of(RECIPES["rloo"], problem), true_gradient(problem))


# ---- the black box ----


def test_one_order_stands_for_all():
    pi = torch.tensor([[0.2, 0.5, 0.3], [0.7, 0.1, 0.2]]).repeat_interleave(3, 0)
    size = torch.tensor([1.0, -2.0, 5.0])
    calls = []

    def estimator(outcomes):
        calls.append(len(outcomes))
        x = size[outcomes].unflatten(1, (2, 3))
        return torch.stack([x.prod(2).sum(1), x.amax(2)[:, 0]], 1)

    each = black_box_moments(estimator, pi)
    found = black_box_moments(estimator, pi, alike=3)
    assert calls == [512, 217, 100]
    close(found.mean, each.mean)
    close(found.covariance, each.covariance)
    with pytest.raises(ValueError, match="alike 2: each run of so many of the 6 slots"):
        black_box_moments(estimator, pi, alike=2)
    with pytest.raises(ValueError, match="alike 4"):
        black_box_moments(estimator, pi, alike=4)


def test_moments_of_what_is_accepted():
    pi = torch.tensor([[0.2, 0.5, 0.3], [0.7, 0.0, 0.3]])
    seen = []

    def estimator(y):
        seen.append(tuple(y.tolist()))
        return torch.stack([y[0] * 10.0 + y[1], y[1] * 1.0])

    found = black_box_moments(one_at_a_time(estimator), pi, accepted=lambda y: y[:, 0] != 1)
    chance = {(0, 0): 0.14, (0, 2): 0.06, (2, 0): 0.21, (2, 2): 0.09}
    assert set(seen) == set(chance)  # what cannot happen is not tried
    mean, covariance = exact_oracles.moments(
        (p / 0.5, torch.tensor([10.0 * a + b, float(b)])) for (a, b), p in chance.items()
    )
    close(found.mean, mean)
    close(found.covariance, covariance)
    with pytest.raises(UsageError, match="mine accepts no batch"):
        black_box_moments(one_at_a_time(estimator), pi, "mine", accepted=lambda y: y[:, 0] > 2)


def test_a_batch_of_random_prompts_spreads_between_them():
    """Against all pairs of prompts, told apart."""
    from pgprog.exact.blackbox import Moments
    from pgprog.exact.recipes import mixture

    parts = [Moments(torch.tensor([1.0, 0.0]), torch.eye(2)), Moments(torch.tensor([-3.0, 2.0]), 2 * torch.eye(2))]
    found = mixture(parts, torch.tensor([0.25, 0.75]))
    close(found.mean, torch.tensor([-2.0, 1.5]))
    second = 0.25 * (torch.eye(2) + torch.outer(*[parts[0].mean] * 2)) + 0.75 * (
        2 * torch.eye(2) + torch.outer(*[parts[1].mean] * 2)
    )
    close(found.covariance, second - torch.outer(found.mean, found.mean))


# ---- the command ----

SMALL = ["--group-size", "2"]


def test_the_command_prints_what_is_measured(capsys, tmp_path):
    chosen = ["dr_grpo", "dapo", "trpo", "rloo_kl"]
    assert main(["exact", "--recipes", *chosen, *SMALL, "--json", "--out", str(tmp_path / "out")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "out" / "exact.json").read_text())
    assert [row["name"] for row in found["recipes"]] == chosen
    for row in found["recipes"]:
        # In float32 by default, as users run it: all is in float64 nonetheless.
        wanted = json.loads(json.dumps(dataclasses.asdict(row_of(row["name"]))))
        for part in ("fresh", "stale", "penalised", "stale_penalised"):
            assert row[part] == pytest.approx(wanted[part], rel=1e-9, abs=1e-12) if wanted[part] else row[part] is None
        assert (row["prompts"], row["group_size"]) == ((4, 1) if row["name"] == "trpo" else (2, 2))
    assert found["targets"] == [0, 2] and found["completions"] == 4
    assert found["kl_of_the_update"] == pytest.approx(problem_of().distance, rel=1e-9)
    assert main(["exact", "--recipes", *chosen, *SMALL]) == 0
    out = capsys.readouterr().out
    for line in (
        "Dr. GRPO 0.7500 0.2500 0 0.00°",
        "TRPO, F^-1 g 0 1.0000 0 0.00°",
        "No stale data, by the recipe's own rules: TRPO.",
        "|E[g] - grad J|",
    ):
        assert line in " ".join(out.split()), out
    assert "success was 0.440, 0.170" in out
    assert any(line.split()[-1] == "0" for line in out.splitlines() if line.strip().startswith("RLOO + KL"))


def test_float32_by_default_loses_nothing(capsys):
    torch.set_default_dtype(torch.float32)
    assert main(["exact", "--recipes", "dr_grpo", "--group-size", "3", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["recipes"]
    assert row["fresh"]["scale"] == pytest.approx(1 / 3, abs=1e-13)  # weights of 1/12: no power of 2
    assert torch.get_default_dtype() == torch.float32


def test_set_changes_every_recipe_and_all_stands_for_all(capsys):
    changes = ["--set", "aggregation.denominator=sequence_sum"]
    assert main(["exact", "--recipes", "dr_grpo", "trl:grpo", *changes, *SMALL, "--stale-step", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["fresh"]["rest"] < 1e-12 for row in found["recipes"]] == [True, True]
    assert found["recipes"][0]["stale"]["scale"] == pytest.approx(0.5) and found["kl_of_the_update"] == 0
    assert main(["exact", "--recipes", "vpg", "--set", "sampling.temperature=0.5", *SMALL, "--json"]) == 0
    cold = tempered(problem_of(), 0.5)
    p = (outcome_probabilities(cold.policy, cold) * rewards_of(cold)).sum(1).tolist()
    assert json.loads(capsys.readouterr().out)["success_by_target"] == pytest.approx(p) and abs(p[0] - 0.5149) > 0.01
    from pgprog.exact.commands import Exact, check_recipes

    assert [recipe.name for recipe in check_recipes(Exact(recipes=("all",)))] == NAMES


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "constraint.clip_high=1"], "--set constraint.clip_high=1 changes a recipe: name one or more with"),
        (["--recipes", "gpro"], "gpro"),
        (["--recipes", "rloo", "rloo"], "--recipes rloo rloo names one twice"),
        (["--recipes", "rloo", "--algos", "grpo"], "--algos with --recipes: name a rung among the recipes"),
        (["--recipes", "rloo", "--run", "x"], "--run with --recipes: all batches are tried at a tiny policy"),
        (["--recipes", "rloo", "--advantage", "x.py:f"], "--advantage with --recipes"),
        (["--recipes", "rloo", "--critic-curves"], "--critic-curves with --recipes: ask for them alone"),
        (["--recipes", "rloo", "--resamples", "7"], "--resamples with --recipes: nothing is sampled"),
        (["--recipes", "rloo", "--rollouts", "8"], "--rollouts with --recipes: a batch is two prompts"),
        (["--recipes", "rloo", "--targets", "sum"], "--targets with --recipes: the prompts are given"),
        (["--recipes", "rloo", "--group-size", "1"], "--group-size 1 is too small: give 2 or more"),
        (["--recipes", "rloo", "--hidden", "0"], "--hidden 0 is too small"),
        (
            ["--recipes", "rloo", "--hidden", "64"],
            "hidden 64: a covariance of 12,288 parameters and more needs 4.5 GiB",
        ),
        (["--recipes", "rloo", "--group-size", "8"], "batches of 7 completions, over the limit of 2,000,000"),
        (["--recipes", "rloo", "--digits", "10"], "batches of 111 completions, over the limit"),
        (["--recipes", "rloo", "--seq-len", "1000"], "over the limit"),
        (["--recipes", "rloo", "--stale-step", "-1"], "--stale-step -1 is out of range"),
        (["--recipes", "rloo", "--seed", "-1"], "--seed -1 is out of range"),
        (["--recipes", "rloo", "--set", "sampling.group=false"], "leave_one_out compares completions of one prompt"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments, said, capsys):
    assert main(["exact", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_the_page_shows_what_the_command_prints(capsys):
    block = DOCS.read_text().split("`pgprog exact --recipes all`")[1].split("```text")[1].split("```")[0]
    rows = {" ".join(line.split()) for line in block.splitlines()}
    assert main(["exact", "--recipes", "dr_grpo", "trpo"]) == 0
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    wanted = [line for line in printed if line.startswith(("Dr. GRPO", "TRPO", "One update old"))]
    assert len(wanted) == 5 and not [line for line in wanted if line not in rows]


# ---- planted faults ----


@pytest.mark.parametrize("mutant", EXACT_RECIPE_MUTANTS, ids=[m.name for m in EXACT_RECIPE_MUTANTS])
def test_the_fault_applies_once_and_still_compiles(mutant):
    original = (ROOT / "src" / "pgprog" / mutant.file).read_text()
    assert ast.dump(ast.parse(patched(mutant))) != ast.dump(ast.parse(original))


def test_faults_are_named_apart():
    assert len({m.name for m in EXACT_RECIPE_MUTANTS}) == len(EXACT_RECIPE_MUTANTS)


def test_what_is_small_is_shown_and_what_is_rounding_is_0():
    from pgprog.report.exact_tables import _share

    assert [_share(value) for value in (3e-17, 9e-10, 2e-4, 0.1152)] == ["0", "0", "0.0002", "0.1152"]
