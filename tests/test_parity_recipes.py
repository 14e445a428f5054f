"""Recipes and building blocks equal what TRL, verl and OpenRLHF computed: value and gradient, on every golden entry.

Each entry is evaluated as training would, by ``charged``, ``advantage_of``, ``objective_of``, ``aggregation_of`` and,
for a whole step, ``update``; or it stands in NOT_OURS with the reason, or in REFUSED, and raises. The rollout of a case
has one replica; its ``logprobs`` are those of the policy before its first step, which the libraries call old.
"""

# ruff: noqa: E402 (the repository's root comes into sys.path first)
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT))

from parity.cases import cases
from parity.record import GOLDEN, load

from pgprog.algorithms import advantages
from pgprog.algorithms.from_recipe import advantage_of, aggregation_of, charged, kl_rewards, objective_of
from pgprog.algorithms.objectives import (
    aggregate,
    kl_estimate,
    mismatch_weights,
    sequence_sum_mean,
    token_value_loss,
    token_weights,
)
from pgprog.algorithms.recipes import (
    AdvantageChoice,
    AggregationChoice,
    ConstraintChoice,
    KLChoice,
    SamplingChoice,
    find,
)
from pgprog.algorithms.update import update
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Policy, Rollout

LIBRARIES = ("trl", "verl", "openrlhf")
CASES = cases()
RTOL, ATOL = 1e-12, 1e-14
COUNT = 1e-7  # verl's mean over tokens, in masked_whiten, divides by their count + 1e-8
LENGTHS = 1e-7  # verl and OpenRLHF divide by length + 1e-8
FLOAT32 = {"rtol": 2e-6, "atol": 2e-6}  # of an output that the library itself rounds
ULP = 2.0**-52  # of a mean of rewards below 1; divided by std + eps where a group's rewards are equal


def golden(library):
    return {(item["name"], item["case"]): item for item in load(library)["entries"]}


TABLES = {library: golden(library) for library in LIBRARIES}


# ---- what is held, and by what ----


def one(case):
    return 1.0


def rows(case):
    """A sum over the batch in place of a mean over its sequences."""
    return float(case.rewards.size)


def live_rows(case):
    """A mean over the sequences that have a token, in place of one over all."""
    return case.rewards.size / float(case.mask.any(-1).sum())


def half(case):
    return 0.5


class Held(NamedTuple):
    """How an entry is made here."""

    recipe: str = ""
    changes: tuple[str, ...] = ()
    rtol: float = RTOL
    factor: Callable = one  # theirs over ours, where the library counts in other units
    weights: tuple = ()  # level, mode, cap, floor of mismatch_weights, where no recipe has a floor
    on_mild: tuple[str, ...] = ()  # what else is changed there
    live_weights: bool = False  # the correction is pi / sampler with pi of the step, not of before the batch
    entropy_coef: float = 0.0
    block: Callable | None = None  # a building block where no recipe has it


def aggregated(denominator, length=None):
    changes = (f"aggregation.denominator={denominator}",)
    return changes if length is None else (*changes, f"aggregation.length={length}")


SEQUENCE = ("constraint.ratio=sequence_mean",)
SUM, MEAN, TOKENS = aggregated("sequence_sum"), aggregated("sequence_mean"), aggregated("token_mean")
TRL_LOSSES = {  # max_completion_length is 10
    "grpo": MEAN,
    "bnpo": TOKENS,
    "dr_grpo": aggregated("constant_length", 10),
    "dapo": TOKENS,
    "luspo": SUM,
}


def unclipped_below(high):
    """CISPO as TRL has it: the weight is at most ``high``."""
    return ("constraint.kind=cispo", "constraint.clip_low=1", f"constraint.clip_high={high - 1!r}")


def kl_in_loss(estimator, coef=0.04):
    return ("kl.place=loss", f"kl.estimator={estimator}", f"kl.coef={coef}")


def corrected(how, cap):
    """The sampler is another one; which one does not matter to the loss."""
    return (f"sampling.correction={how}", f"sampling.cap={cap}", "sampling.sampler_temperature=0.9")


def trl():
    table = {
        "advantage/group": Held("trl:grpo"),
        "advantage/batch": Held("trl:grpo", ("advantage.scale=batch_std",)),
        "advantage/none": Held("trl:grpo", ("advantage.scale=none",)),
        "advantage/group_float32": Held("trl:grpo"),
        "advantage/rloo": Held("trl:rloo", ("kl.place=none", "kl.coef=0")),
        "advantage/rloo_kl": Held("trl:rloo"),
        # Its eps, 1e-4, is no choice of a recipe that whitens.
        "advantage/rloo_normalized": Held(
            block=lambda b: advantages.standardize(advantages.leave_one_out(b.rewards), eps=1e-4)
        ),
        "loss/cispo/token": Held("trl:grpo", (*unclipped_below(0.2), *TOKENS)),
        "loss/cispo_5": Held("cispo", TOKENS),
        "loss/rloo": Held("trl:rloo", ("kl.place=none", "kl.coef=0")),
        "loss/rloo/clip_higher": Held("trl:rloo", ("kl.place=none", "kl.coef=0", "constraint.clip_high=0.28")),
        "loss/clip_higher": Held("trl:grpo", (*MEAN, "constraint.clip_high=0.28")),
        "loss/clip_higher_sequence": Held("trl:grpo", (*MEAN, *SEQUENCE, "constraint.clip_high=0.28")),
        "loss/gspo_paper": Held("gspo"),
        "loss/delta": Held("trl:grpo", (*MEAN, "constraint.dual_clip=2")),
        "loss/kl_biased": Held("trl:grpo", (*MEAN, *kl_in_loss("k3"))),
        "loss/kl_corrected": Held("trl:grpo", (*MEAN, *kl_in_loss("k3_ratio"))),
        "loss/kl_biased_sequence": Held("trl:grpo", (*MEAN, *SEQUENCE, *kl_in_loss("k3"))),
        "loss/kl_corrected_dapo": Held("trl:grpo", kl_in_loss("k3_ratio")),
        "loss/kl_biased_dr_grpo": Held("dr_grpo", (*kl_in_loss("k3"), "aggregation.length=10")),
        "loss/kl_corrected_delta": Held("trl:grpo", (*MEAN, *kl_in_loss("k3_ratio"), "constraint.dual_clip=2")),
        "loss/entropy_bonus_dapo": Held("trl:grpo", entropy_coef=0.01),
        # The parts of a batch add up to the whole, as ours do.
        "loss/accumulated_grpo": Held("trl:grpo", MEAN),
        "loss/accumulated_dr_grpo": Held("dr_grpo", ("aggregation.length=10",)),
        "loss/accumulated_dapo": Held("trl:grpo"),
        "step/defaults": Held("trl:grpo"),
        "step/defaults_off_policy": Held("trl:grpo"),
        "step/grpo_paper": Held("grpo_kl", ("advantage.eps=1e-4",)),
        "step/dr_grpo": Held("dr_grpo", ("aggregation.length=10",)),
        "step/gspo": Held("trl:grpo", (*MEAN, *SEQUENCE)),
        "step/rloo_defaults": Held("trl:rloo"),
    }
    for loss, changes in TRL_LOSSES.items():
        table[f"loss/{loss}/token"] = Held("trl:grpo", changes)
        # LUSPO sums one objective per sequence over its tokens: constant_length with a length of one.
        at_sequence = aggregated("constant_length", 1) if loss == "luspo" else changes
        table[f"loss/{loss}/sequence"] = Held("trl:grpo", (*at_sequence, *SEQUENCE))
    for level in ("token", "sequence"):
        for mode in ("truncate", "mask"):
            how = f"{level}_{mode}"
            table[f"loss/sampler_{how}"] = Held("trl:grpo", (*MEAN, *corrected(how, 3)), on_mild=TOKENS)
            table[f"loss/sampler_{how}_two_sided"] = Held(
                "trl:grpo", MEAN, weights=(level, mode, 4.0, 0.3), on_mild=TOKENS
            )
    return table


VERL_MODES = {  # name -> changes, rtol, factor of the local denominators, of the whole batch's
    "token_mean": (TOKENS, RTOL, one, one),
    "token_sum": (SUM, RTOL, rows, rows),
    "seq_mean_token_sum": (SUM, RTOL, live_rows, one),
    "seq_mean_token_mean": (MEAN, LENGTHS, live_rows, one),
    "seq_mean_token_sum_norm": (aggregated("constant_length"), RTOL, live_rows, one),
    "seq_mean_token_sum_norm_10": (aggregated("constant_length", 10), RTOL, live_rows, one),
}


def verl():
    bounded = ("kl.limit=10",)
    table = {
        "advantage/gae": Held("verl:gae", rtol=COUNT),
        "advantage/gae_discounted": Held("verl:gae", ("advantage.gamma=0.9", "advantage.lam=0.95"), COUNT),
        "advantage/grpo": Held("verl:grpo"),
        "advantage/grpo_mean_only": Held("verl:grpo", ("advantage.scale=none",)),
        "advantage/grpo_vectorized": Held("verl:grpo"),
        # Divided by the std all the same: compute_advantage hands the setting to "grpo" alone.
        "advantage/grpo_vectorized_mean_only": Held("verl:grpo"),
        "advantage/rloo": Held("verl:rloo"),
        "advantage/rloo_vectorized": Held("verl:rloo"),
        "advantage/reinforce_plus_plus": Held("reinforce_plus_plus", ("kl.place=none", "kl.coef=0"), COUNT),
        "advantage/reinforce_plus_plus_discounted": Held(
            "reinforce_plus_plus", ("kl.place=none", "kl.coef=0", "advantage.gamma=0.9"), COUNT
        ),
        "advantage/reinforce_plus_plus_baseline": Held("reinforce_plus_plus_baseline", rtol=COUNT),
        "advantage/remax": Held("actor_critic"),  # with the greedy completion's reward as V(prompt)
        "loss/vanilla/clip_higher": Held("verl:grpo", ("constraint.clip_high=0.28",)),
        "loss/vanilla/dual_clip_10": Held("verl:grpo", ("constraint.dual_clip=10",)),
        "loss/vanilla/token_advantages": Held("verl:gae"),
        "loss/gspo/token_mean": Held("slime:gspo", TOKENS),
        "loss/gspo/seq_mean_token_mean": Held("slime:gspo", rtol=LENGTHS, factor=live_rows),
        "loss/gspo/paper": Held("gspo", rtol=LENGTHS, factor=live_rows),
        "loss/cispo/token_mean": Held("cispo", ("constraint.clip_low=0.2", "constraint.clip_high=0.2")),
        "loss/cispo/upper_5": Held("cispo"),
        "loss/gpg/token_mean": Held("vpg", TOKENS),
        "step/defaults_kl": Held("verl:grpo", (*kl_in_loss("k3", 0.001), *bounded)),
        "step/kl_and_entropy": Held("verl:grpo", (*kl_in_loss("k3"), *bounded), entropy_coef=0.01),
        "step/dapo": Held("verl:grpo", ("constraint.clip_high=0.28", "constraint.dual_clip=10")),
        "step/dr_grpo": Held("verl:grpo", ("advantage.scale=none", *aggregated("constant_length", 10))),
        "kl_in_reward/kl": Held("reinforce_plus_plus", ("kl.coef=0.05",)),
        "kl_in_reward/low_var_kl": Held("reinforce_plus_plus", ("kl.coef=0.05", "kl.estimator=k3", *bounded)),
        "kl/k1": Held("rloo_kl"),
        "kl/kl": Held("rloo_kl"),
        "kl/k2": Held("grpo_kl", ("kl.estimator=k2",)),
        "kl/mse": Held("grpo_kl", ("kl.estimator=k2",)),
        "kl/k3": Held("grpo_kl", bounded),
        "kl/low_var_kl": Held("grpo_kl", bounded),
        "value/unclipped": Held(factor=half),
    }
    for mode, (changes, rtol, local, whole) in VERL_MODES.items():
        table[f"loss/vanilla/{mode}"] = Held("verl:grpo", changes, rtol, local)
        table[f"aggregation/{mode}"] = Held("verl:grpo", changes, rtol, local)
        table[f"aggregation/{mode}/whole_batch"] = Held("verl:grpo", changes, rtol, whole)
        table[f"step/{mode}"] = Held("verl:grpo", changes, rtol, whole)
    for level in ("token", "sequence"):
        table[f"loss/vanilla/rollout_{level}_truncate"] = Held("verl:grpo", corrected(f"{level}_truncate", 2))
        table[f"loss/vanilla/rollout_{level}_mask"] = Held("verl:grpo", weights=(level, "mask", 2.0, 0.5))
        table[f"loss/reinforce/{level}_truncate"] = Held(
            "vpg", (*TOKENS, *corrected(f"{level}_truncate", 2)), live_weights=True
        )
    return table


def openrlhf():
    no_kl = ("kl.place=none", "kl.coef=0", "kl.limit=none")
    gspo = ("constraint.ratio=sequence_mean",)
    table = {
        "advantage/gae": Held("openrlhf:gae", no_kl),
        "advantage/gae_discounted": Held("openrlhf:gae", (*no_kl, "advantage.gamma=0.9", "advantage.lam=0.95")),
        "advantage/reinforce": Held("reinforce_plus_plus", (*no_kl, "advantage.whiten=tokens_floor")),
        "advantage/reinforce_discounted": Held(
            "reinforce_plus_plus", (*no_kl, "advantage.whiten=tokens_floor", "advantage.gamma=0.9")
        ),
        "advantage/reinforce_baseline": Held("reinforce_plus_plus_baseline", ("advantage.whiten=tokens_floor",)),
        "advantage/rloo": Held("openrlhf:rloo", no_kl),
        "advantage/rloo_kl": Held("openrlhf:rloo"),
        "advantage/group_norm": Held("openrlhf:grpo", no_kl),
        "advantage/group_norm_kl": Held("openrlhf:grpo"),
        "advantage/dr_grpo": Held("dr_grpo"),
        "advantage/flash_reinforce": Held("reinforce"),
        "loss/ppo/token_mean": Held("openrlhf:grpo", no_kl),
        "loss/ppo/seq_mean": Held("openrlhf:grpo", (*no_kl, *MEAN), LENGTHS, live_rows),
        "loss/ppo/seq_mean_whole_batch": Held("openrlhf:grpo", (*no_kl, *MEAN), LENGTHS),
        "loss/ppo/clip_higher": Held("openrlhf:grpo", (*no_kl, "constraint.clip_high=0.28")),
        "loss/ppo/dual_clip": Held("openrlhf:grpo", (*no_kl, "constraint.dual_clip=3")),
        "loss/gspo": Held("slime:gspo", gspo, LENGTHS, live_rows),
        "loss/gspo/paper": Held("gspo", gspo, LENGTHS, live_rows),
        "loss/ppo/sampler_token_mask": Held("openrlhf:grpo", no_kl, weights=("token", "mask", 5.0, 0.5)),
        "loss/ppo/sampler_token_clip": Held("openrlhf:grpo", no_kl, weights=("token", "truncate", 5.0, 0.5)),
        "aggregation/token_mean": Held("openrlhf:grpo"),
        "aggregation/seq_mean": Held("openrlhf:grpo", MEAN, LENGTHS, live_rows),
        "aggregation/seq_mean_whole_batch": Held("openrlhf:grpo", MEAN, LENGTHS),
        "value/unclipped": Held(factor=half),
    }
    for estimator in ("k1", "k2", "k3"):
        table[f"kl/{estimator}"] = Held("openrlhf:grpo", (f"kl.estimator={estimator}",))
    return table


HELD = {"trl": trl(), "verl": verl(), "openrlhf": openrlhf()}

SOFT = "a smooth gate in place of a clip; no constraint here has one"
CLIPPED_CRITIC = "the critic's step is clipped; here it is plain regression"
STRAIGHT = "the value of one estimator with the gradient of another"
REJECTED = "what is rejected leaves the mask, and with it the denominators; here it stays in them"
LEVEL = "one weight per sequence of a loss that weights tokens"
NORMALIZED = "the weights are divided by their mean over the batch"
NOT_OURS = {
    "trl": {
        "advantage/normalize_then_sum": "scaled over the group and then over the batch; a recipe scales once",
        "advantage/rloo_clipped": "rewards are clipped first; no recipe clips a reward",
        "loss/cispo/sequence": LEVEL,
        "loss/cispo_5_sequence": LEVEL,
        "loss/sapo/token": SOFT,
        "loss/sapo/sequence": SOFT,
        "loss/vespo/token": SOFT,
        "loss/vespo/sequence": SOFT,
        "loss/delta_sequence": "delta below 1 + epsilon cuts the clip's own gap, A > 0 too; a dual clip is over it",
        "loss/kl_corrected_sequence": "the KL is corrected by the sequence's ratio; k3_ratio has the token's",
        "loss/entropy_bonus": "the bonus is a mean over tokens whatever the loss is; here it has the loss's weights",
        "loss/top_entropy": "the tokens of least entropy are left out",
        "loss/off_policy_mask": "sequences with A < 0 that are far from the sampler are left out",
        "loss/accumulated_bnpo": "a mean of the micro-batches' own means; here the parts add up to the whole",
    },
    "verl": {
        "advantage/grpo_passk": "only the best completion of a group has an advantage",
        "advantage/opo": "the baseline weights completions by their length",
        "advantage/gpg": "divided by the share of rewards that are not 0",
        "loss/sapo": SOFT,
        "loss/geo_mean": "a geometric mean of clipped token ratios",
        "loss/vanilla/rollout_token_truncate_normalized": NORMALIZED,
        "loss/vanilla/rollout_sequence_truncate_normalized": NORMALIZED,
        "step/kl_straight_through": STRAIGHT,
        "kl/abs": "the absolute log-ratio is no estimator of a KL",
        "kl/k1+": STRAIGHT,
        "kl/k3+": STRAIGHT,
        "kl/low_var_kl+": STRAIGHT,
        "value/clip_0.5": CLIPPED_CRITIC,
        "value/clip_0.2": CLIPPED_CRITIC,
        "value/seq_mean_token_mean": CLIPPED_CRITIC,
        **{
            f"rejection/{how}": REJECTED
            for how in ("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_mean_k1", "seq_mean_k3", "seq_max_k2")
        },
    },
    "openrlhf": {
        "advantage/reinforce_baseline_mean_only": "the batch's mean is taken off without a scale",
        "loss/ppo/sampler_seq_mask": "the statistic of a sequence is a geometric mean",
        "loss/ppo/sampler_token_binary_kl": "the gate is a divergence, not a ratio",
        "value/clip_0.5": CLIPPED_CRITIC,
        "value/seq_mean": CLIPPED_CRITIC,
        "kl/k1_unbiased": STRAIGHT,
        "kl/k2_unbiased": "k2 times a ratio that is cut at 10 and has no gradient",
        "kl/k3_unbiased": STRAIGHT,
    },
}
# A group of one is no group here; verl gives it the reward (over 1 + eps, or whitened), or 0.
REFUSED = [
    ("verl", name, "single")
    for name, held in HELD["verl"].items()
    if name.startswith("advantage/") and find(held.recipe, held.changes).sampling.group
]


def entries_of(*kinds):
    """(library, name, case) of every entry that is held."""
    return [
        (library, *key)
        for library, table in TABLES.items()
        for key, item in table.items()
        if item["kind"] in kinds and key[0] in HELD[library] and (library, *key) not in REFUSED
    ]


def test_every_golden_value_is_held_or_not_ours_for_a_reason():
    for library, table in TABLES.items():
        names = {name for name, _ in table}
        assert names == HELD[library].keys() | NOT_OURS[library].keys()
        assert not HELD[library].keys() & NOT_OURS[library].keys()
        assert all(NOT_OURS[library].values())
        held = [key[1:] for key in CHECKED if key[0] == library]
        assert len(held) == len(set(held))
        left_out = {key for key in table if key[0] in NOT_OURS[library] or (library, *key) in REFUSED}
        assert left_out.isdisjoint(held) and left_out | set(held) == table.keys()


# ---- a case as a rollout, and how it is compared ----


class Numbers(Policy):
    """A policy whose log-probabilities and entropies are its parameters; its task pays the case's rewards."""

    def __init__(self, case):
        torch.nn.Module.__init__(self)
        self.logprobs = torch.nn.Parameter(tensor(case.logprobs))
        self.entropies = torch.nn.Parameter(tensor(case.entropies))
        paid = advantages.at_last_token(tensor(case.rewards), tensor(case.mask))
        self.task = SimpleNamespace(process_rewards=lambda *_: paid)


def tensor(array):
    """With the axis of replicas."""
    return torch.tensor(array).unsqueeze(0)


def rollout_of(case):
    shape = (1, *case.mask.shape)
    mask = tensor(case.mask)
    return Rollout(
        targets=torch.zeros(shape[:2], dtype=torch.long),
        tokens=torch.zeros(shape, dtype=torch.long),
        mask=mask,
        logprobs=tensor(case.old_logprobs),
        entropies=tensor(case.entropies),
        rewards=tensor(case.rewards),
        success=torch.zeros(shape[:3], dtype=torch.bool),
        values=tensor(case.greedy_rewards),
        prefix_values=torch.where(mask, tensor(case.values), 0),
        old_logprobs=tensor(case.old_logprobs),
        sampler_logprobs=tensor(case.sampler_logprobs),
        ref_logprobs=tensor(case.ref_logprobs),
    )


def found(key):
    library, name, case = key
    held = HELD[library][name]
    changes = held.changes + (held.on_mild if case == "mild" else ())
    return TABLES[library][name, case], CASES[case], held, find(held.recipe, changes) if held.recipe else None


def agree(item, output, ours, rtol=RTOL, atol=None, at=None):
    """The output of an entry equals ours, at these places.

    Where a library adds 1e-8 to a denominator, a loss or an A in which terms cancel is off by that of the terms.
    """
    if atol is None:
        atol = ATOL if rtol == RTOL or output.startswith("grad") else 1e-8
    theirs, ours = np.array(item["outputs"][output]), ours.detach().numpy()
    if ours.shape[:1] == (1,):
        ours = ours[0]
    assert theirs.shape == ours.shape
    if at is not None:
        theirs, ours = theirs[at], ours[at]
    if output in item["float32"]:
        np.testing.assert_allclose(ours, theirs, **FLOAT32, err_msg=output)
    else:
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol, err_msg=output)


def weighted(held, recipe, batch):
    weights = aggregation_of(recipe.aggregation)(batch.mask)
    if not held.weights:
        return weights
    level, mode, cap, floor = held.weights
    return weights * mismatch_weights(
        batch.logprobs, batch.sampler_logprobs, batch.mask, level=level, mode=mode, cap=cap, floor=floor
    )


def unseen(key, A):
    """TRL's RLOO counts a fully masked sequence: ratio 1, so - A / N in the value, and no gradient."""
    library, name, case = key
    if library == "trl" and "rloo" in name:
        return -float(A[~CASES[case].mask.any(-1)].sum()) / A.size
    return 0.0


each = pytest.mark.parametrize


def held_by(*kinds):
    keys = entries_of(*kinds)
    CHECKED.extend(keys)
    return each("key", keys, ids=[" ".join(key) for key in keys])


CHECKED: list[tuple[str, str, str]] = []


# ---- the entries ----


@held_by("advantage")
def test_advantages(key):
    item, case, held, recipe = found(key)
    batch = rollout_of(case)
    if recipe is None:
        A = held.block(batch)
    else:
        batch = charged(recipe, batch, Numbers(case))
        A = advantage_of(recipe)(batch)
        check_returns(item, recipe, batch)
    theirs = np.array(item["outputs"]["advantages"])
    per_sequence, per_token = theirs.ndim == 2, A.dim() == 4
    at = np.ones(theirs.shape, dtype=bool) if per_sequence else case.mask.copy()
    equal = case.rewards.max(-1) == case.rewards.min(-1)
    if recipe is not None and recipe.advantage.scale == "group_std" and recipe.kl.place == "none":
        # Ours are 0 exactly; theirs are the rounding of a mean over eps, up to 1e-7 in OpenRLHF.
        if "advantages" not in item["float32"]:
            assert np.abs(theirs[equal]).max(initial=0) <= ULP / recipe.advantage.eps
        assert (A[0][torch.tensor(equal)] == 0).all()
        at &= ~equal.reshape(-1, *(1,) * (theirs.ndim - 1))
    if not per_sequence and not per_token:
        A = A.unsqueeze(-1).expand(1, *theirs.shape)
    agree(item, "advantages", A, held.rtol, at=at)


def check_returns(item, recipe, batch):
    """Of a critic: A + V before whitening; without one: what is paid from a token on."""
    if "returns" not in item["outputs"] or recipe.advantage.baseline == "group_mean":
        return
    a, mask = recipe.advantage, batch.mask
    if a.baseline == "gae":
        returns = advantages.gae(batch.token_rewards, batch.prefix_values, mask, a.gamma, a.lam) + batch.prefix_values
    else:
        paid = batch.token_rewards
        paid = advantages.at_last_token(batch.rewards, mask) if paid is None else paid
        returns = advantages.reward_to_go(paid, mask, gamma=a.gamma)
    agree(item, "returns", returns, at=mask[0].numpy())


@each("key", REFUSED, ids=[" ".join(key) for key in REFUSED])
def test_a_group_of_one_is_refused_where_verl_goes_on(key):
    item, case, _, recipe = found(key)
    with pytest.raises(ValueError, match="group size G = 1"):
        advantage_of(recipe)(rollout_of(case))
    theirs = torch.tensor(item["outputs"]["advantages"])[..., 0]
    r = torch.tensor(case.rewards)
    if recipe.advantage.whiten == "tokens":
        r = advantages.whiten(r.unsqueeze(-1).expand(case.mask.shape), torch.tensor(case.mask))[..., 0]
    torch.testing.assert_close(theirs, 0 * r if "rloo_vectorized" in key[1] else r, rtol=2e-6, atol=0)


@held_by("loss")
def test_losses(key):
    item, case, held, recipe = found(key)
    policy, batch = Numbers(case), rollout_of(case)
    name = "token_advantages" if key[1] == "loss/vanilla/token_advantages" else "advantages"
    A = getattr(case, name)
    weights = weighted(held, recipe, batch)
    if held.live_weights:
        batch = batch._replace(logprobs=tensor(case.logprobs))
    surrogate = objective_of(recipe)(policy.logprobs, batch, tensor(A), weights)
    loss = surrogate.loss
    if held.entropy_coef:
        loss = loss - held.entropy_coef * aggregate(policy.entropies, weights)
    loss = loss * held.factor(case)
    loss.sum().backward()
    agree(item, "loss", loss[0] + unseen(key, A), held.rtol)
    agree(item, "grad_logprobs", policy.logprobs.grad, held.rtol)
    if "grad_entropies" in item["outputs"]:
        agree(item, "grad_entropies", policy.entropies.grad, held.rtol)
    if key[:2] == ("verl", "loss/vanilla/token_mean"):  # theirs are in two parts
        outputs = item["outputs"]
        both = outputs["metric/actor/pg_clipfrac"] + outputs["metric/actor/pg_clipfrac_lower"]
        assert float(surrogate.metrics["clip_frac"]) == pytest.approx(both, rel=1e-7)


@held_by("step")
def test_whole_steps(key):
    """From rewards, or from verl's advantages, to the gradient: by ``update``, with a step of length 0."""
    item, case, held, recipe = found(key)
    policy = Numbers(case)
    made = []

    def draw(policy, generator, prompts, group_size):
        batch = rollout_of(case)._replace(values=None, prefix_values=None)  # no step has a critic
        batch = charged(recipe, batch, policy)._replace(logprobs=policy.logprobs, entropies=policy.entropies)
        return batch._replace(old_logprobs=None) if key[1] == "step/defaults" else batch

    def advantage(batch):
        made.append(advantage_of(recipe)(batch) if key[0] == "trl" else tensor(case.advantages))
        return made[0]

    metrics = update(
        policy,
        torch.optim.SGD(policy.parameters(), lr=0.0),
        ReplicaGenerator([0], "train"),
        advantage,
        prompts=case.rewards.shape[0],
        group_size=case.rewards.shape[1],
        entropy_coef=held.entropy_coef,
        max_grad_norm=math.inf,
        draw=draw,
        objective=objective_of(recipe),
        aggregation=aggregation_of(recipe.aggregation),
    )
    # Where a group's rewards are equal TRL's A is a rounding over eps, and ours is 0.
    atol = ULP / recipe.advantage.eps if key[0] == "trl" and recipe.advantage.scale != "none" else None
    factor = held.factor(case)
    if "advantages" in item["outputs"]:
        agree(item, "advantages", made[0], held.rtol, atol)
    agree(item, "loss", metrics["loss"][0] * factor + unseen(key, made[0][0].numpy()), held.rtol, atol)
    agree(item, "grad_logprobs", policy.logprobs.grad * factor, held.rtol, atol)
    if "grad_entropies" in item["outputs"]:
        agree(item, "grad_entropies", policy.entropies.grad, held.rtol)


@held_by("aggregation")
def test_aggregations(key):
    item, case, held, recipe = found(key)
    mask, x = tensor(case.mask), tensor(case.token_advantages).requires_grad_()
    weights = aggregation_of(recipe.aggregation)(mask)
    if weights is None:  # summed as update does, and by weights
        theirs = np.array(item["outputs"]["grad_loss_mat"])
        np.testing.assert_allclose(token_weights(mask, "sequence_sum")[0] * held.factor(case), theirs, rtol=RTOL)
    loss = (sequence_sum_mean(x, mask) if weights is None else aggregate(x, weights)) * held.factor(case)
    loss.sum().backward()
    agree(item, "loss", loss[0], held.rtol)
    agree(item, "grad_loss_mat", x.grad, held.rtol)


@held_by("kl")
def test_estimates_of_the_kl(key):
    item, case, held, recipe = found(key)
    logprobs = tensor(case.logprobs).requires_grad_()
    kl = kl_estimate(logprobs, tensor(case.ref_logprobs), recipe.kl.estimator, limit=recipe.kl.limit)
    kl.sum().backward()
    agree(item, "kl", kl, held.rtol)
    agree(item, "grad_logprobs", logprobs.grad, held.rtol)


@held_by("kl_reward")
def test_the_kl_in_the_reward(key):
    item, case, held, recipe = found(key)
    agree(item, "token_rewards", tensor(case.token_rewards) - kl_rewards(recipe.kl, rollout_of(case)), held.rtol)


@held_by("value")
def test_the_loss_of_a_critic_that_is_not_clipped(key):
    item, case, held, _ = found(key)
    values = tensor(case.new_values).requires_grad_()
    loss = token_value_loss(values, tensor(case.returns), tensor(case.mask)) * held.factor(case)
    loss.sum().backward()
    agree(item, "loss", loss[0], held.rtol)
    agree(item, "grad_values", values.grad, held.rtol)


WITH_WEIGHTS = [
    key
    for key in entries_of("loss")
    if {"sampler_weights", "rollout_is_weights"} & TABLES[key[0]][key[1:]]["outputs"].keys()
]


@each("key", WITH_WEIGHTS, ids=" ".join)
def test_weights_of_another_sampler(key):
    item, case, held, recipe = found(key)
    outputs = item["outputs"]
    level, mode = recipe.sampling.correction.split("_") if not held.weights else held.weights[:2]
    cap, floor = held.weights[2:] if held.weights else (recipe.sampling.cap, None)
    batch = rollout_of(case)
    w = mismatch_weights(
        batch.old_logprobs, batch.sampler_logprobs, batch.mask, level=level, mode=mode, cap=cap, floor=floor
    )
    theirs = np.array(outputs.get("sampler_weights") or outputs["rollout_is_weights"])
    theirs = np.where(case.mask, np.broadcast_to(theirs, case.mask.shape), 0)
    np.testing.assert_allclose(w[0].numpy(), theirs, rtol=RTOL, atol=ATOL)


# ---- defaults ----


class Read(dict):
    """A table of defaults that knows which of them were read."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = set()

    def __getitem__(self, key):
        self.seen.add(key)
        return super().__getitem__(key)


DEFAULTS = json.loads((GOLDEN / "defaults.json").read_text())


def axes(recipe):
    kept = ("advantage", "constraint", "kl", "aggregation", "sampling", "rollouts")
    return {name: getattr(recipe, name) for name in kept}


def trl_defaults(trainer):
    d = Read(DEFAULTS["trl"][trainer])
    grpo, beta = trainer == "GRPOConfig", d["beta"]
    if grpo:
        scale = {"group": "group_std", "batch": "batch_std", "none": "none"}[d["scale_rewards"]]
        advantage = AdvantageChoice(baseline="group_mean", scale=scale, eps=1e-4)  # eps: in the code
        ratio = {"token": "token", "sequence": "sequence_mean"}[d["importance_sampling_level"]]
        place, estimator = "loss", "k3_ratio" if d["use_bias_correction_kl"] else "k3"
        denominator = {"dapo": "token_mean", "grpo": "sequence_mean", "cispo": "token_mean"}[d["loss_type"]]
        kind, dual_clip = "cispo" if d["loss_type"] == "cispo" else "clip", d["delta"]
    else:
        assert not d["normalize_advantages"] and d["reward_clip_range"] is None
        advantage = AdvantageChoice(baseline="leave_one_out")
        ratio, kind, dual_clip = "sequence", "clip", None
        place, estimator = "reward", "k1"
        denominator = "sequence_mean"  # one objective per sequence, and their mean
    high = d["epsilon"] if d["epsilon_high"] is None else d["epsilon_high"]
    return d, {
        "advantage": advantage,
        "constraint": ConstraintChoice(
            kind=kind, ratio=ratio, clip_low=d["epsilon"], clip_high=high, dual_clip=dual_clip
        ),
        "kl": KLChoice(place=place, estimator=estimator, coef=beta) if beta else KLChoice(),
        "aggregation": AggregationChoice(denominator=denominator),
        "sampling": SamplingChoice(
            group=True,
            epochs=d["num_iterations"],
            minibatches=d["steps_per_generation"] // d["gradient_accumulation_steps"],
            temperature=d["temperature"],
            sampler_top_p=d["top_p"],
        ),
        "rollouts": d["num_generations"],
    }


def verl_defaults(estimator):
    part = DEFAULTS["verl"]
    d = Read(
        {f"{section}.{key}": value for section in part if section != "version" for key, value in part[section].items()}
    )
    if d["algorithm.adv_estimator"] != "gae":
        raise ValueError("the default was gae")
    if estimator == "gae":
        advantage = AdvantageChoice(baseline="gae", whiten="tokens", gamma=d["algorithm.gamma"], lam=d["algorithm.lam"])
    elif estimator == "grpo":
        scale = "group_std" if d["algorithm.norm_adv_by_std_in_grpo"] else "none"
        advantage = AdvantageChoice(baseline="group_mean", scale=scale)
    else:
        advantage = AdvantageChoice(baseline="leave_one_out")
    assert d["actor.policy_loss.loss_mode"] == "vanilla" and d["rollout_correction.rollout_is"] is None
    assert not d["actor.use_kl_loss"] and not d["algorithm.use_kl_in_reward"]
    assert not d["algorithm.filter_groups"]["enable"]
    steps = d["data.train_batch_size"] // d["actor.ppo_mini_batch_size"]
    return d, {
        "advantage": advantage,
        "constraint": ConstraintChoice(
            kind="clip",
            clip_low=d["actor.clip_ratio_low"],
            clip_high=d["actor.clip_ratio_high"],
            dual_clip=d["actor.clip_ratio_c"],
            log_ratio_limit=20.0,  # in the code
        ),
        "kl": KLChoice(),
        "aggregation": AggregationChoice(denominator={"token-mean": "token_mean"}[d["actor.loss_agg_mode"]]),
        "sampling": SamplingChoice(
            group=estimator != "gae",
            epochs=d["actor.ppo_epochs"],
            minibatches=steps,
            temperature=d["rollout.temperature"],
            sampler_top_p=float(d["rollout.top_p"]),
        ),
        "rollouts": d["rollout.n"],
    }


def openrlhf_defaults(estimator):
    d = Read(DEFAULTS["openrlhf"]["train_ppo_ray"])
    if d["algo.advantage.estimator"] != "gae":
        raise ValueError("the default was gae")
    if estimator == "gae":
        assert not d["algo.advantage.no_std_norm"]
        gamma, lam = float(d["algo.advantage.gamma"]), float(d["algo.advantage.lambd"])
        advantage = AdvantageChoice(baseline="gae", whiten="tokens_floor", gamma=gamma, lam=lam)
    elif estimator == "grpo":
        advantage = AdvantageChoice(baseline="group_mean", scale="group_std", eps=1e-9)  # in the code
    else:
        advantage = AdvantageChoice(baseline="leave_one_out")
    assert d["actor.policy_loss_type"] == "ppo" and d["algo.advantage.is_correction_level"] == "off"
    low, high = d["actor.eps_clip_low_high"] or (d["actor.eps_clip"],) * 2
    return d, {
        "advantage": advantage,
        "constraint": ConstraintChoice(
            kind="clip",
            clip_low=low,
            clip_high=high,
            dual_clip=d["actor.dual_clip"],
            log_ratio_limit=20.0,  # in the code, as is the limit of the KL
        ),
        "kl": KLChoice(
            place="loss" if d["algo.kl.use_loss"] else "reward",
            level="token",
            estimator=d["algo.kl.estimator"],
            coef=d["algo.kl.init_coef"],
            limit=10.0,
        ),
        "aggregation": AggregationChoice(denominator={"token-mean": "token_mean"}[d["actor.loss_agg_mode"]]),
        "sampling": SamplingChoice(
            group=estimator != "gae",
            epochs=d["train.max_epochs"],
            minibatches=d["rollout.batch_size"] * d["rollout.n_samples_per_prompt"] // d["train.batch_size"],
            dynamic=3 if d["algo.dynamic_filtering_enable"] else 1,
            temperature=d["rollout.temperature"],
            sampler_top_p=float(d["rollout.top_p"]),
        ),
        "rollouts": d["rollout.n_samples_per_prompt"],
    }


# Defaults that no recipe of the library has to do with, and why.
UNREAD = {
    "trl": {
        "of another part: entropy bonus, optimiser, length": (
            *("entropy_coef", "learning_rate", "max_grad_norm", "max_completion_length"),
            "mask_truncated_completions",
        ),
        "of a loss, a mask or several rewards that the defaults do not turn on": (
            *("sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg"),
            *("vespo_lambda_pos", "top_entropy_quantile", "off_policy_mask_threshold"),
            "multi_objective_aggregation",
        ),
        "of vLLM, which the defaults do not use": (
            *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
            *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
        ),
    },
    "verl": {
        "of another part: entropy bonus, critic": ("actor.entropy_coeff", "critic.cliprange_value"),
        "both bounds are given": ("actor.clip_ratio",),
        "of a loss, a KL or an estimator that the defaults do not turn on": (
            *("actor.kl_loss_coef", "actor.kl_loss_type", "actor.loss_scale_factor", "actor.tau_neg"),
            *("actor.tau_pos", "algorithm.gamma", "algorithm.lam", "algorithm.kl_ctrl", "algorithm.kl_penalty"),
            "algorithm.norm_adv_by_std_in_grpo",
        ),
        "of a correction that is off": (
            "rollout.calculate_log_probs",
            *(
                f"{section}.{name}"
                for section in ("rollout_correction", "RolloutCorrectionConfig")
                for name in DEFAULTS["verl"]["rollout_correction"]
            ),
        ),
    },
    "openrlhf": {
        "of another part: entropy bonus, critic, reward": (
            *("actor.entropy_coef", "critic.value_clip", "reward.clip_range"),
        ),
        "of a correction, a filter or an estimator that is off": (
            *(f"algo.advantage.is_correction_{name}" for name in ("gating", "mode", "threshold")),
            *(f"algo.advantage.{name}" for name in ("gamma", "lambd", "no_std_norm")),
            *("algo.dynamic_filtering_range", "algo.kl.target", "algo.kl.unbiased_gradient"),
        ),
    },
}
NAMED = {
    "trl:grpo": lambda: trl_defaults("GRPOConfig"),
    "trl:rloo": lambda: trl_defaults("RLOOConfig"),
    **{f"verl:{name}": lambda name=name: verl_defaults(name) for name in ("grpo", "rloo", "gae")},
    **{f"openrlhf:{name}": lambda name=name: openrlhf_defaults(name) for name in ("grpo", "rloo", "gae")},
}


@each("name", NAMED)
def test_a_recipe_of_a_library_has_its_defaults(name):
    read, expected = NAMED[name]()
    recipe = axes(find(name))
    for axis, choice in expected.items():
        if dataclasses.is_dataclass(choice):
            assert dataclasses.asdict(recipe[axis]) == dataclasses.asdict(choice), axis
        else:
            assert recipe[axis] == choice, axis
    rest = {key for keys in UNREAD[name.split(":")[0]].values() for key in keys}
    assert read.keys() - read.seen <= rest, "a default that nothing was made of"
