"""Places: what is held for requests on their way is given back, whatever becomes of them."""

from hypothesis import given
from hypothesis import strategies as st

from flying_serving.controller.places import Place, Places


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
def test_no_place_is_held_after_all_are_given_back(
    held: list[tuple[str, int, int, bool, bool]],
) -> None:
    """Calls may have the same name. As many requests are taken as there are places for."""
    places = Places()
    made = [Place(call, 10, left, urgent) for call, left, _, urgent, _ in held]
    for place in made:
        places.hold(place)
    assert sum(places.requests.values()) == sum(place.left for place in made)
    for place, (call, _, arriving, _, early) in zip(made, held, strict=True):
        if early:
            places.give_back(place)
        of_call = sum(one.left for one in made if one.call == call)
        assert sum(places.take(call) for _ in range(arriving)) == min(arriving, of_call)
    for place in made:
        places.give_back(place)
    assert places.requests == {False: 0, True: 0}
    assert places.tokens_beyond(0) == 0
    assert not places


def test_a_place_that_is_held_ahead_is_claimed_once() -> None:
    """Another call of this name has none."""
    places = Places()
    places.hold(Place("c"))
    assert not places.claim("c")
    places.hold(Place("c", ahead=True))
    assert places.claim("c")
    assert not places.claim("c")


def test_tokens_beyond_the_first_places_are_of_the_mean_length() -> None:
    places = Places()
    for tokens, left in ((10, 1), (40, 2)):
        places.hold(Place("c", tokens, left))
    assert [places.tokens_beyond(count) for count in range(5)] == [90, 60, 30, 0, 0]
