"""Checks of a request before its answer begins, and the slot that it has from then until it
arrives.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Any
from weakref import finalize

from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from flying_serving.controller.controller import Controller
from flying_serving.controller.queue_slots import CallSlots
from flying_serving.controller.requests import RequestSpec
from flying_serving.errors import PoolFull, RequestError
from flying_serving.server.calls.engine_calls import EngineCalls, refusal
from flying_serving.server.requests.encoding import check_encodable, refused
from flying_serving.server.requests.rights import ClientRights
from flying_serving.server.requests.streams import Streams, prompt_length
from flying_serving.server.requests.xargs import DEGREE_KEY

_BOUNDS = (
    "that many run and wait at most (--max-num-seqs, --max-waiting-requests, --max-waiting-tokens)"
)


class Checks:
    """The checks that one server makes of each request, and the slots that it reserves for it."""

    def __init__(self, calls: EngineCalls, controller: Controller, streams: Streams) -> None:
        self.rights = ClientRights(calls.deployment.flying)
        self._calls = calls
        self._controller = controller
        self._streams = streams
        self._slots = controller.admission.slots

    def checked_spec(self, fields: Mapping[str, Any]) -> RequestSpec:
        """Check the fields of a request, by name. Returns the request as the controller sees it.

        Raises:
            VLLMValidationError: naming the field, its value and the allowed values (HTTP 400).
        """
        sent = {name: value for name, value in fields.items() if name != "prompt_embeds"}
        check_encodable(sent, self._calls.channel.encode)
        priority, params = fields["priority"], fields["sampling_params"]
        self.rights.check(priority, {} if params is None else params.extra_args or {})
        _check_finite(fields["prompt_embeds"])
        prompt = prompt_length(fields["prompt_token_ids"], fields["prompt_embeds"])
        spec = self._streams.spec_of(prompt, params, priority)
        adapter = fields.get("lora_request")
        return spec if adapter is None else replace(spec, variant=adapter.lora_int_id)

    def let_in(self, call: str, fields: Mapping[str, Any], answer: object) -> None:
        """Reserve slots for the requests of a call, if they can be taken, until they arrive or
        `answer` is gone.

        Reading `answer` begins the requests.

        Raises:
            VLLMValidationError: as `checked_spec`; if no layout of this server can run them; if `n`
                is more than it ever lets in (HTTP 400).
            GracefulHTTPError: if too many wait (429), or the server ends (503).
        """
        if not self._slots.claim(call):
            self._reserve(CallSlots(call), fields, answer)

    def let_in_ahead(self, call: str, fields: Mapping[str, Any], answer: object) -> None:
        """As `let_in`, before the call is made; reading `answer` makes the call."""
        self._reserve(CallSlots(call, ahead=True), fields, answer)

    def _reserve(self, slots: CallSlots, fields: Mapping[str, Any], answer: object) -> None:
        if self._calls.ending:
            raise refusal()
        spec = self.checked_spec(fields)
        slots.prompt_tokens, slots.urgent = spec.prompt_tokens, spec.urgent
        slots.left = getattr(fields["sampling_params"], "n", 1)
        with as_refusals_of_vllm(spec):
            self._controller.settings.capacity.sizes(spec)
            self._check_outputs(slots)
            self._controller.admission.reserve(slots)
        # an answer whose client has left is never begun, so no code of it runs
        finalize(answer, self._slots.release, slots).atexit = False

    def _check_outputs(self, slots: CallSlots) -> None:
        """Raise VLLMValidationError for more outputs than are ever let in together."""
        most = self._controller.admission.most_at_once(slots)
        if slots.left > most:
            says = f"must be a whole number from 1 to {most} on this server: {_BOUNDS}"
            raise refused("n", slots.left, says)

    def check_prompts(self, field: str, prompts: Sequence[Mapping[str, Any]], n: int = 1) -> None:
        """Check the number of prompts of a call, each as tokens or embeddings, before any of them
        is let in.

        The shortest prompt counts, and clients that may be urgent have the bounds of urgent
        requests. So no call is refused that an idle server would admit.

        Args:
            field: of the body, which has the prompts.
            n: outputs of each.

        Raises:
            VLLMValidationError: for more requests than are ever let in together (HTTP 400).
        """
        if len(prompts) < 2:
            return
        shortest = min(
            prompt_length(prompt.get("prompt_token_ids"), prompt.get("prompt_embeds"))
            for prompt in prompts
        )
        slots = CallSlots("", shortest, urgent=self.rights.may_be_urgent)
        most = self._controller.admission.most_at_once(slots)
        if len(prompts) * n > most:
            each = f" of n={n} outputs each" if n > 1 else ""
            says = f"must be at most {most // n}{each} on this server: {_BOUNDS}"
            raise VLLMValidationError(f"{field}: {len(prompts)} prompts, {says}", parameter=field)

    def check_end(self, call: str | None) -> None:
        """Raise GracefulHTTPError (503) for a request that arrives as the server ends, unless it
        has a slot.
        """
        if self._calls.engines_may_end or (self._calls.ending and not self._slots.has(call)):
            raise refusal()


def _check_finite(embeds: Any) -> None:
    """Raise VLLMValidationError for embeddings (a tensor, or None) that are not all finite: no
    token could be sampled after them.
    """
    if embeds is not None and not embeds.isfinite().all():
        raise VLLMValidationError(
            "prompt_embeds: must be finite numbers, without NaN and infinity",
            parameter="prompt_embeds",
        )


@contextmanager
def as_refusals_of_vllm(spec: RequestSpec) -> Iterator[None]:
    """Turn the refusals of a controller into vLLM's: VLLMValidationError, or GracefulHTTPError with
    429.
    """
    try:
        yield
    except RequestError as error:
        if spec.degree is None:
            raise VLLMValidationError(str(error)) from None
        raise VLLMValidationError(
            f"vllm_xargs.{error}", parameter=f"vllm_xargs.{DEGREE_KEY}"
        ) from None
    except PoolFull as error:
        raise GracefulHTTPError(str(error), HTTPStatus.TOO_MANY_REQUESTS) from None


def fields_of(given: Mapping[str, Any], prompt: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request, from the arguments of vLLM's `generate` and the prompt as
    tokens or embeddings.
    """
    of_prompt = {
        name: prompt.get(name) for name in ("prompt_token_ids", "prompt_embeds", "cache_salt")
    }
    others = {
        name: value
        for name, value in given.items()
        if name not in ("self", "prompt", "prompt_text")
    }
    return {"priority": 0} | of_prompt | others
