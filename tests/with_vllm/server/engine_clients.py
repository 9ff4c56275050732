"""vLLM's engine client, as its routes call it, over a server's shell."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams

from flying_serving.server.client import FlyingClient
from flying_serving.server.patches import check_before_stream
from tests.with_vllm.server.doubles import Server, request

OUTPUTS = 20


def client_of(server: Server) -> Any:
    """Return a FlyingClient of a server, without sockets to engines: hooks ask it for the shell."""
    client: Any = object.__new__(FlyingClient)
    client.shell = server.shell
    return client


class EngineClient:
    """`AsyncLLM` under our hook. A call begins when its first output is wanted: the shell gets a
    request for each of its outputs, which goes to an engine or waits.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.engine_core = client_of(server)
        self.output_processor = None

    def generate(self, *args: Any, **named: Any) -> AsyncIterator[Any]:
        """As vLLM's. Raises what the hook does."""
        answer: AsyncIterator[Any] = check_before_stream(self._original, self, *args, **named)
        return answer

    async def _original(
        self,
        _: Any,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        **__: Any,
    ) -> AsyncIterator[Any]:
        for number in range(sampling_params.n):
            new = request(f"{number}_{request_id}", OUTPUTS)
            new.external_req_id, new.priority = request_id, priority
            adding = asyncio.ensure_future(self.server.shell.add(new))
            await asyncio.sleep(0)
            self.server.sent()
            await adding
        yield SimpleNamespace(request_id=request_id, metrics=None)
