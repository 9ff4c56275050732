"""Requests that go on in another group: from a history of k tokens on, what an undisturbed run gave
out from there.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.forked import run
from harness.live import tiny
from harness.streams import WORST_LOGPROB, worst_difference
from tests.stock.requests import VOCAB, tokens

pytestmark = pytest.mark.server

TIMEOUT_S = 240.0
SEEDED = {"temperature": 1.0, "seed": 11, "max_tokens": 48, "ignore_eos": True, "logprobs": 0}
PENALTIES = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], int]] = {
    "penalties": (tokens(1, 20), SEEDED | PENALTIES, 1),
    "chunks, top-k and top-p": (tokens(2, 300), SEEDED | {"top_k": 200, "top_p": 0.9}, 2),
    "greedy": (tokens(3, 33), SEEDED | PENALTIES | {"temperature": 0.0, "seed": None}, 2),
    "min_tokens and stop": (
        tokens(4, 40),
        SEEDED | {"min_tokens": 35, "stop_token_ids": [*range(0, VOCAB, 8)]},
        1,
    ),
    "grammar": (tokens(5, 24), SEEDED | {"regex": "[ab]{20}-[0-9]{40}"}, 1),
    "logits processor": (
        tokens(6, 30),
        SEEDED | {"extra_args": {"force_token_ids": tokens(7, 48)}},
        1,
    ),
}
"""Prompt, parameters, and the lane of the undisturbed run."""
KEPT = (1, 7, 31)


class Runs:
    """What the child was asked, and what it answered."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []
        self.whole: dict[str, int] = {}
        self.resumed: dict[tuple[str, int, int], int] = {}
        self.answers: list[dict[str, Any]] = []
        for name, (prompt, sampling, lane) in CASES.items():
            job = {"prompt": prompt, "sampling": sampling}
            self.whole[name] = len(self.jobs)
            self.jobs.append(job | {"lane": lane})
            for kept in KEPT:
                for other in (1, 2):
                    self.resumed[name, kept, other] = len(self.jobs)
                    self.jobs.append(job | {"lane": other, "after": [self.whole[name], kept]})

    def run(self, folder: Path) -> None:
        """Start two engines and let them answer."""
        asked, told = folder / "jobs.json", folder / "answers.json"
        asked.write_text(json.dumps(self.jobs))
        arguments = [str(path) for path in (tiny("llama"), asked, told)]
        done = run(
            [], TIMEOUT_S, f"from tests.deep.server.resuming import main; main(*{arguments})"
        )
        assert done.returncode == 0, done.stderr[-8000:]
        self.answers = json.loads(told.read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Yield all answers, of one start of the engines."""
    made = Runs()
    made.run(tmp_path_factory.mktemp("resumed"))
    yield made


@pytest.mark.parametrize("lane", [1, 2])
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", CASES)
def test_resumed_request_goes_on_as_an_undisturbed_run(
    runs: Runs, name: str, kept: int, lane: int
) -> None:
    """Tokens, logprobs and the end; nothing of the history is given out again."""
    whole, resumed = runs.answers[runs.whole[name]], runs.answers[runs.resumed[name, kept, lane]]
    assert len(whole["tokens"]) > max(KEPT)
    assert resumed["tokens"] == whole["tokens"][kept:]
    assert resumed["finish"] == whole["finish"]
    assert resumed["stop"] == whole["stop"]
    assert worst_difference(resumed["logprobs"], whole["logprobs"][kept:]) <= WORST_LOGPROB


def test_cases_do_what_their_names_say(runs: Runs) -> None:
    """One is stopped by a token after its least number of tokens, one keeps to its grammar, one is
    forced.
    """
    stopped = runs.answers[runs.whole["min_tokens and stop"]]
    assert stopped["stop"] in CASES["min_tokens and stop"][1]["stop_token_ids"]
    assert 35 < len(stopped["tokens"]) < 48
    assert runs.answers[runs.whole["logits processor"]]["tokens"] == list(tokens(7, 48))
    different = {tuple(runs.answers[number]["tokens"]) for number in runs.whole.values()}
    assert len(different) == len(CASES)


def test_metrics_hear_of_a_request_once(runs: Runs) -> None:
    """That it was queued, and its prefill, are told where it began; migrated, it is only scheduled
    again.
    """
    for number in runs.whole.values():
        assert runs.answers[number]["events"] == 2
        assert runs.answers[number]["prefills"] == 1
    for number in runs.resumed.values():
        assert runs.answers[number]["events"] == 1
        assert runs.answers[number]["prefills"] == 0
