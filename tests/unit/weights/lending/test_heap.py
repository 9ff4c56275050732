"""weights/lending/heap.py, in a process of its own: what other tests have freed must not count."""

import subprocess
import sys

PROGRAM = """
import ctypes, os, psutil
from flying_serving.weights.lending.heap import give_back_freed
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
blocks = [libc.malloc(4096) for _ in range(20_000)]
for block in blocks:
    ctypes.memset(block, 1, 4096)
for block in blocks[:-1]:
    libc.free(ctypes.c_void_p(block))
before = psutil.Process().memory_info().rss
give_back_freed()
print(before - psutil.Process().memory_info().rss)
"""


def test_freed_memory_below_memory_in_use_is_given_back() -> None:
    """80 MB, all but the last 4 KB free: glibc alone gives back only what lies above that."""
    given = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(given.stdout) > 50_000_000
