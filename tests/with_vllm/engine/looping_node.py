"""Engines of one server in one process: the loops that `engine/build.py` makes, over vLLM's own
schedulers.

A test has in place of vLLM's core the host of each loop, in place of workers some that write down
whose token is in which block, and in place of the channel one whose messages it can see.
"""

import shutil
import weakref
from collections import deque
from functools import partial
from operator import attrgetter
from tempfile import mkdtemp
from typing import Any

from vllm.config.lora import LoRAConfig
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from flying_serving.comm.board import StepBoard
from flying_serving.config import KEY, Deployment, FlyingConfig
from flying_serving.engine.build import EngineSetup, Links, make_loop
from flying_serving.engine.step_log import StepLog
from flying_serving.migration.transfer import map_peers, pull_kv, unmap_peers
from flying_serving.scheduling.arbiter import Wait
from flying_serving.vllm_adapter.keys import LANE_KEY
from flying_serving.vllm_adapter.kv.cache import groups_of
from flying_serving.vllm_adapter.kv.engine_pool import EnginePool
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane, OutputUse
from flying_serving.vllm_adapter.scheduler.failures import why_failed
from flying_serving.vllm_adapter.scheduler.scheduler import make_scheduler
from tests.with_vllm.engine.inboxes import Inbox, Inboxes
from tests.with_vllm.engine.token_writer import TokenWriter
from tests.with_vllm.vllm_adapter.kv_configs import of_one_layer
from tests.with_vllm.vllm_adapter.kv_lanes import BLOCK, config, token


class LoopingEngine:
    """One engine: in place of vLLM's core the host of its loop.

    `deployment`: as this engine knows it at its start. It has no loop before it has joined the
    others.
    """

    log_stats = False
    request_block_hasher = None

    def __init__(self, number: int, node: "LoopingNode", deployment: Deployment) -> None:
        self.engine_index, self.node = number, node
        self.worker = TokenWriter(partial(node.bring_to_step, number))
        self.aborting: list[str] = []
        self.pulled: list[range] = []
        """Tokens whose KV it has copied, in each call."""
        self.waits: list[Wait] = []
        """For which it had nothing else to do."""
        self._rounds = 0
        self._deployment = deployment
        self.vllm_config, self.kv_config = self._lane_config()
        self.structured_output_manager = StructuredOutputManager(self.vllm_config)
        self.scheduler = make_scheduler(self, self.vllm_config, self.kv_config)
        self._setup = EngineSetup(self, deployment)
        self.table = self._setup.offer_table()

    def _lane_config(self) -> Any:
        made, blocks = config(), self.node.blocks
        made.cache_config.block_size, made.cache_config.num_gpu_blocks = BLOCK, blocks
        made.lora_config = self.node.lora
        made.additional_config = {KEY: self._deployment}
        return made, of_one_layer(blocks, BLOCK)

    def join(self) -> None:
        """Make the loop; the tables of all engines are there."""
        offers = self._setup.peer_offers()
        inbox = Inbox(self.node.inboxes, self.engine_index)
        links = Links(inbox, self.node.board, self.table, offers)
        own = EnginePool(self.scheduler, groups_of(self.kv_config))
        self.loop = make_loop(self._setup, own, links, self.node.clock)

    def run(self) -> None:
        """Make one round of the loop."""
        assert not self._rounds, "it is in a round already"
        self._rounds = 1
        self.loop.run()
        self._rounds = 0

    @property
    def inbox(self) -> deque[Any]:
        """The messages to this engine."""
        return self.node.inboxes.of_engine[self.engine_index]

    @property
    def steps(self) -> StepLog:
        """The log of its steps."""
        return self.loop.instruments.steps

    # ---- host

    def serves_on(self) -> bool:
        goes_on, self._rounds = self._rounds == 1, 2
        return goes_on

    def take_messages(self, wait: Wait | None) -> bool:
        self.waits += [] if wait is None else [wait]
        return False

    def has_own_steps(self) -> bool:
        return bool(self.scheduler.has_requests())

    def step_own(self) -> bool:
        plan = self.scheduler.schedule()
        output = self.worker.execute(1, plan, None, OutputUse.RETURNED)
        self.emit(self.scheduler.update_from_output(plan, output))
        return bool(plan.total_num_scheduled_tokens)

    def add_own(self, request: Request, wave: int) -> None:
        self.scheduler.add_request(request)

    def call_lane(self, size: int, function: Any, *args: Any) -> Any:
        if function is DeviceLane.scheduler_config:
            return self._lane_config()
        return getattr(self.worker, function.__name__)(size, *args)

    def call_workers(self, function: Any, *args: Any) -> Any:
        if isinstance(function, attrgetter):
            return function(self.node)
        names = {
            pull_kv: self._pull,
            unmap_peers: lambda engines: None,
            map_peers: lambda engines: None,
        }
        return names[function](*args)

    def _pull(
        self, source_blocks: Any, target: Any, blocks: list[int], tokens: range, completes: bool
    ) -> None:
        self.pulled.append(tokens)
        first = min(source_blocks)
        for place in tokens:
            at = source_blocks[first][place // BLOCK], place % BLOCK
            value = self.node.engines[first].worker.kv[at]
            self.worker.kv[blocks[place // BLOCK], place % BLOCK] = value

    def process_aborts(self) -> None:
        names, self.aborting = self.aborting, []
        self.loop.abort(names)

    def emit(self, outputs: dict[int, Any] | None) -> None:
        for batch in (outputs or {}).values():
            for output in batch.outputs:
                self.node.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.node.ended[output.request_id] = str(output.finish_reason)
                if (why := why_failed(output)) is not None:
                    self.node.errors[output.request_id] = why


class LoopingNode:
    """Engines and what their clients got.

    `blocks`: physical ones of each engine. `overlaps`: whether groups schedule asynchronously.
    `tick_s`: how much time passes at each look at the clock. `lora`: as of a VllmConfig.
    """

    def __init__(
        self,
        blocks: int = 40,
        *,
        engines: int = 2,
        overlaps: bool = True,
        tick_s: float = 0.001,
        lora: LoRAConfig | None = None,
    ) -> None:
        self.blocks, self._tick_s, self.lora = blocks, tick_s, lora
        self.now_s = 100.0
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self._requests: list[Request] = []
        self.run_dir = run_dir = mkdtemp()
        # a fork that collects this node, as in tests of admission, removes it, too
        weakref.finalize(self, shutil.rmtree, run_dir, ignore_errors=True)
        self._deployment = Deployment(
            run_dir=run_dir,
            engines=engines,  # type: ignore[arg-type]
            devices=1,
            group_sizes=tuple(size for size in (1, 2, 4) if size <= engines),
            survives=True,
            incarnations=(0,) * engines,
            async_groups=overlaps,
            flying=FlyingConfig(lend_blocks=4),
        )
        self.board = StepBoard(f"{run_dir}/steps", engines)
        self.inboxes = Inboxes(engines)
        self.engines = [LoopingEngine(number, self, self._deployment) for number in range(engines)]
        for engine in self.engines:
            engine.join()

    def clock(self) -> float:
        """Return the time, which passes."""
        self.now_s += self._tick_s
        return self.now_s

    @property
    def preempted(self) -> list[str]:
        """Names of requests, each as often as it was preempted."""
        return [made.request_id for made in self._requests for _ in range(made.num_preemptions)]

    @property
    def leader(self) -> Any:
        return self.engines[0].loop.lanes.leaders[2]

    def add(self, request: Request, size: int, engine: int = 0, **notes: Any) -> None:
        """A request comes to an engine, for its lane of this size."""
        self._requests.append(request)
        request.sampling_params.extra_args = {LANE_KEY: size, **notes}
        self.engines[engine].loop.add(request, 0)

    def run(self, rounds: int) -> None:
        """Let both loops make rounds in turn."""
        for _ in range(rounds):
            for engine in self.engines:
                engine.run()

    def bring_to_step(self, number: int, step: int) -> None:
        """Let the other engine come as far as this step of the group, in which both take part."""
        (other,) = (engine for engine in self.engines if engine.engine_index != number)
        for _ in range(200):
            if other.worker.launched >= step:
                return
            other.run()
        raise AssertionError(f"engine {other.engine_index} never launched step {step}")

    def lose_member(self) -> None:
        """Engine 1 is lost, and engine 0 is told so."""
        self.engines[0].worker.loses_member = True
        self.engines[0].loop.set_peers([0, None])

    def start_member(self) -> None:
        """Engine 1 is there again."""
        incarnations = {"incarnations": (0, 1)}
        self.engines[1] = LoopingEngine(1, self, self._deployment.model_copy(update=incarnations))
        self.engines[1].join()
        self.engines[0].loop.set_peers([0, 1])

    def run_until_outstanding(self, steps: int) -> None:
        """Run until so many steps of the group are outstanding."""
        for _ in range(200):
            if self.leader.outstanding.count == steps:
                return
            self.run(1)
        raise AssertionError(f"{steps} steps were never outstanding")

    def run_until_tokens(self, name: str, count: int) -> None:
        """Run until a request has got so many tokens."""
        for _ in range(200):
            if len(self.tokens.get(name, ())) >= count:
                return
            self.run(1)
        raise AssertionError(f"{name} never got {count} tokens")

    def finish(self) -> None:
        """Run until nothing is left, and check that all blocks are free again."""
        for _ in range(2000):
            self.run(1)
            if not any(engine.loop.has_work() or engine.has_own_steps() for engine in self.engines):
                break
        else:
            raise AssertionError("there is still work")
        for engine in self.engines:
            engine.loop.lanes.check()
            assert engine.worker.kept == deque()
            assert not engine.loop.group_steps
        assert not self.leader.outstanding
        assert self.leader.scheduler.requests == {}


def outputs(family: int, prompt: int, count: int) -> list[int]:
    """Return the tokens that a request has to get."""
    return [token(family, prompt + place) for place in range(count)]
