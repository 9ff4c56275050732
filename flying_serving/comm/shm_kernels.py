"""Compiled halves of the shared-memory collectives: one call copies, publishes, waits and sums
without the GIL.

Every operation has a sequence number s, the same on all ranks. A rank *publishes* s: it writes its
data to its slot of buffer s % 2, then stores s in its flag (release). A rank that needs the data
waits for that flag (acquire) and reads the slot.

Why two buffers are enough:

1. A rank publishes s only once every rank has published s - 1: `_publish` waits for that.
2. A rank publishes s - 1 only when its operation s - 2 is over, reads included: its calls come one
   after the other.

So a rank writes to buffer s % 2 for s after every rank's last read of the data of s - 2. A rank may
be one operation ahead of another, never two. (The split sum is two operations here, s and s + 1,
and needs no other argument.)

A kernel waits a little and returns whether it is done. If not it is called again with the same
arguments: the rank's own flag records its progress, so it goes on from there. The caller handles
deadlines, aborts and signals.

Layout of the file: HEADER_BYTES of lines, the group's and one per rank, each of int64 words; then
the slots, shape (2 buffers, world, slot_bytes). A fresh file is all zeros, and needs no other
preparation.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

HEADER_BYTES = 65536
LINE_BYTES = 128  # two cache lines, as processors fetch pairs of them
SPINS = 100  # looks at a flag before the first sched_yield: a microsecond or less

Group = tuple[int, int, int, int]  # address of the file in memory, rank, world, slot_bytes

_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_BYTE, _WORD = ir.IntType(8), ir.IntType(64)


@intrinsic
def _load(_typing: Any, _address: Any) -> Any:
    """Load the int64 at an address: acquire. No later read moves before it, and a loop on it loads
    each time.
    """

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _WORD.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def _store(_typing: Any, _address: Any, _value: Any) -> Any:
    """Store an int64 at an address: release. No earlier read or write moves behind it."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], _WORD.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _copy(_typing: Any, _target: Any, _source: Any, _nbytes: Any) -> Any:
    """Copy bytes from an address (the second) to another (the first); the ranges do not overlap."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        target, source = (builder.inttoptr(address, _BYTE.as_pointer()) for address in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _elements(_typing: Any, _address: Any, zero: Any) -> Any:
    """Return the bytes at an address as elements of the type of `zero`, to be indexed without
    bounds.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(zero)(types.int64, zero), generate


@njit
def _buffer(group: Group, sequence: int) -> int:
    """Return the address of the buffer of `sequence`, where the slot of rank 0 begins."""
    base, _, world, slot_bytes = group
    return base + HEADER_BYTES + (sequence % 2) * world * slot_bytes


@njit
def _reached(base: int, first: int, last: int, sequence: int, yields: int) -> bool:
    """Wait a little until ranks `first` to `last - 1` have published `sequence`; return whether
    they have.
    """
    left = SPINS + yields
    for rank in range(first, last):
        flag = base + (1 + rank) * LINE_BYTES
        while _load(flag) < sequence:
            if left == 0:
                return False
            if left <= yields:
                _sched_yield()
            left -= 1
    return True


@njit
def _publish(
    group: Group, sequence: int, yields: int, sent: tuple[int, int], parts: tuple[int, int]
) -> bool:
    """Publish `sequence` with bytes of this rank, unless done before; return False if that cannot
    be yet.

    `sent` is an address and bytes of a part; `parts` is how many there are, one behind the other
    in the slot, and the distance from one to the next at the address.
    """
    base, rank, world, slot_bytes = group
    flag = base + (1 + rank) * LINE_BYTES
    if _load(base) != 0:  # aborted
        return False
    if _load(flag) >= sequence:
        return True
    if not _reached(base, 0, world, sequence - 1, yields):
        return False
    slot = _buffer(group, sequence) + rank * slot_bytes
    source, nbytes = sent
    for part in range(parts[0]):
        _copy(slot + part * nbytes, source + part * parts[1], nbytes)
    _store(flag, sequence)
    return True


@njit
def _sum(group: Group, buffer: int, target: int, begin: int, end: int, zero: Any) -> None:
    """Add up elements `begin` to `end - 1` over the ranks at address `target`, which holds the
    rank's own.

    In the order of the ranks, but that rank 1 adds 0 to 1 instead of 1 to 0, which is the same.
    """
    _, rank, world, slot_bytes = group
    out = _elements(target, zero)
    held = rank if rank < 2 else 0
    if held != rank:
        first = _elements(buffer, zero)
        for i in range(begin, end):
            out[i] = first[i]
    for other in range(world):
        if other != held:
            added = _elements(buffer + other * slot_bytes, zero)
            for i in range(begin, end):
                out[i] += added[i]


_INT = types.int64
_GROUP = types.UniTuple(_INT, 4)
_PAIR = types.UniTuple(_INT, 2)
_WHOLE = (1, 0)
"""What is published in one part."""


@njit([types.boolean(_GROUP, _INT, _INT, _PAIR, _PAIR, _GROUP)], nogil=True, cache=True)
def gather(
    group: Group,
    sequence: int,
    yields: int,
    sent: tuple[int, int],
    ranks: tuple[int, int],
    received: tuple[int, int, int, int],
) -> bool:
    """Publish `sent`, an address and bytes; fetch the data of ranks[0] to ranks[1] - 1; return
    whether it is done.

    `received` is (target, start, nbytes, row_bytes). Each rank's `nbytes` begin at `start` of a
    whole, shape (rows, row_bytes). They go where the whole has its place at the address `target`,
    shape (rows, number of ranks, row_bytes): a concatenation along the middle dimension.
    """
    if not _publish(group, sequence, yields, sent, _WHOLE):
        return False
    base, _, _, slot_bytes = group
    first, last = ranks
    target, start, nbytes, row_bytes = received
    if not _reached(base, first, last, sequence, yields):
        return False
    for rank in range(first, last):
        slot = _buffer(group, sequence) + rank * slot_bytes
        done = 0
        while done < nbytes:
            row = (start + done) // row_bytes
            column = (start + done) % row_bytes
            run = min(row_bytes - column, nbytes - done)
            _copy(
                target + (row * (last - first) + rank - first) * row_bytes + column,
                slot + done,
                run,
            )
            done += run
    return True


@njit([types.boolean(_GROUP, _INT, _INT, _PAIR, _PAIR, _INT)], nogil=True, cache=True)
def exchange(
    group: Group,
    sequence: int,
    yields: int,
    sent: tuple[int, int],
    received: tuple[int, int],
    nbytes: int,
) -> bool:
    """Publish `nbytes` of a part for each rank; fetch this rank's part of each rank; return whether
    it is done.

    `sent` and `received` are each an address and the distance from one part to the next. A slot
    holds the pieces of all parts.
    """
    base, rank, world, slot_bytes = group
    if not _publish(group, sequence, yields, (sent[0], nbytes), (world, sent[1])):
        return False
    if not _reached(base, 0, world, sequence, yields):
        return False
    mine = _buffer(group, sequence) + rank * nbytes
    for other in range(world):
        _copy(received[0] + other * received[1], mine + other * slot_bytes, nbytes)
    return True


_SUMMED = (types.float32, types.float64, types.int32, types.int64)


@njit([types.boolean(_GROUP, _INT, _INT, _GROUP, t) for t in _SUMMED], nogil=True, cache=True)
def sum_all(
    group: Group, sequence: int, yields: int, piece: tuple[int, int, int, int], zero: Any
) -> bool:
    """Sum a `piece` over the ranks, in place: (address, elements, bytes of one, split), of the type
    of `zero`.

    Without `split` every rank sums everything. With it each rank sums a part, publishes it as
    `sequence + 1` and copies the others'. That is less to read with more than two ranks, but one
    more wait. Return whether it is done.
    """
    base, rank, world, slot_bytes = group
    flag = base + (1 + rank) * LINE_BYTES
    target, count, size, split = piece
    buffer, sums = _buffer(group, sequence), _buffer(group, sequence + 1)
    # whole cache lines; the last parts may be short or empty
    part = (count // world + 32) // 32 * 32
    begin, end = (min(rank * part, count), min((rank + 1) * part, count)) if split else (0, count)
    if not _publish(group, sequence, yields, (target, count * size), _WHOLE):
        return False
    if _load(flag) == sequence:
        if not _reached(base, 0, world, sequence, yields):
            return False
        _sum(group, buffer, target, begin, end, zero)
        if not split:
            return True
        _copy(sums + rank * slot_bytes, target + begin * size, (end - begin) * size)
        _store(flag, sequence + 1)
    if not _reached(base, 0, world, sequence + 1, yields):
        return False
    for other in range(world):
        if other != rank:
            begin, end = min(other * part, count), min((other + 1) * part, count)
            _copy(target + begin * size, sums + other * slot_bytes, (end - begin) * size)
    return True
