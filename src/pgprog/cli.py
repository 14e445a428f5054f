"""The command line: parses arguments, runs the command, and turns a user's mistake into one line."""

import contextlib
import dataclasses
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version
from itertools import dropwhile, takewhile
from typing import Any

import tyro

from pgprog.arguments import Compare, Grid, Sample, Train
from pgprog.doctor_command import Doctor
from pgprog.errors import UsageError, choose, full
from pgprog.exact.commands import Exact, Foundations
from pgprog.experiment.executor import start_server
from pgprog.imports import without_collection
from pgprog.plan_command import Plan
from pgprog.recipes_command import Recipes

COMMANDS: dict[str, tuple[type, str]] = {
    "train": (Train, "pgprog.commands:train"),
    "compare": (Compare, "pgprog.commands:compare"),
    "grid": (Grid, "pgprog.grid_command:grid"),
    "sample": (Sample, "pgprog.commands:sample"),
    "foundations": (Foundations, "pgprog.exact.commands:foundations"),
    "exact": (Exact, "pgprog.exact.commands:exact"),
    "recipes": (Recipes, "pgprog.recipes_command:recipes"),
    "plan": (Plan, "pgprog.plan_command:plan"),
    "doctor": (Doctor, "pgprog.doctor_command:doctor"),
}
"""Arguments of each command, and the function that takes them; imported when it is wanted, for it brings torch."""


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point: returns the exit code, 2 for a mistake of the user's."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parsed = parse(arguments)
        if isinstance(parsed, Compare | Grid):
            start_server()
        module, function = next(where for kind, where in COMMANDS.values() if type(parsed) is kind).split(":")
        with without_collection():
            command = importlib.import_module(module)
        code = int(getattr(command, function)(parsed))
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where it is said what is wrong with it
        return code
    except UsageError as error:
        complain(f"pgprog: error: {error}")
        return 2
    except MemoryError:
        complain("pgprog: error: not enough memory: give smaller sizes")
        return 2
    except BrokenPipeError:  # of a reader such as head, who has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        where = str(error.filename)[:200] if error.filename else "standard output, or a file"
        path = "give a path that can be read and written"
        remedy = "make room, then repeat, or --resume a run" if full(error) else path
        complain(f"pgprog: error: {where}: {error.strerror}: {remedy}")
        return 2
    except KeyboardInterrupt:
        complain("pgprog: interrupted")
        return 130


def complain(line: str) -> None:
    """Print to standard error, if there is one that takes it."""
    if sys.stderr is not None:  # to print, None is standard output
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)


def parse(arguments: list[str]) -> Any:
    """The typed arguments of a command; what cannot be parsed becomes a UsageError, in place of tyro's framed page."""
    if arguments == ["--version"]:
        print(f"pgprog {version('pgprog')}")
        sys.exit(0)
    if arguments and not arguments[0].startswith("-"):
        choose("command", arguments[0], COMMANDS)
    refuse_repeated_flags(arguments)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return _parse(arguments)
    except SystemExit as stop:
        if not stop.code:
            raise  # --help
        # A title, then what is wrong, then (below a rule) hints; in a frame where the terminal has one.
        lines = [line.strip("│╭╮╰╯─ \n") for line in said.getvalue().splitlines()][1:]
        message = list(takewhile(lambda line: line.strip("-"), dropwhile(lambda line: not line.strip("-"), lines)))
        command = arguments[0] if arguments and arguments[0] in COMMANDS else None
        see = " ".join(filter(None, ("pgprog", command, "--help")))
        raise UsageError(f"{plainly(' '.join(message).rstrip('.'), command)}; see {see}") from None


def plainly(message: str, command: str | None) -> str:
    """What tyro says, in words that a user knows, with the flag that is nearest to one that there is not."""
    message = re.sub(
        r"Error parsing (--[\w-]+): invalid literal for int\(\) .*: ('.*')", r"\1 \2 is no integer", message
    )
    message = re.sub(r"Error parsing (--[\w-]+): could not convert .*: ('.*')", r"\1 \2 is no number", message)
    message = re.sub(r"Error parsing (--[\w-]+): Could not find .*: \[('.*')\]", r"\1 \2 is no value for it", message)
    message = re.sub(r" \(applied to [^)]*\)", "", message)
    if command is not None and (found := re.match(r"Unrecognized (?:or misplaced )?options: (--[\w-]+)", message)):
        flags = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(COMMANDS[command][0])]
        if near := get_close_matches(found[1], flags, n=1):
            message += f"; did you mean {near[0]}?"
    return message


def refuse_repeated_flags(arguments: list[str]) -> None:
    """Raise UsageError for a flag given twice, of which the last would win in silence; the choices of --set add up."""
    given: set[str] = set()
    for word, behind in zip(arguments, [*arguments, ""][1:], strict=True):
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if flag == "--set":
            flag = f"--set {(value if equals else behind).partition('=')[0]}"
        if flag.startswith("--") and flag in given:
            raise UsageError(f"{flag} is given twice: give it once, with all that belongs to it")
        given.add(flag)


def _parse(arguments: list[str]) -> Any:
    return tyro.extras.subcommand_cli_from_dict(
        {name: kind for name, (kind, _) in COMMANDS.items()},
        prog="pgprog",
        description="Policy gradients for language models, from REINFORCE to GRPO, held against exact truth.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


if __name__ == "__main__":
    sys.exit(main())
