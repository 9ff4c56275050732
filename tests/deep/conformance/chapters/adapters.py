"""Requests with adapters of LoRA, and without, in one server."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from flying_lab.tiny_models.adapters import make_adapter
from flying_serving.vllm_adapter.lora.engine_adapters import RETRY_S
from harness import lora
from harness.forked import ROOT
from harness.live import wait_until
from harness.streams import WORST_LOGPROB, worst_difference
from tests.deep.conformance.live import Asked, Job, Live
from tests.stock.requests import REQUESTS

SHAPE = "llama"
RUNTIME = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
ADAPTERS = (lora.BASE, lora.ONE, lora.TWO)
JOBS = tuple(Job(request, adapter) for request in REQUESTS for adapter in ADAPTERS)
LATER = "later"
LONG_TOKENS = 1900
"""Of a request that runs while files are removed and a switch is made."""
FOLDERS = {name: lora.folder(SHAPE, ROOT / ".models") / name for name in (lora.ONE, lora.TWO)}
FLAGS = (*lora.FLAGS, "--lora-modules", *(f"{name}={path}" for name, path in FOLDERS.items()))


def write_adapters(model: Path, _: Path) -> Path:
    """Write the adapters, and return the model as it is."""
    lora.adapters(SHAPE, model.parent)
    return model


def post(live: Live, path: str, **body: Any) -> httpx.Response:
    return live.http.post(path, json=body)


def names(live: Live) -> list[str]:
    return [model["id"] for model in live.http.get("/v1/models").json()["data"]]


def adapters_change_answers(live: Live) -> None:
    """The recorded ones: what follows would show little otherwise."""
    stock = live.case.stock(1)
    for request in REQUESTS:
        said = [stock[Job(request, name).name]["logprobs"] for name in ADAPTERS]
        for one, other in itertools.combinations(said, 2):
            assert worst_difference(one, other) > 0.1


def models_are_listed(live: Live) -> None:
    """Adapters are among them as in stock vLLM."""
    models = live.http.get("/v1/models").json()["data"]
    assert [(model["id"], model["root"], model["parent"]) for model in models] == [
        (live.model, live.model, None),
        *((name, str(folder), live.model) for name, folder in FOLDERS.items()),
    ]


def logprobs_of_a_prompt(live: Live) -> None:
    """A prompt that ends with recorded outputs has the logprobs that stock computed for these."""

    def ask(asked: Asked) -> None:
        stock = live.case.stock(asked.degree or 1)[asked.job.name]
        choice = live.complete(
            (*asked.job.prompt, *stock["tokens"]),
            model=asked.job.adapter or live.model,
            max_tokens=1,
            prompt_logprobs=0,
            vllm_xargs={"tp_degree": asked.degree},
        )
        ranked = choice["prompt_logprobs"][-len(stock["tokens"]) :]
        pairs = zip(stock["tokens"], ranked, strict=True)
        found = [logprobs[str(token)]["logprob"] for token, logprobs in pairs]
        assert worst_difference(found, stock["logprobs"]) <= WORST_LOGPROB, asked.job.name

    every = [Asked(job, degree) for degree in live.degrees for job in live.jobs(degree)]
    with ThreadPoolExecutor(len(every)) as pool:
        list(pool.map(ask, every))
    live.check()


def one_is_loaded_while_the_server_runs(live: Live) -> None:
    """It is served at every degree, from memory when its folder has gone, and not once unloaded."""
    with TemporaryDirectory() as scratch:
        folder = make_adapter(Path(scratch, LATER), SHAPE, seed=1)
        loaded = post(live, "/v1/load_lora_adapter", lora_name=LATER, lora_path=str(folder))
        success = f"Success: LoRA adapter '{LATER}' added successfully."
        assert (loaded.status_code, loaded.text) == (200, success)
        assert LATER in names(live)
        for degree in live.degrees:
            answer = live.run(Asked(Job(REQUESTS[0], LATER), degree))
            live.compare(Asked(Job(REQUESTS[0], lora.ONE), degree), answer)  # of the same seed
        shutil.rmtree(folder)
        gone = post(live, "/v1/completions", model=LATER, prompt=[1, 2, 3], max_tokens=1)
        assert gone.status_code == 200
    unloaded = post(live, "/v1/unload_lora_adapter", lora_name=LATER)
    assert unloaded.status_code == 200
    assert LATER not in names(live)
    answered = post(live, "/v1/completions", model=LATER, prompt=[1, 2, 3], max_tokens=1)
    assert answered.status_code == 404


def another_version_is_no_answer(live: Live) -> None:
    """An adapter that engines have to read again, and whose files have changed or gone: its
    requests end with an error, at every degree, and no engine ends.
    """
    before = _processes(live)
    with TemporaryDirectory() as scratch:
        folder = make_adapter(Path(scratch, LATER), SHAPE, seed=1)
        _load(live, LATER, folder)
        others = [f"other{number}" for number in range(lora.MAX_CPU_LORAS)]
        for number, name in enumerate(others, 3):  # no engine has LATER in memory any more
            _load(live, name, make_adapter(Path(scratch, name), SHAPE, seed=number))
        kept = Path(scratch, "kept")
        folder.rename(kept)
        make_adapter(folder, SHAPE, seed=2)
        changed = "the files of adapter 'later' have changed since it was loaded"
        for degree in live.degrees:
            _refused(live, degree, changed)
        shutil.rmtree(folder)
        time.sleep(RETRY_S + 1)
        for degree in live.degrees:
            _refused(live, degree, "cannot read adapter 'later' again")
        kept.rename(folder)
        time.sleep(RETRY_S + 1)
        for degree in live.degrees:
            answer = live.run(Asked(Job(REQUESTS[0], LATER), degree))
            live.compare(Asked(Job(REQUESTS[0], lora.ONE), degree), answer)
        for name in (LATER, *others):
            assert post(live, "/v1/unload_lora_adapter", lora_name=name).status_code == 200
    assert _processes(live) == before
    live.check()


def a_running_one_comes_to_an_engine_without_it(live: Live) -> None:
    """Its folder has gone, and a member of its new group lacks it: it ends with an error, and no
    engine ends.
    """
    before, moved = _processes(live), live.migrations()
    live.layout(live.apart)
    with TemporaryDirectory() as scratch, ThreadPoolExecutor(1) as pool:
        folder = make_adapter(Path(scratch, LATER), SHAPE, seed=1)
        _load(live, LATER, folder)
        others = [f"other{number}" for number in range(lora.MAX_CPU_LORAS)]
        for number, name in enumerate(others, 3):
            _load(live, name, make_adapter(Path(scratch, name), SHAPE, seed=number))
        asked = pool.submit(live.post, [1, 2, 3], LONG_TOKENS, model=LATER)
        tokens = live.metric("vllm:generation_tokens_total", "model_name")
        wait_until(lambda: live.metric("vllm:generation_tokens_total", "model_name") != tokens)
        assert post(live, "/v1/unload_lora_adapter", lora_name=LATER).status_code == 200
        shutil.rmtree(folder)
        live.layout(live.layouts[0], "migrate")
        answer = asked.result()
        assert "cannot read adapter 'later' again" in answer.text
        assert answer.status_code == 500
        for name in others:
            assert post(live, "/v1/unload_lora_adapter", lora_name=name).status_code == 200
    assert live.migrations() > moved
    assert _processes(live) == before
    live.check()


def _processes(live: Live) -> list[int]:
    return [engine["pid"] for engine in live.status()["engines"]]


def _load(live: Live, name: str, folder: Path) -> None:
    loaded = post(live, "/v1/load_lora_adapter", lora_name=name, lora_path=str(folder))
    assert loaded.status_code == 200, loaded.text


def _refused(live: Live, degree: int, why: str) -> None:
    asked = {"model": LATER, "prompt": [1, 2, 3], "vllm_xargs": {"tp_degree": degree}}
    answer = post(live, "/v1/completions", **asked, max_tokens=1)
    assert (answer.status_code, why in answer.text) == (500, True), answer.text


def some_cannot_be_loaded(live: Live) -> None:
    """vLLM's own answers; no engine has anything of them."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wide = make_adapter(folder / "wide", SHAPE, seed=3, rank=16)
        other = make_adapter(folder / "other", "llama-75m", seed=3)
        loud = make_adapter(folder / "loud", SHAPE, seed=3)
        settings = json.loads((loud / "adapter_config.json").read_text())
        (loud / "adapter_config.json").write_text(json.dumps(settings | {"lora_alpha": 1e300}))
        cases: dict[str, tuple[Path, int, str]] = {
            "missing": (folder / "nothing", 404, "No adapter found"),
            "wide": (wide, 500, "LoRA rank 16 is greater than max_lora_rank 8"),
            "other": (other, 500, "must match"),
            "loud": (loud, 500, "must be finite in float32"),
            lora.ONE: (wide, 400, "has already been loaded"),
            live.model: (wide, 400, "conflicts with a served base model"),
        }
        for name, (path, status, what) in cases.items():
            answer = post(live, "/v1/load_lora_adapter", lora_name=name, lora_path=str(path))
            assert (answer.status_code, what in answer.text) == (status, True), answer.text
        again = {"lora_name": lora.ONE, "lora_path": str(wide), "load_inplace": True}
        refused = post(live, "/v1/load_lora_adapter", **again)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "load_inplace"
    assert post(live, "/v1/unload_lora_adapter", lora_name="missing").status_code == 404
    assert set(names(live)) == {live.model, lora.ONE, lora.TWO}
    live.check()
