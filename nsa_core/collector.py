"""Python's collector of garbage while modules are loaded."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collect_nothing() -> Iterator[None]:
    """Leave the collector out while torch is loaded, and what was loaded out of it for good.

    It would walk a heap that grows and of which nothing dies, again and again: a tenth of the time
    that loading takes. Inside another such block this one does nothing.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
