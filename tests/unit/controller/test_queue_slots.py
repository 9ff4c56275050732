"""QueueSlots: what is reserved for requests on their way is released, whatever becomes of them."""

from hypothesis import given
from hypothesis import strategies as st

from flying_serving.controller.queue_slots import CallSlots, QueueSlots


@given(
    held=st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.integers(1, 4),
            st.integers(0, 5),
            st.booleans(),
            st.booleans(),
        ),
        max_size=8,
    )
)
def test_no_slot_is_reserved_after_all_are_released(
    held: list[tuple[str, int, int, bool, bool]],
) -> None:
    """Calls may have the same name. As many requests are taken as there are slots for."""
    slots = QueueSlots()
    made = [CallSlots(call, 10, left, urgent) for call, left, _, urgent, _ in held]
    for one in made:
        slots.reserve(one)
    assert sum(slots.requests.values()) == sum(one.left for one in made)
    for one, (call, _, arriving, _, early) in zip(made, held, strict=True):
        if early:
            slots.release(one)
        of_call = sum(one.left for one in made if one.call == call)
        assert sum(slots.use(call) for _ in range(arriving)) == min(arriving, of_call)
    for one in made:
        slots.release(one)
    assert slots.requests == {False: 0, True: 0}
    assert slots.tokens_beyond(0) == 0
    assert not slots


def test_slots_that_are_reserved_ahead_are_claimed_once() -> None:
    """Another call of this name has none."""
    slots = QueueSlots()
    slots.reserve(CallSlots("c"))
    assert not slots.claim("c")
    slots.reserve(CallSlots("c", ahead=True))
    assert slots.claim("c")
    assert not slots.claim("c")


def test_tokens_beyond_the_first_slots_are_of_the_mean_length() -> None:
    slots = QueueSlots()
    for tokens, left in ((10, 1), (40, 2)):
        slots.reserve(CallSlots("c", tokens, left))
    assert [slots.tokens_beyond(count) for count in range(5)] == [90, 60, 30, 0, 0]
