"""``pgprog plan``: closed forms against every group, sampled figures, memory, time, words and bad input."""

import doctest
import itertools
import json
import math
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from pgprog import plan as planning
from pgprog.algorithms.recipes import RECIPES, find
from pgprog.cli import main
from pgprog.env import DigitSum
from pgprog.exact.enumeration import every_target
from pgprog.exact.moments import group_moments
from pgprog.exact.scores import ScoreMoments, score_moments
from pgprog.noise import ReplicaGenerator
from pgprog.plan import Bytes, Candidate, Hours, Pace, Sizes
from pgprog.plan_command import LARGEST_GROUP, Plan
from pgprog.policy import Policy

PAGE = Path(__file__).resolve().parent.parent / "docs" / "plan.md"


def said(capsys, *arguments, code=0):
    assert main(["plan", *arguments]) == code
    return capsys.readouterr()


def data(capsys, *arguments):
    return json.loads(said(capsys, *arguments, "--json").out)


# ---- oracles: plain loops ----


def advantages(name, r, p):
    """A of one group of rewards, by the formula."""
    n, mean = len(r), sum(r) / len(r)
    if name == "vpg":
        return list(r)
    if name == "actor_critic":
        return [x - p for x in r]
    if name in ("reinforce", "dr_grpo"):
        return [x - mean for x in r]
    if name == "rloo":
        return [x - (sum(r) - x) / (n - 1) for x in r]
    std = math.sqrt(sum((x - mean) ** 2 for x in r) / (n - 1))
    return [(x - mean) / (std + 1e-6) for x in r]


def every_group(name, p, G, kappa):
    """(E h, E|h|^2, E[A^2], P(informative)) over 2^G groups of a one-logit policy, noise of the scores added."""
    first = second = squared = differs = 0.0
    for r in itertools.product((0, 1), repeat=G):
        chance = math.prod(p if x else 1 - p for x in r)
        A = advantages(name, r, p)
        h = sum(a * (x - p) for a, x in zip(A, r, strict=True)) / G
        noise = sum(a * a for a in A) / G**2 * (kappa - 1) * p * (1 - p)
        first += chance * h
        second += chance * (h * h + noise)
        squared += chance * sum(a * a for a in A) / G
        differs += chance * (len(set(r)) > 1)
    return first, second, squared, differs


# ---- groups ----


@pytest.mark.parametrize("p", [0.01, 0.1819, 0.5, 0.93])
@pytest.mark.parametrize("G", [2, 3, 8])
def test_the_informative_share_is_that_of_every_group(p, G):
    assert abs(planning.informative(p, None, G) - every_group("rloo", p, G, 1.0)[3]) < 1e-12


def test_known_shares():
    without = [1 - planning.informative(0.1819, None, G) for G in (2, 4, 8, 16)]
    assert [round(share, 3) for share in without] == [0.702, 0.449, 0.201, 0.040]
    assert round(1 - planning.informative(0.01, None, 8), 2) == 0.92
    assert planning.smallest_group(0.01, None) == 69


@pytest.mark.parametrize("concentration", [None, 2.0, 30.0])
@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.995])
def test_the_smallest_group_is_the_first_with_half(p, concentration):
    found = planning.smallest_group(p, concentration)
    if found is None:
        assert planning.informative(p, concentration, 2**40) < 0.5
        return
    assert planning.informative(p, concentration, found) >= 0.5
    assert found == 2 or planning.informative(p, concentration, found - 1) < 0.5


@pytest.mark.parametrize(("a", "b"), [(0.2, 1.8), (1.0, 1.0), (0.5, 0.5), (3.0, 0.7), (0.05, 0.05), (50.0, 450.0)])
def test_the_points_of_a_beta_have_its_moments(a, b):
    p, draw = planning.beta_points(a, b, 12)
    assert ((p >= 0) & (p <= 1)).all()
    for n in range(20):
        exact = math.prod((a + i) / (a + b + i) for i in range(n))
        assert abs(float(draw @ p**n) - exact) < 1e-13


def test_the_share_of_a_beta_is_that_of_its_points():
    for mean, k, G in [(0.1, 2.0, 8), (0.4, 0.5, 16), (0.02, 5.0, 2), (0.3, 1000.0, 8)]:
        p, draw = planning.spread(mean, k, G)
        exact = float(draw @ planning.informative_groups(p, G))
        assert abs(planning.informative(mean, k, G) - exact) < 1e-12


# ---- signal to noise ----


@pytest.mark.parametrize("name", ["vpg", "actor_critic", "reinforce", "rloo", "dr_grpo", "grpo"])
@pytest.mark.parametrize("p", [0.02, 0.1819, 0.6])
@pytest.mark.parametrize("kappa", [1.0, 7.5])
@pytest.mark.parametrize("G", [2, 7])
def test_signal_to_noise_is_that_of_every_group(name, p, kappa, G):
    grouped = RECIPES[name].sampling.group
    n = G if grouped or name == "reinforce" else 1
    first, second, squared, _ = every_group(name, p, n, kappa)
    found = planning.signal(find(name), planning.spread(p, None, G), G, G, kappa=kappa)
    expected = first**2 / (second - first**2) / n
    assert abs(found.signal_to_noise / expected - 1) < 1e-10
    assert abs(found.squared_advantage - squared) < 1e-12
    q = p * (1 - p)
    assert abs(found.weight - first / q) < 1e-12
    assert abs(found.efficiency - (first / q) ** 2 * q / squared) < 1e-8


def test_a_filter_is_conditional_on_groups_that_differ():
    p, G = 0.1, 4
    first, second, squared, differs = every_group("grpo", p, G, 1.0)
    mean, square = first / differs, second / differs
    found = planning.signal(find("dapo"), planning.spread(p, None, G), G, 64)
    assert abs(found.signal_to_noise / (mean**2 / (square - mean**2) / (G / differs)) - 1) < 1e-10
    assert abs(found.squared_advantage - squared / differs) < 1e-12
    plain = planning.signal(find("grpo"), planning.spread(p, None, G), G, 64)
    assert abs(found.efficiency - plain.efficiency) < 1e-9  # it saves passes, not rollouts


def test_a_spread_of_prompts_is_an_average_over_them(monkeypatch):
    chances, kappa, G = {0.05: 0.5, 0.3: 0.25, 0.8: 0.25}, 3.0, 3
    prompts = planning.Prompts(torch.tensor(list(chances)), torch.tensor(list(chances.values())))
    for name in ("rloo", "grpo", "actor_critic"):
        n = 1 if name == "actor_critic" else G
        each = {p: every_group(name, p, n, kappa) for p in chances}
        first, second = (sum(c * each[p][i] for p, c in chances.items()) for i in (0, 1))
        found = planning.signal(find(name), prompts, G, 64, kappa=kappa)
        assert abs(found.signal_to_noise / (first**2 / (second - first**2) / n) - 1) < 1e-10
        q = {p: p * (1 - p) for p in chances}
        noisy = first**2 / sum(c * each[p][2] * q[p] for p, c in chances.items())
        best = sum(c * q[p] for p, c in chances.items()) ** 2 / sum(c * q[p] ** 2 for p, c in chances.items())
        assert abs(found.efficiency - noisy / best) < 1e-8


def test_the_mean_of_a_batch_of_unlike_prompts_against_every_batch():
    chances, kappa, N = {0.1: 0.75, 0.6: 0.25}, 2.0, 3
    prompts = planning.Prompts(torch.tensor(list(chances)), torch.tensor(list(chances.values())))
    first = second = 0.0
    for batch in itertools.product(itertools.product(chances, (0, 1)), repeat=N):
        chance = math.prod(chances[p] * (p if r else 1 - p) for p, r in batch)
        A = advantages("reinforce", [r for _, r in batch], None)
        h = sum(a * (r - p) for a, (p, r) in zip(A, batch, strict=True)) / N
        noise = sum(a * a * (kappa - 1) * p * (1 - p) for a, (p, _) in zip(A, batch, strict=True)) / N**2
        first, second = first + chance * h, second + chance * (h * h + noise)
    found = planning.signal(find("reinforce"), prompts, 1, N, kappa=kappa)
    assert abs(found.signal_to_noise / (first**2 / (second - first**2) / N) - 1) < 1e-10


def test_a_critic_that_knows_only_the_mean_is_a_constant():
    prompts = planning.spread(0.2, 2.0, 1)
    knows, mean = (planning.signal(find("ppo_gae"), prompts, 1, 64, critic_quality=c) for c in (1.0, 0.0))
    constant = planning.signal(find("reinforce"), prompts, 1, 1000)
    assert abs(knows.efficiency - 1) < 1e-9 and mean.efficiency < 0.8
    assert abs(mean.efficiency / constant.efficiency - 1) < 2e-3


def test_no_constant_is_better_than_the_optimal_one():
    prompts = planning.spread(0.2, 2.0, 1)
    best = planning.signal(find("optimal_baseline"), prompts, 1, 64, kappa=4.0)
    for name in ("vpg", "reinforce"):
        assert planning.signal(find(name), prompts, 1, 64, kappa=4.0).signal_to_noise < best.signal_to_noise
        assert planning.signal(find(name), prompts, 1, 64).efficiency < best.efficiency


def test_without_any_noise_the_ratio_is_infinite():
    assert planning.signal(find("actor_critic"), planning.spread(0.5, None, 1), 1, 64).signal_to_noise == math.inf


def test_no_policy_has_more_signal_than_one_logit():
    policy = Policy(DigitSum(seq_len=2), ReplicaGenerator([0], "init"), hidden=6, dtype=torch.float64)
    scores = ScoreMoments(*(part[0] for part in score_moments(policy, every_target(policy.task))))
    prompts = planning.spread(0.1, None, 4)
    for name in ("rloo", "grpo"):
        table = planning.table_of(find(name), prompts, 4, 64, 1.0, 1.0)
        groups = group_moments(table, scores)
        mean = groups.mean.square().sum(-1)
        for p, ratio in zip(scores.p.tolist(), (mean / (groups.second - mean) / 4).tolist(), strict=True):
            most = planning.signal(find(name), planning.spread(p, None, 4), 4, 64).signal_to_noise
            assert 0 < ratio < most


@pytest.mark.parametrize("name", ["rloo", "grpo"])
def test_predicted_and_sampled_agree(name):
    p, G, kappa, n, z = 0.15, 4, 5.0, 40_000, 4
    generator = torch.Generator().manual_seed(3)
    r = (torch.rand(n, G, generator=generator) < p).double()
    scores = torch.stack([r - p, math.sqrt((kappa - 1) * p * (1 - p)) * torch.randn(n, G, generator=generator)])
    others = (r.sum(1, keepdim=True) - r) / (G - 1)
    A = r - others if name == "rloo" else (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-6)
    h = (A * scores).mean(-1)  # two directions: the logit's, and noise
    differs = (r.amax(1) > r.amin(1)).double()
    found = planning.signal(find(name), planning.spread(p, None, G), G, 64, kappa=kappa)
    mean = found.weight * p * (1 - p)
    trace = mean**2 / (found.signal_to_noise * G)
    noise = (h - torch.tensor([[mean], [0.0]])).square().sum(0)
    for sampled, exact in [(h[0], mean), (noise, trace), (differs, planning.informative(p, None, G))]:
        assert abs(sampled.mean() - exact) <= z * sampled.std() / n**0.5


# ---- memory ----


def test_bytes_per_parameter():
    assert Bytes().trained == 16
    assert Bytes(gradients=4.0).trained == 18


def test_roles_and_their_gigabytes():
    def held(name, reward=None, reference=False):
        found = planning.roles(find(name), Sizes(7.0, 3.0, reward, reference), Bytes())
        return {role.name: role.gigabytes for role in found}

    assert held("openrlhf:gae", 5.0) == {"policy": 112, "critic": 48, "reference": 14, "reward model": 10}
    assert held("rloo") == {"policy": 112}
    assert held("rloo", 5.0) == {"policy": 112, "reward model": 10}
    assert held("grpo_kl", 5.0) == {"policy": 112, "reference": 14, "reward model": 10}
    assert held("rloo", reference=True) == {"policy": 112, "reference": 14}
    assert [r.trained for r in planning.roles(find("openrlhf:gae"), Sizes(7.0, 7.0, 7.0), Bytes())] == [
        True,
        True,
        False,
        False,
    ]


def test_gpus_for_memory():
    assert planning.gpus_for(112.0, 80.0, 0.4) == 3  # 48 each
    assert planning.gpus_for(96.0, 80.0, 0.4) == 2
    assert planning.gpus_for(0.1, 80.0, 0.4) == 1


# ---- steps and time ----


def test_what_a_step_samples():
    assert planning.step(find("rloo"), 64, 8, 0.25) == planning.Step(64.0, 64.0, 16.0, 512.0)
    assert planning.step(find("reinforce"), 64, 8, 1.0) == planning.Step(64.0, 64.0, None, 64.0)
    assert planning.step(find("dapo"), 64, 8, 0.5) == planning.Step(128.0, 64.0, 64.0, 1024.0)
    assert planning.step(find("dapo"), 64, 8, 0.25) == planning.Step(
        192.0, 48.0, 48.0, 1536.0
    )  # three batches are not enough


def test_passes_by_hand():
    sizes = Sizes(7.0, 3.5, None)
    assert planning.passes(find("rloo"), sizes) == {"policy": 3}
    # four epochs of forward and backward; values once, then four epochs of half the size
    assert planning.passes(find("ppo_gae"), sizes) == {"policy": 12, "old log-probabilities": 1, "critic": 6.5}
    assert planning.passes(find("grpo_kl"), sizes) == {"policy": 3, "reference": 1}
    assert planning.passes(find("verl:grpo"), sizes) == {"policy": 3, "old log-probabilities": 1}


def test_hours_by_hand():
    # 1/100 h to generate; training of the plain step is a quarter of it, so 1/300 h, and a forward pass a third
    pace, forward = Pace(100.0, 0.75), 1 / 900
    plain = planning.hours(find("rloo"), Sizes(7.0, 7.0, None), pace)
    assert plain.generation == 0.01 and math.isclose(plain.generation / plain.total, 0.75)
    paid = planning.hours(find("grpo_kl"), Sizes(7.0, 7.0, 3.5), pace, kept=0.5)
    assert math.isclose(paid.training, forward * (0.5 + 0.5 * 4))
    assert planning.rollout_gpus(2, 1, Hours(0.03, 0.01)) == 6
    assert planning.rollout_gpus(2, 4, Hours(0.03, 0.01)) == 8


# ---- which ----


def test_the_choice():
    def candidate(name, score, critic=False, models=1, biased=False, fits=True):
        return Candidate(name, 8, float(score), critic, models, biased, fits)

    choose = planning.choose_recipe
    assert choose([]) is None and choose([candidate("a", 1, fits=False)]) is None
    assert choose([candidate("a", 1), candidate("b", 2)]).name == "b"
    assert choose([candidate("a", 1), candidate("b", 2, fits=False)]).name == "a"
    assert choose([candidate("a", 1.0, biased=True), candidate("b", 0.99)]).name == "b"
    assert choose([candidate("a", 1.0, models=2), candidate("b", 0.99)]).name == "b"
    assert choose([candidate("a", 1.0, biased=True), candidate("b", 0.97)]).name == "a"
    assert choose([candidate("a", 1.2, critic=True), candidate("b", 1.0)]).name == "b"
    assert choose([candidate("a", 1.3, critic=True), candidate("b", 1.0)]).name == "a"
    assert choose([candidate("a", 1.0, critic=True)]).name == "a"


def test_which_follow_another_objective():
    names = {name for name in ("reinforce", "ppo_gae", "rloo", "dr_grpo") if planning.other_objective(find(name))}
    assert not names
    assert all(planning.other_objective(find(name)) for name in ("grpo", "grpo_kl", "dapo", "trl:rloo"))


# ---- the command ----


def test_every_figure_of_the_json_has_its_unit_and_assumptions(capsys):
    found = data(
        capsys,
        "--success-rate",
        "0.01",
        "0.3",
        "--group-size",
        "4",
        "8",
        "--generation-share",
        "0.7",
        "--reward",
        "model",
    )
    assert set(found) == {"inputs", "fits", "memory", "groups", "signal", "recommendations"}
    assert len(found["groups"]) == 4 and len(found["signal"]) == 2 * (3 + 5 * 2)
    assert [r["success_rate"] for r in found["recommendations"]] == [0.01, 0.3]
    flags = {"--" + f.name.replace("_", "-") for f in fields(Plan)}
    mentioned = set()
    for row in (*found["memory"], *found["groups"], *found["signal"]):
        assert row["figures"]
        for figure in row["figures"].values():
            assert set(figure) == {"value", "unit", "assumptions"}
            assert figure["unit"] and figure["assumptions"] and all(figure["assumptions"])
            mentioned |= set(re.findall(r"--[a-z0-9-]+", " ".join(figure["assumptions"])))
    assert mentioned <= flags
    # every flag that decides a figure stands beside one (the rate of generation is given in one of two ways)
    assert flags - mentioned == {"--recipes", "--json", "--rollouts-per-gpu-hour"}
    again = data(capsys, "--rollouts-per-gpu-hour", "90", "--generation-share", "0.7")
    assert "--rollouts-per-gpu-hour 90" in json.dumps(again["signal"])


def value(found, part, name, **where):
    (row,) = [row for row in found[part] if all(row[key] == x for key, x in where.items())]
    return row["figures"][name]["value"]


def test_flags_reach_their_figures(capsys):
    plain = data(capsys, "--generation-share", "0.5")
    assert value(plain, "memory", "total memory", recipe="openrlhf:gae") == 238
    assert value(plain, "memory", "rollout copy memory", recipe="rloo") == 14
    assert value(plain, "groups", "informative groups per step") == 64 * planning.informative(0.1, None, 8)
    assert value(plain, "signal", "rollouts per step", recipe="rloo") == 512
    assert value(plain, "signal", "steps", recipe="rloo") == 195
    assert value(plain, "signal", "GPU seconds per rollout", recipe="rloo") == pytest.approx(1.0)  # twice 1000 / 2000
    assert value(plain, "signal", "GPU hours in all", recipe="rloo") == pytest.approx(100_000 / 3600)
    assert value(plain, "signal", "wall hours", recipe="rloo") == pytest.approx(100_000 / 3600 / 8)
    ratio = value(plain, "signal", "signal to noise per rollout", recipe="rloo")
    assert value(plain, "signal", "signal to noise per step", recipe="rloo") == pytest.approx(512 * ratio)
    assert value(plain, "signal", "rollouts for S/N 1", recipe="rloo") == pytest.approx(1 / ratio)
    assert value(plain, "signal", "signal to noise per GPU hour", recipe="rloo") == pytest.approx(3600 * ratio)
    wide = data(capsys, "--float32-gradients", "--reward", "model", "--reward-params-b", "70", "--critic-params-b", "1")
    assert value(wide, "memory", "policy memory", recipe="rloo") == 7 * 18
    assert value(wide, "memory", "reward model memory", recipe="rloo") == 140
    assert value(wide, "memory", "critic memory", recipe="ppo_gae") == 18
    noisy = data(capsys, "--score-noise", "50")
    assert value(noisy, "signal", "signal to noise per rollout", recipe="rloo") < ratio / 5
    assert "GPU hours in all" not in noisy["signal"][0]["figures"]


def test_without_rollouts_none_fits_and_a_preference_method_does(capsys):
    found = data(capsys, "--rollout-budget", "0")
    assert not found["fits"] and not found["signal"]
    assert value(found, "memory", "total memory", recipe="dpo") == 126
    words = " ".join(found["recommendations"][0]["reasons"])
    assert "No method of this family fits" in words and "DPO does" in words
    assert "DPO does" in said(capsys, "--rollout-budget", "0").out


def reasons(capsys, *arguments):
    (one,) = data(capsys, *arguments)["recommendations"]
    return one, " ".join(one["reasons"])


def test_the_recommendation_says_why(capsys):
    one, words = reasons(capsys, "--success-rate", "0.01")
    assert "92% of the groups carry no signal: success is 0.01 and G = 8; the smallest G with half" in words
    assert "is 69." in words and "raise G, take easier prompts" in words and "process reward" in words
    one, words = reasons(capsys, "--success-rate", "0.001", "--rollout-budget", "1000")
    assert "The whole budget holds 0.997 informative groups" in words and "worked answers" in words
    one, words = reasons(capsys, "--success-rate", "0.999")
    assert "take harder prompts" in words
    one, words = reasons(capsys, "--concentration", "2", "--recipes", "reinforce", "ppo_gae", "rloo")
    assert (one["recipe"], one["group_size"]) == ("rloo", 8) and "has to be learned" in words
    one, words = reasons(capsys, "--gpus", "4", "--recipes", "ppo_gae", "rloo", "--group-size", "2")
    assert (
        one["recipe"] == "rloo" and "ppo_gae does not fit: 224 GB need 5 GPUs, and there are 4; a group method" in words
    )
    one, words = reasons(capsys, "--gpus", "2")
    assert one["recipe"] is None and "None fits in 2 x 80 GB" in words and "needs 3" in words
    one, words = reasons(capsys, "--concentration", "5", "--success-rate", "0.01")
    assert "no practical G (4,702,040) has half of them informative" in words and "raise G" not in words
    one, words = reasons(capsys, "--concentration", "0.5", "--success-rate", "0.03")
    assert "no G up to 2^50" in words and "raise G" not in words


OF_SIGNAL = {"signal to noise per rollout", "rollouts for S/N 1", "signal to noise per step"}


def test_a_filter_that_takes_away_the_only_noise_is_marked(capsys, monkeypatch):
    rare = ("--success-rate", "0.01", "--recipes", "rloo", "grpo", "dapo")
    found = data(capsys, *rare)
    told = {row["recipe"]: row["remarks"] for row in found["signal"]}
    assert told["rloo"] == told["grpo"] == {} and set(told["dapo"]) == OF_SIGNAL
    assert "an artefact" in told["dapo"]["signal to noise per rollout"]
    for noise, count in (("30", 3), ("10000", 0)):  # of direction, which no filter takes away
        assert len(data(capsys, *rare, "--score-noise", noise)["signal"][-1]["remarks"]) == count
    one, words = reasons(capsys, *rare, "--score-noise", "1")
    assert one["recipe"] == "dapo" and "But the S/N of dapo is an artefact" in words
    monkeypatch.setenv("COLUMNS", "100")
    out = said(capsys, *rare).out
    assert len(re.findall(r"^ dapo .* \u2020 \S+", out, re.M)) == 2
    assert out.count("\u2020 an artefact") == 1 and out.count("\u2020 as above.") == 1


def test_more_gpus_to_keep_pace_than_there_are_is_explained(capsys, monkeypatch):
    pace = "rollout GPUs that keep pace"
    arguments = ("--recipes", "rloo", "dapo", "--success-rate", "0.01", "--generation-share", "0.7")
    for gpus, who in (("9", {"rloo", "dapo"}), ("10", {"dapo"}), ("1000", set())):
        rows = data(capsys, *arguments, "--gpus", gpus)["signal"]
        assert value({"signal": rows}, "signal", pace, recipe="rloo") == 7  # beside 3 that train
        assert {row["recipe"] for row in rows if pace in row["remarks"]} == who
    monkeypatch.setenv("COLUMNS", "100")
    out = " ".join(said(capsys, *arguments).out.split())
    assert "\u2021 7" not in out.split("What the budget costs")[0]
    assert "more than --gpus 8: apart, training would wait for samples. On the 8 both take turns" in out


def test_the_recommendation_comes_first_and_gpus_are_told_apart(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out = said(capsys, "--concentration", "5", "--success-rate", "0.01").out
    assert out.startswith("Recommendation at success 0.01\n")
    (head,) = [line for line in out.splitlines() if line.startswith(" recipe") and "policy" in line]
    assert "GPUs to train" in head and "GPUs to sample" in head
    assert "no practical G (4,702,040)" in out.split("Groups that carry a signal")[1]
    assert " no G " in said(capsys, "--concentration", "0.5", "--success-rate", "0.03").out


def test_what_is_infinite_is_null_and_ranks_first(capsys):
    one, _ = reasons(capsys, "--success-rate", "0.5", "--score-noise", "1", "--recipes", "actor_critic", "rloo")
    assert one["recipe"] == "actor_critic"
    found = data(capsys, "--success-rate", "0.5", "--score-noise", "1", "--recipes", "actor_critic")
    assert value(found, "signal", "signal to noise per rollout", recipe="actor_critic") is None


@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_tables_show_every_row_and_number_every_assumption(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    arguments = ("--generation-share", "0.7", "--reward", "model", "--success-rate", "0.1", "0.3")
    out = said(capsys, *arguments).out
    assert max(map(len, out.splitlines())) <= int(columns) and "…" not in out
    numbers = [int(n) for n in re.findall(r"^ *(\d+)  \S", out, re.M) if not re.match(r" +0\.", n)]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 30
    flat = " ".join(out.split())
    for row in data(capsys, *arguments)["signal"]:
        for figure in row["figures"].values():
            assert all(" ".join(text.split()) in flat for text in figure["assumptions"])
    assert "Recommendation at success 0.3" in out


def test_help_teaches_and_needs_no_torch():
    program = (
        "import sys; from pgprog.cli import main\n"
        "try: main(['plan', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "Example: pgprog plan" in done.stdout and "--generation-share" in done.stdout


def test_every_recipe_can_be_planned(capsys):
    found = data(capsys, "--recipes", *RECIPES, "--concentration", "3", "--generation-share", "0.6")
    assert [row["recipe"] for row in found["signal"]] == list(RECIPES)


def test_the_largest_group_is_the_one_that_weights_know():
    assert LARGEST_GROUP == planning.LARGEST_GROUP


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--success-rate", "0"), "--success-rate 0.0: all rewards would be equal"),
        (("--success-rate", "1"), "--success-rate 1.0: all rewards would be equal"),
        (("--success-rate", "0.1", "1.5"), "--success-rate 1.5: it is no probability; give a number between 0 and 1"),
        (("--success-rate", "nan"), "--success-rate nan: it is no probability"),
        (("--success-rate", "1e-12"), "--success-rate 1e-12: no budget sees both rewards"),
        (("--success-rate",), "--success-rate"),
        (("--recipes", "rloo", "grpo", "rloo"), "--recipes rloo grpo rloo names one twice: give each once"),
        (("--group-size", "1"), "--group-size 1 with rloo: one completion has no others"),
        (("--group-size", "0"), "--group-size 0 is out of range: give 2 to 1000"),
        (("--group-size", "1001"), "--group-size 1001 is out of range"),
        (("--rollout-budget", "-1"), "--rollout-budget -1 is out of range: give 0 to 1e+15 (completions in all"),
        (("--rollout-budget", "500"), "--rollout-budget 500 is less than one step of rloo, 64 x 8 = 512 completions"),
        (("--prompts", "0"), "--prompts 0 is out of range"),
        (("--params-b", "-7"), "--params-b -7.0 is out of range"),
        (("--params-b", "nan"), "--params-b nan is out of range"),
        (("--params-b", "inf"), "--params-b inf is out of range"),
        (("--gpu-memory-gb", "0"), "--gpu-memory-gb 0.0 is out of range"),
        (("--gpus", "0"), "--gpus 0 is out of range: give 1"),
        (("--generation-share", "1"), "--generation-share 1.0 is out of range: give a share above 0, below 1"),
        (("--generation-share", "0"), "--generation-share 0.0 is out of range"),
        (("--train-overhead", "1"), "--train-overhead 1.0 is out of range: give a share from 0, below 1"),
        (("--tokens", "0"), "--tokens 0.0 is out of range"),
        (
            ("--score-noise", "0.5"),
            "--score-noise 0.5 is out of range: give 1 to 1e+12 (kappa; no policy has less than 1)",
        ),
        (("--critic-quality", "2"), "--critic-quality 2.0 is out of range"),
        (("--concentration", "0"), "--concentration 0.0 is out of range"),
        (("--concentration", "0.5", "--success-rate", "0.001"), "is Beta(0.0005, 0.4995): give more"),
        (("--reward-params-b", "7"), "--reward-params-b 7 with --reward verifier: a verifier has no parameters"),
        (("--recipes", "grppo"), "unknown recipe 'grppo': did you mean 'grpo'?"),
        (("--recipes",), "--recipes"),
    ],
)
def test_bad_input_is_one_line_with_the_reason(capsys, arguments, words):
    err = said(capsys, *arguments, code=2).err
    assert err.count("\n") == 1 and words in err, err


def test_a_recipe_without_groups_needs_no_group_size(capsys):
    assert data(capsys, "--recipes", "reinforce", "--group-size", "1")["groups"] == []


def test_shares_of_nothing_are_allowed(capsys):
    found = data(capsys, "--train-overhead", "0", "--rollout-overhead", "0")
    assert value(found, "memory", "training GPUs", recipe="rloo") == 2


# ---- the page ----


def test_the_blocks_of_the_page_give_what_they_say():
    text = PAGE.read_text().replace("```\n", "\n")
    test = doctest.DocTestParser().get_doctest(text, {}, "plan.md", str(PAGE), 0)
    assert len(test.examples) > 5
    out: list[str] = []
    assert doctest.DocTestRunner().run(test, out=out.append).failed == 0, "".join(out)


def test_what_is_assumed_is_one_list_after_the_tables_by_number(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = said(capsys, "--group-size", "8", "16", "--generation-share", "0.7").out
    tables, listed = out.split("What is assumed, by number, and the flags that change it\n")
    numbers = [int(line[:3]) for line in listed.splitlines() if line[:3].strip()]  # the rest of a line is indented
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 30
    lines = [line for line in tables.splitlines() if line.startswith("Assumes: ")]
    assert len(lines) == 6 and lines[1].startswith(
        "Assumes: informative, no signal: 12-14; informative per step: 12-15;"
    )
    named = {int(n) for line in lines for part in line.split(": ")[2:] for n in re.findall(r"\d+", part.split("; ")[0])}
    assert named <= set(numbers) and max(named) == len(numbers)


def test_the_tables_of_the_page_are_what_the_command_prints(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    command, block = re.search(r"`pgprog (plan [^`]*)`:\n\n```text\n(.*?)```", PAGE.read_text(), re.S).groups()
    printed = {line.rstrip() for line in said(capsys, *command.split()[1:]).out.splitlines()}
    lines = [line.rstrip() for line in block.splitlines() if line.strip()]
    assert len(lines) > 20 and not [line for line in lines if line not in printed]
