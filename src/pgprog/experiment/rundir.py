"""The run directory: config, metrics and checkpoint, written so that a kill at any moment leaves them readable."""

import contextlib
import fcntl
import json
import os
import platform
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from pgprog.errors import UsageError, said

FORMAT = "pgprog-checkpoint-2"
CHECKPOINT = "checkpoint.safetensors"
METRICS = "metrics.jsonl"
CONFIG = "config.json"
LOCK = ".pgprog.lock"
RESULT = "result.json"
SUMMARY = "summary.json"
GRID = "grid.json"
ROWS_AT_ONCE = 250
_FILE = r"((config|result|summary|grid)\.json|metrics\.jsonl|checkpoint\.safetensors|\.pgprog\.lock)(\.partial)?"
_FIGURE = r"(learning_curves|final_success|success_by_target|gradient_noise|grid)\.(png|svg)"
_PAGE = rf"(results\.md|curves\.csv|{_FIGURE})(\.partial)?"
RUN_FILE = re.compile(rf"(runs/[a-z_-]+/)?{_FILE}|{_PAGE}")
RUN_FOLDER = re.compile(r"runs(/[a-z_-]+)?")


def run_of(comparison: Path, name: str) -> Path:
    """Where a comparison keeps one of its runs; not every file system takes the colon of a library's recipe."""
    return comparison / "runs" / name.replace(":", "-")


@contextlib.contextmanager
def open_run(directory: Path, *, overwrite: bool = False, resume: bool = False) -> Iterator[Path]:
    """Hold a run directory: made and empty, or as it was left where ``resume``; locked against a second process.

    Raises:
        UsageError: a run is in the way, or there is none to resume; another process holds it; it cannot be written.
    """
    if resume and not (directory / CONFIG).is_file():
        raise UsageError(f"--resume {directory} holds no run ({CONFIG} is missing): give the directory of one")
    with contextlib.ExitStack() as stack:
        try:
            if not resume:
                refuse_occupied(directory, overwrite)  # before anything is left there
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
            stack.enter_context(lock(directory))
            if not resume:
                refuse_occupied(directory, overwrite)  # by a process that was faster
                clear(directory)
        except OSError as error:
            raise UsageError(f"{directory} cannot be written ({error.strerror}): give a directory that can") from error
        yield directory


@contextlib.contextmanager
def lock(directory: Path, wait: float = 0.0) -> Iterator[None]:
    """Hold a directory's lock, which the system gives back when the process ends, however it ends.

    Raises:
        UsageError: another process holds it, after ``wait`` seconds; it is named.
    """
    deadline = time.monotonic() + wait
    with os.fdopen(os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), "r+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.05)
                    continue
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise UsageError(f"{directory} is in use by {holder}: wait for it, or give another directory") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}, since {now()}\n")
        file.flush()
        yield


def refuse_occupied(directory: Path, overwrite: bool) -> None:
    """Raise UsageError where files are in the way that are not to be replaced, or are not a run's."""
    never_begun = (LOCK, CONFIG + ".partial")  # what a kill before the first file was whole leaves
    if not directory.is_dir() or all(p.name in never_begun and not p.is_dir() for p in directory.iterdir()):
        return
    if not overwrite:
        raise UsageError(
            f"--out {directory} exists and is not empty: give another, --overwrite to replace it, "
            "or --resume to go on with it"
        )
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink() or not (RUN_FOLDER if path.is_dir() else RUN_FILE).fullmatch(name):
            raise UsageError(f"--overwrite: {path} is no file of a run, and would be lost: give another --out")
    config = directory / CONFIG
    if not config.is_file() or not _made_here(config):
        raise UsageError(f"--overwrite: {config} is missing or no run's, {directory} stays: give another --out")


def cure(path: Path) -> str:
    """What to do about a damaged file of a run: of a comparison's or a grid's only its own run is trained again."""
    run = path.parent
    whole = run.parent.parent
    if path.name == RESULT:
        return "remove it, and --resume evaluates again"
    if run.parent.name == "runs" and _is_ours(whole / CONFIG):
        if path.name == CONFIG:
            return f"--resume {whole} writes it again"
        return f"remove the folder {run}, and --resume {whole} trains that run again, and no other"
    return "it cannot be gone on with: train again, with another --out"


def _is_ours(config: Path) -> bool:
    try:
        return _made_here(config)
    except UsageError:
        return False


def _made_here(config: Path) -> bool:
    """Whether it is this project's; raises UsageError where it cannot be read."""
    content = read_json(config)
    return isinstance(content, dict) and "pgprog" in str(content.get("environment"))


def clear(directory: Path) -> None:
    """Remove a run, which ``refuse_occupied`` has found to be nothing else."""
    # Files before their folders, and the config last: a clearing that was cut short can be repeated.
    order = sorted(directory.rglob("*"), key=lambda path: (path == directory / CONFIG, -len(path.parts)))
    for path in order:
        if path.is_dir():
            path.rmdir()
        elif path != directory / LOCK:
            path.unlink()


def environment() -> dict[str, str]:
    """The versions that a result depends on, and the command that made it."""
    packages = {name: version(name) for name in ("pgprog", "torch", "numpy", "scipy")}
    return packages | {"python": platform.python_version(), "machine": platform.machine()}


def command() -> str:
    """The command line of this process, as a person would type it."""
    program = Path(sys.argv[0])
    shown = ["python", f"scripts/{program.name}"] if program.parent.name == "scripts" else ["pgprog"]
    return shlex.join([*shown, *sys.argv[1:]])


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_json(path: Path, content: Any) -> None:
    """Write a file whole or not at all."""
    write_bytes(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: to a neighbour first, then over it. An OSError names the file."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        with open(partial, "xb") as file:  # x: never through a link that somebody has put there
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()  # on a full disk it takes room, and in a new directory it would look like a run
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_json(path: Path) -> Any:
    """Read a JSON file; raise UsageError where it is missing or broken."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: give the directory of a run") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} cannot be read ({said(error)}): it is no file of a run, or is damaged; {cure(path)}"
        ) from error


class RowWriter:
    """Appends JSON objects to a file, one per line, some at a time; leaving the context writes the rest.

    With ``path`` None nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []

    def add(self, rows: list[dict[str, Any]]) -> None:
        if self._path is not None:
            self._rows += rows
            if len(self._rows) >= ROWS_AT_ONCE:
                self.flush()

    def flush(self) -> None:
        if self._path is not None and self._rows:
            rows, self._rows = self._rows, []  # no second try: it would go on from a line that was cut short
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            with os.fdopen(os.open(self._path, flags, 0o644), "a") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
                file.flush()
                os.fsync(file.fileno())

    def __enter__(self) -> "RowWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.flush()


def cut_rows(path: Path, last_step: int, seeds: Sequence[int]) -> None:
    """Drop the rows after a step, and a line that was cut short: what a killed run wrote past its checkpoint.

    In place, which a full disk has room for.

    Raises:
        UsageError: a line that is no row, or not the one that belongs there; rows that end before that step, for a run
            writes them before its checkpoint.
    """
    expected = ((step, seed) for step in range(1, last_step + 1) for seed in seeds)
    if not path.exists():
        return refuse_lost_rows(path, 0, last_step)
    kept = rows = 0
    with os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
        for (step, seed), line in zip(expected, file, strict=False):
            if not line.endswith(b"\n"):
                break
            try:
                refuse_other_row(json.loads(line), step, seed)
            except (ValueError, RecursionError) as error:
                raise UsageError(
                    f"{path}: line {rows + 1} is no row of metrics ({said(error)}): the file is damaged; {cure(path)}"
                ) from error
            kept, rows = kept + len(line), rows + 1
        refuse_lost_rows(path, rows // len(seeds), last_step)
        if os.fstat(file.fileno()).st_size > kept:
            file.truncate(kept)


def refuse_other_row(row: Any, step: int, seed: int) -> None:
    """Raise ValueError for what is no row of this step and seed."""
    if not isinstance(row, dict) or not all(isinstance(value, (int, float)) for value in row.values()):
        raise ValueError("it is no object of numbers")
    if (found := (row.get("step"), row.get("seed"))) != (step, seed):
        raise ValueError(f"it is of step {found[0]}, seed {found[1]}: step {step}, seed {seed} belongs there")
    if missing := {"rollouts", "success"} - row.keys():
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    if type(row["rollouts"]) is not int or not 0 <= row["success"] <= 1:
        raise ValueError(f"its rollouts are {row['rollouts']!r}, its success is {row['success']!r}"[:200])


def refuse_lost_rows(path: Path, reached: int, last_step: int) -> None:
    """Raise UsageError where rows are missing that the checkpoint had before it."""
    if reached != last_step:
        beside = [name for name in (CHECKPOINT, RESULT) if path.with_name(name).exists()]
        raise UsageError(
            f"{path} ends at step {reached}, its checkpoint is of step {last_step}: put the whole file back, "
            f"or remove {' and '.join(str(path.with_name(name)) for name in beside)}, and --resume begins again"
        )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a metrics file; raise UsageError where it is damaged."""
    try:
        with open(path) as file:
            return [json.loads(line) for line in file]
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no file of metrics ({said(error)}), or is damaged; {cure(path)}") from error


def rows_so_far(directory: Path) -> list[dict[str, Any]]:
    """The metrics that a run has written; none where it has not made a step."""
    path = directory / METRICS
    return read_rows(path) if path.exists() else []


def save_checkpoint(directory: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors and metadata (strings) to the checkpoint of a run, whole or not at all."""
    write_bytes(directory / CHECKPOINT, save(tensors, metadata={"format": FORMAT, **metadata}))


def load_checkpoint(directory: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and metadata, without unpickling.

    Raises: UsageError for a missing, damaged or foreign file; OSError for one that must not be read, with its name.
    """
    path = directory / CHECKPOINT
    try:
        with open(path, "rb"):  # for safetensors, one that must not be read is missing
            pass
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: give the directory of a run that has saved one") from None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise UsageError(
                    f"{path} is no checkpoint of this version ({FORMAT}): it says {metadata.get('format')!r}"
                )
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} cannot be read ({error}): it is damaged or no checkpoint") from error
