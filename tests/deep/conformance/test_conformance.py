"""Every case of the table goes through its chapters, all on one server. Most share weights in one
of the ways of `weights/layouts.py`.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.deep.conformance.cases import CASES, CPU_ALONE
from tests.deep.conformance.live import Case, Chapter, Live

pytestmark = pytest.mark.server


class Servers:
    """The live server of one case after the other, each started once."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._started: list[Case] = []
        self._live: Live | None = None
        self._running = ExitStack()

    def of(self, case: Case) -> Live:
        """Return the server of a case. That of the case before it is stopped."""
        if self._live is None or self._live.case is not case:
            assert case not in self._started, f"{case.name}: its chapters are apart"
            self.stop()
            self._started.append(case)
            self._live = self._running.enter_context(Live(case, self._scratch / case.name))
        return self._live

    def stop(self) -> None:
        self._live = None
        self._running.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    found = Servers(tmp_path_factory.mktemp("servers"))
    yield found
    found.stop()


def marks(case: Case, chapter: Chapter) -> list[pytest.MarkDecorator]:
    reason = case.cpu_only or CPU_ALONE.get(chapter)
    return [pytest.mark.cpu_only(reason)] if reason else []


@pytest.mark.parametrize(
    ("case", "chapter"),
    [
        pytest.param(
            case, chapter, id=f"{case.name}-{chapter.__name__}", marks=marks(case, chapter)
        )
        for case in CASES
        for chapter in case.chapters
    ],
)
def test_a_server_answers_as_stock_vllm(servers: Servers, case: Case, chapter: Chapter) -> None:
    chapter(servers.of(case))
