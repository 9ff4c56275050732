"""Clients that leave, or do not read, cost what they hold and no more."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from benchmarks.cancel import FLAGS, LEAST_SWITCHES, cancel, ends_at_once
from harness.live import HOST, Server, wait_until

pytestmark = pytest.mark.server

STREAMS = 100
UNREAD_TOKENS = 600
UNREAD_BYTES = 2048
SEGMENT_BYTES = 536
"""The kernel gives a connection a buffer for some segments: on the loopback device, where they are
long, megabytes.
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        live = Server("llama", 4, *FLAGS)
    with live:
        yield live


def test_client_that_does_not_read_holds_no_engine_and_gets_all_tokens(server: Server) -> None:
    """Its stream ends in the engine; what it had not read is put together, and comes when it
    reads.
    """
    body = {
        "model": server.model,
        "prompt": [300, 301],
        "max_tokens": UNREAD_TOKENS,
        "ignore_eos": True,
    }
    body |= {"stream": True, "logprobs": 20, "return_token_ids": True}
    content = json.dumps(body)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNREAD_BYTES)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
        client.connect((HOST, server.port.number))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        client.sendall((head + content).encode())
        wait_until(lambda: server.requests("running"))
        server.until_idle()
        server.check()
        assert len(server.complete([302, 303], max_tokens=3)["token_ids"]) == 3
        client.settimeout(60)
        read = b"".join(iter(lambda: client.recv(1 << 16), b""))
    events = [json.loads(line[5:]) for line in read.splitlines() if line.startswith(b"data: {")]
    assert (
        sum(len(choice["token_ids"]) for event in events for choice in event["choices"])
        == UNREAD_TOKENS
    )
    assert len(events) < UNREAD_TOKENS
    assert b"data: [DONE]" in read


def test_clients_that_leave_at_random_moments_free_all_blocks(server: Server) -> None:
    """A short form of benchmarks/cancel.py."""
    found = cancel(server, STREAMS, clients=16, seed=1)
    ends_at_once(server)
    assert found.where.total() >= STREAMS
    assert found.switches >= LEAST_SWITCHES
    assert sum(count for where, count in found.where.items() if where.startswith("decoded")) >= 10
    assert sum(count for where, count in found.where.items() if "changing" in where) >= 10
