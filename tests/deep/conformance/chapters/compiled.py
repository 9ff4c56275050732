"""Lane 1 is compiled; those of groups beside it are eager."""

from __future__ import annotations

from tests.deep.conformance.live import Live


def each_engine_has_compiled(live: Live) -> None:
    """At the start, and each time that it was lost since."""
    losses = sum(live.status()["losses"].values())
    started = live.case.engines + losses
    assert live.log().count("lane 1: compiled steps equal eager steps within") == started
