"""An engine's reason not to start reaches the server, in one line."""

from pathlib import Path

import pytest

from flying_serving.errors import LaneError, WeightError
from flying_serving.start_error import start_error, told_to_server


def test_the_first_reason_stays(tmp_path: Path) -> None:
    assert start_error(str(tmp_path)) is None
    with pytest.raises(WeightError), told_to_server(str(tmp_path), 1):
        raise WeightError("layers.0: no shared storage")
    with pytest.raises(LaneError), told_to_server(str(tmp_path), 0):
        raise LaneError("group size 2: later")
    assert start_error(str(tmp_path)) == "layers.0: no shared storage"


def test_other_errors_and_successes_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), told_to_server(str(tmp_path), 0):
        raise RuntimeError("out of memory")
    with told_to_server(str(tmp_path), 0):
        pass
    assert start_error(str(tmp_path)) is None
