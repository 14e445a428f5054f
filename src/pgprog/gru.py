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
    x: Float[Tensor, "K N J"], h: Float[Tensor, "K N H"], U: Float[Tensor, "K H J"], b: Float[Tensor, "K 1 J"]
) -> Step:
    """Advance every row by one token, J = 3 H; differentiable any number of times."""
    H = h.shape[-1]
    u = torch.baddbmm(b, h, U)
    r, z = torch.sigmoid(x[..., : 2 * H] + u[..., : 2 * H]).chunk(2, dim=-1)
    u_n = u[..., 2 * H :]
    # tanh(a) = 2 sigmoid(2 a) - 1, which takes a third of the time on a CPU.
    n = 2 * torch.sigmoid(2 * torch.addcmul(x[..., 2 * H :], r, u_n)) - 1
    return Step(torch.lerp(n, h, z), r, z, n, u_n)


def scan(
    tokens: Int[Tensor, "K S N"],
    h: Float[Tensor, "K N H"],
    table: Float[Tensor, "K I J"],
    U: Float[Tensor, "K H J"],
    b: Float[Tensor, "K 1 J"],
    steps: Sequence[Step] | None = None,
) -> Float[Tensor, "K S1 N H"]:
    """Read S tokens per row and return the S + 1 states, ``h`` first; differentiable once, except in the tokens.

    ``steps``, where the same tokens have just been read from the same states, saves computing them again.
    """
    return _Scan.apply(tokens, h, table, U, b, steps)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, h: Tensor, table: Tensor, U: Tensor, b: Tensor, known: Sequence[Step] | None
    ) -> Tensor:
        states = h.new_empty(h.shape[0], tokens.shape[1] + 1, *h.shape[1:])
        states[:, 0] = h
        steps = []
        for t in range(tokens.shape[1]):
            steps.append(known[t] if known else step(gather_inputs(table, tokens[:, t]), states[:, t], U, b))
            states[:, t + 1] = steps[-1].h
        ctx.save_for_backward(tokens, states, table, U, *(part for s in steps for part in s[1:]))
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_states: Tensor) -> tuple[Tensor | None, ...]:
        tokens, states, table, U, *saved = ctx.saved_tensors
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
            d_h = kept.add_(d_states[:, t]).baddbmm_(d_u, U.mT)
            d_U.baddbmm_(h.mT, d_u)
            d_b += d_u.sum(1, keepdim=True)
            d_table[..., : 2 * H] += torch.bmm(one_hot[:, t], d_u[..., : 2 * H])
            d_table[..., 2 * H :] += torch.bmm(one_hot[:, t], d_n)
        return None, d_h, d_table, d_U, d_b, None


def read_out(h: Float[Tensor, "K N H"], W: Float[Tensor, "K H V"], b: Float[Tensor, "K 1 V"]) -> Float[Tensor, "K V N"]:
    """The logits after each state, V before N; differentiable once.

    Autograd would hand back the derivative by h with N and H exchanged in memory, which ``scan`` would read slowly.
    """
    return _ReadOut.apply(h, W, b)


class _ReadOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, W: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(h, W)
        return torch.baddbmm(b.mT, W.mT, h.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, ...]:
        h, W = ctx.saved_tensors
        return torch.bmm(d.mT, W.mT), torch.bmm(d, h).mT, d.sum(2, keepdim=True).mT
