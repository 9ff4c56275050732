"""The steps of a lane's scheduler where requests have adapters (LoRA)."""

from collections import defaultdict
from itertools import chain
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from flying_serving.config import deployment_of
from flying_serving.vllm_adapter.lora.notes import AdapterNotes
from flying_serving.vllm_adapter.lora.requests import AdapterRequests


class AdapterScheduler(Scheduler):
    """vLLM's scheduler, which keeps a slot for an adapter whose requests have waited for too long.
    It ends the requests of an adapter that an engine of its group lacked in a step.

    It is below a `LaneScheduler`, and has its group, its clock and its hooks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        deployment = deployment_of(self.vllm_config.additional_config)
        aging_s = deployment.flying.priority_aging_s
        self.adapters = AdapterRequests(self.lora_config.max_loras, aging_s)
        self.notes = AdapterNotes(deployment.run_dir)
        self._slot_kept_for: int | None = None

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Keep a slot for an adapter whose requests have waited for too long, and schedule a step
        as vLLM does.

        Until it has the slot, no request of another adapter is begun. So running requests end, and
        the slots of their adapters become free.
        """
        adapters = {
            request.lora_request.lora_int_id
            for request in self.running
            if request.lora_request is not None
        }
        self._slot_kept_for = self.adapters.keep(adapters, self._waits_for_slot, self.clock())
        return super().schedule(*args, **kwargs)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take an output as vLLM does, without the requests of an adapter that was lacking."""
        self._end_without_adapter(scheduler_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _free_request_blocks(self, request: Any) -> None:
        if request.lora_request is not None and request.is_finished():
            self.adapters.ended(request.lora_request.lora_int_id, request.request_id)
        super()._free_request_blocks(request)

    def add_request(self, request: Any) -> None:
        """Take a request as vLLM does, and note when one with an adapter has come."""
        if request.lora_request is not None:
            adapter = request.lora_request.lora_int_id
            self.adapters.arrived(adapter, request.request_id, self.clock())
        super().add_request(request)

    def _waits_for_slot(self, request_id: str) -> bool:
        request = self.requests.get(request_id)
        return request is not None and request.status in (
            RequestStatus.WAITING,
            RequestStatus.PREEMPTED,
        )

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        is_ready = super()._handle_blocked_waiting_request(request)
        if self._slot_kept_for is None or request.lora_request is None:
            return is_ready
        # one that has begun may hold the blocks that the adapter's request needs
        has_begun = request.num_computed_tokens > 0 or request.num_preemptions > 0
        return is_ready and (has_begun or request.lora_request.lora_int_id == self._slot_kept_for)

    def _end_without_adapter(self, plan: Any) -> None:
        """End all requests of an adapter that an engine lacked in this step, with an error.

        The step has computed them without the adapter, or without a part of it. No token of theirs
        is taken, and their blocks are no prefixes.
        """
        of_plan = defaultdict[int, list[str]](list)
        for request_id in plan.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is not None and request.lora_request is not None:
                of_plan[request.lora_request.lora_int_id].append(request_id)
        for adapter, request_ids in of_plan.items():
            since_s = self.adapters.arrived_s(adapter, request_ids)
            why = self.notes.failure(self.group, adapter, since_s)
            if why is not None:
                failed, manager = self.adapters.of(adapter), self.kv_cache_manager
                blocks = (group for name in failed for group in manager.get_block_ids(name))
                manager.evict_blocks(set(chain.from_iterable(blocks)))
                ended = self.finish_requests(failed, RequestStatus.FINISHED_ERROR)
                self.hooks.requests_failed(ended, why)
