"""Large imports, without the garbage collector that looks on."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Hold the garbage collector while modules are imported: it would find nothing, in a fifth of the time.

    In a process that has called ``gc.freeze`` before, since it is all our own, what was imported is frozen too: then no
    later collection goes through half a million objects that stay.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() > 0:
            gc.freeze()
        gc.enable()
