"""Which log-probabilities are trained: shifted by one against their tokens, and those of the prompt as well.

On the token-prompt form, where a prompt is digits and the policy reads prompt and completion as one text. A fault is a
function of policy and batch in the place of sum_t log pi(a_t | s_t); it reaches ``update`` by way of the draw. In
expectation, A = r - b with b independent of the completion,

    E[A grad h(y)] = mean over prompts of Cov(r, grad h),        h(y) what is trained in the place of log pi(y)

since h is no log-probability of y, E[grad h] is not 0, and the baseline no longer drops out by itself.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pgprog.algorithms.advantages import batch_mean, leave_one_out
from pgprog.algorithms.sampling import Draw
from pgprog.algorithms.update import update
from pgprog.doctor.mode import Check, Effort, Finding, Panel, Trace, curve, last, mean, moments_of, trained
from pgprog.exact.blackbox import replicated
from pgprog.exact.enumeration import completions, value_and_gradient
from pgprog.exact.recipes import Problem, compared, rewards_of, tiny_problem, true_gradient
from pgprog.experiment.config import RunConfig
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Policy, Rollout, rollout, scored

Trained = Callable[[Policy, Rollout], Float[Tensor, "K P G T"]]
"""What stands in the place of the completion's log-probabilities, 0 where masked, with gradient."""


def aligned(policy: Policy, batch: Rollout) -> Tensor:
    """The cure: log pi(token_t | prompt, tokens_<t)."""
    return batch.logprobs


def unshifted(policy: Policy, batch: Rollout) -> Tensor:
    """The fault: token t looked up in the distribution after it has been read, log pi(token_t | prompt, tokens_<=t)."""
    longer = torch.cat([batch.tokens, batch.tokens[..., -1:]], dim=-1)
    after = policy.distributions(batch.targets, longer)[..., 1:, :]
    return after.gather(-1, batch.tokens.unsqueeze(-1)).squeeze(-1).where(batch.mask, 0)


def late_mask(policy: Policy, batch: Rollout) -> Tensor:
    """Another: the mask one token late, so that the first token is not trained (and the one after the end, if any)."""
    return torch.cat([torch.zeros_like(batch.logprobs[..., :1]), batch.logprobs[..., 1:]], dim=-1)


def prompt_logprobs(policy: Policy, batch: Rollout) -> Float[Tensor, "K P"]:
    """sum over the prompt's digits but the first of log pi(digit | digits before it): a language model of prompts."""
    tokens = policy.task.prompt_tokens(batch.targets)[..., :-1]  # without bos, which the policy cannot emit
    hidden = policy.recurrent_weight.new_zeros(*batch.targets.shape, policy.recurrent_weight.shape[1])
    total = policy.recurrent_weight.new_zeros(batch.targets.shape)
    for before, token in zip(tokens.unbind(-1), tokens.unbind(-1)[1:], strict=False):
        hidden = policy.read(before, hidden)
        total = total + policy.log_pi(hidden).gather(1, token.unsqueeze(1)).squeeze(1)
    return total


def with_prompt(policy: Policy, batch: Rollout) -> Tensor:
    """The fault: the prompt's log-probabilities are in the sum, weighted by A; here they ride on the first token."""
    first = torch.zeros_like(batch.logprobs)
    first[..., 0] = 1
    return batch.logprobs + first * prompt_logprobs(policy, batch)[..., None, None]


def drawn(trained_on: Trained) -> Draw:
    """A rollout whose log-probabilities are replaced."""

    def draw(policy: Policy, generator: ReplicaGenerator, prompts: int, group_size: int) -> Rollout:
        batch = rollout(policy, generator, prompts, group_size)
        return batch._replace(logprobs=trained_on(policy, batch))

    return draw


def of_group(batch: Rollout) -> Tensor:
    """r less the mean of the others."""
    return leave_one_out(batch.rewards)


def of_batch(batch: Rollout) -> Tensor:
    """r less the batch's mean."""
    return batch_mean(batch.rewards)


CONFIG = RunConfig(algo="rloo", seq_len=2, digits=5, prompt_form="tokens", hidden=32, steps=240, prompts=24, lr=0.015)


def shift(effort: Effort, fault: Trained = unshifted) -> Finding:
    """Shifted by one, both ways: token t where t + 1 is predicted, and the mask one token late."""
    problem = tiny_problem(group_size=2, prompt_form="tokens")
    kinds: dict[str, Trained] = {"sick": fault, "mask one late": late_mask, "cured": aligned}
    proof = {name: exact_row(trained_on, problem) for name, trained_on in kinds.items()}
    runs = {
        name: trained(CONFIG, effort, partial(update, advantage=of_group, draw=drawn(trained_on)))
        for name, trained_on in kinds.items()
    }
    numbers = at_the_end(runs)
    J = {name: row["success"] for name, row in numbers.items()}
    return Finding(
        name="shift",
        title="Log-probabilities shifted by one",
        sick="Token t is looked up where token t + 1 is predicted, so it learns to repeat what it just read; "
        "the loss looks as ever, and success rises all the same, for weights are shared, and stops short.",
        cure="Logits at t - 1 score token t, and the mask is the tokens': check once that exp(log pi) sums to 1 over "
        "all completions.",
        watch="grad_norm that stays up when success has stopped rising; at a learning rate of 0 the trainer's "
        "log-probabilities differ from the sampler's",
        numbers={"steps": len(runs["sick"].metrics["reward"])} | numbers,
        proof=proof,
        panels=panels(runs, {"sick": "sick", "mask one late": "other", "cured": "cured"}),
        checks=(
            *exact_checks(proof),
            Check("the sick gradient is another direction, by 10 degrees or more", proof["sick"]["angle"] > 10),
            Check(
                "sum of exp(what is trained) over all completions: 1 for the cured one alone (to 1e-12)",
                abs(proof["cured"]["sum of exp"] - 1) < 1e-12 and abs(proof["sick"]["sum of exp"] - 1) > 1e-3,
            ),
            Check("at work the sick policy learns part of it: 0.05 less success or more", worse(J, "sick")),
            Check("and so does a mask that is one token late", worse(J, "mask one late")),
        ),
    )


def prompt_loss(effort: Effort, fault: Trained = with_prompt) -> Finding:
    """The prompt in the loss: hidden by a group's baseline, not by the batch's.

        E[g] = what it was + mean over prompts of E[A] grad log pi(prompt)

    E[A | prompt] is p - mean p for the batch's mean, 0 for a group's. The batch's mean holds each completion's own r,
    so that without the prompt E[g] is (1 - 1/N) grad J: a relative bias of 1/N, which is no fault of the mask.
    """
    problem = tiny_problem(group_size=2, prompt_form="tokens")
    N = len(problem.targets) * problem.group_size
    kinds: dict[str, Trained] = {"sick": fault, "cured": aligned}
    added = moments(fault, problem, of_batch) - moments(aligned, problem, of_batch)
    wanted = language_model_gradient(problem)
    proof: dict[str, Any] = {
        "sick": against_truth(fault, problem, of_batch),
        "cured": (cured := against_truth(aligned, problem, of_batch)) | {"1/N, the batch mean's own": 1 / N},
        "sick, A of the group": exact_row(fault, problem),
        "cured, A of the group": exact_row(aligned, problem),
        "what is added": added.norm().item(),
        "of the language model": wanted.norm().item(),
        "their difference": (added - wanted).norm().item(),
    }
    runs = {
        name: trained(CONFIG, effort, partial(update, advantage=of_batch, draw=drawn(trained_on)))
        for name, trained_on in kinds.items()
    }
    numbers = at_the_end(runs)
    J = {name: row["success"] for name, row in numbers.items()}
    return Finding(
        name="prompt-loss",
        title="Prompt tokens in the loss",
        sick="Each prompt's own tokens are made likelier where it earns more than the batch's mean, and less "
        "likely where it earns less: a language model of easy prompts, without end, in the same weights.",
        cure="The loss mask covers the completion alone; a group's baseline hides the fault, since A then sums "
        "to 0 over each prompt.",
        watch="grad_norm that does not fall as success rises",
        numbers={"steps": len(runs["sick"].metrics["reward"])} | numbers,
        proof=proof,
        panels=panels(runs, {"sick": "sick", "cured": "cured"}),
        checks=(
            *exact_checks(
                {name: proof[name] for name in ("sick, A of the group", "cured, A of the group")}, "A of the group"
            ),
            Check(
                "exact: cured with A of the batch, that is (1 - 1/N) grad J, the batch mean's own scale (to 1e-12)",
                abs(cured["scale"] - (1 - 1 / N)) < 1e-12 and cured["rest"] < 1e-12,
            ),
            Check(
                "exact: what the prompt adds to E[g] is the mean of (p - mean p) grad log pi(prompt) (to 1e-12), not 0",
                proof["their difference"] < 1e-12 and proof["what is added"] > 1e-3,
            ),
            Check(
                "exact: with A of a group it adds nothing (to 1e-12)",
                proof["sick, A of the group"]["relative_bias"] < 1e-12,
            ),
            Check("at work the sick policy has 0.05 less success or more", worse(J, "sick")),
            Check(
                "and the larger gradient at the end, twice or more",
                numbers["sick"]["grad_norm"] > 2 * numbers["cured"]["grad_norm"],
            ),
        ),
    )


def worse(J: dict[str, float], name: str) -> bool:
    """Than the cured run, by 0.05 of success."""
    return J[name] < J["cured"] - 0.05


def moments(trained_on: Trained, problem: Problem, advantage: Callable[[Rollout], Tensor]) -> Float[Tensor, "D"]:
    """E[g] with this in the place of log pi."""
    return moments_of(partial(update, advantage=advantage, draw=drawn(trained_on)), problem).mean


def against_truth(trained_on: Trained, problem: Problem, advantage: Callable[[Rollout], Tensor]) -> dict[str, float]:
    """E[g] over every batch, against grad J."""
    found = moments_of(partial(update, advantage=advantage, draw=drawn(trained_on)), problem)
    return asdict(compared(found, true_gradient(problem)))


def exact_row(trained_on: Trained, problem: Problem) -> dict[str, float]:
    """E[g] with A of the group over every batch, against grad J and against the covariance that it should be."""
    found = moments_of(partial(update, advantage=of_group, draw=drawn(trained_on)), problem)
    expected, total = covariance_gradient(trained_on, problem)
    formula = {"from mean Cov(r, grad h)": float((found.mean - expected).norm()), "sum of exp": total}
    return asdict(compared(found, true_gradient(problem))) | formula


def covariance_gradient(trained_on: Trained, problem: Problem) -> tuple[Float[Tensor, "D"], float]:
    """mean over prompts of sum over y of pi(y) (r(y) - p) grad h(y); and the mean of sum over y of exp h(y)."""
    tokens = completions(problem.policy, problem.targets).tokens
    batch = scored(problem.policy, problem.targets.unsqueeze(0), tokens.expand(1, len(problem.targets), -1, -1))
    h = trained_on(problem.policy, batch).sum(-1)[0]
    pi, r = batch.logprobs.detach().sum(-1)[0].exp(), rewards_of(problem)
    p = (pi * r).sum(1, keepdim=True)
    value = (pi * (r - p) * h).sum(1).mean()
    return value_and_gradient(problem.policy, value.unsqueeze(0)).gradient[0], h.detach().exp().sum(1).mean().item()


def language_model_gradient(problem: Problem) -> Float[Tensor, "D"]:
    """mean over prompts of (p - mean p) grad log pi(prompt)."""
    pi = completions(problem.policy, problem.targets).logprobs[0].exp().detach()
    p = (pi * rewards_of(problem)).sum(1)
    one = replicated(problem.policy, 0, 1)
    batch = rollout(one, ReplicaGenerator([0]), 1)._replace(targets=problem.targets.unsqueeze(0))
    value = ((p - p.mean()) * prompt_logprobs(one, batch)[0]).mean()
    return value_and_gradient(one, value.unsqueeze(0)).gradient[0]


def exact_checks(proof: dict[str, Any], advantage: str = "") -> tuple[Check, ...]:
    """Shared: the formula holds, and the cured one is grad J; with which advantage, where there are several."""
    cured, also = (f"cured, {advantage}", f", {advantage}") if advantage else ("cured", "")
    return (
        Check(
            f"exact: E[g] is the mean over prompts of Cov(r, grad h), sick and cured{also} (to 1e-12)",
            max(row["from mean Cov(r, grad h)"] for row in proof.values()) < 1e-12,
        ),
        Check(f"exact: {cured}: that is grad J (relative bias below 1e-12)", proof[cured]["relative_bias"] < 1e-12),
    )


def at_the_end(runs: dict[str, Trace]) -> dict[str, Any]:
    """Success, and what a loss curve shows."""
    return {
        name: {
            "success": mean(run.success),
            "grad_norm": last(run.metrics["grad_norm"]),
            "entropy": last(run.metrics["entropy"]),
        }
        for name, run in runs.items()
    }


def panels(runs: dict[str, Trace], kinds: dict[str, Any]) -> tuple[Panel, ...]:
    """Loss beside success."""
    return tuple(
        Panel("step", label, tuple(curve(name, kinds[name], run.metrics[key]) for name, run in runs.items()))
        for label, key in (("loss", "loss"), ("gradient norm", "grad_norm"), ("success of the batch", "success"))
    )
