"""Requests with adapters, and without, in one server: the answers of stock vLLM at every degree,
through switches of the layout in every mode and the loss of an engine.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from flying_lab.tiny_models.adapters import make_adapter
from flying_serving.config import MODES
from harness import lora
from harness.forked import ENVIRONMENT, ROOT
from harness.live import Server, wait_until
from harness.losing import is_whole, kill
from harness.streams import WORST_LOGPROB, worst_difference
from tests.stock.record import Answers, recorded
from tests.stock.requests import REQUESTS, StockRequest

pytestmark = [pytest.mark.server, pytest.mark.cpu_only("LoRA is served on the CPU alone")]

SHAPE = "llama"
DEGREES = (1, 2)
APART, TOGETHER = [[0], [1]], [[0, 1]]
ADAPTERS = (lora.BASE, lora.ONE, lora.TWO)
JOBS = list(itertools.product(REQUESTS, ADAPTERS))
ROUNDS = 2
"""Of switches: to each layout in each mode."""
BACK_S = 90.0
LATER = "later"
RUNTIME = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
Answer = tuple[list[int], list[float]]


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    return lora.adapters(SHAPE, ROOT / ".models")


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Server]:
    modules = [f"{name}={folder}" for name, folder in folders.items()]
    environment = {**ENVIRONMENT, RUNTIME: "1"}
    flags = (*lora.FLAGS, "--lora-modules", *modules)
    with Server(SHAPE, 2, *flags, environment=environment) as live:
        yield live


@pytest.fixture(scope="module")
def stock() -> dict[int, Answers]:
    return {degree: recorded(f"{SHAPE}-lora", degree) for degree in DEGREES}


def run(
    server: Server, request: StockRequest, adapter: str, degree: int | None, **told: int
) -> Answer:
    sampling = request.sampling()
    extra = (sampling.pop("extra_args") or {}) | ({"tp_degree": degree} if degree else {}) | told
    model = adapter or server.model
    choice = server.complete(request.prompt, vllm_xargs=extra, model=model, **sampling)
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def compare(stock: Answers, request: StockRequest, adapter: str, answer: Answer) -> None:
    name = lora.answer_name(request.name, adapter)
    tokens, logprobs = answer
    assert tokens == stock[name]["tokens"], name
    worst = worst_difference(logprobs, stock[name]["logprobs"])
    assert worst <= WORST_LOGPROB, f"{name}: logprobs differ by {worst}"


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return server.http.post(path, json=body)


def names(server: Server) -> list[str]:
    return [model["id"] for model in server.http.get("/v1/models").json()["data"]]


def test_recorded_adapters_change_answers(stock: dict[int, Answers]) -> None:
    """What follows would show little otherwise."""
    for request in REQUESTS:
        said = [stock[1][lora.answer_name(request.name, name)]["logprobs"] for name in ADAPTERS]
        for one, other in itertools.combinations(said, 2):
            assert worst_difference(one, other) > 0.1


def test_models_list_adapters_as_stock_does(server: Server, folders: dict[str, Path]) -> None:
    models = server.http.get("/v1/models").json()["data"]
    assert [(model["id"], model["root"], model["parent"]) for model in models] == [
        (server.model, server.model, None),
        *((name, str(folder), server.model) for name, folder in folders.items()),
    ]


def test_each_degree_gives_the_answers_of_stock(server: Server, stock: dict[int, Answers]) -> None:
    """Requests with adapters and without are in one batch."""
    for degree in DEGREES[::-1]:
        with ThreadPoolExecutor(len(JOBS)) as pool:
            answers = [pool.submit(run, server, *job, degree) for job in JOBS]
            for job, answer in zip(JOBS, answers, strict=True):
                compare(stock[degree], *job, answer.result())
    server.check()


def test_logprobs_of_a_prompt_are_those_of_its_adapter(
    server: Server, stock: dict[int, Answers]
) -> None:
    """A prompt that ends with recorded outputs has the logprobs that stock computed for these."""

    def ask(request: StockRequest, adapter: str, degree: int) -> list[float]:
        outputs = stock[degree][lora.answer_name(request.name, adapter)]["tokens"]
        choice = server.complete(
            (*request.prompt, *outputs),
            model=adapter or server.model,
            max_tokens=1,
            prompt_logprobs=0,
            vllm_xargs={"tp_degree": degree},
        )
        ranked = choice["prompt_logprobs"][-len(outputs) :]
        return [
            logprobs[str(token)]["logprob"] for token, logprobs in zip(outputs, ranked, strict=True)
        ]

    for degree in DEGREES:
        with ThreadPoolExecutor(len(JOBS)) as pool:
            answers = [pool.submit(ask, *job, degree) for job in JOBS]
            for (request, adapter), answer in zip(JOBS, answers, strict=True):
                name = lora.answer_name(request.name, adapter)
                worst = worst_difference(answer.result(), stock[degree][name]["logprobs"])
                assert worst <= WORST_LOGPROB, f"{name}: logprobs differ by {worst}"
    server.check()


def test_storm_of_switches_in_all_modes_changes_no_answer(
    server: Server, stock: dict[int, Answers]
) -> None:
    """Some requests stay at a degree. The others go wherever they are sent."""
    jobs = list(itertools.product(JOBS, (None, 2)))
    asked: list[tuple[tuple[StockRequest, str], int | None, Future[Any]]] = []
    with ThreadPoolExecutor(len(jobs)) as pool:
        for _, mode, groups in itertools.product(range(ROUNDS), MODES, (TOGETHER, APART)):
            if all(answer.done() for _, _, answer in asked):
                asked += [
                    (job, degree, pool.submit(run, server, *job, degree)) for job, degree in jobs
                ]
            server.layout(groups, mode)
        for job, degree, answer in asked:
            compare(stock[degree or 1], *job, answer.result())
    assert {switch["mode"] for switch in server.switches()} == set(MODES)
    server.check()


def test_request_that_two_engines_share_keeps_its_adapter(
    server: Server, stock: dict[int, Answers]
) -> None:
    server.layout(APART)
    jobs = [job for job in JOBS if len(job[0].prompt) > 100]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = [
            pool.submit(run, server, *job, None, split_at=len(job[0].prompt) // 2) for job in jobs
        ]
        for job, answer in zip(jobs, answers, strict=True):
            compare(stock[1], *job, answer.result())
    server.check()


def test_loss_of_an_engine_changes_no_answer(server: Server, stock: dict[int, Answers]) -> None:
    """The engine that is back has no adapter: it loads each with the first request for it."""
    server.layout(TOGETHER)
    with ThreadPoolExecutor(len(JOBS)) as pool:
        answers = [pool.submit(run, server, *job, 2) for job in JOBS]
        wait_until(lambda: server.requests("running") > 1, server.status)
        kill(server, 1)
        for job, answer in zip(JOBS, answers, strict=True):
            compare(stock[2], *job, answer.result())
    wait_until(lambda: is_whole(server), server.log, BACK_S)
    with ThreadPoolExecutor(len(JOBS)) as pool:
        answers = [pool.submit(run, server, *job, 2) for job in JOBS]
        for job, answer in zip(JOBS, answers, strict=True):
            compare(stock[2], *job, answer.result())
    server.check()


def test_adapter_that_is_loaded_while_the_server_runs(server: Server, tmp_path: Path) -> None:
    """It is served at every degree, and no more once its folder has gone, or once unloaded."""
    folder = make_adapter(tmp_path / LATER, SHAPE, seed=1)
    loaded = post(server, "/v1/load_lora_adapter", lora_name=LATER, lora_path=str(folder))
    assert (loaded.status_code, loaded.text) == (
        200,
        f"Success: LoRA adapter '{LATER}' added successfully.",
    )
    assert LATER in names(server)
    stock = {degree: recorded(f"{SHAPE}-lora", degree) for degree in DEGREES}
    for degree in DEGREES:
        answer = run(server, REQUESTS[0], LATER, degree)
        compare(stock[degree], REQUESTS[0], lora.ONE, answer)  # of the same seed
    shutil.rmtree(folder)
    gone = post(server, "/v1/completions", model=LATER, prompt=[1, 2, 3], max_tokens=1)
    assert gone.status_code == 404
    assert "model='later': the folder of this adapter" in gone.text  # vLLM hides the path itself
    unloaded = post(server, "/v1/unload_lora_adapter", lora_name=LATER)
    assert unloaded.status_code == 200
    assert LATER not in names(server)
    answer = post(server, "/v1/completions", model=LATER, prompt=[1, 2, 3], max_tokens=1)
    assert answer.status_code == 404


def test_adapters_that_cannot_be_loaded(server: Server, tmp_path: Path) -> None:
    """vLLM's own answers; no engine has anything of them."""
    wide = make_adapter(tmp_path / "wide", SHAPE, seed=3, rank=16)
    other = make_adapter(tmp_path / "other", "llama-75m", seed=3)
    cases: dict[str, tuple[str, int, str]] = {
        "missing": (str(tmp_path / "nothing"), 404, "No adapter found"),
        "wide": (str(wide), 500, "LoRA rank 16 is greater than max_lora_rank 8"),
        "other": (str(other), 500, "must match"),
        lora.ONE: (str(wide), 400, "has already been loaded"),
        server.model: (str(wide), 400, "conflicts with a served base model"),
    }
    for name, (path, status, what) in cases.items():
        answer = post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=path)
        assert (answer.status_code, what in answer.text) == (status, True), answer.text
    again = {"lora_name": lora.ONE, "lora_path": str(wide), "load_inplace": True}
    refused = post(server, "/v1/load_lora_adapter", **again)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "load_inplace"
    assert post(server, "/v1/unload_lora_adapter", lora_name="missing").status_code == 404
    assert set(names(server)) == {server.model, lora.ONE, lora.TWO}
    server.check()
