"""vLLM's pause (`/pause` in dev mode) in every lane that an engine leads."""

from __future__ import annotations

from typing import Any, get_args

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import PauseMode
from vllm.v1.request import RequestStatus

from flying_serving.engine.group import Leader


class Pausing:
    """The part of an engine that pauses and resumes, before vLLM's in the order of base classes."""

    leaders: dict[int, Leader]
    _send_abort_outputs: Any

    def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Any:
        """vLLM's utility; it is over when no lane that this engine leads has anything to do.

        Raises:
            ValueError: for a mode that vLLM does not have.
        """
        for leader in self.leaders.values() if mode in get_args(PauseMode) else ():
            if mode == "abort":
                aborted = leader.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
                self._send_abort_outputs(aborted)
            leader.scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
        return super().pause_scheduler(mode, clear_cache)  # type: ignore[misc]

    def resume_scheduler(self) -> None:
        """vLLM's utility, in every lane."""
        for leader in self.leaders.values():
            leader.scheduler.set_pause_state(PauseState.UNPAUSED)
        super().resume_scheduler()  # type: ignore[misc]
