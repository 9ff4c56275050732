"""How an engine ends: with the server, and not before those who need it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import DistError
from vllm.v1.engine.core import EngineShutdownState

from flying_serving.errors import EngineLost

logger = logging.getLogger("vllm.flying_serving")

_GLOO = "gloo/transport"
"""What is in the text of Gloo's errors, plain RuntimeErrors, when a peer is gone."""


class Leaving:
    """The part of an engine that ends it, before vLLM's in the order of base classes.

    With `--shutdown-timeout`, vLLM's engine ends by itself when it has no request. Between two tickets a member of a
    group has none, and requests may be on their way to it; so an engine takes no notice of the signal, which may come
    to all processes of the server at once, until the client says that nothing runs, waits or moves any more.
    """

    engine: int
    vllm_config: Any
    model_executor: Any
    shutdown_state: EngineShutdownState = EngineShutdownState.RUNNING
    _may_leave = False

    @property
    def _serves_on(self) -> bool:
        return self.vllm_config.shutdown_timeout > 0 and not self._may_leave

    @property
    def _leaves(self) -> bool:
        signalled = self.shutdown_state != EngineShutdownState.RUNNING
        return self._may_leave or (signalled and not self._serves_on)

    def flying_leave(self) -> None:
        """No request is left in the whole server."""
        self._may_leave = True

    @contextmanager
    def ending_quietly(self) -> Iterator[None]:
        """Around the loop: once it is to end itself, that another engine has left a step is no error.

        Every other error is raised, and so is that one as long as requests may drain.
        """
        try:
            yield
        except Exception as error:
            if not (self._leaves and self._others_left(error)):
                raise
            logger.info("engine %d ends in the middle of a step: %s", self.engine, error)

    def _others_left(self, error: Exception) -> bool:
        """Whether an error says that a process is gone that a step needs: another engine, or an own worker."""
        lost = isinstance(error, EngineLost | DistError) or _GLOO in str(error)
        return lost or getattr(self.model_executor, "is_failed", False)

    def _handle_shutdown(self) -> bool:
        return self._serves_on or super()._handle_shutdown()  # type: ignore[misc]

    def _reject_add_in_shutdown(self, request: Any) -> bool:
        return not self._serves_on and super()._reject_add_in_shutdown(request)  # type: ignore[misc]

    def _reject_utility_in_shutdown(self, client_idx: int, call_id: int, method_name: str) -> bool:
        return False  # as long as it is here it may answer: that it ends is no failure of the call
