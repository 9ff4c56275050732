"""The fields that steer the node and that clients may set: `--clients-may-set`; by default none
where an API key is set.
"""

from collections.abc import Mapping
from typing import Any

from flying_serving.config import FlyingConfig
from flying_serving.server.requests.encoding import refused
from flying_serving.server.requests.xargs import DEGREE_KEY, EXPECTED_KEY, SPLIT_KEY

FLAG = "--clients-may-set"
_NOT_SET = f"clients may not set it on this server ({FLAG})"
PRIORITY = "priority"
_XARGS = (DEGREE_KEY, SPLIT_KEY, EXPECTED_KEY)
EVERYTHING = frozenset({PRIORITY, *_XARGS})
_USUAL_PRIORITY = 0


class ClientRights:
    """The fields that clients of one server may set in their requests.

    `has_key`: True if the server asks for an API key, which is known when its HTTP application is
    made.
    """

    def __init__(self, flying: FlyingConfig) -> None:
        self.has_key = False
        self._given = flying.clients_may_set
        self._most_urgent = flying.most_urgent_priority

    @property
    def allowed(self) -> frozenset[str]:
        """The fields that clients may set."""
        if self._given is not None:
            return EVERYTHING & frozenset(self._given)
        if not self.has_key:
            return EVERYTHING
        # a bound on urgency implies that requests may be urgent
        return frozenset({PRIORITY} if self._most_urgent is not None else ())

    @property
    def may_be_urgent(self) -> bool:
        """True if any request may have a priority below the usual one."""
        return PRIORITY in self.allowed and self._most_urgent != _USUAL_PRIORITY

    def check(self, priority: int, extra: Mapping[str, Any]) -> None:
        """Raise VLLMValidationError for a field that clients may not set here, or a priority that
        is too urgent.

        Args:
            priority: of the request.
            extra: its `vllm_xargs`.
        """
        allowed = self.allowed
        if priority != _USUAL_PRIORITY and PRIORITY not in allowed:
            raise refused(PRIORITY, priority, _NOT_SET)
        if self._most_urgent is not None and priority < self._most_urgent:
            says = f"must be {self._most_urgent} or more on this server (--most-urgent-priority)"
            raise refused(PRIORITY, priority, says)
        for key in _XARGS:
            if key in extra and key not in allowed:
                raise refused(f"vllm_xargs.{key}", extra[key], _NOT_SET)
