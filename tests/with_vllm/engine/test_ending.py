"""When an engine ends: not at a signal as long as requests may drain, and quietly once the server
ends.
"""

import queue
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistNetworkError
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineShutdownState

from flying_serving.engine.core import FlyingEngineCore
from flying_serving.engine.ending import LeaveGuard
from flying_serving.errors import CollectiveTimeout, EngineLost
from flying_serving.scheduling.arbiter import Wait

RUNNING, REQUESTED = EngineShutdownState.RUNNING, EngineShutdownState.REQUESTED


class EndingEngine(FlyingEngineCore):
    """The production class, with the state that vLLM's constructor would make of it, as far as its
    end needs it.
    """

    def __init__(self, timeout_s: int, *, work: bool = False, survives: bool = False) -> None:
        state: Any = self
        state.leave_guard = LeaveGuard(timeout_s, survives=survives)
        state.engine_index, state.shutdown_state = 0, RUNNING
        state.vllm_config = SimpleNamespace(shutdown_timeout=timeout_s)
        state.scheduler = SimpleNamespace(
            get_num_unfinished_requests=lambda: 0, finish_requests=lambda *_: []
        )
        state.model_executor = SimpleNamespace(is_failed=False)
        state.input_queue, state.aborts_queue = queue.Queue(), queue.Queue()
        state._idle_state_callbacks = []
        self.works = work
        self.sent: list[list[str]] = []

    def has_work(self) -> bool:
        """Whether anything is left to do."""
        return self.works

    def _send_abort_outputs_to_client(self, ids: list[str], client: int) -> None:
        self.sent.append(ids)


engine: Any = EndingEngine
REQUEST = SimpleNamespace(request_id="a", client_index=0)


def test_a_signal_does_not_end_an_engine_that_others_may_need() -> None:
    """Though it has nothing to do at the moment. It takes requests until it is told that it may
    leave.
    """
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
    one.works = False
    assert not one._handle_shutdown()


def test_without_a_timeout_a_signal_ends_it() -> None:
    one = engine(0)
    one.shutdown_state = REQUESTED
    assert one._reject_add_in_shutdown(REQUEST)
    assert not one._handle_shutdown()


def test_engine_with_survivors_aborts_no_request_at_a_signal() -> None:
    """Not even what comes after it: the server has it done by others, or ends too and answers
    it.
    """
    one = engine(0, work=True, survives=True)
    assert one._handle_shutdown()
    one.shutdown_state = REQUESTED
    assert not one._reject_add_in_shutdown(REQUEST)
    assert not one._handle_shutdown()
    assert one.sent == []


def test_an_engine_answers_as_long_as_it_is_there() -> None:
    one = engine(0)
    one.shutdown_state = REQUESTED
    assert not one._reject_utility_in_shutdown(0, 1, "flying_steps")


LOST = [
    EngineLost("engine 1 is gone"),
    CollectiveTimeout("all_reduce: waited 60.0 s for engine 1"),
    DistNetworkError("the connection was closed"),
    RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
        "[::1]:1"
    ),
]


@pytest.mark.parametrize("lost", LOST, ids=lambda error: type(error).__name__)
def test_that_others_leave_is_an_error_only_while_the_server_runs(lost: Exception) -> None:
    one = engine(0)
    with pytest.raises(type(lost)), one.leave_guard.quietly(one):
        raise lost
    one.shutdown_state = REQUESTED
    with one.leave_guard.quietly(one):
        raise lost


@pytest.mark.parametrize("lost", LOST, ids=lambda error: type(error).__name__)
def test_that_others_leave_is_an_error_as_long_as_requests_drain(lost: Exception) -> None:
    """Though the signal has come to all processes: those that leave before they may have failed."""
    one = engine(30)
    one.shutdown_state = REQUESTED
    with pytest.raises(type(lost)), one.leave_guard.quietly(one):
        raise lost
    one.flying_leave()
    with one.leave_guard.quietly(one):
        raise lost


@pytest.mark.parametrize(
    ("timeout_s", "told"), [(0, False), (30, False), (30, True)], ids=["no drain", "drain", "told"]
)
def test_a_failed_step_is_an_error_while_other_engines_leave(timeout_s: int, told: bool) -> None:
    one = engine(timeout_s)
    one.shutdown_state = REQUESTED
    if told:
        one.flying_leave()
    with pytest.raises(RuntimeError, match="injected"), one.leave_guard.quietly(one):
        raise RuntimeError("injected")


def test_workers_that_the_signal_has_ended_are_no_error() -> None:
    """vLLM's executor answers then that a step was cancelled."""
    one = engine(0)
    one.shutdown_state = REQUESTED
    one.model_executor = SimpleNamespace(is_failed=True)
    with one.leave_guard.quietly(one):
        raise RuntimeError("cancelled")


def test_an_idle_engine_notices_a_signal_that_does_not_wake_it() -> None:
    """As one that comes just before the main thread begins to wait: it did not, and the server
    waited with it.
    """
    one = engine(30)
    noticed: list[int] = []
    asleep = threading.Timer(20.0, one.input_queue.put, [(EngineCoreRequestType.WAKEUP, None)])

    def send() -> None:
        time.sleep(0.1)
        # to this thread: the main one sleeps on
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda number, _frame: noticed.append(number))
    sender = threading.Thread(target=send)
    try:
        asleep.start()
        sender.start()
        assert not one.take_messages(Wait(None)), "only a message woke it"
        assert not one.take_messages(Wait(None))
        assert noticed == [signal.SIGUSR1]
    finally:
        asleep.cancel()
        sender.join()
        signal.signal(signal.SIGUSR1, before)
