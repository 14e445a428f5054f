"""The GRU and its written-out backward pass against torch.nn.GRUCell and autograd."""

import pytest
import torch

from oracles import close, gru_cell, same
from pgprog.gru import gather_inputs, scan, step, token_scores

K, N, INPUTS, H = 3, 4, 5, 6


def generic(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(steps):
    """Tokens (the last of the table's rows is never read), first state, table, U, b; all but the tokens are leaves."""
    tokens = torch.randint(0, INPUTS - 1, (K, steps, N), generator=torch.Generator().manual_seed(9))
    leaves = [generic(K, *shape, seed=i) for i, shape in enumerate([(N, H), (INPUTS, 3 * H), (H, 3 * H), (1, 3 * H)])]
    return tokens, [leaf.requires_grad_() for leaf in leaves]


def scan_tokens(tokens, h, *rest):
    """A scan without a prompt."""
    return scan(tokens.new_empty(K, 0, h.shape[1]), tokens, h, *rest)


def states_by_gru_cell(tokens, h, table, U, b):
    """(K, S + 1, N, H), one replica, one row and one step at a time."""
    replicas = []
    for k in range(K):
        weights = {"weight_ih": table[k].T, "weight_hh": U[k].T, "bias_ih": torch.zeros(3 * H), "bias_hh": b[k, 0]}
        rows = []
        for row in range(N):
            state = h[k, row]
            states = [state]
            for token in tokens[k, :, row].tolist():
                one_hot = torch.eye(INPUTS)[token]
                state = torch.func.functional_call(gru_cell(INPUTS, H), weights, (one_hot, state))
                states.append(state)
            rows.append(torch.stack(states))
        replicas.append(torch.stack(rows, dim=1))
    return torch.stack(replicas)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_states_and_all_gradients_of_a_scan_equal_those_of_torchs_gru_cell(steps):
    """A loss that weights every state, the first too, with a generic number."""
    tokens, leaves = inputs(steps)
    actual, expected = scan_tokens(tokens, *leaves), states_by_gru_cell(tokens, *leaves)
    close(actual, expected)
    upstream = generic(*expected.shape, seed=7)
    actual_grads = torch.autograd.grad(actual, leaves, upstream)
    expected_grads = torch.autograd.grad(expected, leaves, upstream, allow_unused=True)
    for leaf, a, e in zip(leaves, actual_grads, expected_grads, strict=True):
        close(a, torch.zeros_like(leaf) if e is None else e, rtol=1e-11, atol=1e-13)  # sums of some dozen terms


@pytest.mark.parametrize("prompt", [0, 1, 3])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_group_that_shares_its_prompt_is_its_rows_one_by_one(steps, prompt):
    """Each row apart reads the prompt itself, as the first of its tokens."""
    (before, _), (tokens, (h, table, U, b)) = inputs(prompt), inputs(steps)
    before, few = before[..., :2], h[:, :2].detach().requires_grad_()
    shared = scan(before, tokens, few, table, U, b)
    whole = torch.cat([before.repeat_interleave(2, dim=-1), tokens], dim=1)
    apart = scan_tokens(whole, few.repeat_interleave(2, dim=1), table, U, b)[:, prompt:]
    close(shared, apart)
    upstream = generic(*apart.shape, seed=7)
    leaves = [few, table, U, b]
    for a, e in zip(
        *(torch.autograd.grad(x, leaves, upstream, allow_unused=True) for x in (shared, apart)), strict=True
    ):
        close(a, e, rtol=1e-11, atol=1e-13)
    if steps:
        x = gather_inputs(table, tokens[:, 0])
        for a, e in zip(step(x, few, U, b), step(x, few.repeat_interleave(2, dim=1), U, b), strict=True):
            close(a, e)


def test_a_loss_of_the_last_state_alone_reaches_the_first():
    tokens, leaves = inputs(4)
    actual = torch.autograd.grad(scan_tokens(tokens, *leaves)[:, -1].sum(), leaves)
    expected = torch.autograd.grad(states_by_gru_cell(tokens, *leaves)[:, -1].sum(), leaves)
    for a, e in zip(actual, expected, strict=True):
        close(a, e, rtol=1e-11, atol=1e-13)


def test_a_scan_is_its_steps():
    tokens, (h, table, U, b) = inputs(3)
    states = scan_tokens(tokens, h, table, U, b)
    same(states[:, 0], h)
    for t in range(3):
        h = step(gather_inputs(table, tokens[:, t]), h, U, b).h
        close(states[:, t + 1], h)


def test_steps_that_are_handed_over_change_nothing():
    """The first of them of the prompt."""
    tokens, leaves = inputs(3)
    h, table, U, b = leaves
    known = []
    with torch.no_grad():
        for t in range(3):
            known.append(step(gather_inputs(table, tokens[:, t]), known[-1].h if known else h, U, b))
    results = [scan(tokens[:, :1], tokens[:, 1:], *leaves, steps) for steps in (None, known)]
    same(*results)
    upstream = generic(*results[0].shape, seed=7)
    for a, e in zip(*(torch.autograd.grad(states, leaves, upstream) for states in results), strict=True):
        same(a, e)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_of_tokens_and_all_their_gradients_equal_autograds(temperature):
    leaves = [generic(*shape, seed=i).requires_grad_() for i, shape in enumerate([(K, N, H), (K, H, 7), (K, 1, 7)])]
    h, W, b = leaves
    tokens = torch.randint(0, 7, (K, N), generator=torch.Generator().manual_seed(3))
    log_pi = ((h @ W + b) / temperature).log_softmax(-1)
    expected = log_pi.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), -(log_pi.exp() * log_pi).sum(-1)
    actual = token_scores(h, W, b, tokens, temperature)
    upstream = [generic(K, N, seed=i) for i in (7, 8)]
    for both in ([0, 1], [0], [1]):
        pair = ([scores[i] for i in both] for scores in (actual, expected))
        grads = [torch.autograd.grad(x, leaves, [upstream[i] for i in both], retain_graph=True) for x in pair]
        for a, e in zip(*grads, strict=True):
            close(a, e, rtol=1e-11, atol=1e-13)
    for a, e in zip(actual, expected, strict=True):
        close(a, e)


def test_replicas_get_no_gradient_from_each_other():
    tokens, leaves = inputs(3)
    for grad in torch.autograd.grad(scan_tokens(tokens, *leaves)[1].sum(), leaves):
        assert (grad[0] == 0).all() and (grad[2] == 0).all() and (grad[1] != 0).any()


def test_a_nan_in_one_replica_leaves_the_others_as_they_are():
    tokens, leaves = inputs(3)
    results = []
    for sick in (False, True):
        copies = [leaf.detach().clone() for leaf in leaves]
        if sick:
            copies[2][1, 0, 0] = torch.nan
        copies = [leaf.requires_grad_() for leaf in copies]
        states = scan_tokens(tokens, *copies)
        results.append([states, *torch.autograd.grad(states.sum(), copies)])
    for sound, beside in zip(*results, strict=True):
        same(sound[[0, 2]], beside[[0, 2]])


def test_a_second_derivative_is_refused_not_wrong():
    tokens, leaves = inputs(2)
    (grad,) = torch.autograd.grad(scan_tokens(tokens, *leaves).square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_tokens_are_looked_up_in_their_own_replicas_table():
    table = generic(K, INPUTS, 3).requires_grad_()
    tokens = torch.tensor([[[0, 4], [1, 1]], [[2, 0], [4, 3]], [[1, 2], [0, 1]]])
    rows = gather_inputs(table, tokens)
    weight = generic(*rows.shape, seed=3)
    (grad,) = torch.autograd.grad(rows, table, weight)
    expected = torch.zeros_like(table)
    for k in range(K):
        for i in range(2):
            for j in range(2):
                same(rows[k, i, j], table[k, tokens[k, i, j]])
                expected[k, tokens[k, i, j]] += weight[k, i, j]
    close(grad, expected)
