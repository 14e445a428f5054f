"""Where a batch comes from: another sampler, a policy of some updates ago, only prompts that teach something.

Each is a ``draw`` in the place of ``rollout``: (policy, generator, prompts, group_size) -> Rollout, whose ``logprobs``
are the present policy's, with gradient. What the tokens really came from is in ``sampler_logprobs``.
"""

import copy
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pgprog.noise import ReplicaGenerator
from pgprog.policy import Policy, Rollout, rollout, scored

Draw = Callable[[Policy, ReplicaGenerator, int, int], Rollout]
"""(policy, generator, prompts, group_size) to a batch whose ``logprobs`` are the policy's, with gradient."""
SCORES_AT_ONCE = 256


def copy_of(
    policy: Policy, *, dtype: torch.dtype | None = None, temperature: float | None = None, top_p: float | None = None
) -> Policy:
    """A frozen copy to sample from: it has no gradient and does not follow the policy.

    Args:
        dtype: round each parameter to it and back (``torch.bfloat16``). An inference engine in bfloat16 rounds
            activations too, so its mismatch is larger; here everything but the parameters is computed as before.
        temperature, top_p: as in ``Policy``; None takes the policy's own.

    Raises: ValueError for a temperature that is not positive and finite, or a top_p outside (0, 1].
    """
    if temperature is not None and not 0 < temperature < float("inf"):
        raise ValueError(f"temperature {temperature} is out of range: logits are divided by it, give a positive number")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p {top_p} is out of range: give a share in (0, 1], 1 keeps every token")
    other = copy.deepcopy(policy).requires_grad_(False)
    for p in other.parameters():
        p.grad = None
        if dtype is not None:
            p.copy_(p.to(dtype).to(p.dtype))
    if temperature is not None:
        other.temperature = temperature
    if top_p is not None:
        other.top_p = top_p
    return other


def sampled_by(
    sampler: Policy, policy: Policy, generator: ReplicaGenerator, prompts: int, group_size: int = 1
) -> Rollout:
    """A batch whose tokens come from ``sampler``, scored by the policy: ``rollout`` where the two are equal.

    ``sampler_logprobs`` is the sampler's, without gradient, under its own temperature and nucleus: the weight
    pi / sampler of a token, exp(logprobs - sampler_logprobs), makes the batch the policy's again in expectation (where
    the sampler's nucleus leaves nothing out). ``old_logprobs`` is None, so a clipped ratio starts at 1 in spite of the
    mismatch. A token outside the policy's own nucleus has log-probability -inf under the policy.
    """
    targets = policy.task.sample_targets(generator, prompts)
    tokens = sampler.sample(targets, group_size, generator)
    with torch.no_grad():
        sampler_logprobs, _ = sampler.score(targets, tokens)
    return scored(policy, targets, tokens)._replace(sampler_logprobs=sampler_logprobs)


class Past:
    """Stale data: batches from the policy of ``age`` updates ago, as when sampling runs ahead of training.

    Call ``remember(policy)`` before each update and give ``draw`` to it. In the first updates, where there is no policy
    that old, the oldest samples. Age 0 is ``rollout``.

    Args:
        policy: as it is before the first update; its temperature and nucleus are kept.
        age: d, 0 or more. d + 1 copies of the parameters are held (none for 0).

    Raises: ValueError for a negative age.
    """

    def __init__(self, policy: Policy, age: int) -> None:
        if age < 0:
            raise ValueError(f"age {age} is out of range: give the number of updates that data are old, 0 or more")
        self.age = age
        self._kept = [copy_of(policy) for _ in range(age + 1 if age else 0)]  # oldest first, the present one last

    @torch.no_grad()
    def remember(self, policy: Policy) -> None:
        """Take the policy's parameters as those of the update that comes; forget those of d + 1 updates ago."""
        if not self._kept:
            return
        oldest, *others = self._kept
        for mine, p in zip(oldest.parameters(), policy.parameters(), strict=True):
            mine.copy_(p)
        self._kept = [*others, oldest]

    def draw(self, policy: Policy, generator: ReplicaGenerator, prompts: int, group_size: int = 1) -> Rollout:
        """A batch of the stale policy, scored by the present one.

        ``old_logprobs`` and ``sampler_logprobs`` are both the stale policy's: the denominator of a ratio is the
        behaviour's probability. Lesson: computed from present weights it is 1 always, and the clip never acts.
        """
        if not self._kept:
            return rollout(policy, generator, prompts, group_size)
        batch = sampled_by(self._kept[0], policy, generator, prompts, group_size)
        return batch._replace(old_logprobs=batch.sampler_logprobs)

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor that ``draw`` depends on, by name, each with K first; copied over, they bring the past back.

        The names are the same at any step: ``<place>.<parameter>``, place 0 the oldest.
        """
        return {f"{i}.{name}": p for i, kept in enumerate(self._kept) for name, p in kept.named_parameters()}


def dynamic(
    policy: Policy,
    generator: ReplicaGenerator,
    prompts: int,
    group_size: int = 1,
    *,
    attempts: int,
    draw: Draw = rollout,
) -> Rollout:
    """Draw again until every group of a batch has unequal rewards: DAPO's dynamic sampling.

    A replica takes its first P informative groups in the order of drawing. Where ``attempts`` batches hold fewer, its
    first uninformative groups fill the place, marked in ``valid`` as not counting.

    Bias: conditional on acceptance, groups are those of the policy given that they are informative, and prompts are
    those of the task reweighted by the chance of that, with success probability p: P(T) (1 - p^G - (1 - p)^G), made
    to sum to 1. So the update follows another objective than J: hopeless and solved prompts leave it.

    Args:
        attempts: the most batches of P prompts that a replica draws, 1 or more. The first is ``draw``'s own; each has
            noise of its own, a function of (seed, stream, step, attempt), and the generator is left where one ``draw``
            leaves it. So a replica's batch is the same, bit for bit, however long others have to search.
        draw: makes a batch; called without gradient. What it says of the sampler is kept.

    Returns:
        the batch, scored once with gradient, with ``valid`` (K, P, G) and ``sampled`` (K,): the completions in the
        batches that the replica had to draw.

    Paper: Yu et al. 2025, DAPO, arXiv:2503.14476, eq. 11. Parity: verl ``algorithm.filter_groups``, which keeps
    groups whose metric has a std other than 0.
    Edge: one completion per prompt, or equal rewards everywhere: nothing is valid.
    Raises: ValueError for fewer than one prompt, completion or attempt.
    """
    refuse_less_than_one(prompts=prompts, group_size=group_size, attempts=attempts)
    with torch.no_grad():
        batch = draw(policy, generator, prompts, group_size)
        found = informative(batch)
        drawn = found.new_ones(len(found), dtype=torch.long)
        for attempt in range(1, attempts):
            if found.all():
                break
            drawn = drawn + ~found.all(-1)
            more = draw(policy, _branch(generator, attempt), prompts, group_size)
            found = torch.cat([found, informative(more)], dim=1)
            first = found.long().argsort(dim=1, descending=True, stable=True)[:, :prompts]
            batch, found = _chosen(_joined(batch, more), first), found.gather(1, first)
    logprobs, entropies = policy.score(batch.targets, batch.tokens)
    valid = found.unsqueeze(-1).expand_as(batch.success)
    return batch._replace(
        logprobs=logprobs,
        entropies=entropies,
        valid=valid if batch.valid is None else valid & batch.valid,
        sampled=(drawn * prompts * group_size).to(logprobs.dtype),
    )


def informative(batch: Rollout) -> Bool[Tensor, "K P"]:
    """Groups whose rewards, of the completions that count, are not all equal."""
    r = batch.rewards
    if batch.valid is None:
        return r.amax(-1) > r.amin(-1)
    return r.masked_fill(~batch.valid, -torch.inf).amax(-1) > r.masked_fill(~batch.valid, torch.inf).amin(-1)


def informative_groups(p: Float[Tensor, "*any"], group_size: int) -> Float[Tensor, "*any"]:
    """The chance that a group of G teaches something: 1 - p^G - (1 - p)^G, p the probability of success.

    The distribution of prompts after ``dynamic`` is the task's times this. Differentiable inside (0, 1); exact to
    rounding at either end. Raises ValueError for p outside [0, 1] or a group of none.
    """
    if group_size < 1:
        raise ValueError(f"group_size {group_size} is too small: give 1 or more completions of a prompt")
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"p {p.flatten().tolist()[:4]} is no probability: give numbers in [0, 1]")
    q = torch.minimum(p, 1 - p)  # the formula is symmetric, and 1 - (1 - q)^G keeps its digits where q is small
    return (-torch.expm1(group_size * torch.log1p(-q)) - q**group_size).clamp(min=0)


def score_squared_norms(
    policy: Policy, targets: Int[Tensor, "K P"], tokens: Int[Tensor, "K P G T"]
) -> Float[Tensor, "K P G"]:
    """|grad log pi(completion | prompt)|^2 over all parameters, of every completion; exact, no gradient.

    What weighs a reward in the baseline of least variance, E[|s|^2 r] / E[|s|^2]. Every completion is a replica of its
    own, so one backward pass gives many gradients; K P G copies of the parameters, ``SCORES_AT_ONCE`` at a time.
    """
    K, P, G, T = tokens.shape
    owner = torch.arange(K).repeat_interleave(P * G)
    each = zip(
        owner.split(SCORES_AT_ONCE),
        targets.repeat_interleave(G, dim=1).view(-1, 1).split(SCORES_AT_ONCE),
        tokens.reshape(-1, 1, 1, T).split(SCORES_AT_ONCE),
        strict=True,
    )
    norms = []
    for k, target, completion in each:
        one_each = replicas_of(policy, k)
        with torch.enable_grad():
            logprob = one_each.score(target, completion)[0].sum()
        s = torch.autograd.grad(logprob, list(one_each.parameters()), materialize_grads=True)
        norms.append(torch.stack([g.flatten(1).square().sum(-1) for g in s]).sum(0))
    return torch.cat(norms).view(K, P, G)


def replicas_of(policy: Policy, of: Int[Tensor, "N"]) -> Policy:
    """A policy of N replicas with the parameters of these."""
    other = copy.deepcopy(policy)
    for name, p in policy.named_parameters():
        other.register_parameter(name, nn.Parameter(p.detach()[of]))
    return other


def refuse_less_than_one(**counts: int) -> None:
    """Raise ValueError for a count that is none."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} {count} is too small: give 1 or more")


def _branch(generator: ReplicaGenerator, attempt: int) -> ReplicaGenerator:
    """Noise apart from the generator's own in this step: ``attempt`` times 2^128 numbers further on."""
    other = copy.copy(generator)
    philox = [bits.bit_generator for bits in generator._bits]
    other._bits = [np.random.Generator(each.jumped(attempt)) for each in philox if isinstance(each, np.random.Philox)]
    return other


def _joined(a: Rollout, b: Rollout) -> Rollout:
    """The prompts of both."""
    pairs = zip(a, b, strict=True)
    return Rollout(*(x if x is None or y is None else torch.cat([x, y], dim=1) for x, y in pairs))  # type: ignore[arg-type]


def _chosen(batch: Rollout, which: Int[Tensor, "K P"]) -> Rollout:
    """These prompts of each replica."""
    k = torch.arange(len(which)).unsqueeze(1)
    return Rollout(*(None if x is None else x[k, which] for x in batch))  # type: ignore[arg-type]
