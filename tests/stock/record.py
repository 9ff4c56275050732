"""What stock vLLM answers at static tensor parallel degrees, each request run alone: `python -m
tests.stock` records it.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flying_lab.tiny_models.checkpoint import make_model, weights_hash
from harness import amx_cpu, drafts_cpu, experts_cpu, fp8_cpu, lora, mxfp4_cpu, triton_cpu
from harness.place import Place, environment, place
from tests.stock import drafted
from tests.stock.requests import FORCED, REQUESTS, StockRequest, requests_hash, shortened

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
MODELS = ROOT / ".models"
DEGREES: dict[str, tuple[int, ...]] = {
    "llama": (1, 2, 4, 8),
    "qwen2": (1, 2, 4),
    "qwen3": (1, 2, 4),
    "mixtral": (1, 2, 4),
    "llama-mqa": (1, 2, 4),
    "llama-tied": (1, 2),
    "llama-bfloat16": (1, 2, 4),
    "llama-v2": (1, 2, 4),
    "mixtral-v2": (1, 2, 4),
    "mixtral-windows": (1, 2),
    "mixtral-fp8": (1, 2, 4),
    "falcon-h1": (1,),
    "llama-mixed-bfloat16": (1, 2),
    "llama-fp8-mixed": (1, 2, 4),
    "gpt-oss": (1, 2, 4),
    "deepseek-v3": (1, 2, 4),
    "gpt-oss-mxfp4": (1, 2, 4),
    "gemma4": (1, 2, 4),
    "llama-lora": (1, 2),
    "llama-ngram": (1, 2),
}
BFLOAT16 = "-bfloat16"
"""A recording of this name is of the shape before it, in that type: degrees then differ by more
than rounding errors of float32, so servers are compared with how far stock's own degrees are apart.
How products of that type are rounded depends on the processor, so each kind has a recording of its
own; on one that has none, stock is asked each time.
"""
V2 = "-v2"
"""A recording of this name is of the shape before it, under vLLM's V2 model runner. It draws random
numbers in another way than V1. Triton's interpreter takes 20 times as long for a token as V1, so
only the first V2_TOKENS of each answer are recorded.
"""
MXFP4, FP8, FP8_EXPERTS = "-mxfp4", "-fp8-mixed", "-fp8"
"""A model of this name has experts in MXFP4 or weights in FP8: stock vLLM gets products of them in
plain torch. FP8 rounds inputs, so degrees differ: only requests with forced tokens are recorded.
"""
V2_TOKENS = 16
LORA = "-lora"
"""A recording of this name has each request without an adapter and with each of harness/lora.py."""
INT4 = "-mixed-bfloat16"
"""A model of this name has layers of int4: see harness/amx_cpu."""
NGRAM = "-ngram"
"""A recording of this name is of the shape before it, with the requests of `drafted.py`, which all
run together.
"""
WINDOWS = "-windows"
"""A recording of this name is of the shape before it, whose every layer sees a window of
WINDOW_TOKENS.
"""
WINDOW_TOKENS = 64
NO_PREFIX_CACHE = ("falcon-h1",)
"""Shapes whose kernel for the CPU cannot keep states of a prefix."""
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "block_size": 32,
    "max_num_batched_tokens": 1024,  # above every seeded prompt: see requests.py
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20,
    "logits_processors": ["harness.force:ForceTokens"],
}
ENVIRONMENT = {
    "VLLM_PLUGINS": "",  # none, ours included
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONPATH": str(ROOT),
}
KERNELS = {
    V2: triton_cpu.ENVIRONMENT,
    MXFP4: mxfp4_cpu.ENVIRONMENT,
    FP8: fp8_cpu.ENVIRONMENT,
    FP8_EXPERTS: experts_cpu.ENVIRONMENT,
    NGRAM: drafts_cpu.ENVIRONMENT,
    INT4: amx_cpu.ENVIRONMENT,
}
"""Variables of processes in which vLLM gets kernels for this CPU, by the end of a name."""
TIMEOUT_S = 280.0
"""Of a test that asks stock vLLM."""
RECORDING_S = 1200.0
GRACE_S = 10.0  # for vLLM's own processes to end after the one that started them

Answers = dict[str, dict[str, list[Any]]]


def record(
    shape: str, degree: int, models: Path = MODELS, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """Run stock vLLM at `degree` in processes of its own and return its answers.

    The result has "answers" (request name -> "tokens" and "logprobs"), "cpu" (torch's name of its
    vector instructions), "start_s" and "run_s". Raises RuntimeError with the end of vLLM's log if
    it fails or takes longer than `timeout_s`; no process is left in either case.
    """
    path = _model(shape, models)
    with tempfile.TemporaryDirectory() as scratch:
        out, log = Path(scratch, "answers.json"), Path(scratch, "log")
        command = [
            sys.executable,
            "-m",
            "tests.stock.record",
            "--child",
            str(path),
            str(degree),
            str(out),
            shape,
        ]
        runner = next((kernels for end, kernels in KERNELS.items() if shape.endswith(end)), {})
        with log.open("wb") as stream:
            child = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | environment(place()) | ENVIRONMENT | runner,
                stdout=stream,
                stderr=stream,
                process_group=0,
            )
            try:
                status = child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end_session(child)
        text = log.read_text(encoding="utf-8", errors="replace")
        _unlink_shared_memory(text)
        if status != 0:
            raise RuntimeError(
                f"stock vLLM, {shape} at degree {degree}: status {status}\n{text[-8000:]}"
            )
        return dict(json.loads(out.read_text(encoding="utf-8")))


def hash_of(data: bytes) -> str:
    """Return a hash by which recordings notice other data."""
    return hashlib.sha256(data).hexdigest()[:16]


def processor() -> str:
    """The kind of this processor, as far as products of bfloat16 depend on it."""
    flags = set(
        re.findall(
            r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE
        )[0].split()
    )
    kinds = (
        ("amx_bf16", "amx"),
        ("avx512_bf16", "avx512-bf16"),
        ("avx512f", "avx512"),
        ("avx2", "avx2"),
    )
    return next((kind for flag, kind in kinds if flag in flags), "other")


def _file(shape: str) -> Path:
    """Where the answers of a shape are kept."""
    return (
        FOLDER / f"{shape}-{processor()}.json"
        if shape.endswith(BFLOAT16)
        else FOLDER / f"{shape}.json"
    )


def is_asked_each_time(shape: str) -> bool:
    """Return whether no recording holds for this processor."""
    return shape.endswith(BFLOAT16) and not _file(shape).exists()


def recorded(shape: str, degree: int, models: Path = MODELS) -> Answers:
    """Return the recorded answers (request name -> "tokens" and "logprobs"). Where products of
    bfloat16 were not recorded on such a processor, stock is asked.

    Raises ValueError if another model, other requests, versions or settings were recorded.
    """
    if is_asked_each_time(shape):
        return dict(record(shape, degree, models)["answers"])
    saved = json.loads(_file(shape).read_text(encoding="utf-8"))
    here = identity(shape, models)
    if other := {key: saved.get(key) for key in here if saved.get(key) != here[key]}:
        now = {key: here[key] for key in other}
        raise ValueError(
            f"recorded were {other}, here are {now}: run python -m tests.stock {shape}"
        )
    return dict(saved["degrees"][str(degree)]["answers"])


def identity(shape: str, models: Path = MODELS) -> dict[str, Any]:
    """Return what a recording made here would be of: the model, the requests, vLLM, torch and
    numpy, and the settings of the engine. A processor's kind is in the name of its file.
    """
    model = _model(shape, models)
    return {
        "shape": shape,
        "weights": weights_hash(model),
        "config": hash_of((model / "config.json").read_bytes()),
        "requests": _requests_hash(shape),
        "versions": {name: version(name) for name in ("vllm-cpu", "torch", "numpy")},
        "engine": _engine(shape),
    }


def largest_difference(left: Answers, right: Answers) -> float:
    """Return the largest difference of a token's logprob. Raises AssertionError where tokens
    differ.
    """
    assert left.keys() == right.keys()
    for name in left:
        ours, theirs = left[name]["tokens"], right[name]["tokens"]
        first = next(
            (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
            None,
        )
        assert ours == theirs, f"{name}: tokens differ from token {first} on: {ours} and {theirs}"
    return max(
        abs(a - b)
        for name in left
        for a, b in zip(left[name]["logprobs"], right[name]["logprobs"], strict=True)
    )


def _end_session(child: subprocess.Popen[bytes]) -> None:
    """Wait for the rest of the child's session, if the child has ended, and kill what is left after
    GRACE_S.
    """
    deadline = time.monotonic() + (GRACE_S if child.poll() is not None else 0.0)
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(child.pid, 0)  # raises ProcessLookupError once no process is left
            time.sleep(0.1)
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _unlink_shared_memory(log: str) -> None:
    """Remove the segments that vLLM's CPU workers often leave behind; their names begin with a word
    in the log.
    """
    for name in set(re.findall(r"vllm_dist_[0-9a-f]{32}", log)):
        for segment in Path("/dev/shm").glob(f"{name}*"):
            segment.unlink(missing_ok=True)


def _model(shape: str, models: Path) -> Path:
    """Make the model of a recording."""
    for ending in (BFLOAT16, V2, LORA, NGRAM, WINDOWS):
        shape = shape.removesuffix(ending)
    return make_model(models / shape, shape)


def _adapters(shape: str, model: str) -> dict[str, Any]:
    """Return vLLM's LoRARequest of each adapter of a recording by name, and None for none."""
    from vllm.lora.request import LoRARequest

    if not shape.endswith(LORA):
        return {lora.BASE: None}
    folders = lora.adapters(shape.removesuffix(LORA), Path(model).parent)
    requests = {
        name: LoRARequest(name, number, str(folder))
        for number, (name, folder) in enumerate(folders.items(), start=1)
    }
    return {lora.BASE: None, **requests}


def _dtype(shape: str) -> str:
    """Return the type that a recording computes in."""
    return "bfloat16" if shape.endswith(BFLOAT16) else "float32"


def _engine(shape: str) -> dict[str, Any]:
    """Return the settings of a recording's engine."""
    processors = ["harness.force_v2:ForceTokens"] if shape.endswith(V2) else None
    changed: dict[str, Any] = {"logits_processors": processors} if processors else {}
    if place() is Place.ONE_GPU:  # where servers are too
        changed["gpu_memory_utilization"] = 0.1
    by_ending = {LORA: lora.ENGINE, NGRAM: drafted.ENGINE, FP8_EXPERTS: experts_cpu.ENGINE}
    by_ending[WINDOWS] = {"hf_overrides": {"sliding_window": WINDOW_TOKENS}}
    changed |= next((by_ending[ending] for ending in by_ending if shape.endswith(ending)), {})
    if shape in NO_PREFIX_CACHE:
        changed["enable_prefix_caching"] = False
    return ENGINE | {"dtype": _dtype(shape)} | changed


def _requests_hash(shape: str) -> str:
    """Return a hash of the requests of a recording."""
    return drafted.requests_hash() if shape.endswith(NGRAM) else requests_hash()


def _requests(shape: str) -> list[StockRequest]:
    """Return the requests of a recording."""
    if shape.endswith((FP8, FP8_EXPERTS)):
        return list(FORCED)
    if not shape.endswith(V2):
        return list(REQUESTS)
    return [shortened(request, V2_TOKENS) for request in REQUESTS]


def _answer_all(model: str, degree: int, out: Path, shape: str) -> None:
    """Body of the child: start stock vLLM, answer each request alone, write what it said."""
    import torch
    from vllm import LLM, SamplingParams

    start = time.perf_counter()
    llm = LLM(model=model, tensor_parallel_size=degree, **_engine(shape))
    ready = time.perf_counter()
    answers: Answers = {}
    counts: list[int] = []
    if shape.endswith(NGRAM):
        answers, counts = drafted.answer(llm)
    adapters = {} if shape.endswith(NGRAM) else _adapters(shape, model)
    for request, adapter in itertools.product(_requests(shape), adapters):
        prompt: Any = {"prompt_token_ids": list(request.prompt)}
        done = llm.generate(
            [prompt],
            SamplingParams(**request.sampling()),
            use_tqdm=False,
            lora_request=adapters[adapter],
        )[0].outputs[0]
        ids = list(done.token_ids)
        if request.forced and ids != list(request.forced):
            raise RuntimeError(f"{request.name} was not forced: {ids}")
        logprobs = [entry[token].logprob for entry, token in zip(done.logprobs, ids, strict=True)]
        answers[lora.answer_name(request.name, adapter)] = {
            "tokens": ids,
            "logprobs": [round(value, 6) for value in logprobs],
        }
    result = {
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "start_s": round(ready - start, 1),
        "run_s": round(time.perf_counter() - ready, 1),
        "answers": answers,
        "counts": counts,
    }
    out.write_text(json.dumps(result), encoding="utf-8")


def _save(shape: str, degrees: dict[str, dict[str, Any]]) -> None:
    """Write the recording of one shape. Degrees recorded before stay if all else is as it was."""
    content = identity(shape)
    path = _file(shape)
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept = (
        before["degrees"] if all(before.get(key) == value for key, value in content.items()) else {}
    )
    content["degrees"] = dict(sorted((kept | degrees).items()))
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")


def record_all(shape: str, degrees: Sequence[int]) -> None:
    """Record a shape at these degrees, and report how far they are apart."""
    found: dict[str, dict[str, Any]] = {}
    for degree in degrees:
        begin = time.perf_counter()
        found[str(degree)] = result = record(shape, degree, timeout_s=RECORDING_S)
        total_s = time.perf_counter() - begin
        print(
            f"{shape} degree {degree}: {result['start_s']} s start, {result['run_s']} s run, "
            f"{total_s:.1f} s in all"
        )
    _save(shape, found)
    first, *others = degrees
    for degree in () if shape.endswith((BFLOAT16, FP8, FP8_EXPERTS)) else others:
        apart = largest_difference(found[str(first)]["answers"], found[str(degree)]["answers"])
        print(f"{shape}: degrees {first} and {degree}: same tokens, logprobs within {apart:.1e}")


if __name__ == "__main__":
    _answer_all(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
