"""Errors that a user can mend: one line that names the value, the cause and the remedy."""

import errno
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class UsageError(Exception):
    """Something that was asked for cannot be done; the command line prints it as one line and exits with 2."""


def full(error: OSError) -> bool:
    """Whether a disk has no room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def said(error: BaseException) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def choose(what: str, value: str, choices: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``choices``; else raise UsageError with the nearest of them."""
    choices = list(choices)
    if value in choices:
        return value
    near = get_close_matches(value, choices, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(f"unknown {what} {value!r}: {hint}choose one of {', '.join(choices)}")


def refuse_twice(flag: str, names: Sequence[str]) -> None:
    """Raise UsageError where one of the names after a flag stands there twice."""
    if len(set(names)) < len(names):
        raise UsageError(f"{flag} {' '.join(names)} names one twice: give each once")
