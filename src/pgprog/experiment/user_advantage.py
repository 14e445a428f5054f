"""A user's own advantage, FILE.py:function, checked at every call."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pgprog.errors import UsageError, said
from pgprog.foreign import call_on_rewards
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
    if not name or not function_name:
        raise UsageError(f"--advantage {spec!r} names no function: give FILE.py:function")
    if not path.is_file():
        raise UsageError(
            f"--advantage {spec!r} is not there: give FILE.py:function, a file that exists and a function in it"
        )
    module_spec = importlib.util.spec_from_file_location(f"pgprog_user_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise UsageError(f"--advantage {spec!r}: {path} is no Python file, give FILE.py:function")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickles look there
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(f"--advantage {spec!r}: {path} fails to import ({said(error)})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = ", ".join(n for n, value in vars(module).items() if inspect.isfunction(value)) or "none"
        raise UsageError(f"--advantage {spec!r}: {path} has no function {function_name!r}, but: {names}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        raise UsageError(f"{spec} shows no signature: give a function written in Python") from error
    fixed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if named := [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]:
        raise UsageError(f"{spec} wants {named[0]} by name: it gets rewards, or rewards and values, by place")
    wanted = sum(p.default is p.empty and p.kind in fixed for p in parameters)
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
        for k, rewards in enumerate(batch.rewards.clone()):  # a copy: a function may work in place
            arguments: tuple[Tensor, ...] = (rewards,)
            if wanted == 2 and batch.values is not None:
                arguments = (rewards, batch.values[k].clone())
            results.append(call_on_rewards(spec, function, *arguments))
        return torch.stack(results)

    return advantage
