"""A GRU with K replicas, and its backward pass written out.

    r, z = sigmoid(x_r + h U_r + b_r), sigmoid(x_z + h U_z + b_z)
    n    = tanh(x_n + r * (h U_n + b_n))
    h'   = n + z * (h - n)

The input of a step is one token, so its share ``x = (x_r, x_z, x_n)`` of the gates is a row of a table. ``step`` is
the formula; ``scan`` runs it over a sequence. Autograd could differentiate the scan, but would multiply for the
gradient of U once per step; the backward pass below collects the steps and multiplies once.
Shapes: K replicas, N rows, S steps, I input tokens, H hidden units.
"""

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
    x: Float[Tensor, "K N J"], h: Float[Tensor, "K N H"], U: Float[Tensor, "K H J"], b: Float[Tensor, "K 1 J"]
) -> Step:
    """Advance every row by one token, J = 3 H; differentiable any number of times."""
    H = h.shape[-1]
    u = torch.baddbmm(b, h, U)
    r, z = torch.sigmoid(x[..., : 2 * H] + u[..., : 2 * H]).chunk(2, dim=-1)
    u_n = u[..., 2 * H :]
    # tanh(a) = 2 sigmoid(2 a) - 1, which takes a third of the time on a CPU.
    n = 2 * torch.sigmoid(2 * (x[..., 2 * H :] + r * u_n)) - 1
    return Step(n + z * (h - n), r, z, n, u_n)


def scan(
    tokens: Int[Tensor, "K S N"],
    h: Float[Tensor, "K N H"],
    table: Float[Tensor, "K I J"],
    U: Float[Tensor, "K H J"],
    b: Float[Tensor, "K 1 J"],
) -> Float[Tensor, "K S1 N H"]:
    """Read S tokens per row and return the S + 1 states, ``h`` first; differentiable once, except in the tokens."""
    return _Scan.apply(tokens, h, table, U, b)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, h: Tensor, table: Tensor, U: Tensor, b: Tensor) -> Tensor:
        inputs = gather_inputs(table, tokens)
        states = h.new_empty(h.shape[0], tokens.shape[1] + 1, *h.shape[1:])
        states[:, 0] = h
        steps = []
        for t, x in enumerate(inputs.unbind(1)):
            steps.append(step(x, states[:, t], U, b))
            states[:, t + 1] = steps[-1].h
        ctx.save_for_backward(tokens, states, table, U, *(part for s in steps for part in s[1:]))
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_states: Tensor) -> tuple[Tensor | None, ...]:
        tokens, states, table, U, *saved = ctx.saved_tensors
        K, S, N = tokens.shape
        H = states.shape[-1]
        d_u = states.new_empty(K, S, N, 3 * H)  # of h U + b
        d_n = states.new_empty(K, S, N, H)  # of the argument of tanh; those of the two sigmoids are in d_u
        d_h = d_states[:, S]
        for t in reversed(range(S)):
            r, z, n, u_n = saved[4 * t : 4 * t + 4]
            kept = d_h * z
            a = torch.ops.aten.tanh_backward(d_h - kept, n)
            d_n[:, t] = a
            d_u[:, t, :, :H] = torch.ops.aten.sigmoid_backward(a * u_n, r)
            d_u[:, t, :, H : 2 * H] = torch.ops.aten.sigmoid_backward(d_h * (states[:, t] - n), z)
            d_u[:, t, :, 2 * H :] = a * r
            d_h = torch.baddbmm(kept + d_states[:, t], d_u[:, t], U.mT)
        d_u, d_n = d_u.flatten(1, 2), d_n.flatten(1, 2)
        one_hot = F.one_hot(tokens.flatten(1), table.shape[1]).to(states.dtype).mT
        d_table = torch.cat([torch.bmm(one_hot, d_u[..., : 2 * H]), torch.bmm(one_hot, d_n)], dim=-1)
        d_U = torch.bmm(states[:, :S].flatten(1, 2).mT, d_u)
        return None, d_h, d_table, d_U, d_u.sum(1, keepdim=True)
