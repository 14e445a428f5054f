"""A user's own advantage, FILE.py:function, checked at every call."""

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pgprog.errors import UsageError
from pgprog.policy import Rollout


def load_advantage(spec: str) -> Callable[[Rollout], Tensor]:
    """Load ``FILE.py:function`` as an advantage of a rollout.

    The function gets one replica at a time: ``rewards (P, G)``, and ``values (P,)`` as well if it has a second
    parameter without a default. It returns advantages (P, G), finite and detached. Importing the file runs its code.

    Raises:
        UsageError: no such file or function, a file that fails to import, or, at a call, a function that raises, or
            returns something else.
    """
    name, _, function_name = spec.rpartition(":")
    path = Path(name)
    if not name or not function_name or not path.is_file():
        raise UsageError(
            f"--advantage {spec!r} is not there: give FILE.py:function, a file that exists and a function in it"
        )
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    if module_spec is None or module_spec.loader is None:
        raise UsageError(f"--advantage {spec!r}: {path} is no Python file, give FILE.py:function")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"--advantage {spec!r}: {path} fails to import ({_said(error)})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = ", ".join(n for n, value in vars(module).items() if inspect.isfunction(value)) or "none"
        raise UsageError(f"--advantage {spec!r}: {path} has no function {function_name!r}, but: {names}")
    wanted = sum(p.default is p.empty for p in inspect.signature(function).parameters.values())
    if wanted not in (1, 2):
        raise UsageError(
            f"{spec} takes {wanted} arguments: rewards (P, G), or rewards and values (P,), are what it can get"
        )

    def advantage(batch: Rollout) -> Tensor:
        if wanted == 2 and batch.values is None:
            raise UsageError(
                f"{spec}: the function wants values, and this algorithm has no critic: take one argument, rewards"
            )
        results = []
        for k, rewards in enumerate(batch.rewards):
            arguments = (rewards, batch.values[k]) if wanted == 2 and batch.values is not None else (rewards,)
            try:
                result = function(*arguments)
            except Exception as error:
                raise UsageError(f"{spec} raised {_said(error)} on rewards of shape {tuple(rewards.shape)}") from error
            results.append(_checked(spec, result, rewards))
        return torch.stack(results)

    return advantage


def _checked(spec: str, result: object, rewards: Tensor) -> Tensor:
    wanted = f"a detached, finite tensor of shape {tuple(rewards.shape)} was expected"
    if not isinstance(result, Tensor):
        raise UsageError(f"{spec} returned {type(result).__name__}: {wanted}")
    if result.shape != rewards.shape:
        raise UsageError(f"{spec} returned shape {tuple(result.shape)}: {wanted}")
    if result.requires_grad:
        raise UsageError(f"{spec} returned a tensor with a live gradient: {wanted}")
    if not result.isfinite().all():
        raise UsageError(f"{spec} returned NaN or infinity: {wanted}")
    return result.to(rewards.dtype)


def _said(error: Exception) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
