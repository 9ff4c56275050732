"""When an engine ends: not at a signal as long as requests may drain, and quietly once the server ends."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineShutdownState

from flying_serving.engine.core import FlyingEngineCore
from flying_serving.errors import EngineLost

RUNNING, REQUESTED = EngineShutdownState.RUNNING, EngineShutdownState.REQUESTED


def engine(timeout_s: int, *, work: bool = False) -> Any:
    """Return an engine as far as its end needs it, with nothing of a model behind it."""
    one: Any = FlyingEngineCore.__new__(FlyingEngineCore)
    one.engine = 0
    one.vllm_config = SimpleNamespace(shutdown_timeout=timeout_s)
    one.scheduler = SimpleNamespace(get_num_unfinished_requests=lambda: 0, finish_requests=lambda *_: [])
    one.has_work = lambda: work
    one.sent = []
    one._send_abort_outputs_to_client = lambda ids, client: one.sent.append(ids)
    return one


REQUEST = SimpleNamespace(request_id="a", client_index=0)


def test_a_signal_does_not_end_an_engine_that_others_may_need() -> None:
    """Though it has nothing to do at the moment. It takes requests until it is told that it may leave."""
    one = engine(30)
    assert one._handle_shutdown()
    one.shutdown_state = REQUESTED
    assert one._handle_shutdown()
    assert not one._reject_add_in_shutdown(REQUEST)
    one.flying_leave()
    assert not one._handle_shutdown()
    assert one._reject_add_in_shutdown(REQUEST)
    assert one.sent == [["a"]]


def test_an_engine_that_may_leave_does_so_when_it_is_signalled() -> None:
    """And when it has served what is on its way to it."""
    one = engine(30, work=True)
    one.flying_leave()
    assert one._handle_shutdown()
    one.shutdown_state = REQUESTED
    assert one._handle_shutdown()
    one.has_work = lambda: False
    assert not one._handle_shutdown()


def test_without_a_timeout_a_signal_ends_it() -> None:
    one = engine(0)
    one.shutdown_state = REQUESTED
    assert one._reject_add_in_shutdown(REQUEST)
    assert not one._handle_shutdown()


def test_an_engine_answers_as_long_as_it_is_there() -> None:
    one = engine(0)
    one.shutdown_state = REQUESTED
    assert not one._reject_utility_in_shutdown(0, 1, "flying_steps")


def test_that_others_leave_is_an_error_only_while_the_server_runs() -> None:
    one = engine(0)
    with pytest.raises(EngineLost), one.ending_quietly():
        raise EngineLost("engine 1 is gone")
    one.shutdown_state = REQUESTED
    with one.ending_quietly():
        raise EngineLost("engine 1 is gone")
