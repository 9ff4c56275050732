"""The short form of `make fuzz`: some hundred requests that nobody should send, and good ones
beside them.
"""

import pytest

from harness.live import Server, tiny
from tests.deep.fuzz.run import COMMON, SETTINGS, fuzz_admin, fuzz_requests
from tests.deep.fuzz.sending import Found, end_is_clean

COUNT = 200
ENOUGH = 1 / 100
"""This share of requests is right, at least."""


def expect_nobody_hurt(found: dict[str, Found]) -> None:
    """No 5xx but where stock vLLM gives one; good requests beside them are right."""
    for name, one in found.items():
        assert not one.failures, f"{name}: {one.report()}"
        assert not one.wrong, f"{name}: {one.report()}"
        assert one.statuses.total() == COUNT
        assert one.statuses[200] > COUNT * ENOUGH, f"{name}: {one.report()}"


@pytest.mark.server
def test_fuzzed_requests_leave_the_server_sound() -> None:
    """Of vLLM's fields and of ours, while the policy decides the layout; nothing is left of any."""
    with Server(tiny("llama"), 2, *SETTINGS) as server:
        found = dict(fuzz_requests(server, COUNT, 1))
        end_is_clean(server)
    expect_nobody_hurt(found)


@pytest.mark.server
def test_fuzzed_admin_requests_leave_the_server_sound() -> None:
    """Orders that are right are carried out beside them."""
    with Server(tiny("llama"), 2, *COMMON) as server:
        found = dict(fuzz_admin(server, COUNT, 1))
        end_is_clean(server)
        assert server.switches()
    expect_nobody_hurt(found)
