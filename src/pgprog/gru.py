"""A GRU with K replicas, and its backward pass written out.

    r, z = sigmoid(x_r + h U_r + b_r), sigmoid(x_z + h U_z + b_z)
    n    = tanh(x_n + r * (h U_n + b_n))
    h'   = n + z * (h - n)

The input of a step is one token, so its share ``x = (x_r, x_z, x_n)`` of the gates is a row of a table. ``step`` is
the formula; ``scan`` runs it over a sequence. Autograd could differentiate the scan, but would allocate every
intermediate of every step anew; the backward pass below goes through all steps in two buffers.
Shapes: K replicas, N rows, S steps, I input tokens, H hidden units.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable


class Step(NamedTuple):
    """What one step computes; ``h`` is the new state, the rest is what its derivative needs."""

    h: Float[Tensor, "K N H"]
    r: Float[Tensor, "K N H"]
    z: Float[Tensor, "K N H"]
    n: Float[Tensor, "K N H"]
    u_n: Float[Tensor, "K N H"]


def gather_inputs(table: Float[Tensor, "K I J"], tokens: Int[Tensor, "K *rows"]) -> Float[Tensor, "K *rows J"]:
    """Look the tokens up in each replica's table; differentiable."""
    K, inputs, width = table.shape
    offsets = inputs * torch.arange(K, device=tokens.device).view(K, *[1] * (tokens.dim() - 1))
    return table.flatten(0, 1).index_select(0, (tokens + offsets).flatten()).view(*tokens.shape, width)


def step(
    x: Float[Tensor, "K N J"], h: Float[Tensor, "K P H"], U: Float[Tensor, "K H J"], b: Float[Tensor, "K 1 J"]
) -> Step:
    """Advance every row by one token, J = 3 H; differentiable any number of times.

    Where x has G times as many rows as h, each state is that of G rows in turn: the first token of a group.
    """
    H = h.shape[-1]
    u = torch.baddbmm(b, h, U)
    if (G := x.shape[1] // h.shape[1]) > 1:
        u, h = u.repeat_interleave(G, dim=1), h.repeat_interleave(G, dim=1)
    r, z = torch.sigmoid(x[..., : 2 * H] + u[..., : 2 * H]).chunk(2, dim=-1)
    u_n = u[..., 2 * H :]
    # tanh(a) = 2 sigmoid(2 a) - 1, which takes a third of the time on a CPU.
    n = 2 * torch.sigmoid(2 * torch.addcmul(x[..., 2 * H :], r, u_n)) - 1
    return Step(torch.lerp(n, h, z), r, z, n, u_n)


def scan(
    tokens: Int[Tensor, "K S N"],
    h: Float[Tensor, "K P H"],
    table: Float[Tensor, "K I J"],
    U: Float[Tensor, "K H J"],
    b: Float[Tensor, "K 1 J"],
    steps: Sequence[Step] | None = None,
) -> Float[Tensor, "K S1 N H"]:
    """Read S tokens per row and return the S + 1 states, ``h`` first; differentiable once, except in the tokens.

    Where there are G times as many rows as in h, each state of h is the first of G rows in turn.
    ``steps``, where the same tokens have just been read from the same states, saves computing them again.
    """
    return _Scan.apply(tokens, h, table, U, b, steps)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, h: Tensor, table: Tensor, U: Tensor, b: Tensor, known: Sequence[Step] | None
    ) -> Tensor:
        K, S, N = tokens.shape
        states = h.new_empty(K, S + 1, N, h.shape[-1])
        states[:, 0] = h.repeat_interleave(N // h.shape[1], dim=1)
        steps, state = [], h
        for t in range(S):
            steps.append(known[t] if known else step(gather_inputs(table, tokens[:, t]), state, U, b))
            state = states[:, t + 1] = steps[-1].h
        ctx.save_for_backward(tokens, h, states, table, U, *(part for s in steps for part in s[1:]))
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_states: Tensor) -> tuple[Tensor | None, ...]:
        tokens, first, states, table, U, *saved = ctx.saved_tensors
        K, S, N = tokens.shape
        H = states.shape[-1]
        d_u, d_n = states.new_empty(K, N, 3 * H), states.new_empty(K, N, H)
        d_r, d_z, d_un = d_u.split(H, dim=-1)
        d_U, d_b, d_table = torch.zeros_like(U), U.new_zeros(K, 1, 3 * H), torch.zeros_like(table)
        one_hot = F.one_hot(tokens, table.shape[1]).to(states.dtype).mT
        d_h = d_states[:, S]
        for t in reversed(range(S)):
            h = states[:, t]
            r, z, n, u_n = saved[4 * t : 4 * t + 4]
            kept = d_h * z
            torch.ops.aten.tanh_backward.grad_input(d_h - kept, n, grad_input=d_n)
            torch.ops.aten.sigmoid_backward.grad_input(d_n * u_n, r, grad_input=d_r)
            torch.ops.aten.sigmoid_backward.grad_input((h - n).mul_(d_h), z, grad_input=d_z)
            torch.mul(d_n, r, out=d_un)
            d_table[..., : 2 * H] += torch.bmm(one_hot[:, t], d_u[..., : 2 * H])
            d_table[..., 2 * H :] += torch.bmm(one_hot[:, t], d_n)
            d_h = kept.add_(d_states[:, t])
            if t == 0:
                h, d_h, d_u = first, per_state(d_h, first), per_state(d_u, first)
            d_h = d_h.baddbmm_(d_u, U.mT)
            d_U.baddbmm_(h.mT, d_u)
            d_b += d_u.sum(1, keepdim=True)
        return None, per_state(d_h, first), d_table, d_U, d_b, None


def per_state(d: Float[Tensor, "K N D"], h: Float[Tensor, "K P H"]) -> Float[Tensor, "K P D"]:
    """Sum over the rows that share a state of h."""
    P = h.shape[1]
    return d if d.shape[1] == P else d.unflatten(1, (P, -1)).sum(2)


def token_scores(
    h: Float[Tensor, "K N H"],
    W: Float[Tensor, "K H V"],
    b: Float[Tensor, "K 1 V"],
    tokens: Int[Tensor, "K N"],
    temperature: float = 1.0,
) -> tuple[Float[Tensor, "K N"], Float[Tensor, "K N"]]:
    """log pi of the token after each state, and the entropy there; differentiable once.

        pi = softmax((h W + b) / temperature),        H = - sum_v pi_v log pi_v
        d log pi_a / d logit_v = [v = a] - pi_v,      d H / d logit_v = - pi_v (log pi_v + H)

    Autograd makes a dozen small operations of this, and hands back the derivative by h in a layout that ``scan`` would
    read slowly.
    """
    return _TokenScores.apply(h, W, b, tokens, temperature)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, W: Tensor, b: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = torch.baddbmm(b.mT, W.mT, h.mT)  # (K, V, N): a short axis costs least in the middle
        log_pi = (logits if temperature == 1 else logits / temperature).log_softmax(1)
        pi = log_pi.exp()
        entropies = -(pi * log_pi).sum(1)
        ctx.save_for_backward(h, W, tokens, log_pi, pi, entropies)
        ctx.temperature = temperature
        return log_pi.gather(1, tokens.unsqueeze(1)).squeeze(1), entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Tensor, d_entropies: Tensor) -> tuple[Tensor | None, ...]:
        h, W, tokens, log_pi, pi, entropies = ctx.saved_tensors
        d_logprobs = d_logprobs.unsqueeze(1)
        d = (log_pi + entropies.unsqueeze(1)).mul_(d_entropies.unsqueeze(1)).add_(d_logprobs).mul_(pi).neg_()
        d.scatter_add_(1, tokens.unsqueeze(1), d_logprobs)
        if ctx.temperature != 1:
            d /= ctx.temperature
        return torch.bmm(d.mT, W.mT), torch.bmm(d, h).mT, d.sum(2, keepdim=True).mT, None, None
