"""``pgprog recipes``: its lists, and ``diff`` against loops over tokens and completions."""

import dataclasses
import itertools
import json
import math
import re
import subprocess
import sys

import pytest
import torch

import oracles
from oracles import close
from pgprog.algorithms.recipes import AXES, LIBRARIES, RECIPES, Recipe, differences, find
from pgprog.cli import main
from pgprog.exact import diff
from pgprog.exact.values import objective_gradient
from pgprog.report.recipe_tables import MEANINGS

PATHS = {f"{axis}.{f.name}" for axis in AXES for f in dataclasses.fields(getattr(RECIPES["vpg"], axis))}


def said(capsys, *arguments, code=0):
    assert main(["recipes", *arguments]) == code
    return capsys.readouterr()


def data(capsys, *arguments):
    return json.loads(said(capsys, *arguments, "--json").out)


# ---- lists ----


def test_every_recipe_has_a_row_in_both_tables(capsys, monkeypatch):
    for columns in ("80", "100", "140"):
        monkeypatch.setenv("COLUMNS", columns)
        out = said(capsys).out
        computed, made = out.split("From which data")
        assert max(map(len, out.splitlines()[:-1])) <= int(columns)
        for part in (computed, made):
            starts = [line.split()[0] for line in part.splitlines() if re.match(r"  \w", line)]
            names = [name if columns != "80" or len(name) < 18 else "reinforce_plus_" for name in RECIPES]
            assert [s for s in starts if s in names] == names
            assert [s for s in starts if s in ("ladder", "papers", "libraries")] == ["ladder", "papers", "libraries"]
    words = {line.split()[0]: " ".join(line.split()) for line in computed.splitlines() if line.strip()}
    assert words["vpg"] == "vpg r none sequence_sum"
    assert words["dr_grpo"] == "dr_grpo r - mean, group clip [0.8, 1.2] constant_length"
    assert words["rloo_kl"] == "rloo_kl r - mean of the others KL 0.05 k1, sequence reward sequence_sum"
    assert words["grpo_kl"].endswith("clip [0.8, 1.2]; KL 0.04 k3, loss sequence_mean")
    assert words["slime:gspo"].endswith("clip [0.8, 1.2], sequence, mean sequence_mean")
    words = {line.split()[0]: " ".join(line.split()) for line in made.splitlines() if line.strip()}
    assert "G is the paper's, or the library's default; runs take --group-size (default 8)." in out
    assert words["grpo_kl"] == "grpo_kl G = 64 reference 2402.03300"
    assert words["openrlhf:gae"] == "openrlhf:gae 1 per prompt, 8 minibatches critic, reference OpenRLHF 0.11.2"
    assert words["optimal_baseline"].endswith("Greensmith, Bartlett & Baxter 2004")
    assert words["vpg"].endswith("- Williams 1992")


def test_the_list_fits_a_screen_or_two(capsys, monkeypatch):
    """A row per recipe is all that a list is for: 80 columns take 106 lines, 120 columns 86."""
    for columns, lines in (("80", 106), ("120", 86)):
        monkeypatch.setenv("COLUMNS", columns)
        assert len(said(capsys).out.splitlines()) <= lines


def test_the_list_as_json(capsys):
    found = data(capsys)
    assert {group: len(rows) for group, rows in found.items()} == {
        "ladder": 5,
        "papers": len(RECIPES) - 5 - len(LIBRARIES),
        "libraries": len(LIBRARIES),
    }
    rows = {row["name"]: row for rows in found.values() for row in rows}
    assert list(rows) == list(RECIPES)
    row = rows["openrlhf:gae"]
    assert row["extra_models"] == ["critic", "reference"] and row["changed"] == {}
    assert row["extra_passes"] == ["7 x score and backward", "reference scores", "critic"]
    assert row["choices"]["kl"]["coef"] == 0.01 and row["axes"]["kl"] == "0.01 k1 in the reward of the token"


def test_one_recipe_shows_every_choice_and_marks_what_is_not_the_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = said(capsys, "dapo").out
    assert max(map(len, out.splitlines()[:-1])) <= 80
    rows = {line.split()[0]: " ".join(line.split()) for line in out.splitlines() if line.strip()}
    assert {path.partition(".")[2] for path in PATHS} <= set(rows)
    assert rows["clip_high"].startswith("clip_high 0.28 * 0.2, a number")
    assert rows["clip_low"].startswith("clip_low 0.2 a number")
    assert rows["dynamic"].startswith("dynamic 3 * 1, an integer")
    assert rows["group"].startswith("group true * false")
    assert rows["dual_clip"].startswith("dual_clip none a number")
    assert rows["denominator"].startswith("denominator token_mean * sequence_sum,")
    assert "arXiv:2503.14476" in out and "conditional on acceptance" in out and "changed" not in out


def test_changes_are_shown_as_such(capsys):
    change = ("--set", "constraint.clip_high=0.5", "--set", "sampling.epochs=2")
    found = data(capsys, "trl:grpo", *change)
    assert found["changed"] == {
        "constraint.clip_high": {"was": 0.2, "is": 0.5},
        "sampling.epochs": {"was": 1, "is": 2},
    }
    out = " ".join(said(capsys, "trl:grpo", *change).out.split())
    assert "constraint.clip_high is 0.5, was 0.2; sampling.epochs is 2, was 1; what follows was said of it" in out


def test_every_choice_has_its_meaning_and_what_is_left_out_exists():
    assert set(MEANINGS) == PATHS
    assert set(diff.NOT_HERE) <= PATHS


def test_only_diff_needs_torch():
    for words in ([], ["grpo"], ["--json"], ["diff", "grpo", "grpo"], ["--help"]):
        program = (
            "import sys\nfrom pgprog.cli import main\n"
            f"try:\n    main({['recipes', *words]!r})\nexcept SystemExit:\n    pass\n"
            "sys.exit(3 if 'torch' in sys.modules else 0)"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout
    assert "Example: pgprog recipes diff trl:grpo verl:grpo" in done.stdout


# ---- the batch ----


def test_the_batch_is_generic():
    w = diff.world()
    successes = diff.TASK.success(w.targets, w.tokens)[0].sum(-1).tolist()
    assert 0 in successes and len(set(successes)) == 4
    lengths = diff.TASK.mask(w.tokens)[0].sum(-1)
    assert set(lengths.flatten().tolist()) == {1, 2, 3, 4} and len(lengths.sum(-1).unique()) > 4
    values = w.critics["prompt"](w.targets)[0]
    assert values.std() > 0.1
    # Every bound acts on stale data, and none on fresh.
    for name in ("trl:grpo", "gspo", "trl:rloo", "verl:rloo"):
        bounded = {state: m.clip_frac for state, m in diff.measure(RECIPES[name]).items()}
        assert bounded["fresh"] == 0 and bounded["stale"] > 0.05
    g = {name: diff.gradient_of(RECIPES[name], "stale")[1] for name in ("grpo", "cispo")}
    assert diff.degrees(g["grpo"], g["cispo"]) > 1


def test_the_exact_gradient_is_that_of_j_at_the_prompts():
    w = diff.world()
    for state, policy in w.policies.items():
        weights = oracles.weights(policy)
        J = sum(oracles.success_probability(weights, diff.TASK, T) for T in diff.TARGETS) / len(diff.TARGETS)
        close(w.exact[state].value[0], J, rtol=1e-10)
        close(w.exact[state].gradient[0], oracles.gradient(J, weights), rtol=1e-9, atol=1e-12)
        # Of all targets together it would be another number.
        assert (w.exact[state].gradient - objective_gradient(policy).gradient).norm() > 1e-3


def squared_norm(policy, target, tokens):
    weights = oracles.weights(policy)
    return oracles.gradient(oracles.log_pi(weights, diff.TASK, target, tokens), weights).square().sum().item()


def optimal_constant(rewards, norms):
    total = sum(norms)
    mean = [
        sum(n * r for j, (n, r) in enumerate(zip(norms, rewards, strict=True)) if j != i) / (total - norms[i])
        for i in range(len(norms))
    ]
    return [r - b for r, b in zip(rewards, mean, strict=True)]


def advantages(name, rewards, logprobs, ref, tokens):
    """[p][g], by the words of each paper."""
    w = diff.world()
    if name == "actor_critic":
        value = oracles.weights(w.critics["prompt"])
        with torch.no_grad():
            V = [oracles.value(value, diff.TASK, T).item() for T in diff.TARGETS]
        return [[r - v for r in row] for row, v in zip(rewards, V, strict=True)]
    if name == "optimal_baseline":
        norms = [
            squared_norm(w.policies["fresh"], T, row)
            for T, rows in zip(diff.TARGETS, tokens, strict=True)
            for row in rows
        ]
        flat = optimal_constant([r for row in rewards for r in row], norms)
        return [flat[4 * p : 4 * p + 4] for p in range(8)]
    if name == "rloo_kl":
        paid = [
            [r - 0.05 * (sum(logprobs[p][g]) - sum(ref[p][g])) for g, r in enumerate(row)]
            for p, row in enumerate(rewards)
        ]
        return [oracles.leave_one_out(row) for row in paid]
    if name == "dr_grpo":
        return [oracles.centred(row) for row in rewards]
    eps = {"trl:grpo": 1e-4}.get(name, 1e-6)
    return [oracles.z_score(row, eps=eps) for row in rewards]


def padded(rows):
    """Lists of lists of up to 4 floats, filled with 0."""
    return [[[*(float(x.detach()) for x in row), *[0.0] * (4 - len(row))] for row in group] for group in rows]


SIDES = {
    "trl:grpo": ("token_mean", {"low": 0.2, "high": 0.2}),
    "verl:grpo": ("token_mean", {"low": 0.2, "high": 0.2, "dual": 3.0, "limit": 20.0}),
    "dr_grpo": ("constant_length", {"low": 0.2, "high": 0.2}),
    "dapo": ("token_mean", {"low": 0.2, "high": 0.28}),
    "rloo_kl": ("sequence_sum", None),
    "actor_critic": ("sequence_sum", None),
    "optimal_baseline": ("sequence_sum", None),
}


@pytest.mark.parametrize("name", SIDES)
def test_a_side_is_what_loops_over_tokens_give(name):
    aggregation, bounds = SIDES[name]
    w = diff.world()
    tokens = w.tokens[0].tolist()

    def scores(policy):
        """[p][g][t], with gradient to the weights that come along."""
        weights = oracles.weights(policy)
        pairs = zip(diff.TARGETS, tokens, strict=True)
        return weights, [[oracles.score(weights, diff.TASK, T, row)[0] for row in rows] for T, rows in pairs]

    old, ref = (padded(scores(policy)[1]) for policy in (w.policies["fresh"], w.reference))
    rewards = [
        [float(oracles.success(diff.TASK, T, row)) for row in rows]
        for T, rows in zip(diff.TARGETS, tokens, strict=True)
    ]
    A = advantages(name, rewards, old, ref, tokens)
    mask = [[[t < oracles.length(diff.TASK, row) for t in range(4)] for row in rows] for rows in tokens]
    if name == "dapo":  # its token mean is over the groups that are kept
        mask = [[[m and len(set(r)) > 1 for m in row] for row in rows] for rows, r in zip(mask, rewards, strict=True)]
    share = oracles.token_weight(mask, aggregation, length=4)
    for state, found in diff.measure(RECIPES[name]).items():
        weights, live = scores(w.policies[state])
        now = padded(live)
        if bounds is None:
            slopes = [
                [[-x * a for x in row] for row, a in zip(*rows, strict=True)] for rows in zip(share, A, strict=True)
            ]
            loss = sum(s * x for p in range(8) for g in range(4) for s, x in zip(slopes[p][g], now[p][g], strict=True))
            lost = None
        else:
            loss, slopes, lost, _ = oracles.clipped_surrogate(now, old, A, mask, share, "token", **bounds)
        scalar = sum(
            slopes[p][g][t] * x for p in range(8) for g in range(4) for t, x in enumerate(live[p][g]) if mask[p][g][t]
        )
        gradient = -oracles.gradient(scalar, weights)
        _, g, _ = diff.gradient_of(RECIPES[name], state)
        close(g, gradient, rtol=1e-9, atol=1e-12)
        assert found.loss == pytest.approx(loss, rel=1e-10, abs=1e-13)
        assert found.norm == pytest.approx(gradient.norm().item(), rel=1e-10)
        exact = w.exact[state].gradient[0]
        cosine = (gradient @ exact / gradient.norm() / exact.norm()).item()
        assert found.angle == pytest.approx(math.degrees(math.acos(cosine)), rel=1e-8)
        assert found.clip_frac == (None if lost is None else pytest.approx(lost, abs=1e-7))


def test_angles():
    a = torch.tensor([1.0, 0.0])
    for angle in (1e-9, 1.0, 90.0, 179.0):
        b = 7 * torch.tensor([math.cos(math.radians(angle)), math.sin(math.radians(angle))])
        assert diff.degrees(a, b) == pytest.approx(angle, rel=1e-9)
    assert diff.degrees(a, a) == 0 and diff.degrees(a, -a) == 180
    assert diff.degrees(a, 0 * a) is None
    assert diff.against(0 * a, a) == diff.Change(ratio=0.0, angle=None, change=1.0)
    assert diff.against(a, 0 * a) == diff.Change(ratio=None, angle=None, change=None)
    assert diff.against(2 * a, -a) == diff.Change(ratio=2.0, angle=180.0, change=3.0)


# ---- what matters ----


def test_each_choice_alone():
    """trl:grpo to verl:grpo: eps moves both states, the dual clip stale data alone, the overflow guard nothing."""
    a, b = RECIPES["trl:grpo"], RECIPES["verl:grpo"]
    rows = {row.choices: row for row in diff.compare(a, b).attributions}
    assert list(rows) == [
        ("constraint.dual_clip",),
        ("advantage.eps",),
        ("constraint.log_ratio_limit",),
        ("sampling.minibatches",),
    ]
    dual, eps, guard, left_out = rows.values()
    changed = find("trl:grpo", ("constraint.dual_clip=3",))
    for state in diff.STATES:
        g, other = (diff.gradient_of(recipe, state)[1] for recipe in (changed, a))
        assert dual.effect[state].ratio == pytest.approx((g.norm() / other.norm()).item(), rel=1e-12)
        assert dual.effect[state].change == pytest.approx(((g - other).norm() / other.norm()).item(), abs=1e-15)
        assert 1e-5 < eps.effect[state].change < 1e-3
        assert guard.effect[state] == diff.Change(ratio=1.0, angle=0.0, change=0.0)
    assert dual.effect["fresh"].change == 0 and dual.effect["stale"].change > 0.1
    assert left_out.effect is None and "second minibatch" in left_out.left_out


def test_choices_that_mean_nothing_alone_go_together():
    def rows(a, b):
        return {row.choices: row for row in diff.compare(RECIPES[a], RECIPES[b]).attributions}

    kl = rows("trl:grpo", "openrlhf:grpo")
    together = ("kl.place", "kl.level", "kl.coef", "kl.limit")
    assert kl[together].effect["fresh"].change > 1e-3
    assert ("kl.place",) not in kl and ("kl.coef",) not in kl and kl[("kl.limit",)].effect["stale"].change == 0
    found = rows("reinforce", "rloo")
    assert list(found) == [("advantage.baseline", "sampling.group"), ("sampling.group",)]
    whole = diff.compare(RECIPES["reinforce"], RECIPES["rloo"]).b_against_a
    assert found[("advantage.baseline", "sampling.group")].effect == whole
    assert found[("sampling.group",)].effect["stale"].change < 1e-14
    assert ("sampling.group", "sampling.dynamic") in rows("verl:gae", "dapo")
    # Epochs are not in the numbers, so a trust region does not have to go with them.
    assert rows("ppo", "trpo")[("constraint.kind",)].effect["fresh"].change == 0
    back = rows("rloo", "reinforce")
    assert back[("advantage.baseline",)].effect["fresh"].change > 0.1
    assert "leave_one_out compares completions" not in str(back.keys())


def test_what_cannot_be_changed_alone_says_why():
    a = dataclasses.replace(RECIPES["cispo"], name="a")
    b = find("slime:gspo", ("kl.place=loss", "kl.coef=0.1"))
    b = dataclasses.replace(b, constraint=dataclasses.replace(b.constraint, kind="cispo"))  # a point without meaning
    (row,) = [row for row in diff.compare(a, b).attributions if row.choices == ("constraint.ratio",)]
    assert row.effect is None and row.left_out == "not alone: cispo weights tokens: set constraint.ratio=token"


def numbers(x):
    if isinstance(x, dict):
        x = list(x.values())
    return [n for part in x for n in numbers(part)] if isinstance(x, (list, tuple)) else [x]


def test_every_pair_of_libraries_runs_and_is_finite():
    for a, b in itertools.combinations(LIBRARIES, 2):
        found = diff.compare(a, b)
        assert all(math.isfinite(n) for n in numbers(dataclasses.asdict(found)) if isinstance(n, float))
        assert None not in numbers(dataclasses.asdict(found.b_against_a["stale"]))
        covered = {choice for row in found.attributions for choice in row.choices}
        assert covered == {path for path, _, _ in differences(a, b)}
        assert diff.compare(a, a).attributions == ()


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_measured_and_fresh_is_the_first_gradient(name):
    recipe = RECIPES[name]
    found = diff.measure(recipe)
    assert all(m.norm > 0 and math.isfinite(m.loss) and m.angle is not None for m in found.values())
    if recipe.constraint.kind in ("clip", "cispo"):
        plain = dataclasses.replace(recipe, constraint=dataclasses.replace(find("vpg").constraint))
        if recipe.constraint.ratio == "token":
            close(diff.gradient_of(recipe, "fresh")[1], diff.gradient_of(plain, "fresh")[1], rtol=1e-10, atol=1e-14)


def test_another_sampler_is_weighed():
    """Its weights act with fresh data too, and are those of the copy that is named."""
    plain = find("rloo")
    same = find("rloo", ("sampling.sampler_temperature=1", "sampling.correction=token_truncate"))
    hot = find("rloo", ("sampling.sampler_temperature=2", "sampling.correction=token_truncate"))
    assert diff.compare(plain, same).b_against_a["fresh"].change < 1e-14
    assert diff.compare(plain, hot).b_against_a["fresh"].change > 0.05
    top_p = find("rloo", ("sampling.sampler_top_p=0.5", "sampling.correction=token_truncate"))
    assert math.isfinite(diff.measure(top_p)["stale"].norm)


# ---- the command ----


def test_diff_as_json_has_every_number(capsys):
    found = data(capsys, "diff", "trl:grpo", "verl:grpo")
    compared = diff.compare(RECIPES["trl:grpo"], RECIPES["verl:grpo"])
    for part in ("a", "b", "b_against_a"):
        expected = {state: dataclasses.asdict(x) for state, x in getattr(compared, part).items()}
        assert found[part] == expected
    assert [row["choice"] for row in found["differences"]] == [
        "advantage.eps",
        "constraint.dual_clip",
        "constraint.log_ratio_limit",
        "sampling.minibatches",
    ]
    assert found["differences"][1] == {
        "choice": "constraint.dual_clip",
        "a": None,
        "b": 3.0,
        "meaning": MEANINGS["constraint.dual_clip"],
    }
    w = diff.world()
    assert found["exact"]["stale"]["norm"] == w.exact["stale"].gradient.norm().item()
    assert found["exact"]["fresh"]["J"] == w.exact["fresh"].value.item()
    assert found["batch"]["ratios"]["fresh"] == {"least": 1.0, "most": 1.0}
    ratio = (
        w.policies["stale"].score(w.targets, w.tokens)[0] - w.policies["fresh"].score(w.targets, w.tokens)[0]
    ).exp()
    assert found["batch"]["ratios"]["stale"]["most"] == ratio.max().item() > 3  # where a mask is, it is 1
    assert found["recipes"]["b"]["name"] == "verl:grpo"
    assert found["completions_per_prompt"] == {"a": 8, "b": 1}
    assert data(capsys, "diff", "verl:grpo", "openrlhf:grpo")["completions_per_prompt"] is None
    for side, name in (("a", "trl:grpo"), ("b", "verl:grpo")):
        assert found["recipes"][side]["equals"] == RECIPES[name].equals
        assert found["recipes"][side]["notes"] == RECIPES[name].notes


def test_diff_says_what_each_equals_in_its_librarys_names(capsys):
    out = " ".join(said(capsys, "diff", "trl:grpo", "verl:grpo").out.split())
    assert "completions per prompt 8 1 by the paper or" in out
    assert 'trl:grpo equals: loss_type="dapo", scale_rewards="group"' in out and "trl:grpo notes" not in out
    assert "verl:grpo equals: norm_adv_by_std_in_grpo=True" in out and "clip_ratio_c=3.0" in out
    assert "verl:grpo notes: rollout.n is 1 by default, where verl returns the raw reward" in out
    changed = " ".join(said(capsys, "diff", "trl:grpo", "verl:grpo", "--set", "sampling.epochs=2").out.split())
    assert "verl:grpo before --set equals: norm_adv" in changed
    assert "completions per prompt" not in said(capsys, "diff", "verl:grpo", "openrlhf:grpo").out


def test_names_of_choices_are_not_broken(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    pairs = (
        ("trl:grpo", "verl:grpo"),
        ("grpo", "reinforce_plus_plus_baseline"),
        ("trl:rloo", "openrlhf:gae"),
        ("reinforce_plus_plus_baseline", "dr_grpo"),
    )
    for pair in pairs:
        out = said(capsys, "diff", *pair).out
        assert max(map(len, out.splitlines())) <= 80
        table = out.split("On one fixed batch")[0]
        for path, _, _ in differences(*(RECIPES[name] for name in pair)):
            assert re.search(rf"^  {re.escape(path)} ", table, re.M), path


def test_diff_as_tables(capsys, monkeypatch):
    for columns in (80, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        out = said(capsys, "diff", "trl:grpo", "verl:grpo").out
        assert max(map(len, out.splitlines())) <= columns
    found = data(capsys, "diff", "trl:grpo", "verl:grpo")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for state in diff.STATES:
        for side, name in (("a", "trl:grpo"), ("b", "verl:grpo")):
            m = found[side][state]
            row = f"{name} {m['loss']:.6f} {m['norm']:.6f} {m['angle']:.2f}\u00b0 {100 * m['clip_frac']:.1f}%"
            assert row in lines
        assert f"exact gradient, grad J {found['exact'][state]['norm']:.6f}" in lines
    assert "verl:grpo against trl:grpo x 1.00020 8e-04\u00b0" in lines
    assert "constraint.dual_clip same x 0.78533 12.87\u00b0" in lines
    assert "advantage.eps x 1.00020 8e-04\u00b0 x 1.00019 3e-04\u00b0" in lines
    assert "constraint.log_ratio_limit same same" in lines
    assert "constraint.dual_clip none 3 where A < 0, a ratio over this gives no" in lines
    text = " ".join(lines)
    assert "Stale data: ratios 0.25 to 3.44" in text
    assert "sampling.minibatches is not in these numbers: the batch is fixed and whole" in text


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ("vpg", "rloo", "vpg samples one completion per prompt: it sees the same completions as 32 prompts of one."),
        ("grpo", "dapo", "dapo filters: groups of equal rewards do not count"),
        ("rloo", "rloo_kl", "rloo_kl has a KL in what it maximises; the exact gradient is that of J alone."),
        ("trpo", "actor_critic", "trpo: its gradient, before the natural step is made of it."),
        ("grpo", "trl:grpo", "compare gradients, not losses"),
    ],
)
def test_what_a_reader_must_know_is_noted(capsys, a, b, words):
    assert any(words in note for note in data(capsys, "diff", a, b)["notes"])
    assert words in " ".join(said(capsys, "diff", a, b).out.split())
    notes = data(capsys, "diff", "trl:grpo", "verl:grpo")["notes"]
    assert notes == []


def test_equal_recipes_are_the_same(capsys):
    assert said(capsys, "diff", "grpo", "grpo").out == "grpo and grpo are the same: no choice differs.\n"
    found = data(capsys, "diff", "grpo", "grpo")
    assert found["differences"] == [] and found["attributions"] == []
    assert found["b_against_a"]["stale"] == {"ratio": 1.0, "angle": 0.0, "change": 0.0}


def test_set_holds_for_both(capsys):
    found = data(
        capsys, "diff", "trl:grpo", "verl:grpo", "--set", "advantage.eps=0.5", "--set", "constraint.clip_low=0.9"
    )
    assert "advantage.eps" not in [row["choice"] for row in found["differences"]]
    for side in ("a", "b"):
        assert found["recipes"][side]["choices"]["advantage"]["eps"] == 0.5
    assert found["a"]["fresh"]["norm"] == found["b"]["fresh"]["norm"] < 0.05
    assert found["notes"][:2] == [
        "--set advantage.eps=0.5 holds for both.",
        "--set constraint.clip_low=0.9 holds for both.",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gspoo"], "unknown recipe 'gspoo': did you mean 'gspo'?"),
        (["diff", "trl:grpo", "verl:gpro"], "unknown recipe 'verl:gpro': did you mean 'verl:grpo'?"),
        (["diff"], "diff compares two recipes and got none: name two, as in"),
        (["diff", "grpo"], "diff compares two recipes and got 1 (grpo): name two"),
        (["diff", "grpo", "rloo", "ppo"], "diff compares two recipes and got 3 (grpo, rloo, ppo)"),
        (["grpo", "rloo"], "recipes grpo rloo: give one name, or diff and two"),
        (["--set", "kl.coef=1"], "--set kl.coef=1 without a recipe: name one"),
        (["grpo", "--set", "kl.coef=1"], "kl.coef 1 with kl.place=none does nothing"),
        (["diff", "grpo", "reinforce", "--set", "sampling.group=false"], "group_mean compares completions"),
        (["grpo", "--set", "clip=1"], "--set clip=1: give axis.choice=value"),
        (["grpo", "--what"], "see pgprog recipes --help"),
    ],
)
def test_wrong_arguments_are_one_line(capsys, words, message):
    err = said(capsys, *words, code=2).err
    assert message in err and err.startswith("pgprog: error: ") and err.count("\n") == 1


def test_numbers_do_not_depend_on_the_default_dtype(capsys):
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        diff.world.cache_clear()
        diff.gradient_of.cache_clear()
        one = data(capsys, "diff", "openrlhf:gae", "dr_grpo")
        found.append(one)
        assert torch.get_default_dtype() == dtype
    assert found[0] == found[1]


def test_a_recipe_of_ones_own_can_be_measured():
    mine = Recipe(name="mine", title="Mine", paper="", bias="")
    assert diff.compare(RECIPES["vpg"], mine).b_against_a["fresh"].change == 0
