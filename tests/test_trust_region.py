"""Fisher products, conjugate gradients and the step, against dense matrices, loops and the enumerated KL."""

import copy
import itertools
import math

import pytest
import torch

import exact_oracles
import oracles
from oracles import close, same
from pgprog.algorithms.objectives import policy_gradient_loss
from pgprog.algorithms.sampling import copy_of, sampled_by
from pgprog.algorithms.trust_region import (
    conjugate_gradients,
    fisher_vector_product,
    sequence_kl,
    trust_region_step,
)
from pgprog.env import DigitSum
from pgprog.exact import values
from pgprog.exact.blackbox import replicated
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Policy, Rollout, rollout, scored

TASKS = [
    DigitSum(seq_len=2, digits=3),
    DigitSum(seq_len=2, digits=2, variable_length=True, prompt_form="tokens"),
]
SEEDS = [5, 8]


@pytest.fixture(params=TASKS, ids=["fixed", "variable"])
def task(request):
    return request.param


def make(task, seeds=SEEDS, hidden=2):
    policy = Policy(task, ReplicaGenerator(seeds, "init"), hidden=hidden, dtype=torch.float64)
    with torch.no_grad():
        policy.head_weight.mul_(2)
    return policy


def flat(tensors):
    return torch.cat([x.detach().flatten(1) for x in tensors], dim=1)


def replica(policy, k):
    alone = make(policy.task, [0], policy.head_weight.shape[1])
    with torch.no_grad():
        for p, q in zip(alone.parameters(), policy.parameters(), strict=True):
            p.copy_(q[k : k + 1])
    return alone


def a_batch(policy, P=4, G=3, step=0):
    return rollout(policy, ReplicaGenerator(list(range(policy.replicas)), step=step), P, G)


def an_advantage(batch, seed=0, per_token=False):
    torch.manual_seed(seed)
    shape = batch.tokens.shape if per_token else batch.rewards.shape
    return torch.randn(1, *shape[1:]).repeat(shape[0], *[1] * (len(shape) - 1))


def gradients(policy, batch, A):
    logprobs, _ = policy.score(batch.targets, batch.tokens)
    loss = policy_gradient_loss(logprobs, A, batch.mask)
    return list(torch.autograd.grad(loss.sum(), list(policy.parameters())))


def fisher_of(w, task, target, tokens):
    """sum_t sum_a pi(a | s_t) grad log pi(a | s_t) grad log pi(a | s_t)^T of one completion, action by action."""
    total = 0.0
    prefix = []
    for t in range(oracles.length(task, tokens)):
        for a in range(oracles.tokens_to_choose_from(task)):
            hidden = oracles.first_state(w, task, target)
            for token in prefix:
                hidden = oracles.read(w, token, hidden)
            log_p = oracles.next_token(w, hidden)[a]
            s = oracles.gradient(log_p, w)
            total = total + log_p.exp().item() * torch.outer(s, s)
        prefix.append(tokens[t])
    return total


def dense(policy, batch):
    """F of each replica; its columns are products in as many copies of the replica."""
    D = flat(policy.parameters()).shape[1]
    each = []
    for k in range(policy.replicas):
        copies = {
            name: x[k : k + 1].expand(D, *x.shape[1:]).contiguous()
            for name, x in batch._asdict().items()
            if x is not None
        }
        each.append(fisher_vector_product(replicated(policy, k, D), Rollout(**copies), torch.eye(D)).mT)
    return torch.stack(each)


def oracle_fisher(policy, batch, k):
    w, task = oracles.weights(policy, k), policy.task
    rows = [(p, g) for p, g in itertools.product(*map(range, batch.rewards.shape[1:])) if batch.mask[k, p, g].any()]
    each = [fisher_of(w, task, int(batch.targets[k, p]), tuple(batch.tokens[k, p, g].tolist())) for p, g in rows]
    return sum(each) / len(rows)


# ---- Fisher products ----


def test_fisher_product_equals_the_dense_matrix_by_loops(task):
    policy = make(task)
    batch = a_batch(policy, 2, 2)
    mask = batch.mask.clone()
    mask[1, 0, 1] = False  # a row that does not count
    batch = batch._replace(mask=mask)
    F = dense(policy, batch)
    for k in range(2):
        close(F[k], oracle_fisher(policy, batch, k), rtol=1e-9, atol=1e-12)
    close(F, F.mT, rtol=1e-9, atol=1e-12)
    assert torch.linalg.eigvalsh(F).min() > -1e-12
    v = fisher_vector_product(policy, batch, torch.ones_like(F[..., 0]))
    assert not v.requires_grad and all(p.grad is None for p in policy.parameters())


def test_expected_over_completions_the_fisher_matrix_is_that_of_whole_completions(task):
    """sum over y of pi(y) F(y) = sum over y of pi(y) s s^T, s = grad log pi(y): the chain rule."""
    policy, target = make(task, [5]), 1
    completions = oracles.completions(task)
    w = oracles.weights(policy)
    pi = torch.tensor(oracles.probabilities(w, task, target))
    s = exact_oracles.scores(w, task, target)
    total = 0.0
    for chance, tokens in zip(pi, completions, strict=True):
        batch = scored(policy, torch.tensor([[target]]), torch.tensor([[[tokens]]]))
        total = total + chance * dense(policy, batch)[0]
    close(total, s.mT @ (pi.unsqueeze(1) * s), rtol=1e-9, atol=1e-12)


def test_fisher_product_within_a_nucleus_at_a_temperature():
    """p and its scores by autograd from the distributions themselves, action by action."""
    policy = make(TASKS[1], [5])
    policy.temperature, policy.top_p = 0.6, 0.8
    batch = a_batch(policy, 2, 2)
    log_pi = policy.distributions(batch.targets, batch.tokens)
    assert (log_pi == -torch.inf).any()
    total = 0.0
    for row in batch.mask.nonzero().tolist():
        for log_p in log_pi[tuple(row)]:
            if log_p > -torch.inf:
                s = flat(torch.autograd.grad(log_p, list(policy.parameters()), retain_graph=True))[0]
                total = total + log_p.exp().item() * torch.outer(s, s) / 4
    close(dense(policy, batch)[0], total, rtol=1e-9, atol=1e-12)


# ---- conjugate gradients ----


def systems(K=3, D=6):
    torch.manual_seed(2)
    root = torch.randn(K, D, D)
    A = root @ root.mT + 0.1 * torch.eye(D)
    return A, torch.randn(K, D)


def times(A, calls=None):
    def product(v):
        if calls is not None:
            calls.append(v)
        return (A @ v.unsqueeze(-1)).squeeze(-1)

    return product


def test_conjugate_gradients_equal_a_dense_solve():
    A, b = systems()
    x, residual = conjugate_gradients(times(A), b, 30, 1e-13)
    close(x, torch.linalg.solve(A, b), rtol=1e-9)
    assert (residual <= 1e-13).all()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_nth_iterate_is_the_best_of_its_krylov_space(n):
    """min over x in span{b, A b, ..} of (x - x*)^T A (x - x*), by least squares; and the residual that is told."""
    A, b = systems()
    x, residual = conjugate_gradients(times(A), b, n)
    for k in range(3):
        basis = torch.linalg.qr(torch.stack([torch.linalg.matrix_power(A[k], i) @ b[k] for i in range(n)], 1))[0]
        best = basis @ torch.linalg.solve(basis.mT @ A[k] @ basis, basis.mT @ b[k])
        close(x[k], best, rtol=1e-9)
        close(residual[k], (b[k] - A[k] @ x[k]).norm() / b[k].norm(), rtol=1e-9)


def test_a_replica_that_is_done_stays_and_one_that_cannot_harms_none():
    """Of the identity, done after one; b = 0; a NaN; a singular matrix; a hard one, solved as if alone."""
    A, b = systems(5)
    A[0], b[1], b[2, 3] = torch.eye(6), 0, math.nan
    A[3] = torch.diag(torch.tensor([1.0, 2.0, 3.0, 0.0, 0.0, 0.0]))
    b[3] = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    x, residual = conjugate_gradients(times(A), b, 20, 1e-12)
    close(x[0], b[0])
    assert (x[1] == 0).all() and residual[1] == 0
    assert (x[2] == 0).all() and residual[2].isnan()
    close(x[3], [1, 1 / 2, 1 / 3, 0, 0, 0], rtol=1e-9)
    close(x[4], torch.linalg.solve(A[4], b[4]), rtol=1e-9)
    close(x[4], conjugate_gradients(times(A[4:]), b[4:], 20, 1e-12).x[0], rtol=1e-11)
    b = torch.tensor([[1.0, 1.0]])
    negative = conjugate_gradients(times(-torch.eye(2).expand(1, 2, 2)), b, 5)
    assert (negative.x == 0).all() and negative.residual == 1


def test_the_tolerance_is_relative_and_ends_the_iteration():
    A, b = systems()
    for scale in (1.0, 1e-6):
        calls = []
        x, residual = conjugate_gradients(times(A, calls), scale * b, 30, 0.3)
        assert (residual <= 0.3).all() and 1 <= len(calls) < 6
        for k in range(3):
            alone = []
            y, _ = conjugate_gradients(times(A[k : k + 1], alone), scale * b[k : k + 1], 30, 0.3)
            close(x[k], y[0], rtol=1e-11)
            assert len(alone) <= len(calls)
    calls = []
    conjugate_gradients(times(A, calls), b, 3, 0.0)
    assert len(calls) == 3


# ---- the KL ----


def test_expected_over_completions_the_KL_is_that_of_whole_completions(task):
    """sum over y of pi(y) KL(y) = KL(pi || other), by loops and by exact.values; the first argument samples."""
    policy = make(task)
    other = copy.deepcopy(policy)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in other.parameters():
            p += 0.3 * torch.randn_like(p)
    targets = torch.arange(oracles.largest_target(task) + 1)
    exact = values.kl(policy, other, targets).whole
    for k, target in itertools.product(range(2), targets.tolist()):
        w, v = oracles.weights(policy, k), oracles.weights(other, k)
        total = 0.0
        for chance, tokens in zip(oracles.probabilities(w, task, target), oracles.completions(task), strict=True):
            one = torch.tensor([[target]] * 2), torch.tensor([[[tokens]]] * 2)
            kl = sequence_kl(policy.distributions(*one), other.distributions(*one), task.mask(one[1]))
            total += chance * kl[k].item()
        assert total == pytest.approx(exact_oracles.kl_of(w, v, task, target).item(), rel=1e-12)
        assert total == pytest.approx(exact[k, target].item(), rel=1e-12)


def test_KL_counts_sequences_and_is_infinite_where_the_new_leaves_something_out():
    log = torch.log(torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.75, 0.0], [1.0, 0.0, 0.0]]))
    old = log[0].expand(1, 1, 3, 2, 3)
    mask = torch.tensor([[[[True, True], [True, False], [False, False]]]])
    truth = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    close(sequence_kl(old, log[1].expand(1, 1, 3, 2, 3), mask), [3 * truth / 2])  # 3 tokens of 2 sequences
    assert sequence_kl(old, log[2].expand(1, 1, 3, 2, 3), mask).isinf()
    close(sequence_kl(log[2].expand(1, 1, 3, 2, 3), old, mask), [3 * math.log(2) / 2])
    assert sequence_kl(old, log[1].expand(1, 1, 3, 2, 3), torch.zeros_like(mask)) == 0


# ---- the step ----


def outcome(policy, before, batch, A, k, old=None):
    """KL and the surrogate's growth by plain loops over tokens."""
    kl, growth, n = 0.0, 0.0, 0
    w, v = oracles.weights(before, k), oracles.weights(policy, k)
    for p, g in itertools.product(*map(range, batch.rewards.shape[1:])):
        counts = [t for t in range(batch.tokens.shape[-1]) if batch.mask[k, p, g, t]]
        n += bool(counts)
        tokens = tuple(batch.tokens[k, p, g].tolist())
        h, i = (oracles.first_state(x, policy.task, int(batch.targets[k, p])) for x in (w, v))
        for t in counts:
            was, now = oracles.next_token(w, h).tolist(), oracles.next_token(v, i).tolist()
            kl += sum(math.exp(a) * (a - b) for a, b in zip(was, now, strict=True))
            denominator = was[tokens[t]] if old is None else old[k, p, g, t].item()
            a = A[k, p, g, t].item() if A.dim() == 4 else A[k, p, g].item()
            if batch.valid is None or batch.valid[k, p, g]:
                growth += a * (math.exp(now[tokens[t]] - denominator) - math.exp(was[tokens[t]] - denominator))
            h, i = oracles.read(w, tokens[t], h), oracles.read(v, tokens[t], i)
    return kl / n, growth / n


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("max_kl", [0.01, 0.5, 3.0])
def test_after_a_step_the_KL_is_within_its_bound_and_the_surrogate_has_grown(task, max_kl, per_token):
    policy = make(task)
    before = copy.deepcopy(policy)
    batch = a_batch(policy)
    A = an_advantage(batch, per_token=per_token)
    told = trust_region_step(policy, batch, A, gradients(policy, batch, A), max_kl=max_kl)
    assert told.keys() == {"kl", "cg_residual", "step_fraction", "improvement", "accepted"}
    assert told["accepted"].tolist() == [1, 1]
    one = batch.targets, batch.tokens
    with torch.no_grad():
        same(told["kl"], sequence_kl(before.distributions(*one), policy.distributions(*one), batch.mask))
    assert (told["kl"] <= max_kl).all() and (told["kl"] > 0).all() and (told["improvement"] > 0).all()
    for k in range(2):
        kl, growth = outcome(policy, before, batch, A, k)
        close(told["kl"][k], kl, rtol=1e-9)
        close(told["improvement"][k], growth, rtol=1e-9)


def test_the_step_is_the_natural_gradient_of_the_dense_matrix(task):
    damping, max_kl = 0.05, 0.02
    policy = make(task)
    batch = a_batch(policy)
    A = an_advantage(batch)
    start, g = flat(policy.parameters()), gradients(policy, batch, A)
    damped = dense(policy, batch) + damping * torch.eye(start.shape[1])
    told = trust_region_step(policy, batch, A, g, max_kl=max_kl, damping=damping, iterations=200, tolerance=1e-12)
    x = torch.linalg.solve(damped, -flat(g))
    length = (2 * max_kl / torch.einsum("kd,kde,ke->k", x, damped, x)).sqrt()
    expected = (told["step_fraction"] * length).unsqueeze(1) * x
    close(flat(policy.parameters()) - start, expected, rtol=1e-7, atol=1e-10)
    assert (told["step_fraction"] > 0).all() and (told["cg_residual"] < 1e-11).all()


def test_the_scale_of_gradient_and_advantage_does_not_matter():
    policy = make(TASKS[0])
    other = copy.deepcopy(policy)
    batch = a_batch(policy)
    A = an_advantage(batch)
    g = gradients(policy, batch, A)
    trust_region_step(policy, batch, A, g)
    trust_region_step(other, batch, 1024 * A, [x / 4096 for x in g])  # powers of 2 round alike
    close(flat(other.parameters()), flat(policy.parameters()))


@pytest.mark.parametrize("max_kl", [1e-6, 1e-8])
def test_for_a_small_bound_without_damping_the_KL_is_the_bound(task, max_kl):
    """KL = step^T F step / 2 + O(|step|^3), so KL / max_kl = 1 + O(sqrt(max_kl)); halved, where it is above, to 1/4.

    At any iterate of the conjugate gradients; an early one, for late ones are long where F is nearly singular.
    """
    policy = make(task)
    batch = a_batch(policy)
    A = an_advantage(batch)
    told = trust_region_step(policy, batch, A, gradients(policy, batch, A), max_kl=max_kl, damping=0.0, iterations=4)
    assert (told["accepted"] == 1).all()
    ratio = told["kl"] / (max_kl * told["step_fraction"].square())
    assert (ratio - 1).abs().max() < 20 * max_kl**0.5
    assert set(told["step_fraction"].tolist()) <= {1.0, 0.5}


def test_the_enumerated_KL_is_near_that_of_a_large_batch(task):
    """n completions of every prompt: within z = 5 standard errors of the enumerated KL(pi_old || pi_new).

    The step has seen the batch, which the bound leaves out: it moves KL by O(1/n), here far below an error.
    """
    n, z = 4000, 5
    policy = make(task, [5])
    before = copy.deepcopy(policy)
    targets = torch.arange(oracles.largest_target(task) + 1).unsqueeze(0)
    batch = scored(policy, targets, policy.sample(targets, n, ReplicaGenerator([1])))
    A = (batch.rewards - batch.rewards.mean(-1, keepdim=True)).detach()
    told = trust_region_step(policy, batch, A, gradients(policy, batch, A), max_kl=0.05)
    exact = values.kl(before, policy, targets[0]).whole[0].detach()
    variance, w = 0.0, oracles.weights(before)
    for target in targets[0].tolist():
        for chance, tokens in zip(oracles.probabilities(w, task, target), oracles.completions(task), strict=True):
            one = torch.tensor([[target]]), torch.tensor([[[tokens]]])
            kl = sequence_kl(before.distributions(*one), policy.distributions(*one), task.mask(one[1])).item()
            variance += chance * (kl - exact[target].item()) ** 2
    P = targets.shape[1]
    assert told["accepted"] == 1 and told["kl"] > 0.005
    assert abs(told["kl"].item() - exact.mean().item()) < z * (variance / n) ** 0.5 / P
    assert abs(exact.mean().item() - told["kl"].item()) < 0.1 * told["kl"].item()  # of a sampled batch


def test_the_step_taken_is_the_first_of_the_halvings_that_holds():
    """A bound that is far too long: every longer one breaks the bound or lowers the surrogate."""
    policy = make(TASKS[0])
    batch = a_batch(policy)
    A = an_advantage(batch)
    g = gradients(policy, batch, A)
    before = copy.deepcopy(policy)
    start = flat(policy.parameters())
    told = trust_region_step(policy, batch, A, g, max_kl=2.0, damping=0.01, iterations=10)
    move = (flat(policy.parameters()) - start) / told["step_fraction"].unsqueeze(1)
    assert (told["step_fraction"] < 1).any()
    for k, taken in enumerate(told["step_fraction"].tolist()):
        assert math.log2(taken) == int(math.log2(taken))
        fraction = 1.0
        while fraction > taken:
            longer = copy.deepcopy(before)
            parts = (start + fraction * move).split([p[0].numel() for p in longer.parameters()], dim=1)
            with torch.no_grad():
                for p, x in zip(longer.parameters(), parts, strict=True):
                    p.copy_(x.view_as(p))
            kl, growth = outcome(longer, before, batch, A, k)
            assert kl > 2.0 or growth <= 0
            fraction /= 2


def test_without_a_step_that_holds_a_replica_stays_bit_for_bit():
    """An advantage against the gradient in replica 1; too few halvings in both."""
    policy = make(TASKS[0])
    batch = a_batch(policy)
    A = an_advantage(batch)
    g = gradients(policy, batch, A)
    start = flat(policy.parameters())
    against = A * torch.tensor([1.0, -1.0]).view(2, 1, 1)
    told = trust_region_step(policy, batch, against, g, backtracks=3)
    assert told["accepted"].tolist() == [1, 0] and told["step_fraction"][1] == 0
    assert told["kl"][1] == 0 and told["improvement"][1] == 0 and told["kl"][0] > 0
    same(flat(policy.parameters())[1], start[1])
    assert (flat(policy.parameters())[0] != start[0]).any()
    again = flat(policy.parameters())
    told = trust_region_step(policy, batch, -A, g, backtracks=0)
    assert not told["accepted"].any()
    same(flat(policy.parameters()), again)


def test_backtracks_are_counted():
    """A step that needs h halvings is found with h of them, and not with one less."""
    setting = {"max_kl": 2.0, "damping": 0.01, "iterations": 10}
    first = make(TASKS[0], [5])
    batch = a_batch(first)
    A = an_advantage(batch)
    g = gradients(first, batch, A)
    needed = -int(math.log2(trust_region_step(copy.deepcopy(first), batch, A, g, **setting)["step_fraction"].item()))
    assert needed > 0
    for more, found in ((0, 1), (-1, 0)):
        policy = copy.deepcopy(first)
        assert trust_region_step(policy, batch, A, g, backtracks=needed + more, **setting)["accepted"] == found


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf, None])
def test_a_gradient_of_nothing_moves_nothing_and_leaves_the_others_unharmed(bad):
    policy = make(TASKS[1], [5, 8, 9])
    alone = replica(policy, 2)
    batch = a_batch(policy)
    A = an_advantage(batch)
    g = gradients(policy, batch, A)
    start = flat(policy.parameters())
    if bad is None:
        told = trust_region_step(policy, batch, A, [None] * len(g))
        assert not told["accepted"].any() and not any(value.isnan().any() for value in told.values())
        same(flat(policy.parameters()), start)
        return
    for x in g:
        x[1] *= 0
    g[3][1] += bad
    told = trust_region_step(policy, batch, A, g)
    assert told["accepted"].tolist() == [1, 0, 1]
    assert all(value[1] == 0 for value in told.values())
    same(flat(policy.parameters())[1], start[1])
    mine = batch._replace(
        **{
            name: x[2:]
            for name in ("targets", "tokens", "mask", "rewards", "success")
            if (x := getattr(batch, name)) is not None
        }
    )
    expected = trust_region_step(alone, mine, A[2:], [x[2:] for x in g])
    close(flat(policy.parameters())[2], flat(alone.parameters())[0], rtol=1e-9, atol=1e-11)
    for name, value in expected.items():
        close(told[name][2], value[0], rtol=1e-8)


def test_parameters_that_are_nan_or_an_advantage_that_is_harm_none_of_the_others():
    policy = make(TASKS[0], [5, 8, 9])
    batch = a_batch(policy)
    A = an_advantage(batch)
    g = gradients(policy, batch, A)
    expected = copy.deepcopy(policy)
    trust_region_step(expected, batch, A, g)
    with torch.no_grad():
        policy.recurrent_weight[0] = math.nan
    A[1, 2, 1] = math.nan
    start = flat(policy.parameters())
    told = trust_region_step(policy, batch, A, g)
    assert told["accepted"].tolist() == [0, 0, 1]
    same(flat(policy.parameters())[:2], start[:2])
    close(flat(policy.parameters())[2], flat(expected.parameters())[2])


def test_replicas_move_as_if_alone(task):
    """To rounding, at different numbers of halvings and iterations."""
    policy = make(task, [5, 8, 9, 3])
    singles = [replica(policy, k) for k in range(4)]
    batch = a_batch(policy, 3, 4)
    A = an_advantage(batch) * torch.tensor([1.0, 2.0, -1.0, 0.5]).view(4, 1, 1)
    g = gradients(policy, batch, A)
    setting = {"max_kl": 1.5, "damping": 0.003, "iterations": 6, "tolerance": 0.05}
    told = trust_region_step(policy, batch, A, g, **setting)
    assert len(set(told["step_fraction"].tolist())) > 1
    for k, single in enumerate(singles):
        mine = batch._replace(**{n: getattr(batch, n)[k : k + 1] for n in ("targets", "tokens", "mask", "rewards")})
        alone = trust_region_step(single, mine, A[k : k + 1], [x[k : k + 1] for x in g], **setting)
        close(flat(policy.parameters())[k], flat(single.parameters())[0], rtol=1e-8, atol=1e-10)
        assert alone["step_fraction"][0] == told["step_fraction"][k]


def test_the_ratio_has_the_denominator_of_the_behaviour():
    """C4: ``old_logprobs`` of another policy weight the surrogate; the KL is from the policy before the step."""
    policy = make(TASKS[1])
    sampler = copy_of(policy, temperature=3.0)
    batch = sampled_by(sampler, policy, ReplicaGenerator([0, 1]), 4, 3)
    batch = batch._replace(old_logprobs=batch.sampler_logprobs)
    A = an_advantage(batch)
    before = copy.deepcopy(policy)
    told = trust_region_step(policy, batch, A, gradients(policy, batch, A), max_kl=0.3)
    assert told["accepted"].all()
    for k in range(2):
        kl, growth = outcome(policy, before, batch, A, k, batch.old_logprobs)
        close(told["kl"][k], kl, rtol=1e-9)
        close(told["improvement"][k], growth, rtol=1e-9)
        assert growth != pytest.approx(outcome(policy, before, batch, A, k)[1], rel=1e-3)


def test_what_is_not_valid_has_no_part_in_the_surrogate():
    """NaN advantages there too."""
    policy = make(TASKS[1])
    batch = a_batch(policy)
    A = an_advantage(batch)
    valid = torch.ones_like(batch.success)
    valid[:, 1] = False
    g = gradients(policy, batch, A.masked_fill(~valid, 0))
    A = A.masked_fill(~valid, math.nan)
    batch = batch._replace(valid=valid)
    before = copy.deepcopy(policy)
    told = trust_region_step(policy, batch, A, g)
    assert told["accepted"].all()
    for k in range(2):
        kl, growth = outcome(policy, before, batch, A, k)
        close(told["kl"][k], kl, rtol=1e-9)
        close(told["improvement"][k], growth, rtol=1e-9)


def test_a_step_at_a_temperature_within_a_nucleus():
    policy = make(TASKS[0])
    policy.temperature, policy.top_p = 0.7, 0.9
    batch = a_batch(policy)
    A = an_advantage(batch)
    told = trust_region_step(policy, batch, A, gradients(policy, batch, A), max_kl=1e-3)
    assert told["accepted"].all() and (told["kl"] <= 1e-3).all() and (told["kl"] > 0).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_kl", 0.0),
        ("max_kl", math.inf),
        ("damping", -1.0),
        ("iterations", 0),
        ("backtracks", -1),
        ("tolerance", 1.0),
    ],
)
def test_settings_out_of_range_are_refused(name, value):
    policy = make(TASKS[0])
    batch = a_batch(policy)
    A = an_advantage(batch)
    with pytest.raises(ValueError, match=f"{name} {value} is out of range"):
        trust_region_step(policy, batch, A, gradients(policy, batch, A), **{name: value})


def test_gradients_of_other_parameters_are_refused():
    policy = make(TASKS[0])
    batch = a_batch(policy)
    A = an_advantage(batch)
    g = gradients(policy, batch, A)
    for wrong in (g[1:], [*g[:-1], g[0]], [x[:1] for x in g]):
        with pytest.raises(ValueError, match=r"one for each of policy\.parameters"):
            trust_region_step(policy, batch, A, wrong)
