"""The zoo's verdicts and its page: wrong is wrong, and a refusal is not a success."""

from typing import Any

import pytest

from tests.unit.zoo.made_answers import answers
from zoo.lanes import Ended
from zoo.page import page
from zoo.survey import cause_of_end, refusal, root_cause
from zoo.verdict import (
    BAD,
    BLIND,
    FAILED,
    OK,
    QUANTIZED,
    REFUSED,
    STOCK,
    VERDICTS,
    WRONG,
    Row,
    needs,
    verdict_on,
)

NAME = ("LlamaForCausalLM", "tied")
STOCKS: dict[int, Any] = {degree: {"answers": answers(), "reason": ""} for degree in (1, 2)}
NO_STOCK = {"answers": None, "reason": "RuntimeError: no kernel"}


def lanes(**changes: Any) -> dict[str, Any]:
    served = {"status": "served", "reason": "", "sizes": [1, 2], "alone": "", "answers": {}}
    return served | {"answers": {"1": answers(), "2": answers()}} | changes


def test_a_model_whose_lanes_agree_with_stock_is_ok() -> None:
    row = verdict_on(NAME, lanes(), STOCKS)
    assert row.verdict == OK
    assert row.group_sizes == (1, 2)
    assert row.difference == {1: 0.0, 2: 0.0}


@pytest.mark.parametrize("degree", ["1", "2"])
def test_one_lane_that_differs_makes_the_model_wrong(degree: str) -> None:
    served = lanes()
    served["answers"][degree] = answers(0.01)
    row = verdict_on(NAME, served, STOCKS)
    assert row.verdict == WRONG
    assert f"degree {degree}" in row.detail


@pytest.mark.parametrize(("apart", "verdict"), [(0.05, OK), (-0.05, OK), (0.06, WRONG)])
def test_rounded_lanes_may_differ_as_stocks_degrees_do(apart: float, verdict: str) -> None:
    stock = {1: STOCKS[1], 2: {"answers": answers(0.02), "reason": ""}}
    stock[4] = {"answers": answers(-0.02), "reason": ""}
    row = verdict_on(NAME, lanes(answers={"1": answers(apart)}), stock, QUANTIZED)
    assert row.verdict == verdict
    if verdict == OK:
        assert row.difference == {1: pytest.approx(0.05)}
        assert "stock's degrees: 4.0e-02" in row.detail


def test_rounded_lanes_are_exact_where_stocks_degrees_are() -> None:
    served = lanes(answers={"1": answers(0.001)})
    assert verdict_on(NAME, served, STOCKS, QUANTIZED).verdict == WRONG


def test_refused_quantized_model_has_the_reason_of_stock_too() -> None:
    served = lanes(status="refused", reason="--model: why")
    assert needs(served, QUANTIZED) == (1,)
    assert needs(served) == ()
    row = verdict_on(NAME, served, {1: NO_STOCK}, QUANTIZED)
    assert row.verdict == REFUSED
    assert row.detail == "--model: why (stock vLLM on this CPU: RuntimeError: no kernel)"
    assert verdict_on(NAME, served, STOCKS, QUANTIZED).detail == "--model: why"


def test_quantized_models_have_a_table_of_their_own() -> None:
    rows = [Row(*NAME, OK), Row("LlamaForCausalLM", "awq", OK, (1, 2, 4), quantized="awq")]
    plain, quantized = page(rows, "a commit", "versions").split("## Quantized weights")
    assert "| ok | 1 | 1 |" in plain
    assert "| awq | LlamaForCausalLM | ok | 1, 2, 4 |" in quantized


def test_group_sizes_that_are_missing_come_with_their_reason() -> None:
    row = verdict_on(NAME, lanes(sizes=[1], alone="3 heads", answers={"1": answers()}), STOCKS)
    assert row.verdict == OK
    assert row.group_sizes == (1,)
    assert "3 heads" in row.detail


def test_a_lane_is_compared_with_tp_1_where_stock_fails_at_its_degree() -> None:
    assert verdict_on(NAME, lanes(), STOCKS | {2: NO_STOCK}).verdict == OK
    served = lanes(answers={"1": answers(), "2": answers(0.01)})
    assert verdict_on(NAME, served, STOCKS | {2: NO_STOCK}).verdict == WRONG


def test_servers_that_end_are_refusals_failures_or_stocks_fault() -> None:
    assert verdict_on(NAME, lanes(status="refused", reason="--model: why"), {}).verdict == REFUSED
    assert verdict_on(NAME, lanes(status="overdue"), {}).verdict == FAILED
    assert verdict_on(NAME, lanes(status="failed"), STOCKS).verdict == FAILED
    assert verdict_on(NAME, lanes(status="failed"), {1: NO_STOCK}).verdict == STOCK


def test_a_lane_that_fails_its_check_is_ours_unless_stock_differs() -> None:
    served = lanes(
        status="differs",
        reason="group size 2: this lane does not compute what lane 1 does",
        answers={},
    )
    assert needs(served) == (1, 2)
    assert verdict_on(NAME, served, STOCKS).verdict == FAILED
    apart = verdict_on(NAME, served, {**STOCKS, 2: {"answers": answers(0.01), "reason": ""}})
    assert apart.verdict == REFUSED
    assert "TP 2, beside TP 1" in apart.detail
    none = verdict_on(NAME, served, STOCKS | {2: NO_STOCK})
    assert none.verdict == REFUSED
    assert "stock vLLM at TP 2: RuntimeError: no kernel" in none.detail


def test_served_model_without_a_comparison_is_blind() -> None:
    assert verdict_on(NAME, lanes(), {1: NO_STOCK, 2: NO_STOCK}).verdict == BLIND


def test_stock_is_asked_only_where_a_verdict_needs_it() -> None:
    assert needs(lanes(status="refused")) == ()
    assert needs(lanes(status="failed", answers={})) == (1,)
    assert needs(lanes()) == (1, 2)


def test_the_page_counts_and_lists_every_verdict() -> None:
    rows = [
        Row(f"Model{place}", "", verdict, detail=f"why {verdict}")
        for place, verdict in enumerate(VERDICTS)
    ]
    text = page(rows, "abc", "versions", missing=3)
    for row in rows:
        assert f"| {row.verdict} | 1 | 1 |" in text
        assert row.architecture in text
        assert row.detail in text
    assert "3 models were not tried" in text
    assert set(BAD) < set(VERDICTS)


def test_an_architecture_without_a_comparison_is_not_named_as_compared() -> None:
    rows = [Row("Lfm2ForCausalLM", "", OK), Row("LongcatFlashForCausalLM", "", STOCK)]
    how = page(rows, "abc", "versions").partition("## How")[2].partition("\n## ")[0]
    assert "in plain torch" in how
    assert "Lfm2ForCausalLM" in how
    assert "LongcatFlashForCausalLM" not in how


@pytest.mark.parametrize(
    ("status", "last", "reason"),
    [
        (
            2,
            "flying-serving: --model: models with X cannot be served",
            "--model: models with X cannot be served",
        ),
        (1, "flying-serving: --model: models with X cannot be served", None),
        (2, "RuntimeError: no", None),
        (2, "flying-serving: a step failed: RuntimeError: shapes", None),
        (2, "flying-serving: engine 1 could not start: AssertionError:", None),
        (2, "flying-serving: it failed. Please check the logs for more details.", None),
    ],
)
def test_only_one_line_that_says_why_is_a_refusal(
    status: int, last: str, reason: str | None
) -> None:
    assert refusal(Ended(status, f"INFO started\n{last}\n")) == reason


def test_the_root_cause_is_the_first_exception_and_its_place() -> None:
    log = (
        "INFO started\n"
        '(EngineCore pid=1) ERROR 11-24 [core.py:1]   File "/a/vllm/x.py", line 7, in load\n'
        "(EngineCore pid=1) ERROR 11-24 [core.py:1] ValueError: first\n"
        '  File "/a/b.py", line 9, in run\n'
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert root_cause(log) == "ValueError: first (x.py:7, load)"
    assert root_cause("nothing\nlast words\n") == "last words"
    assert cause_of_end(1, log) == cause_of_end(-9, log) == root_cause(log)
    assert cause_of_end(1, "last words") == "last words"
    assert cause_of_end(-9, "last words") == "killed by SIGKILL"
