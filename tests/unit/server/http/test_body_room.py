"""Room for bodies that are being read: no address takes all of it, and the longest body fits in
alone.
"""

from contextlib import ExitStack, suppress

import pytest
from fastapi import HTTPException
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.server.http import body_room
from flying_serving.server.http.body_room import BodyRooms, Room, address_of

takes = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 60)), max_size=40)


@given(takes)
def test_another_address_always_finds_as_much_as_any_one_holds(
    asked: list[tuple[str, int]],
) -> None:
    size_bytes, held = 100, dict.fromkeys("abcd", 0)
    made = Room(size_bytes)
    for address, count in asked:
        try:
            made.take(address, count)
        except HTTPException as error:
            assert error.status_code == 429
            assert held[address] + count > size_bytes - sum(held.values()) - count
        else:
            held[address] += count
            assert size_bytes - sum(held.values()) >= held[address]


def test_five_addresses_with_long_bodies_leave_room_for_short_ones_only() -> None:
    length = 2**24
    rooms = BodyRooms(length)
    with ExitStack() as held:
        for address in "abcde":
            with suppress(HTTPException):
                while True:
                    held.enter_context(rooms.held(address))(length)
        with rooms.held("f") as grow:
            grow(body_room.START_BYTES)
            with pytest.raises(HTTPException):
                grow(length)


def test_one_address_alone_may_hold_half() -> None:
    made = Room(100)
    made.take("a", 50)
    with pytest.raises(HTTPException, match="bodies being read have 100 bytes together"):
        made.take("a", 1)
    made.give_back("a", 50)
    made.take("a", 50)


@pytest.mark.parametrize("most", [1024, body_room.LEAST_ROOM_BYTES, 2**40])
def test_the_longest_body_fits_in_where_no_other_is_read(most: int) -> None:
    """Whatever --max-body-bytes is."""
    with BodyRooms(most).held("a") as grow:
        grow(most)


def test_long_bodies_leave_room_to_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_room, "LEAST_ROOM_BYTES", 1024)
    rooms = BodyRooms(max_body_bytes=512)
    with rooms.held("a") as long, rooms.held("a") as short:
        long(body_room.START_BYTES + 512)
        with pytest.raises(HTTPException):
            long(body_room.START_BYTES + 513)
        short(body_room.START_BYTES)


def test_a_body_that_was_read_gives_its_room_back() -> None:
    """Also one that was refused."""
    rooms = BodyRooms(max_body_bytes=body_room.LEAST_ROOM_BYTES)
    for length in (
        body_room.LEAST_ROOM_BYTES // 2,
        body_room.LEAST_ROOM_BYTES * 2,
        body_room.LEAST_ROOM_BYTES,
    ):
        try:
            with rooms.held("a") as grow:
                grow(length)
        except HTTPException:
            assert length > body_room.LEAST_ROOM_BYTES


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("10.0.0.7", 5000), "10.0.0.7"),
        (("::ffff:10.0.0.7", 5000), "10.0.0.7"),
        (("2001:db8::7", 5000), "2001:db8::/64"),
        (("2001:db8::8", 5000), "2001:db8::/64"),
        (("2001:db8:0:1::7", 5000), "2001:db8:0:1::/64"),
        (("fe80::1%eth0", 5000), "fe80::/64"),
        (("localhost", 5000), ""),
        (None, ""),
    ],
    ids=str,
)
def test_hosts_count_by_the_fixed_part_of_their_address(
    peer: tuple[str, int] | None, address: str
) -> None:
    assert address_of({"client": peer}) == address
