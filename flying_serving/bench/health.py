"""Whether a server answers, asked so that asking takes no time from its engines."""

from __future__ import annotations

from types import TracebackType

import httpx


class Health:
    """Asks for a server's health, with one client for all questions.

    To make a client takes 18 ms of a core: with one for each question, several times a second, a sixth of a core was
    missing where engines measured their steps, and those came out a tenth too long.

    Args:
        url: of the server.
    """

    def __init__(self, url: str) -> None:
        self._url = f"{url}/health"
        self._http = httpx.Client(timeout=2, trust_env=False)

    def answers(self) -> bool:
        """Whether it says that it is well, within 2 s."""
        try:
            return self._http.get(self._url).status_code == 200
        except httpx.HTTPError:
            return False

    def __enter__(self) -> Health:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()
