"""The C heap of an engine's process."""

import ctypes

_LIBRARY = ctypes.CDLL(None)
_TCMALLOC = getattr(_LIBRARY, "MallocExtension_ReleaseFreeMemory", None)
_GLIBC = getattr(_LIBRARY, "malloc_trim", None)


def give_back_freed() -> None:
    """Return freed memory to the system, where the allocator can: tcmalloc, which vLLM's CPU wheels
    preload, or glibc.

    The large steps that are measured at start leave tens of MiB in each engine, which it would
    keep.
    """
    if _TCMALLOC is not None:
        _TCMALLOC()
    elif _GLIBC is not None:
        _GLIBC(0)
