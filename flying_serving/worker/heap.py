"""The C heap of an engine's process."""

import ctypes


def give_back_freed() -> None:
    """Return freed memory to the system, where the C library can (glibc's malloc_trim).

    The large steps that are measured at start leave tens of MiB behind in each engine, which glibc would keep.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
