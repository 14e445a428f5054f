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
    rz: Float[Tensor, "K N 2H"]
    """r and z, side by side."""
    n: Float[Tensor, "K N H"]
    u_n: Float[Tensor, "K N H"]


def gather_inputs(table: Float[Tensor, "K I J"], tokens: Int[Tensor, "K *rows"]) -> Float[Tensor, "K *rows J"]:
    """Look the tokens up in each replica's table; differentiable."""
    K, inputs, width = table.shape
    offsets = torch.arange(0, K * inputs, inputs, device=tokens.device).view(K, *[1] * (tokens.dim() - 1))
    return table.flatten(0, 1).index_select(0, (tokens + offsets).flatten()).view(*tokens.shape, width)


def step(
    x: Float[Tensor, "K N J"], h: Float[Tensor, "K P H"], U: Float[Tensor, "K H J"], b: Float[Tensor, "K 1 J"]
) -> Step:
    """Advance every row by one token, J = 3 H; differentiable any number of times.

    Where x has G times as many rows as h, each state is that of G rows in turn: the first token of a group.
    """
    H, rows = h.shape[-1], x.shape[1]
    u = per_row(torch.baddbmm(b, h, U), rows)
    rz = (x[..., : 2 * H] + u[..., : 2 * H]).sigmoid_()
    r, z = rz.chunk(2, dim=-1)
    u_n = u[..., 2 * H :]
    # tanh(a) = 2 sigmoid(2 a) - 1, which takes a third of the time on a CPU.
    n = torch.rsub(torch.addcmul(x[..., 2 * H :], r, u_n).mul_(2).sigmoid_(), -1, alpha=-2)
    return Step(torch.lerp(n, per_row(h, rows), z), rz, n, u_n)


def scan(
    prompt: Int[Tensor, "K S0 P"],
    tokens: Int[Tensor, "K S N"],
    h: Float[Tensor, "K P H"],
    table: Float[Tensor, "K I J"],
    U: Float[Tensor, "K H J"],
    b: Float[Tensor, "K 1 J"],
    steps: Sequence[Step] | None = None,
) -> Float[Tensor, "K S1 N H"]:
    """Read a prompt and then S tokens, and return the S + 1 states from the end of the prompt on.

    Each prompt is that of G rows of tokens in turn, N = P G, and is read once. Differentiable once, except in the
    tokens. ``steps``, where the same tokens have just been read from the same states, saves computing them again.
    """
    return _Scan.apply(prompt, tokens, h, table, U, b, steps)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        prompt: Tensor,
        tokens: Tensor,
        h: Tensor,
        table: Tensor,
        U: Tensor,
        b: Tensor,
        known: Sequence[Step] | None,
    ) -> Tensor:
        steps: list[Step] = list(known or [])
        if not known:
            for x in (x for read in (prompt, tokens) for x in gather_inputs(table, read).unbind(1)):
                steps.append(step(x, steps[-1].h if steps else h, U, b))
        ctx.save_for_backward(prompt, tokens, h, table, U, *(part for s in steps for part in s))
        after, *others = [h, *(s.h for s in steps)][prompt.shape[1] :]
        return torch.stack([per_row(after, tokens.shape[2]), *others], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_states: Tensor) -> tuple[Tensor | None, ...]:
        prompt, tokens, h, table, U, *saved = ctx.saved_tensors
        (K, inputs, J), H, S0 = table.shape, h.shape[-1], prompt.shape[1]
        steps = [Step(*saved[i : i + 4]) for i in range(0, len(saved), 4)]
        states = [h, *(s.h for s in steps)]
        one_hots = [x for read in (prompt, tokens) for x in F.one_hot(read, inputs).to(U.dtype).mT.unbind(1)]
        d_U, d_b, d_x = torch.zeros_like(U), U.new_zeros(K, 1, J), U.new_zeros(K, inputs, J + H)
        d_h, d = per_state(d_states[:, -1], states[-1].shape[1]), U.new_empty(K, 0, J + H)
        for i in reversed(range(len(steps))):
            _, rz, n, u_n = steps[i]
            (r, z), h, rows = rz.chunk(2, dim=-1), states[i], n.shape[1]
            if d.shape[1] != rows:
                d = U.new_empty(K, rows, J + H)  # by r, z and u_n, which reach U and b, and by n's own argument
            d_r, d_z, d_un, d_n = d.split(H, dim=-1)
            d_rz, d_u = d[..., : 2 * H], d[..., :J]
            kept = d_h * z
            torch.sub(d_h, kept, out=d_n)
            torch.ops.aten.tanh_backward.grad_input(d_n, n, grad_input=d_n)
            torch.mul(d_n, u_n, out=d_r)
            torch.sub(per_row(h, rows), n, out=d_z).mul_(d_h)
            torch.ops.aten.sigmoid_backward.grad_input(d_rz, rz, grad_input=d_rz)
            torch.mul(d_n, r, out=d_un)
            d_x += torch.bmm(one_hots[i], d)
            d_h = kept.add_(d_states[:, i - S0]) if i >= S0 else kept
            d_h, d_u = per_state(d_h, h.shape[1]), per_state(d_u, h.shape[1])
            d_h = d_h.baddbmm_(d_u, U.mT)
            d_U.baddbmm_(h.mT, d_u)
            d_b += d_u.sum(1, keepdim=True)
        d_table = torch.cat([d_x[..., : 2 * H], d_x[..., J:]], dim=-1)
        return None, None, d_h, d_table, d_U, d_b, None


def per_row(h: Float[Tensor, "K P D"], rows: int) -> Float[Tensor, "K N D"]:
    """What each row reads, where rows share it in turn."""
    return h if h.shape[1] == rows else h.repeat_interleave(rows // h.shape[1], dim=1)


def per_state(d: Float[Tensor, "K N D"], states: int) -> Float[Tensor, "K P D"]:
    """Sum over the rows that share a state: the derivative of ``per_row``."""
    return d if d.shape[1] == states else d.unflatten(1, (states, -1)).sum(2)


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
