"""A gradient path through the advantage: through a critic's value, and through a KL term in the reward.

    loss = - mean_i log pi(y_i) A_i,        - grad loss = mean_i (A_i s_i + log pi(y_i) grad A_i),    s = grad log pi

The second term is the fault: A is a constant of the update. ``update`` detaches it and the library's losses refuse one
that carries a gradient, so here it is computed anew inside an objective of the mode's own.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pgprog.algorithms.advantages import leave_one_out
from pgprog.algorithms.from_recipe import draw_of
from pgprog.algorithms.objectives import Surrogate, sequence_sum_mean
from pgprog.algorithms.recipes import Recipe
from pgprog.algorithms.update import Metrics, Objective, Weights, update
from pgprog.doctor.mode import Check, Curve, Effort, Finding, Panel, Trace, curve, mean, moments_of, trained
from pgprog.exact.blackbox import replicated
from pgprog.exact.enumeration import completions, every_target, value_and_gradient
from pgprog.exact.recipes import Problem, compared, tiny_problem, true_gradient
from pgprog.exact.values import entropy, expected_return, kl
from pgprog.experiment.config import RunConfig
from pgprog.experiment.learner import make_learner
from pgprog.noise import ReplicaGenerator
from pgprog.optimizer import Optimizer
from pgprog.policy import Critic, Policy, Rollout, scored

Path = Callable[[Tensor], Tensor]
"""What becomes of the advantage before it meets log pi: left as it is, or detached."""

KL_COEF = 0.2


def live(A: Tensor) -> Tensor:
    """The fault: the gradient goes on through A."""
    return A


def on_values(critic: Callable[[Tensor], Tensor], path: Path) -> Objective:
    """- mean_i log pi(y_i) (r_i - V), V the critic's, with its graph."""

    def objective(logprobs: Tensor, batch: Rollout, A: Tensor, weights: Weights) -> Surrogate:
        A = path(batch.rewards - critic(batch.targets).unsqueeze(-1))
        return Surrogate(-sequence_sum_mean(logprobs * A.unsqueeze(-1), batch.mask))

    return objective


def plain(batch: Rollout) -> Tensor:
    """What ``update`` is given; the objective computes its own."""
    return batch.rewards


def critic_step(
    policy: Policy, optimizer: Optimizer, generator: ReplicaGenerator, *, critic: Critic, path: Path, **options: Any
) -> Metrics:
    """Actor-Critic, its advantage computed in the objective."""
    objective = on_values(critic, path)
    return update(policy, optimizer, generator, plain, critic=critic, objective=objective, **options)


class Table(Critic):
    """A V of every target that is given, and can learn."""

    def __init__(self, values: Float[Tensor, "K targets"]) -> None:
        nn.Module.__init__(self)
        self.values = nn.Parameter(values)

    def forward(self, targets: Int[Tensor, "K P"]) -> Float[Tensor, "K P"]:
        """V of these."""
        return self.values.gather(1, targets)


def live_advantage(effort: Effort, fault: Path = live) -> Finding:
    """r - V with V not detached: the policy's gradient stays right, the critic's does not.

        d/dV E[- log pi (r - V) + (r - V)^2] = E[log pi] - 2 (p - V) = 0    at    V = p + H / 2

    H the entropy of the prompt's completions in nats. Detached: V = p.
    """
    proof = exact_values(fault)
    config = RunConfig(algo="actor_critic", seq_len=2, hidden=32, steps=240, lr=0.01)
    sick = trained(config, effort, partial(critic_step, path=fault), values_and_truth)
    cured = trained(config, effort, partial(critic_step, path=torch.Tensor.detach), values_and_truth)
    wrong, right = end(sick, "p + H/2"), end(cured, "p")
    numbers = {
        "steps": len(sick.metrics["reward"]),
        "V": {"sick": end(sick, "V"), "its fixed point p + H/2": wrong, "cured": end(cured, "V"), "p": right},
        "success": {"sick": mean(sick.success), "cured": mean(cured.success)},
        "r - V, the mean at the end": {
            "sick": end(sick, "p") - end(sick, "V"),
            "cured": end(cured, "p") - end(cured, "V"),
        },
    }
    checks = (
        Check(
            "exact: E[g] of the policy is grad J, with and without the fault (relative bias below 1e-12)",
            max(proof["policy"][name]["relative_bias"] for name in ("sick", "cured")) < 1e-12,
        ),
        Check(
            "exact: the critic's expected gradient is 0 at V = p + H/2 with the fault (below 1e-12)",
            proof["slope of the sick critic's loss"]["at p + H/2"] < 1e-12,
        ),
        Check("exact: and at V = p without (below 1e-12)", proof["slope of the cured critic's loss"]["at p"] < 1e-12),
        Check(
            "the sick critic ends nearer to p + H/2 than to p",
            abs(end(sick, "V") - wrong) < abs(end(sick, "V") - end(sick, "p")),
        ),
        Check("the cured critic ends within 0.1 of p", abs(end(cured, "V") - right) < 0.1),
        Check("the sick policy succeeds less", mean(sick.success) < mean(cured.success)),
    )
    truths = ((sick, "p + H/2", "exact p + H/2, of the sick policy"), (cured, "p", "exact p, of the cured policy"))
    return Finding(
        name="live-advantage",
        title="A gradient path through the advantage",
        sick="With V not detached in A = r - V the critic is paid for raising V by -log pi, so it learns p + H/2 in "
        "place of p, and a right but noisy gradient is left to the policy.",
        cure="Detach the advantage: it is a constant of the update.",
        watch="advantage_mean stays far below 0 though the critic has converged; values above 1, the most that is paid",
        numbers=numbers,
        proof=proof,
        panels=(
            Panel(
                "step",
                "V, the mean over all prompts",
                (
                    curve("sick: A carries a gradient", "sick", sick.watched["V"], sick.at),
                    curve("cured: A detached", "cured", cured.watched["V"], cured.at),
                    *(
                        Curve(label, "exact", at(run), run.watched[name].mean(1).tolist())
                        for run, name, label in truths
                    ),
                ),
            ),
            success_panel(sick, cured),
        ),
        checks=checks,
    )


def with_kl(path: Path, coef: float, ratio: bool = False) -> Objective:
    """- mean_i log pi(y_i) A_i, A leave-one-out of r - coef (log pi(y) - log ref(y)), with its graph.

    With ``ratio``, pi / pi_old in the place of log pi.
    """

    def objective(logprobs: Tensor, batch: Rollout, A: Tensor, weights: Weights) -> Surrogate:
        assert batch.ref_logprobs is not None and batch.old_logprobs is not None
        log_pi, log_ref, log_old = (x.sum(-1) for x in (logprobs, batch.ref_logprobs, batch.old_logprobs))
        A = path(leave_one_out(batch.rewards - coef * (log_pi - log_ref)))
        factor = (log_pi - log_old).exp() if ratio else log_pi
        return Surrogate(-(factor * A).mean((-2, -1)))

    return objective


def kl_step(
    policy: Policy,
    optimizer: Optimizer,
    generator: ReplicaGenerator,
    *,
    recipe: Recipe,
    reference: Policy,
    path: Path,
    ratio: bool = False,
    **options: Any,
) -> Metrics:
    """RLOO with a KL in its reward, which the objective takes off in place of the draw."""
    uncharged = replace(recipe, kl=replace(recipe.kl, place="loss"))
    options = {name: value for name, value in options.items() if name != "past"}
    objective = with_kl(path, recipe.kl.coef, ratio)
    draw = draw_of(uncharged, reference)
    return update(policy, optimizer, generator, plain, draw=draw, objective=objective, **options)


def live_kl(effort: Effort, fault: Path = live) -> Finding:
    """r - beta log(pi / ref) with log pi on both sides of the product, neither detached.

        E[g] = grad (J - beta KL(pi || ref)) - beta E[log pi(y) s(y)] = grad (J - beta KL + beta H)

    An entropy bonus that nobody asked for. What it climbs ends at pi proportional to sqrt(ref exp(r / beta)), where the
    cured run's ends at ref exp(r / beta).
    """
    config = RunConfig(
        recipe="rloo_kl",
        set=(f"kl.coef={KL_COEF}",),
        seq_len=2,
        digits=5,
        hidden=32,
        steps=240,
        prompts=24,
        lr=0.03,
        entropy_coef=0.0,
    )
    proof = exact_kl(config.choices, fault)
    sick = trained(config, effort, partial(kl_step, path=fault), policy_entropy)
    cured = trained(config, effort, partial(kl_step, path=torch.Tensor.detach), policy_entropy)
    start = make_learner(config, range(effort.seeds)).policy
    ends = {"sick": optimum(start, KL_COEF, 0.5), "cured": optimum(start, KL_COEF, 1.0)}
    J = {"sick": mean(sick.success), "cured": mean(cured.success)}
    numbers = {
        "steps": len(sick.metrics["reward"]),
        "beta": KL_COEF,
        "success": J,
        "success at the exact optimum": ends,
        "entropy of a completion, in nats": {name: end(run, "H") for name, run in (("sick", sick), ("cured", cured))},
    }
    distance = {
        name: proof["E[g] with the fault"][f"from grad of J - beta KL{also}"]
        for name, also in (("bonus", " + beta H"), ("none", ""))
    }
    checks = (
        Check("exact: with the fault E[g] is grad (J - beta KL + beta H) (to 1e-12)", distance["bonus"] < 1e-12),
        Check("exact: so it is not grad (J - beta KL)", distance["none"] > 1e-3),
        Check(
            "exact: detached, E[g] is grad (J - beta KL) (to 1e-12)",
            proof["E[g] detached"]["from grad of J - beta KL"] < 1e-12,
        ),
        Check(
            "exact: with pi / pi_old for log pi the fault does nothing in a first step: sum_i grad A_i = 0 (to 1e-12)",
            proof["E[g] with the fault, on the ratio"]["from grad of J - beta KL"] < 1e-12,
        ),
        Check(
            "the sick run ends nearer to sqrt(ref exp(r / beta)) than to ref exp(r / beta)",
            abs(J["sick"] - ends["sick"]) < abs(J["sick"] - ends["cured"]),
        ),
        Check(
            "the cured run ends nearer to ref exp(r / beta) than to sqrt(ref exp(r / beta))",
            abs(J["cured"] - ends["cured"]) < abs(J["cured"] - ends["sick"]),
        ),
    )
    span = [0.0, float(len(sick.metrics["reward"]))]
    lines = tuple(Curve(f"exact optimum, {name}", "exact", span, [ends[name]] * 2) for name in ("sick", "cured"))
    panel = success_panel(sick, cured)
    return Finding(
        name="live-kl",
        title="A gradient path through the KL in the reward",
        sick="With log pi live in the reward r - beta log(pi / ref) as well as before it, the gradient has - beta "
        "E[log pi s] = + beta grad H more: an entropy bonus that never ends, and a policy that stays vague.",
        cure="Detach the log-ratio in the reward (or the whole advantage).",
        watch="entropy stays high and success stands still below what the penalty allows; the loss looks ordinary",
        numbers=numbers,
        proof=proof,
        panels=(
            replace(panel, curves=panel.curves + lines),
            Panel(
                "step",
                "entropy of a completion, in nats",
                (
                    curve("sick", "sick", sick.watched["H"], sick.at),
                    curve("cured", "cured", cured.watched["H"], cured.at),
                ),
            ),
        ),
        checks=checks,
    )


def exact_kl(recipe: Recipe, fault: Path) -> dict[str, Any]:
    """E[g] at the tiny problem, against the gradients of what could be meant."""
    problem = tiny_problem(group_size=2)
    beta = recipe.kl.coef
    H = entropy(problem.policy, problem.targets).whole.mean(1)
    bonus = beta * value_and_gradient(problem.policy, H).gradient[0]
    truth = true_gradient(problem, beta)

    def row(path: Path, ratio: bool) -> dict[str, float]:
        step = partial(kl_step, recipe=recipe, path=path, ratio=ratio)
        moments = moments_of(step, problem, reference=problem.reference)
        against = compared(moments, truth)
        return {
            "from grad of J - beta KL": against.bias,
            "from grad of J - beta KL + beta H": float((moments.mean - truth - bonus).norm()),
            "relative bias": against.relative_bias,
            "angle": against.angle,
            "trace": against.trace,
        }

    return {
        "beta": beta,
        "|grad (J - beta KL)|": float(truth.norm()),
        "|beta grad H|": float(bonus.norm()),
        "KL": kl(problem.policy, problem.reference, problem.targets).whole.mean().item(),
        "E[g] with the fault": row(fault, False),
        "E[g] with the fault, on the ratio": row(fault, True),
        "E[g] detached": row(torch.Tensor.detach, False),
    }


@torch.no_grad()
def optimum(reference: Policy, beta: float, power: float) -> float:
    """Success of pi = (ref exp(r / beta))^power / Z, over all targets and replicas; exact."""
    task, targets = reference.task, every_target(reference.task)
    found = completions(reference, targets)
    r = task.success(targets, found.tokens.expand(len(targets), -1, -1)).to(found.logprobs.dtype)
    pi = (power * (found.logprobs + r / beta)).softmax(-1)
    return mean((pi * r).sum(-1) @ task.target_weights().to(pi.dtype))


@torch.no_grad()
def policy_entropy(policy: Policy, critic: nn.Module | None) -> dict[str, Tensor]:
    """H of a completion, the mean over all targets."""
    return {"H": entropy(policy, every_target(policy.task)).whole.mean(1)}


def exact_values(fault: Path) -> dict[str, Any]:
    """At the tiny problem: the policy's E[g] and tr Cov at each fixed point, and the slope of the critic's loss."""
    problem = replace(tiny_problem(), group_size=1)
    truth, p = true_gradient(problem), expected_return(problem.policy, problem.targets)[0].detach()
    H = entropy(problem.policy, problem.targets).whole[0].detach()

    def policy_row(path: Path, V: Tensor) -> dict[str, float]:
        table = torch.zeros(1, problem.policy.task.max_target + 1, dtype=V.dtype)
        table[0, problem.targets] = V
        return asdict(compared(moments_of(partial(critic_step, path=path), problem, critic=Table(table)), truth))

    def slope(path: Path, V: Tensor) -> float:
        return critic_slope(problem, path, V).abs().max().item()

    cured = torch.Tensor.detach
    return {
        "p": p.tolist(),
        "H": H.tolist(),
        "policy": {"sick": policy_row(fault, p + H / 2), "cured": policy_row(cured, p)},
        "slope of the sick critic's loss": {"at p": slope(fault, p), "at p + H/2": slope(fault, p + H / 2)},
        "slope of the cured critic's loss": {"at p": slope(cured, p), "at p + H/2": slope(cured, p + H / 2)},
    }


def expanded(V: Float[Tensor, ""], targets: Int[Tensor, "K P"]) -> Float[Tensor, "K P"]:
    """A critic that says the same of every prompt."""
    return V.expand(targets.shape)


def critic_slope(problem: Problem, path: Path, V: Float[Tensor, "P"]) -> Float[Tensor, "P"]:
    """d/dV(T) of E_y[objective + (r - V)^2] of each prompt, by calling the objective on every completion."""
    V = V.clone().requires_grad_()
    found = completions(problem.policy, problem.targets)
    Y, T = found.tokens.shape
    copies, total = replicated(problem.policy, 0, Y), torch.zeros((), dtype=V.dtype)
    for i, target in enumerate(problem.targets):
        batch = scored(copies, target.expand(Y, 1), found.tokens.view(Y, 1, 1, T))
        batch = batch._replace(rewards=batch.rewards.to(V.dtype))
        loss = on_values(partial(expanded, V[i]), path)(batch.logprobs, batch, V, None).loss
        loss = loss + (batch.rewards[:, 0, 0] - V[i]).square()
        total = total + (found.logprobs[0, i].detach().exp() * loss).sum()
    return torch.autograd.grad(total, V)[0]


@torch.no_grad()
def values_and_truth(policy: Policy, critic: nn.Module | None) -> dict[str, Tensor]:
    """The critic's V, and exactly p and p + H/2, each the mean over all targets."""
    assert critic is not None
    targets = every_target(policy.task)
    p, H = expected_return(policy, targets).mean(1), entropy(policy, targets).whole.mean(1)
    return {"V": critic(targets.expand(policy.replicas, -1)).mean(1), "p": p, "p + H/2": p + H / 2}


def end(run: Trace, name: str) -> float:
    """What was watched at the end, the mean over seeds."""
    return mean(run.watched[name][-1])


def at(run: Trace) -> list[float]:
    return [float(step) for step in run.at]


def success_panel(sick: Trace, cured: Trace) -> Panel:
    """Success of the batches of both."""
    both = (curve("sick", "sick", sick.metrics["success"]), curve("cured", "cured", cured.metrics["success"]))
    return Panel("step", "success of the batch", both)
