"""The walks enter the files that house/walks.json has: recorded again on live servers."""

import pytest

from house import recording, walks
from house.walks import Record

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def made() -> dict[str, Record]:
    return recording.record()


@pytest.mark.parametrize("walk", [walk.name for walk in walks.WALKS])
def test_walk_enters_the_files_that_are_kept(made: dict[str, Record], walk: str) -> None:
    """`python -m house --record` keeps those of this commit."""
    assert walks.differences(walks.load()[walk], made[walk]) == []
