"""An arena of a CUDA device: its pages come and go, and another process maps them: `python -m
benchmarks.device_arena`.

Every page gets a number. Every second page is then released and backed again, and the pages beside
it keep their numbers. A process of its own maps the arena by descriptors, reads the numbers and
writes others.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch

from flying_serving.memory.cuda_arena import CudaArena
from flying_serving.memory.cuda_device import CudaDevice, cuda_driver
from flying_serving.memory.shared_arena import SharedArena, map_arena, share_arena

PAGES, NUMBERS = 128, 100
PEER_S = 60.0


def number_of(page: int) -> int:
    """Return the number that a page gets, never 0."""
    return 1 + page % NUMBERS


def pages_that_differ(memory: torch.Tensor, pages: range, page_bytes: int, added: int) -> list[int]:
    """Return the pages of int8 memory whose bytes are not all their number plus `added`."""
    return [
        page
        for page in pages
        if not bool((_page(memory, page, page_bytes) == number_of(page) + added).all())
    ]


def write_numbers(memory: torch.Tensor, pages: range, page_bytes: int, added: int) -> None:
    """Write each page's number plus `added` into all its bytes."""
    for page in pages:
        _page(memory, page, page_bytes).fill_(number_of(page) + added)


def back_and_release(arena: CudaArena, pages: int) -> dict[str, float]:
    """Back all pages, release every second one, and back it again. Pages have numbers afterwards.

    Returns:
        the median microseconds to back a page, and to release one.

    Raises:
        AssertionError: naming the pages that lost their numbers.
    """
    page_bytes, all_pages, second = arena.page_bytes, range(pages), range(1, pages, 2)
    backed_us = [_us(arena.back, page * page_bytes, page_bytes) for page in all_pages]
    memory = arena.tensor(0, arena.size_bytes)
    write_numbers(memory, all_pages, page_bytes, 0)

    released_us = [_us(arena.release, page * page_bytes, page_bytes) for page in second]
    _require_none(pages_that_differ(memory, range(0, pages, 2), page_bytes, 0), "beside released")

    backed_us += [_us(arena.back, page * page_bytes, page_bytes) for page in second]
    write_numbers(memory, second, page_bytes, 0)
    _require_none(pages_that_differ(memory, all_pages, page_bytes, 0), "that came back")
    return {"back_us": median(backed_us), "release_us": median(released_us)}


def read_as_peer(shared: SharedArena, pages: int, device: CudaDevice) -> list[int]:
    """Map the arena of another process, read its numbers, and write each plus one.

    Returns the pages with other numbers.
    """
    memory = map_arena(shared, "the benchmark", device)
    differ = pages_that_differ(memory, range(pages), device.page_bytes, 0)
    write_numbers(memory, range(pages), device.page_bytes, 1)
    device.synchronize()
    return differ


def shared_with(arena: CudaArena, pages: int, peer: Callable[[SharedArena], list[int]]) -> float:
    """Let a peer map the arena, as `read_as_peer`. Returns the milliseconds that the peer took.

    Raises:
        AssertionError: if one of the two does not see the other's numbers.
    """
    with tempfile.TemporaryDirectory() as folder:
        shared, server = share_arena(arena, f"{folder}/arena")
        with closing(server):
            began_s = time.perf_counter()
            _require_none(peer(shared), "that a peer sees otherwise")
            took_ms = 1e3 * (time.perf_counter() - began_s)
    memory = arena.tensor(0, arena.size_bytes)
    _require_none(
        pages_that_differ(memory, range(pages), arena.page_bytes, 1), "of a peer's writes"
    )
    return took_ms


def _page(memory: torch.Tensor, page: int, page_bytes: int) -> torch.Tensor:
    return memory[page * page_bytes : (page + 1) * page_bytes]


def _us(call: Callable[[int, int], Any], first_byte: int, size_bytes: int) -> float:
    began_s = time.perf_counter()
    call(first_byte, size_bytes)
    return 1e6 * (time.perf_counter() - began_s)


def _require_none(pages: list[int], which: str) -> None:
    assert not pages, f"{len(pages)} pages {which} have other numbers, the first is {pages[0]}"


def _in_a_process(shared: SharedArena) -> list[int]:
    """Run `read_as_peer` in a process of its own, which has a context on the device."""
    said = subprocess.run(
        [sys.executable, "-m", __spec__.name, "--peer", msgspec.json.encode(shared).decode()],
        stdout=subprocess.PIPE,
        text=True,
        timeout=PEER_S,
        check=True,
    )
    differ: list[int] = json.loads(said.stdout)
    return differ


def _cuda_device() -> CudaDevice:
    """Return the first device; torch makes its context the present one."""
    torch.zeros(1, device="cuda")
    return CudaDevice(cuda_driver(), torch.cuda.current_device())


def main() -> None:
    """Print the figures. Exits with an error if a page lost its number."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = _cuda_device()
    if options.peer:
        shared = msgspec.json.decode(options.peer, type=SharedArena)
        print(json.dumps(read_as_peer(shared, PAGES, device)))
        return
    arena = CudaArena(device, PAGES * device.page_bytes)
    with closing(arena):
        row = back_and_release(arena, PAGES)
        row["peer_ms"] = shared_with(arena, PAGES, _in_a_process)
    row["page_bytes"] = device.page_bytes
    print(
        f"pages of {device.page_bytes} bytes: {row['back_us']:.0f} us to back one, "
        f"{row['release_us']:.0f} us to release one; a peer takes {row['peer_ms']:.0f} ms to "
        f"start, map {PAGES} pages and read them"
    )
    if options.json:
        options.json.write_text(json.dumps([row]))


if __name__ == "__main__":
    main()
