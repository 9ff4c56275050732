"""The short form of what `make fuzz` does without a server."""

import pytest

from tests.deep.fuzz.pure import KINDS, run

COUNT = 400


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_input_is_accepted_or_refused(kind: str) -> None:
    cases = KINDS[kind].draw(COUNT, 1)
    tally = run(KINDS[kind].check, cases)
    assert len(cases) == COUNT
    assert not tally.failures
    assert len(tally.statuses) > 1
    assert min(tally.statuses.values()) >= COUNT / 100, tally.statuses


def test_exception_or_hang_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(case: int) -> str:
        return f"{1 // case}"

    tally = run(check, [1, 0])
    assert tally.statuses == {"1": 1, "failed": 1}
    assert tally.failures == ["ZeroDivisionError: integer division or modulo by zero: 0"]
    monkeypatch.setattr("tests.deep.fuzz.pure.HANGS_S", -1.0)
    assert len(run(check, [1]).failures) == 1
