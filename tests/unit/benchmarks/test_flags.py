"""Command lines of live comparisons."""

import pytest

from benchmarks import long_prompts, quiet_and_bursts, urgent_requests

EMULATED = {"rounds": 1, "seed": 1, "slowdown": 2.0, "execution": "graph"}


def test_long_prompts_have_the_sizes_of_the_plan() -> None:
    assert vars(long_prompts.options([])) == EMULATED | {
        "systems": ["static-dp", "static-tp", "unaware, live", "auto"],
        "out": long_prompts.OUT,
        "seconds": 45.0,
        "share": 0.5,
        "every": 15.0,
        "requests": 300,
    }


def test_urgent_requests_have_the_sizes_of_the_plan() -> None:
    assert vars(urgent_requests.options([])) == EMULATED | {
        "systems": ["static-tp", "static-dp", "auto", "load"],
        "out": urgent_requests.OUT,
        "shares": [0.4, 0.7],
        "seconds": 40.0,
        "capacity_rps": 10.1,
    }


def test_quiet_phases_and_bursts_have_three_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["", "--regime", "shm", "--capacity-rps", "2"])
    args = quiet_and_bursts.options()
    assert (args.rounds, args.seed, args.out) == (3, 1, quiet_and_bursts.OUT)
    assert args.systems == ["stock-dp", "static-dp", "static-tp", "auto"]


def test_a_system_that_is_not_compared_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        urgent_requests.options(["--systems", "split"])
    assert "invalid choice: 'split'" in capsys.readouterr().err
