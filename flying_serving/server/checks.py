"""What every request has to pass before the controller gets it, whatever route it came by."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from flying_serving.controller.controller import Controller
from flying_serving.controller.requests import RequestSpec
from flying_serving.errors import PoolFull, RequestError
from flying_serving.server.calls import EngineCalls, refusal
from flying_serving.server.encoding import check_encodable
from flying_serving.server.rights import ClientRights
from flying_serving.server.streams import Streams, prompt_length
from flying_serving.server.xargs import DEGREE_KEY


class Checks:
    """Refuses requests that clients may not send, that cannot be encoded, or that no layout of this server can run."""

    def __init__(self, calls: EngineCalls, controller: Controller, streams: Streams) -> None:
        self.rights = ClientRights(calls.deployment.flying)
        self._calls = calls
        self._controller = controller
        self._streams = streams

    def spec(self, fields: Mapping[str, Any]) -> RequestSpec:
        """What the controller has to know of a request, from the fields of an `EngineCoreRequest` by name.

        Raises:
            VLLMValidationError: naming the field, its value and what is allowed (HTTP 400).
            GracefulHTTPError: if too many requests wait (429), or the server ends (503).
        """
        if self._calls.ending:
            raise refusal()
        sent = {name: value for name, value in fields.items() if name != "prompt_embeds"}
        check_encodable(sent, self._calls.channel.encode)
        priority, params = fields["priority"], fields["sampling_params"]
        self.rights.check(priority, {} if params is None else params.extra_args or {})
        prompt = prompt_length(fields["prompt_token_ids"], fields["prompt_embeds"])
        spec = self._streams.spec(prompt, params, priority)
        try:
            self._controller.check(spec)
        except RequestError as error:
            if spec.degree is None:
                raise VLLMValidationError(str(error)) from None
            raise VLLMValidationError(f"vllm_xargs.{error}", parameter=f"vllm_xargs.{DEGREE_KEY}") from None
        except PoolFull as error:
            raise GracefulHTTPError(str(error), HTTPStatus.TOO_MANY_REQUESTS) from None
        return spec
