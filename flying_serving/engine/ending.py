"""The end of an engine: with the server, and not before the leaders that need it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import DistError
from vllm.v1.engine.core import EngineShutdownState

from flying_serving.errors import EngineLost
from flying_serving.log import logger

_GLOO = "gloo/transport"
"""A part of the text of Gloo's errors, plain RuntimeErrors, when a peer is gone."""


class LeaveGuard:
    """Decides when an engine may end.

    With `--shutdown-timeout`, vLLM's engine ends by itself when it has no request. Between two
    messages a member of a group has none, and requests may be on their way to it. So an engine
    ignores the signal, which may come to all processes of the server at once. It ends when the API
    server says that nothing runs, waits or migrates any more.

    Without `--shutdown-timeout`, vLLM's engine answers its requests at a signal as aborted. Where
    the server `survives` the loss of an engine, the signal may be for this engine alone, so the
    engine answers none. Its requests go on in other engines, or the server, which ends too, answers
    them.
    """

    def __init__(self, shutdown_timeout_s: float, *, survives: bool) -> None:
        self._drains = shutdown_timeout_s > 0
        self.ends_at_once = survives and not self._drains
        self.may_leave = False
        """True once the API server has said that no request is left."""

    @property
    def waits(self) -> bool:
        """True while a signal does not end the engine."""
        return self._drains and not self.may_leave

    @contextmanager
    def quietly(self, engine: Any) -> Iterator[None]:
        """Run the loop of vLLM's EngineCoreProc in the body; once this engine is to end, another
        engine's leaving a step is no error.

        Every other error is raised, and so is this one while requests may drain.
        """
        try:
            yield
        except Exception as error:
            signalled = engine.shutdown_state != EngineShutdownState.RUNNING
            leaves = self.may_leave or (signalled and not self.waits)
            if not (leaves and _peer_left(error, engine)):
                raise
            logger.info("engine %d ends in the middle of a step: %s", engine.engine_index, error)


def _peer_left(error: Exception, engine: Any) -> bool:
    """Return whether an error says that a process that a step needs is gone: another engine, or an
    own worker.
    """
    lost = isinstance(error, EngineLost | DistError) or _GLOO in str(error)
    return lost or getattr(engine.model_executor, "is_failed", False)
