"""Adam in as few operations as can be, for models so small that a step costs what its calls cost.

torch's own Adam makes a dozen operations for every parameter, and importing what it brings along takes a second of
every process. Here all parameters of a group lie in one piece of memory, and so do their gradients: the formula is
written once, over a vector. Element by element it is torch's, so replicas stay apart.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


@runtime_checkable
class Optimizer(Protocol):
    """What ``update`` asks of an optimiser; those of ``torch.optim`` have it."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def step(self) -> Any:
        """Move the parameters by them."""


class Adam:
    """Adam over groups of parameters, each with a learning rate of its own.

        m = b1 m + (1 - b1) g,      v = b2 v + (1 - b2) g^2
        theta = theta - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Paper: Kingma & Ba 2015, arXiv:1412.6980, algorithm 1, with its defaults b1 = 0.9, b2 = 0.999, eps = 1e-8.

    Args:
        groups: ``params`` and ``lr`` of each; the parameters' storage is replaced here, so make it first and copy
            models afterwards. A parameter without a gradient counts as one whose gradient is 0.

    Raises: ValueError for a parameter twice, a group of none, or a learning rate that is negative or not finite.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        held = [id(p) for group in groups for p in group["params"]]
        if len(set(held)) < len(held) or not all(group["params"] for group in groups):
            raise ValueError(f"{len(held)} parameters in {len(groups)} groups: each once, and none of the groups empty")
        if bad := [group["lr"] for group in groups if not 0 <= group["lr"] < float("inf")]:
            raise ValueError(f"lr {bad[0]} is out of range: give 0 or a positive number")
        self.param_groups = [{"params": list(group["params"]), "lr": group["lr"]} for group in groups]
        self._vectors = [Vector(group["params"]) for group in self.param_groups]
        self._t = torch.zeros(())

    def zero_grad(self) -> None:
        """Every gradient is 0."""
        for vector in self._vectors:
            vector.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter by its gradient."""
        self._t += 1
        t = int(self._t)
        for group, vector in zip(self.param_groups, self._vectors, strict=True):
            g, m, v = vector.gradient(), vector.m, vector.v
            m.lerp_(g, 1 - BETA1)
            v.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
            denominator = v.sqrt().div_((1 - BETA2**t) ** 0.5).add_(EPS)
            vector.theta.addcdiv_(m, denominator, value=-group["lr"] / (1 - BETA1**t))

    def named_tensors(self) -> dict[str, Tensor]:
        """What a step goes on from, beside the parameters, by name; copied over, it brings the optimiser back."""
        held = {"step": self._t}
        for i, vector in enumerate(self._vectors):
            held |= {f"{i}.exp_avg": vector.m, f"{i}.exp_avg_sq": vector.v}
        return held


class Still:
    """Moves nothing: to read the gradient of a step."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)

    def zero_grad(self) -> None:
        """No parameter has a gradient."""
        for p in self._parameters:
            p.grad = None

    def step(self) -> None:
        """Stay."""


class Vector:
    """Parameters, their gradients and Adam's moments, each a vector; the parameters become views of the first."""

    theta: Float[Tensor, "D"]
    m: Float[Tensor, "D"]
    v: Float[Tensor, "D"]

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.theta = torch.cat([p.detach().flatten() for p in parameters])
        self._g, self.m, self.v = (torch.zeros_like(self.theta) for _ in range(3))
        self._views = [view.view_as(p) for view, p in zip(self._split(self._g), parameters, strict=True)]
        for view, p in zip(self._split(self.theta), parameters, strict=True):
            p.data = view.view_as(p)

    def _split(self, vector: Tensor) -> tuple[Tensor, ...]:
        return vector.split([p.numel() for p in self._parameters])

    def zero_grad(self) -> None:
        """Gradients are 0, and will be summed where ``gradient`` finds them."""
        self._g.zero_()
        for p, view in zip(self._parameters, self._views, strict=True):
            p.grad = view

    def gradient(self) -> Float[Tensor, "D"]:
        """The gradients as one vector; those that someone put elsewhere are fetched."""
        for p, view in zip(self._parameters, self._views, strict=True):
            if p.grad is None:
                view.zero_()
            elif p.grad is not view:
                view.copy_(p.grad)
        return self._g
