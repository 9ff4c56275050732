"""The walks of docs/architecture.md are those of the product: recorded on live servers."""

import pytest

from house import recording
from house.page import walks_of_page
from house.walks import WALKS, Record, Walk, load

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def made() -> dict[str, Record]:
    return recording.record()


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.name)
def test_each_file_that_the_page_names_is_entered(made: dict[str, Record], walk: Walk) -> None:
    """Of those that house/walks.json has. Which others are depends on the machine, and on what the
    policy has measured there.
    """
    kept = {file.path for file in load()[walk.name].files}
    named = kept & {path for path, _ in walks_of_page()[walk.heading]}
    assert len(named) >= 10
    assert named <= {file.path for file in made[walk.name].files}
