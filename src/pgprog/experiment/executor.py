"""Independent jobs on the machine's cores: one process and one thread each."""

import ctypes
import math
import multiprocessing as mp
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any

from pgprog.errors import UsageError
from pgprog.experiment.config import INSTRUMENTS_EVERY, RunConfig

REPORT_EVERY = 0.2  # seconds
STOPS = (signal.SIGINT, signal.SIGTERM)  # of Ctrl-C; of kill, systemd, docker and slurm
ORPHAN_SECONDS = 30.0


@dataclass(frozen=True)
class Job:
    """A run, under a name."""

    name: str
    config: RunConfig
    seeds: tuple[int, ...]
    directory: Path | None


@dataclass(frozen=True)
class Measurement:
    """The gradient noise of a run's algorithm, under the run's name."""

    name: str
    config: RunConfig


@dataclass(frozen=True)
class Progress:
    """Where a job is."""

    name: str
    step: int
    success: float


def run_jobs(
    jobs: Sequence[Job | Measurement],
    workers: int,
    checkpoint_every: int,
    on_progress: Callable[[Progress], None],
    on_idle: Callable[[], None] = lambda: None,
    instruments_every: int = INSTRUMENTS_EVERY,
    came: Sequence[int] = (),
) -> Iterator[tuple[Job | Measurement, Any]]:
    """Do the jobs and yield each, as it ends, with its Result or GradientNoise.

    Measurements come first: they are short, so a signal leaves none out once a run has begun. Then runs, longest first.
    ``on_idle`` is called once, when the last jobs leave a worker's core to this process.

    A signal in ``came``, of ``stop_on_interrupt``, asks the running jobs to stop where they are: they save and are
    yielded with what they reached, jobs that have not started are dropped, and KeyboardInterrupt is raised at the end.
    Exceptions of a job are raised here, after the others were stopped.
    """
    context = start_server()
    stop, reports = context.Event(), context.Queue()
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(stop, reports))
    others = mp.active_children()
    by_cost = sorted(jobs, key=_cost, reverse=True)
    # Workers inherit the held signals for life: this process gets them too, and says when to stop.
    with _main_left_out(), _signals_held():
        waiting: dict[Future[Any], Job | Measurement] = {
            pool.submit(_do, job, checkpoint_every, instruments_every): job for job in by_cost
        }
    try:
        idle = False
        while waiting:
            done, _ = wait(waiting, timeout=REPORT_EVERY, return_when=FIRST_COMPLETED)
            for progress in _drain(reports):
                on_progress(progress)
            if came:
                stop.set()
                for future in [f for f in waiting if f.cancel()]:
                    del waiting[future]
            for future in done & waiting.keys():
                job, result = waiting.pop(future), future.result()
                if isinstance(job, Job):  # a run that stood finished has told of no step
                    on_progress(Progress(job.name, result.steps, sum(result.success) / len(result.success)))
                yield job, result
            if not idle and len(waiting) < workers:
                idle = True
                on_idle()
    except BrokenProcessPool as error:
        for worker in set(mp.active_children()) - set(others):
            worker.kill()  # the pool sends them SIGTERM, which they do not hear, and waits
        pool.shutdown(cancel_futures=True)
        raise UsageError(
            "a worker process was killed, perhaps for want of memory: use --resume, or fewer --workers"
        ) from error
    except BaseException:
        stop.set()
        pool.shutdown(cancel_futures=True)
        raise
    for worker in set(mp.active_children()) - set(others):
        worker.kill()  # they have nothing left to do, and the pool would wait for one that cannot hear it
    pool.shutdown(wait=False)  # a process with torch takes a second to end: nobody needs to wait for that
    if came:
        raise KeyboardInterrupt


def _cost(job: Job | Measurement) -> float:
    """How long a job takes, fitted to measured times, in about 40 microseconds; only the order matters."""
    if isinstance(job, Measurement):
        return math.inf
    N, again = job.config.rollouts_per_step, job.config.choices.sampling.epochs - 1
    # The first epoch takes over what sampling has computed, the others read the tokens again.
    return job.config.steps * (150 + N + again * (50 + 1.75 * N))


def start_server() -> Any:
    """The context that makes workers; where it forks them from a server, that begins to import what they need now.

    Called before this process imports torch itself, it saves that time: both import at once, and workers are there in
    an instant. On other systems than Linux a fork of torch is not safe, so each worker imports it by itself.
    """
    if sys.platform != "linux":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["pgprog.experiment.worker_imports"])
    with _safe_path():
        resource_tracker.ensure_running()  # or the server would start it, and let the signals in again
        with _signals_held():
            forkserver.ensure_running()
    return context


@contextmanager
def _safe_path() -> Iterator[None]:
    """Start Python without the working directory on its path: a numpy.py there is not what torch imports."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


@contextmanager
def _main_left_out() -> Iterator[None]:
    """Start workers that do not import the program: it may be a notebook, or begin to compare once more."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def stop_on_interrupt() -> Iterator[list[int]]:
    """Turn Ctrl-C and SIGTERM into a request to stop, noted in the list; a second one acts as it would by itself.

    In a thread other than the main one, which has no signals, nothing comes.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def note(signum: int, frame: object) -> None:
        came.append(signum)
        for stop in STOPS:
            signal.signal(stop, act)
        with suppress(OSError):  # of a standard error that is closed
            if os.isatty(2):  # not print: a signal may come in the middle of one
                os.write(2, b"\nStopping, and saving what was reached.\n")

    def act(signum: int, frame: object) -> None:  # in Python, for a signal may be on its way while handlers change
        signal.signal(signum, previous[signal.Signals(signum)])
        signal.raise_signal(signum)

    previous = {stop: signal.getsignal(stop) for stop in STOPS}  # all of them before the first is replaced
    try:
        for stop in STOPS:
            signal.signal(stop, note)
        yield came
    finally:
        for stop, handler in previous.items():
            signal.signal(stop, handler)


def exit_code(came: Sequence[int]) -> int:
    """128 and the number of the signal that came first, as a shell has it; 0 where none came."""
    return 128 + came[0] if came else 0


@contextmanager
def _signals_held() -> Iterator[None]:
    """Let the signals that stop a run wait outside."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _drain(reports: Any) -> Iterator[Progress]:
    while True:
        try:
            yield reports.get_nowait()
        except queue.Empty:
            return


def keep_freed_memory() -> None:
    """Let this process keep up to a gigabyte that it has freed, where the C library is glibc; elsewhere do nothing.

    A step frees its tensors and the next one allocates the same sizes again. By default the C library would hand the
    large ones back to the kernel each time, which then clears every page of them anew.
    """
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # musl and macOS have no mallopt, Windows no CDLL(None)
        return
    mallopt(M_MMAP_THRESHOLD, 2**25)  # the most that a glibc before 2.35 accepts
    mallopt(M_TRIM_THRESHOLD, 2**30)


_worker: dict[str, Any] = {}


def _start_worker(stop: Any, reports: Any) -> None:
    import torch

    torch.set_num_threads(1)
    keep_freed_memory()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _worker.update(stop=stop, reports=reports)


def _die_with_parent() -> None:
    """End this process when the comparison was killed: its directory is for the next one."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _do(job: Job | Measurement, checkpoint_every: int, instruments_every: int) -> Any:
    from pgprog.experiment import rundir
    from pgprog.experiment.gradients import gradient_noise
    from pgprog.experiment.loop import run

    if isinstance(job, Measurement):
        return gradient_noise(job.config)
    last = 0.0

    def on_step(step: int, metrics: dict[str, Any]) -> None:
        nonlocal last
        if step == job.config.steps or time.monotonic() - last > REPORT_EVERY:
            last = time.monotonic()
            _worker["reports"].put(Progress(job.name, step, metrics["success"].mean().item()))

    stop = _worker["stop"].is_set
    if job.directory is None:
        return run(job.config, job.seeds, None, on_step, stop, instruments_every=0)
    with rundir.lock(job.directory, wait=ORPHAN_SECONDS):  # a worker of a killed comparison ends by itself
        return run(
            job.config, job.seeds, job.directory, on_step, stop, checkpoint_every, instruments_every=instruments_every
        )
