"""Files that several processes map."""

from collections.abc import Iterator
from tempfile import TemporaryDirectory

import pytest


@pytest.fixture
def path() -> Iterator[str]:
    """Yield the path of a file in shared memory that does not exist yet."""
    with TemporaryDirectory(dir="/dev/shm") as directory:
        yield f"{directory}/file"
