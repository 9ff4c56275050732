"""Command lines of live comparisons."""

from statistics import mean

import pytest

from benchmarks import live_trace, long_prompts, quiet_and_bursts, urgent_requests, ways

EMULATED = {"rounds": 1, "seed": 1, "slowdown": 2.0, "execution": "graph"}


def test_long_prompts_have_the_sizes_of_the_plan() -> None:
    assert vars(long_prompts.options([])) == EMULATED | {
        "systems": ["static-dp", "static-tp", "unaware, live", "auto"],
        "out": long_prompts.OUT,
        "seconds": 45.0,
        "share": 0.5,
        "long_tokens": 28_000,
        "long_outputs": 64,
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


def test_a_trace_has_the_sizes_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """About five requests a second; the same in each round, but for the tokens of prompts."""
    monkeypatch.setattr("sys.argv", [""])
    args = live_trace.options()
    assert (args.rounds, args.regime) == (5, "shm")
    assert args.systems == ["static-dp", "static-tp", "auto"]
    first, other = (live_trace.workload_of(args, seed) for seed in (1, 2))
    assert first.requests == other.requests
    assert first.seed != other.seed
    requests = first.requests
    assert 4.0 < len(requests) / requests[-1].arrival_s < 6.0
    assert 150 < mean(one.prompt_tokens for one in requests) < 250
    assert max(one.prompt_tokens + one.output_tokens for one in requests) <= 2048
    assert {one.phase for one in requests} == {live_trace.PHASE}


def test_both_ways_of_a_step_get_the_same_loads() -> None:
    found = ways.loads(1)
    assert {phase: len(load.requests) for phase, load in found.items()} == {
        ways.ALONE: 16,
        ways.AT_ONCE: 64,
    }
    assert found == ways.loads(1) != ways.loads(2)


def test_the_ratio_of_both_ways_is_that_of_each_round() -> None:
    kept = {
        "rows": [
            {
                "system": f"{way}, 2 engines",
                "phase": ways.ALONE,
                "figure": "mean_ttft_ms",
                "values": each,
            }
            for way, each in ((ways.TENSOR, [10.0, 20.0]), (ways.TOKEN, [5.0, 30.0]))
        ]
    }
    assert ways.table(kept).splitlines()[2:] == [
        "| 2 | one at a time | mean TTFT (ms) | 15.0 [10.0..20.0] | 17.5 [5.0..30.0] | "
        "1.000 [0.500..1.500] |"
    ]
