"""vLLM's two model runners, V1 and V2: all in which they differ for lanes.

VLLM_USE_V2_MODEL_RUNNER chooses. vLLM's default is V2 where Triton is installed.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class ModelRunner(Protocol):
    """A model runner of vLLM, as far as V1 and V2 differ."""

    def take_model(self, model: torch.nn.Module, lane1: Any) -> None:
        """Use these modules as the model, without loading any weights. `lane1`: lane 1's runner."""

    def request_ids(self) -> set[str]:
        """Return the ids of the requests that the runner has."""

    def replace_blocks(self, copies: Mapping[int, int]) -> None:
        """Give requests other blocks between two steps (`copies`: new ones by old)."""

    def wrap_for_capture(self, config: VllmConfig) -> None:
        """Give the model what captures its CUDA graphs, as `load_model` does: a group's lane is
        not loaded.
        """

    def graph_sizes(self) -> set[int]:
        """Return the numbers of decoding requests for which there is a CUDA graph, or will be."""

    def graph_mode(self, requests: int) -> CUDAGraphMode:
        """Return how a step runs that decodes one token of each of some requests."""

    def use_graphs(self, are_used: bool) -> bool:
        """Replay graphs that are captured, or none. Return what held before."""


class V1:
    """`vllm.v1.worker.gpu_model_runner.GPUModelRunner`."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def take_model(self, model: torch.nn.Module, lane1: Any) -> None:
        """Use these modules, and lane 1's buffer of input embeddings, shape (tokens of a step,
        hidden).

        Each runner has one, of a hundred MB for a large model, though only multimodal models and
        prompts given as embeddings use it. Lanes step one after the other, so they need one at
        most.
        """
        self._runner.inputs_embeds = lane1.inputs_embeds
        self._runner.model = model

    def request_ids(self) -> set[str]:
        """Return the ids of the requests that the runner has."""
        return set(self._runner.requests)

    def replace_blocks(self, copies: Mapping[int, int]) -> None:
        """Replace blocks of the requests, and of their rows in the batch."""
        requests, batch = self._runner.requests, self._runner.input_batch
        for request in requests.values():
            for blocks in request.block_ids:
                blocks[:] = _replaced(blocks, copies)
        for request_id, row in batch.req_id_to_index.items():
            batch.block_table.add_row(requests[request_id].block_ids, row)

    def wrap_for_capture(self, config: VllmConfig) -> None:
        """Wrap the model: the wrapper captures what it calls, and replays it."""
        if not isinstance(self._runner.model, CUDAGraphWrapper):
            self._runner.model = CUDAGraphWrapper(self._runner.model, config, CUDAGraphMode.FULL)

    def graph_sizes(self) -> set[int]:
        """Return the sizes of the dispatcher, which are there once KV memory is bound."""
        of_modes = dict(self._runner.cudagraph_dispatcher.get_capture_descs())
        return {step.num_tokens for step in of_modes.get(CUDAGraphMode.FULL, ())}

    def graph_mode(self, requests: int) -> CUDAGraphMode:
        """Return the dispatcher's answer. It does not know whether the graph is captured."""
        dispatcher = self._runner.cudagraph_dispatcher
        mode, _ = dispatcher.dispatch(num_tokens=requests, uniform_decode=True)
        return CUDAGraphMode(mode)

    def use_graphs(self, are_used: bool) -> bool:
        """Let the dispatcher find its sizes, or none."""
        dispatcher = self._runner.cudagraph_dispatcher
        before, dispatcher.keys_initialized = dispatcher.keys_initialized, are_used
        return bool(before)


class V2:
    """`vllm.v1.worker.gpu.model_runner.GPUModelRunner`."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def take_model(self, model: torch.nn.Module, lane1: Any) -> None:
        """Use these modules by the runner's own `load_model`.

        It makes all that needs a model: its state, the sampler, the workers for grammars and for
        logprobs of prompts.
        """
        self._runner.load_model(model=model)

    def request_ids(self) -> set[str]:
        """Return the ids of the requests that the runner has."""
        return set(self._runner.req_states.req_id_to_index)

    def replace_blocks(self, copies: Mapping[int, int]) -> None:
        """Write the rows of the block tables anew, which alone have the blocks of the requests."""
        tables = self._runner.block_tables
        for row in self._runner.req_states.req_id_to_index.values():
            counts = tables.num_blocks.np[:, row].tolist()
            rows = [
                table.gpu[row, :count].tolist()
                for table, count in zip(tables.block_tables, counts, strict=True)
            ]
            blocks = tuple(_replaced(row_blocks, copies) for row_blocks in rows)
            tables.append_block_ids(row, blocks, overwrite=True)
        tables.apply_staged_writes()

    def wrap_for_capture(self, config: VllmConfig) -> None:
        """Leave the model as it is: the runner's manager captures it and keeps the outputs."""

    def graph_sizes(self) -> set[int]:
        """Return the sizes of the manager, which is there once KV memory is bound."""
        steps = self._runner.cudagraph_manager._capture_descs.get(CUDAGraphMode.FULL, ())
        return {step.num_tokens for step in steps}

    def graph_mode(self, requests: int) -> CUDAGraphMode:
        """Return the manager's answer, which is NONE until all graphs are captured."""
        step = self._runner.cudagraph_manager.dispatch(
            num_reqs=requests,
            num_tokens=requests,
            uniform_token_count=self._runner.decode_query_len,
            num_active_loras=0,
        )
        return CUDAGraphMode(step.cg_mode)

    def use_graphs(self, are_used: bool) -> bool:
        """Let the manager find its graphs, or none."""
        manager = self._runner.cudagraph_manager
        before, manager._graphs_captured = manager._graphs_captured, are_used
        return bool(before)


def _replaced(blocks: Iterable[int], copies: Mapping[int, int]) -> list[int]:
    return [copies.get(block, block) for block in blocks]


def unwrapped(model: Any) -> Any:
    """Return a runner's model without the wrapper that captures its graphs."""
    return model.unwrap() if isinstance(model, CUDAGraphWrapper) else model


def version_of(runner: Any) -> ModelRunner:
    """Return the adapter of a runner that vLLM's worker has made."""
    return V1(runner) if isinstance(runner, GPUModelRunner) else V2(runner)
