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


def test_error_of_vllm_is_one_line_with_its_type(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="memory"), told_to_server(str(tmp_path), 3):
        raise ValueError("too little memory.\n  Use less.")
    assert (
        start_error(str(tmp_path))
        == "engine 3 could not start: ValueError: too little memory. Use less."
    )


def test_successful_start_leaves_no_file(tmp_path: Path) -> None:
    with told_to_server(str(tmp_path), 0):
        pass
    assert list(tmp_path.iterdir()) == []
