"""A sampler that is not quite the policy that is trained: rounded, tempered, or cut to a nucleus.

    E_mu[A grad log pi]                  uncorrected, mu the sampler: A has mean 0 under mu, the score under pi alone
    E_mu[min(pi / mu, cap) A grad log pi]          truncated importance sampling; without a cap, and with mu > 0 where
                                                   pi > 0, that is E_pi[A grad log pi] = grad J, for RLOO's A

KL(mu || pi) and the effective sample size are exact on a tiny problem; what a nucleus leaves out no weight brings back.
"""

from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from pgprog.algorithms.recipes import find
from pgprog.doctor.mode import Check, Curve, Effort, Finding, Panel, Trace, curve, exact_success, last, mean, trained
from pgprog.exact.recipes import (
    Problem,
    compared,
    outcome_probabilities,
    recipe_moments,
    sampler_of,
    tiny_problem,
    true_gradient,
)
from pgprog.experiment.config import RunConfig
from pgprog.policy import Policy

Changes = tuple[str, ...]
ESS_SHOWN: tuple[tuple[str, Any], ...] = (
    ("sick", "sick"),
    ("sick, sequence weights", "other"),
    ("top-p 0.7", "other"),
    ("bfloat16", "other"),
)
COLD: Changes = ("sampling.sampler_temperature=0.5",)
BFLOAT16: Changes = ("sampling.sampler_dtype=bfloat16",)
NUCLEUS: Changes = ("sampling.sampler_top_p=0.7",)
TRUNCATED: Changes = ("sampling.correction=sequence_truncate", "sampling.cap=2")
BY_TOKEN: Changes = ("sampling.correction=token_truncate", "sampling.cap=2")
SHARPER = 0.3  # the tiny problem's policy has learned something: near a uniform one no temperature matters
UNTRUNCATED: Changes = ("sampling.correction=sequence_truncate", "sampling.cap=1e5")


def sampler_mismatch(effort: Effort, fault: Changes = COLD) -> Finding:
    """RLOO from a colder sampler, a nucleus, and bfloat16; uncorrected, and with truncated importance sampling."""
    config = RunConfig(recipe="rloo", seq_len=2, hidden=32, steps=160, prompts=8, group_size=8, lr=0.01)
    samplers: dict[str, Changes] = {"sick": fault, "top-p 0.7": NUCLEUS, "bfloat16": BFLOAT16}
    problem = tiny_problem(group_size=3, step=SHARPER)
    proof = {name: exact_rows(changes, problem) for name, changes in samplers.items()}
    plans: dict[str, Changes] = {
        "sick": fault,
        "sick, sequence weights": corrected(fault, TRUNCATED),
        "sick, token weights": corrected(fault, BY_TOKEN),
        "top-p 0.7": NUCLEUS,
        "top-p 0.7, sequence weights": NUCLEUS + TRUNCATED,
        "bfloat16": BFLOAT16,
        "cured": (),
    }
    runs = {name: trained(replace(config, set=changes), effort, watch=true_success) for name, changes in plans.items()}
    ends = {name: at_the_end(run) for name, run in runs.items()}
    return Finding(
        name="sampler-mismatch",
        title="A sampler that disagrees with the trainer",
        sick="Tokens come from another distribution than the one that is scored: the gradient is another direction, "
        "and the success that the batches show is the sampler's, which the policy itself does not have.",
        cure="Let the sampler be the policy. Weights pi / mu take bias away and pay in variance: truncated ones a part "
        "of it, with no more success here; what a nucleus leaves out none brings back; bfloat16 parameters need none.",
        watch="kl_sampler_k3 off 0 and ess below 1 from the first step on, while success looks better than it is",
        numbers={"steps": len(runs["sick"].metrics["reward"]), **ends},
        proof=proof,
        panels=panels(proof, runs),
        checks=checks_of(proof, ends),
    )


def corrected(changes: Changes, correction: Changes) -> Changes:
    """With the correction, where there is anything to correct."""
    return changes + correction if find("rloo", changes).other_sampler else changes


def exact_rows(changes: Changes, problem: Problem) -> dict[str, Any]:
    """KL and ESS of the sampler; E[g] against grad J with each correction, over every batch that it can draw."""
    pi, mu = outcome_probabilities(problem.policy, problem), sampler_probabilities(changes, problem)
    kinds: dict[str, Changes] = {
        "none": (),
        "token, cap 2": BY_TOKEN,
        "sequence, cap 2": TRUNCATED,
        "sequence, no cap": UNTRUNCATED,
    }
    truth = true_gradient(problem)
    rows = {
        name: asdict(compared(recipe_moments(find("rloo", corrected(changes, correction)), problem), truth))
        for name, correction in kinds.items()
    }
    return {"KL": divergence(mu, pi), "ESS": kept(mu, pi), "covered": covered(mu, pi)} | rows


def sampler_probabilities(changes: Changes, problem: Problem) -> Tensor:
    """mu(completion | prompt)."""
    return outcome_probabilities(sampler_of(find("rloo", changes), problem), problem)


def divergence(mu: Tensor, pi: Tensor) -> float:
    """KL(mu || pi) = sum over y of mu log(mu / pi), in nats per completion, the mean over the prompts."""
    return (torch.xlogy(mu, mu) - torch.xlogy(mu, pi)).sum(1).mean().item()


def kept(mu: Tensor, pi: Tensor) -> float:
    """The effective sample size of large samples: (E_mu w)^2 / E_mu w^2, w = pi / mu; all prompts together."""
    w = torch.where(mu > 0, pi / mu, 0)
    return ((mu * w).sum().square() / ((mu * w.square()).sum() * len(mu))).item()


def covered(mu: Tensor, pi: Tensor) -> float:
    """The share of the policy's completions that the sampler can draw at all."""
    return torch.where(mu > 0, pi, 0).sum(1).mean().item()


def true_success(policy: Policy, critic: nn.Module | None) -> dict[str, Tensor]:
    """The policy's own success, exact."""
    return {"J": exact_success(policy)}


def at_the_end(run: Trace) -> dict[str, float]:
    """What the batches show beside what the policy has, and the instruments' readings."""
    row = {"success": mean(run.success), "success of the batches": last(run.metrics["success"])}
    readings = {name: mean(run.metrics[name]) for name in ("kl_sampler_k3", "ess") if name in run.metrics}
    return row | {"entropy": last(run.metrics["entropy"])} | readings


def checks_of(proof: dict[str, Any], ends: dict[str, Any]) -> tuple[Check, ...]:
    """Exact ones first."""
    sick, nucleus, rounded = proof["sick"], proof["top-p 0.7"], proof["bfloat16"]
    return (
        Check(
            "exact: uncorrected, a bias of a tenth of grad J or more",
            sick["none"]["relative_bias"] > 0.1,
        ),
        Check(
            "exact: with weights pi / mu of sequences and no cap, none (relative bias below 1e-12)",
            sick["sequence, no cap"]["relative_bias"] < 1e-12 and sick["covered"] > 1 - 1e-12,
        ),
        Check(
            "exact: a cap of 2, by token or by sequence, takes a quarter of the bias or more, and adds variance",
            all(
                sick[name]["relative_bias"] < 0.75 * sick["none"]["relative_bias"]
                and sick[name]["trace"] > sick["none"]["trace"]
                for name in ("token, cap 2", "sequence, cap 2")
            ),
        ),
        Check(
            "exact: what a nucleus leaves out stays out, whatever the weights",
            nucleus["covered"] < 0.99 and nucleus["sequence, no cap"]["relative_bias"] > 1e-3,
        ),
        Check(
            "exact: bfloat16 alone biases by less than a hundredth of grad J, at a KL below 1e-4 nats",
            rounded["none"]["relative_bias"] < 0.01 and 0 < rounded["KL"] < 1e-4,
        ),
        Check(
            "at work the sick batches show more success than the policy has, by 0.05 or more",
            ends["sick"]["success of the batches"] > ends["sick"]["success"] + 0.05,
        ),
        Check(
            "the policy stays broader than it would be: half as much entropy again or more",
            ends["sick"]["entropy"] > 1.5 * ends["cured"]["entropy"],
        ),
        Check(
            "not reproduced: a gain in success by truncated weights of 0.15 or more",
            max(ends[f"sick, {kind} weights"]["success"] for kind in ("sequence", "token"))
            < ends["sick"]["success"] + 0.15,
        ),
        Check(
            "the instruments see it: kl_sampler_k3 over 0.01 and ess under 0.9, and nothing of the kind in bfloat16",
            ends["sick"].get("kl_sampler_k3", 0) > 0.01
            and ends["sick"].get("ess", 1) < 0.9
            and ends["bfloat16"]["kl_sampler_k3"] < 1e-3,
        ),
    )


def panels(proof: dict[str, Any], runs: dict[str, Trace]) -> tuple[Panel, ...]:
    """Bias by sampler and correction; the batches' success beside the policy's."""
    x = [float(i) for i in range(len(proof))]
    shown: tuple[tuple[str, Any], ...] = (("none", "sick"), ("token, cap 2", "other"), ("sequence, cap 2", "cured"))
    bias = tuple(
        Curve(name, kind, x, [row[name]["relative_bias"] for row in proof.values()], dots=True) for name, kind in shown
    )
    sick, weighted, cured = runs["sick"], runs["sick, sequence weights"], runs["cured"]
    return (
        Panel("sampler", "|E g - grad J| / |grad J|, exact", bias, ticks=tuple(proof)),
        Panel(
            "step",
            "success",
            (
                curve("sick, of its batches", "other", sick.metrics["success"]),
                curve("sick, of the policy (exact)", "sick", sick.watched["J"], sick.at),
                curve("with sequence weights (exact)", "other", weighted.watched["J"], weighted.at),
                curve("cured, of the policy (exact)", "cured", cured.watched["J"], cured.at),
            ),
        ),
        Panel(
            "step",
            "effective sample size",
            tuple(
                curve(name, kind, runs[name].metrics["ess"]) for name, kind in ESS_SHOWN if "ess" in runs[name].metrics
            ),
        ),
    )
