"""Memory for bodies of requests that are being read: bounded together, and shared fairly between
addresses.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from fastapi import HTTPException
from starlette.types import Scope

START_BYTES = 64 * 1024
"""The beginning of each body, for which there is a room of its own: short bodies pass while long
ones fill the other room.
"""
START_ROOM_BYTES = 256 * 1024**2
"""The room for the first START_BYTES of all bodies."""
LEAST_ROOM_BYTES = 512 * 1024**2
"""The room for the rest of all bodies, unless the longest allowed body needs more."""
IPV6_HOST_BITS = 64
"""The part of an IPv6 address that a host chooses itself. Addresses that differ only there count as
one.
"""
Grow = Callable[[int], None]
"""Take room for a body, by its length in bytes so far. Raises HTTPException (429) if there is
none.
"""


class Room:
    """Memory in bytes. An address may hold at most the amount that is left free: half if alone,
    less beside others.

    One address leaves half free, and each further one that takes its whole share halves the rest.
    Another address then finds room for a short body, but not for every body. Five addresses whose
    bodies of 16 MiB are being read leave too little of 512 MiB for such a body of a sixth.

    With a fixed share, a router, whose clients have one address, would lose most of the room, or a
    few addresses could fill it.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._held_bytes: Counter[str] = Counter()
        self._taken_bytes = 0

    def take(self, address: str, count: int) -> None:
        """Take bytes for an address. Raises HTTPException (429) if it would hold more than is left
        free then.
        """
        held_bytes = self._held_bytes[address] + count
        free_bytes = self._size_bytes - self._taken_bytes - count
        if held_bytes > free_bytes:
            rule = "an address may have as much of it as is free"
            raise HTTPException(
                429, f"body: bodies being read have {self._size_bytes} bytes together, and {rule}"
            )
        self._held_bytes[address] = held_bytes
        self._taken_bytes += count

    def give_back(self, address: str, count: int) -> None:
        """Free bytes that an address has taken."""
        self._taken_bytes -= count
        self._held_bytes[address] -= count
        if not self._held_bytes[address]:
            del self._held_bytes[address]


class BodyRooms:
    """The room for the beginnings of bodies and the room for the rest of them.

    `max_body_bytes`: the length of the longest body. It finds room if no other body is being read.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self._start = Room(START_ROOM_BYTES)
        self._rest = Room(max(LEAST_ROOM_BYTES, 2 * max_body_bytes))

    @contextmanager
    def held(self, address: str) -> Iterator[Grow]:
        """Hold room for one body of an address while the block runs; the room grows with the length
        read so far.
        """
        taken = {self._start: 0, self._rest: 0}

        def grow(length: int) -> None:
            start = min(length, START_BYTES)
            for room, needed in ((self._start, start), (self._rest, length - start)):
                if needed > taken[room]:
                    room.take(address, needed - taken[room])
                    taken[room] = needed

        try:
            yield grow
        finally:
            for room, count in taken.items():
                room.give_back(address, count)


def address_of(scope: Scope) -> str:
    """Return the address that a request counts for: its peer's, of IPv6 the network; "" on a unix
    socket.

    Behind a proxy that uvicorn trusts (FORWARDED_ALLOW_IPS) the peer is the client that the proxy
    names.
    """
    peer = scope.get("client")
    try:
        address = ip_address(peer[0] if peer else "")
    except ValueError:
        return ""
    if isinstance(address, IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or _network(address))


def _network(address: IPv6Address) -> str:
    return str(ip_network((int(address), 128 - IPV6_HOST_BITS), strict=False))
