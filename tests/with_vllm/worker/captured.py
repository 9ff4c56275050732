"""A lane whose graphs are captured and replayed without a GPU: all but vLLM's runner is real, of
either version.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.workspace import lock_workspace

from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane
from tests.with_vllm.worker.configurations import LLAMA, configuration

SIZES = (1, 2, 4, 8, 16, 24)
WIDTH = 16


def graph_configuration(path: Path, sizes: Sequence[int] = SIZES) -> VllmConfig:
    """vLLM's configuration as it is on CUDA with --cuda-graphs, with these sizes of graphs."""
    config = configuration(path, LLAMA)
    compilation = config.compilation_config
    compilation.mode = CompilationMode.NONE
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    compilation.cudagraph_capture_sizes = list(sizes)
    compilation.max_cudagraph_capture_size = max(sizes)
    return config


class Logits(LogitsProcessor):
    """vLLM's class, with the product alone."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, head: torch.Tensor, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x @ head.t()


class SmallModel(nn.Module):
    """The outputs of a token are the sum of the embeddings up to it, which stands for KV."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(vocabulary, WIDTH))
        self.logits_processor = Logits()

    def compute_logits(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.logits_processor(self.embedding, x))


class CapturingRunner:
    """The part of vLLM's two GPUModelRunner that steps and captures.

    `spoil`: what a replayed graph makes of the right outputs, shape (requests, WIDTH).
    """

    model: Any

    def __init__(
        self,
        config: VllmConfig,
        spoil: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
        active: Callable[[], int] = lambda: 1,
    ) -> None:
        self.model = SmallModel(config.model_config.get_vocab_size())
        self.is_captured = False
        self.captured_under: list[int] = []
        """The group that was active at each capture."""
        self.replayed: list[int] = []
        """Requests of the steps that replayed a graph."""
        self.while_capturing: Callable[[], None] = lambda: None
        self._spoil, self._active = spoil, active
        self._tokens: dict[str, list[int]] = {}
        self._logits = torch.empty(0)

    def capture_model(self) -> int:
        self.captured_under.append(self._active())
        self.while_capturing()
        self.is_captured = True
        lock_workspace()
        return 3 << 20

    def mode_of(self, requests: int) -> CUDAGraphMode:
        """How vLLM runs a step that decodes one token of each of some requests."""
        raise NotImplementedError

    def _dummy_run(self, tokens: int) -> None:
        self.warmed = tokens

    def execute_model(self, plan: Any) -> Any:
        for request_id in plan.finished_req_ids:
            del self._tokens[request_id]
        for request in plan.scheduled_new_reqs:
            self._tokens[request.req_id] = list(request.prompt_token_ids)
        self._stepped = plan.num_scheduled_tokens
        if not self._stepped:
            return SimpleNamespace()
        done = dict.fromkeys(self._stepped, 0)
        cached = plan.scheduled_cached_reqs
        done |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ends = [self._tokens[name][: done[name] + n] for name, n in self._stepped.items()]
        outputs = torch.stack([self.model.embedding[tokens].sum(0) for tokens in ends])
        if set(self._stepped.values()) == {1}:
            count = len(ends)
            if self.mode_of(count) == CUDAGraphMode.FULL:
                assert self.is_captured
                self.replayed.append(count)
                outputs = self._spoil(outputs)
        self._logits = self.model.compute_logits(outputs)
        return None

    def sample_tokens(self, grammar: Any) -> Any:
        for name, token in zip(self._stepped, self._logits.argmax(1).tolist(), strict=True):
            self._tokens[name].append(token)
        return SimpleNamespace()


class CapturingV1(CapturingRunner, GPUModelRunner):  # type: ignore[misc]
    """The V1 runner, with vLLM's dispatcher."""

    def __init__(self, config: VllmConfig, *others: Any) -> None:
        super().__init__(config, *others)
        self.cudagraph_dispatcher = CudagraphDispatcher(config)
        self.cudagraph_dispatcher.initialize_cudagraph_keys(
            config.compilation_config.cudagraph_mode
        )

    def mode_of(self, requests: int) -> CUDAGraphMode:
        mode, _ = self.cudagraph_dispatcher.dispatch(num_tokens=requests, uniform_decode=True)
        return CUDAGraphMode(mode)


class CapturingV2(CapturingRunner):
    """The V2 runner, with vLLM's manager, which captures nothing here."""

    decode_query_len = 1

    def __init__(self, config: VllmConfig, *others: Any) -> None:
        super().__init__(config, *others)
        self.cudagraph_manager = ModelCudaGraphManager(
            config,
            torch.device("cpu"),
            config.compilation_config.cudagraph_mode,
            self.decode_query_len,
        )

    def capture_model(self) -> int:
        size_bytes = super().capture_model()
        self.cudagraph_manager._graphs_captured = True
        return size_bytes

    def mode_of(self, requests: int) -> CUDAGraphMode:
        return CUDAGraphMode(
            self.cudagraph_manager.dispatch(requests, requests, 1, num_active_loras=0).cg_mode
        )


class Groups:
    """Communicators of which one is active; `active`: the size of its group. `others_refuse`: what
    another member finds.
    """

    def __init__(self) -> None:
        self.active = 1
        self.others_refuse = False

    def any_of(self, size: int, refuses: bool) -> bool:
        """All members find what this one finds, and perhaps more."""
        return refuses or self.others_refuse

    def require_whole(self, size: int, *, goes_on: bool = False) -> None:
        """No member is lost."""

    @contextmanager
    def activate(self, size: int) -> Iterator[None]:
        self.active, before = size, self.active
        try:
            yield
        finally:
            self.active = before


def graph_lane(
    config: VllmConfig, size: int, spoil: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
) -> tuple[DeviceLane, CapturingRunner]:
    """A lane of a group over a runner that captures, and that runner: of the version that vLLM
    would make.
    """
    groups: Any = Groups()
    version = CapturingV2 if config.use_v2_model_runner else CapturingV1
    runner = version(config, spoil, lambda: int(groups.active))
    return DeviceLane(runner, config, tuple(range(size)), groups), runner
