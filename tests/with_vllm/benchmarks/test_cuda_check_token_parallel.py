"""The lines of token parallel steps: what they ask, and what their figures say."""

from itertools import cycle
from typing import Any

import pytest

from benchmarks.cuda_check import results, times
from benchmarks.cuda_check.asking import TOGETHER
from benchmarks.cuda_check.site import ENGINES, ONE_STEP, specs
from harness import both_ways

STEPS = "flying:token_parallel_steps_total"


class SameAnswers:
    """A server that gives the same answer to all. `divides`: whether the next prompts divide
    tokens, over and over.
    """

    def __init__(self, *divides: bool, tokens: tuple[int, ...] = (5, 6)) -> None:
        self.layouts: list[list[list[int]]] = []
        self.asked: list[dict[str, Any]] = []
        self.steps = {2: 0, 4: 0}
        self._divides = cycle(divides or [False])
        self._tokens = list(tokens)

    def layout(self, groups: list[list[int]]) -> None:
        self.layouts.append(groups)

    def complete(self, prompt: list[int], **fields: Any) -> dict[str, Any]:
        self.asked.append(fields | {"length": len(prompt)})
        degree = fields.get("vllm_xargs", {}).get("tp_degree", 1)
        if degree > 1:
            self.steps[degree] += next(self._divides)
        return {"token_ids": self._tokens, "logprobs": {"token_logprobs": [-1.0, -2.0]}}

    def metric(self, name: str, label: str) -> dict[tuple[str, ...], float]:
        assert (name, label) == (STEPS, "group_size")
        return {(str(size),): float(count) for size, count in self.steps.items()}


def test_first_tokens_are_timed_both_ways_for_each_length() -> None:
    server = SameAnswers(True, False)
    site: Any = {"ours both ways, large": server}
    figures = times.prompts_both_ways(site).split("; ")
    assert [figure.split(":")[0] for figure in figures] == ["2000", "8000"]
    assert server.layouts == [TOGETHER]
    assert [asked["length"] for asked in server.asked] == [2000] * 10 + [8000] * 10
    assert {asked["max_tokens"] for asked in server.asked} == {1}


def test_figure_is_the_median_of_each_way_without_its_first() -> None:
    took_s = {True: [9.0, 0.1, 0.1, 0.3], False: [9.0, 0.2, 0.2, 0.1]}
    expected = "token parallel 100.0 ms, tensor parallel 200.0: 0.50"
    assert times.evaluate_ways(took_s) == expected


@pytest.mark.parametrize("divides", [True, False])
def test_line_fails_if_all_prompts_went_one_way(divides: bool) -> None:
    site: Any = {"ours both ways, large": SameAnswers(divides)}
    with pytest.raises(AssertionError, match="prompts divided tokens"):
        times.prompts_both_ways(site)


def test_answers_of_both_ways_are_compared_with_stocks_at_both_degrees() -> None:
    ours = SameAnswers(True, False)
    site: Any = {"stock float32": SameAnswers(), "ours both ways": ours}
    figure = results.both_ways_as_stock(site)
    assert figure.startswith("degree 2: 12 of 12 answers equal, logprobs within 0.0e+00; degree 4:")
    assert figure.endswith("; 6 and 6 steps divided tokens")
    assert [len(groups) for groups in ours.layouts] == [2, 1]


def test_other_answers_than_stocks_fail() -> None:
    site: Any = {"stock float32": SameAnswers(), "ours both ways": SameAnswers(True, tokens=(5, 7))}
    with pytest.raises(AssertionError, match="0 of 12 answers equal"):
        results.both_ways_as_stock(site)


def test_answers_without_a_step_that_divided_tokens_fail() -> None:
    site: Any = {"stock float32": SameAnswers(), "ours both ways": SameAnswers(False)}
    with pytest.raises(AssertionError, match=r"0 and 0 steps divided tokens$"):
        results.both_ways_as_stock(site)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_groups_of_both_servers_step_both_ways(has_gpu: bool) -> None:
    made = specs(has_gpu=has_gpu)
    small, large = made["ours both ways"], made["ours both ways, large"]
    assert small.preamble == large.preamble == both_ways.PREAMBLE
    assert (small.engines, large.engines) == (ENGINES, 2)
    most = [int(flag.partition("=")[2]) for flag in ONE_STEP]
    assert min(most) > max(times.PROMPTS_TOKENS)
    assert large.flags[-2:] == ONE_STEP, "they come behind the flags that they replace"
