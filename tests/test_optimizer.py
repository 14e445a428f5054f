"""Adam in vectors is torch's Adam."""

import pytest
import torch
from torch import nn

from oracles import close, same
from pgprog.optimizer import Adam, Optimizer, Still


def parameters(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(2, *shape, generator=generator, dtype=dtype)) for shape in ((3, 4), (1, 5), (7,))]


def gradients(step, like):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator, dtype=p.dtype) * 10.0 ** (i - 1) for i, p in enumerate(like)]


@pytest.mark.parametrize("how", ["backward", "assigned"])
def test_every_step_is_that_of_torch(how):
    mine, theirs = parameters(0), parameters(0)
    groups = [([0, 1], 0.1), ([2], 0.01)]
    ours = Adam([{"params": [mine[i] for i in which], "lr": lr} for which, lr in groups])
    torchs = torch.optim.Adam([{"params": [theirs[i] for i in which], "lr": lr} for which, lr in groups])
    for step in range(6):
        for optimizer in (ours, torchs):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimizer.zero_grad()
        for i, (p, q, g) in enumerate(zip(mine, theirs, gradients(step, mine), strict=True)):
            if step == 3 and i == 1:  # torch would skip a missing gradient: 0 is what it means here
                q.grad = torch.zeros_like(q)
                p.grad = None
                continue
            q.grad = g.clone()
            if how == "backward":
                (p * g).sum().backward()
            else:
                p.grad = g.clone()
        ours.step(), torchs.step()
        for p, q in zip(mine, theirs, strict=True):
            close(p, q, rtol=1e-15, atol=1e-16)


def test_what_it_names_brings_it_back():
    mine, later = parameters(0), parameters(1)
    one, other = (Adam([{"params": ps[:2], "lr": 0.1}, {"params": ps[2:], "lr": 0.2}]) for ps in (mine, later))
    for step in range(4):
        if step == 2:
            for name, tensor in other.named_tensors().items():
                tensor.copy_(one.named_tensors()[name])
            with torch.no_grad():
                for p, q in zip(later, mine, strict=True):
                    p.copy_(q)
        for p, q, g in zip(mine, later, gradients(step, mine), strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        one.step(), other.step()
    for p, q in zip(mine, later, strict=True):
        same(p, q)
    assert one.named_tensors().keys() == {"step", "0.exp_avg", "0.exp_avg_sq", "1.exp_avg", "1.exp_avg_sq"}


def test_parameters_keep_their_values_and_their_shapes():
    before, after = parameters(0), parameters(0)
    Adam([{"params": after, "lr": 0.1}])
    for p, q in zip(before, after, strict=True):
        same(p, q)


def test_gradients_do_not_pile_up():
    (p,) = mine = parameters(0)[:1]
    optimizer = Adam([{"params": mine, "lr": 0.1}])
    for _ in range(2):
        optimizer.zero_grad()
        p.sum().backward()
        same(p.grad, torch.ones_like(p))


def test_a_gradient_that_is_taken_away_after_the_backward_pass_counts_as_0():
    (p,) = mine = parameters(0)[:1]
    optimizer, before = Adam([{"params": mine, "lr": 0.1}]), p.detach().clone()
    optimizer.zero_grad()
    p.sum().backward()
    p.grad = None
    optimizer.step()
    same(p, before)


def test_what_cannot_be_stepped_is_refused():
    p, q, _ = parameters(0)
    for groups in ([{"params": [p, p], "lr": 0.1}], [{"params": [], "lr": 0.1}], [{"params": [q], "lr": float("nan")}]):
        with pytest.raises(ValueError, match=r"each once|out of range"):
            Adam(groups)


def test_a_nan_stays_with_its_own_element():
    (p,) = mine = parameters(0)[:1]
    optimizer = Adam([{"params": mine, "lr": 0.1}])
    p.grad = torch.ones_like(p)
    p.grad[1, 0, 0] = torch.nan
    optimizer.step()
    assert p.isnan().sum() == 1 and p[1, 0, 0].isnan()


def test_still_moves_nothing_and_forgets():
    mine, before = parameters(0), parameters(0)
    still = Still(mine)
    mine[0].grad = torch.ones_like(mine[0])
    still.step()
    for p, q in zip(mine, before, strict=True):
        same(p, q)
    still.zero_grad()
    assert all(p.grad is None for p in mine)
    assert isinstance(still, Optimizer) and isinstance(torch.optim.SGD(mine, lr=0.1), Optimizer)
