"""Phases follow each other as their table says."""

import pytest

from flying_serving.phase import Phase


class Light(Phase):
    RED = "red"
    GREEN = "green"


FOLLOWING = {Light.RED: (Light.GREEN,), Light.GREEN: ()}


def test_phase_of_the_table_follows() -> None:
    assert Light.RED.then(Light.GREEN, FOLLOWING, "a light") is Light.GREEN


def test_other_phase_is_an_error_that_says_what_was_tried() -> None:
    with pytest.raises(RuntimeError, match=r"^a light: from green to red$"):
        Light.GREEN.then(Light.RED, FOLLOWING, "a light")
