"""Notes the functions of the product that a server's processes enter. It runs in these, as the
preamble of a server of the tests (harness/live.py).
"""

import mmap
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import flying_serving

NUMBER, ENTRIES = "window", "entries"
"""Files of a recording: a byte, the number of the window that is open, or 0; a line for each
function that a process enters in a window for the first time.
"""
PRODUCT = f"{Path(flying_serving.__file__).parent}/"


def watch(folder: str) -> None:
    """Note entries into `folder` from now on, in this thread, in all later ones and in forks."""
    with Path(folder, NUMBER).open("rb") as file:
        number = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
    entries = Path(folder, ENTRIES)
    seen: dict[int, CodeType] = {}  # what has run in the window `seen_in`, by its id
    seen_in = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal seen_in
        window = number[0]
        if event != "call" or not window:
            return
        if window != seen_in:
            seen.clear()
            seen_in = window
        code = frame.f_code
        if id(code) not in seen:
            seen[id(code)] = code
            if code.co_filename.startswith(PRODUCT):
                path = code.co_filename.removeprefix(PRODUCT)
                # lines of several processes do not mix: each is written at once, at the end
                with entries.open("a", encoding="utf-8") as lines:
                    lines.write(f"{window}\t{time.monotonic()}\t{path}\t{code.co_qualname}\n")

    threading.setprofile(note)
    sys.setprofile(note)
