"""Prompts in a lane of all engines, outputs in the engines apart: a server that is not built.

The lane divides each prompt over all devices. Its forms, and a bound:

- `token-split`: every engine computes a share of the prompt's tokens with all of its weights.
  Attention is divided by heads, between two all-to-alls in each layer. The lane's steps are woven
  with the decode steps of the engines, as lanes are.
- `tensor-split`: the same, but the lane is tensor parallel, as the groups of our server are.
- `token-split-fused`: as `token-split`, but each engine decodes its outputs in the lane's steps.
  Weights are then read once for both. Outputs are divided evenly at every step, without a cost.

- `free-prompts`: engines apart whose prompts take no time. It bounds every server that decodes
  outputs apart.

Keys and values of a prompt are left with the devices that own its heads. The engine that decodes
the output pulls the heads that it lacks, and steps no lane meanwhile.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from flying_lab.sim.cluster import SHORTEST_S, Cluster, Options
from flying_lab.sim.cost import LaneCost, all_reduce_s
from flying_lab.sim.machine import DegreeTime, Modelled
from flying_lab.sim.models import ACTIVATION_BYTES
from flying_lab.sim.node import System
from flying_lab.sim.requests import UNLIMITED, Chunk, SimRequest, SimStep
from flying_lab.sim.system import apart, system_of
from flying_lab.sim.token_parallel import without_attention_s
from flying_serving.errors import ConfigError
from flying_serving.policy.policies import POLICIES
from flying_serving.predict.migrations import MigrationCost


@dataclass(frozen=True)
class TokenSplit:
    """The costs of a lane of all `degree` devices in engines of `base` devices each.

    Raises:
        ConfigError: there is only one engine, or the model cannot be divided by heads.
    """

    machine: Modelled
    base: int
    degree: int
    engine: LaneCost
    heads: LaneCost

    @classmethod
    def of(cls, machine: Modelled, base: int) -> "TokenSplit":
        """Return the costs of a lane of all devices of a machine."""
        degree = machine.degrees(base)[-1]
        if degree == base:
            raise ConfigError(f"base={base}: the lane needs several engines")
        hardware = machine.kind.hardware
        engine, heads = (LaneCost(machine.model, hardware, count) for count in (base, degree))
        return cls(machine, base, degree, engine, heads)

    @property
    def engines(self) -> int:
        """Return the number of engines, each with all weights."""
        return self.degree // self.base

    def prompt_s(self, step: SimStep) -> float:
        """Return the seconds of a step of the lane, without the coordination of its engines."""
        tokens = step.sequences + step.prefill_tokens
        attention_s = self.heads.attention_s(
            step.sequences, step.decode_context_tokens, step.chunks
        )
        share_s = without_attention_s(self.engine, -(-tokens // self.engines))
        return share_s + attention_s + self.all_to_all_s(tokens)

    def all_to_all_s(self, tokens: float) -> float:
        """Return the seconds of the all-to-alls of all layers.

        Queries, keys and values go to the devices that own their heads, and the outputs of
        attention go back. Heads of keys and values are replicated as in tensor parallelism.
        """
        model = self.machine.model
        queries = model.query_width / self.degree
        keys_values = 2 * model.kv_width(self.degree)
        number_bytes = tokens * ACTIVATION_BYTES
        there_s = self._one_s(number_bytes * (queries + keys_values))
        return model.layers * (there_s + self._one_s(number_bytes * queries))

    def _one_s(self, device_bytes: float) -> float:
        """Return the seconds of one all-to-all, from the bytes that a device has before or after
        it.

        A device sends (p-1)/p of them. In an all-reduce it sends twice that share of the message.
        """
        hardware = self.machine.kind.hardware
        lines, link = hardware.all_reduce[self.engines], hardware.spec.link_bandwidth.value
        return all_reduce_s(lines, link, self.engines, device_bytes / 2)

    def weights_s(self) -> float:
        """Return the seconds in which an engine reads all weights once, input embedding apart."""
        model, hardware = self.machine.model, self.machine.kind.hardware
        embedding_bytes = model.embedding_bytes * model.vocab * model.hidden / self.base
        read_bytes = model.weight_bytes(self.base) - embedding_bytes
        efficiency = hardware.coefficients.memory_efficiency.value
        return read_bytes / (hardware.spec.memory_bandwidth.value * efficiency)

    def migration(self) -> MigrationCost:
        """Return the time in which an engine pulls the KV of a prompt from the devices that own the
        heads.

        Each of its devices has the heads of its part of the lane already.
        """
        whole = self.machine.migration(self.degree)
        assert whole is not None, "the lane has collectives"
        return MigrationCost(whole.fixed_s, self._lacked_bytes / self._link_bytes_per_s)

    @property
    def _lacked_bytes(self) -> int:
        model = self.machine.model
        return model.kv_bytes_per_token(self.base) - model.kv_bytes_per_token(self.degree)

    @property
    def _link_bytes_per_s(self) -> float:
        hardware = self.machine.kind.hardware
        line = hardware.all_reduce[self.degree].large
        return hardware.spec.link_bandwidth.value * line.efficiency.value

    def woven_s(self, step: SimStep) -> float:
        """Return the seconds of a step of the lane, which is no shorter than the host's work."""
        return max(self.prompt_s(step), self._busy_s(self.engines, step))

    def fused_s(self, step: SimStep) -> float:
        """Return the seconds of a step in which each engine decodes its outputs beside its share of
        the prompts.
        """
        decodes = -(-step.sequences // self.engines)
        context_tokens = step.decode_context_tokens * decodes / max(1, step.sequences)
        if not step.chunks:
            step_s = self.engine.step_s(decodes, context_tokens)
            return max(step_s, self._busy_s(1, SimStep([], decodes)))
        tokens = step.prefill_tokens
        share = [Chunk(-(-tokens // self.engines), 0)]
        step_s = self.engine.step_s(decodes, context_tokens, share)
        step_s += self.heads.attention_s(0, 0, step.chunks) - self.engine.attention_s(0, 0, share)
        pulling = min(self.engines, len(step.chunks))
        pull_s = tokens * self.migration().token_s / pulling
        step_s += self.all_to_all_s(tokens) + pull_s
        return max(step_s, self._busy_s(self.engines, step))

    def _busy_s(self, size: int, step: SimStep) -> float:
        busy = self.machine.host(size, self.base * size).busy
        return busy.seconds(step.sequences + len(step.chunks))


class PromptLane:
    """Sends prompts to the lane of all engines, and outputs to the engine with the fewest."""

    def __init__(self, cluster: Cluster, migration: MigrationCost) -> None:
        self._cluster = cluster
        self._migration = migration
        self._lane = max(cluster.lanes, key=len)
        self._outputs = [0] * cluster.shape.engines
        self._engines: dict[SimRequest, int] = {}

    def send(self, request: SimRequest) -> None:
        """Let all engines compute a prompt and its first token."""
        request.limit_tokens = 1
        message_s = self._cluster.shape.options.message_s
        self._cluster.clock.after(message_s, self._cluster.add, self._lane, request)

    def ended(self, run: SimRequest) -> bool:
        """Let an engine decode a request that has its first token. False if it is over."""
        engine = self._engines.pop(run, None)
        if engine is not None:
            self._outputs[engine] -= 1
        if run.ended:
            return False
        run.limit_tokens = UNLIMITED
        engine = min(range(len(self._outputs)), key=self._outputs.__getitem__)
        self._engines[run] = engine
        self._outputs[engine] += 1
        pull_s = self._migration.seconds(run.prompt_tokens)
        self._cluster.together((engine,), pull_s, self._cluster.add, (engine,), run)
        return True


def token_split(machine: Modelled, devices: int, options: Options) -> System:
    """Build a server whose lane of all engines splits tokens, woven with their decode steps."""
    split = TokenSplit.of(machine, devices)
    return replace(_woven(split, options, split.woven_s), name="token-split")


def tensor_split(machine: Modelled, devices: int, options: Options) -> System:
    """Build the same server with a tensor parallel lane."""
    split = TokenSplit.of(machine, devices)
    time = machine.step_time(split.degree, size=split.engines)
    return replace(_woven(split, options, time), name="tensor-split")


def token_split_fused(machine: Modelled, devices: int, options: Options) -> System:
    """Build the bound of such servers: outputs are decoded in the lane's steps.

    The server is simulated as one engine that has the KV memory of all engines, and runs as many
    requests.
    """
    split = TokenSplit.of(machine, devices)
    options = replace(options, max_num_seqs=options.max_num_seqs * split.engines)
    policy = POLICIES["static-dp"]
    system = apart(machine, split.degree, policy, options, resident=devices, time=split.fused_s)
    return replace(system, name="token-split-fused")


def free_prompts(machine: Modelled, devices: int, options: Options) -> System:
    """Build stock engines apart whose steps take the time of their outputs alone."""
    time = machine.device_time(devices, "graph", 0)

    def outputs_s(step: SimStep) -> float:
        return max(SHORTEST_S, time(SimStep([], step.sequences, step.decode_context_tokens)))

    system = apart(machine, devices, POLICIES["static-dp"], options, time=outputs_s)
    return replace(system, name="free-prompts")


def _woven(split: TokenSplit, options: Options, lane: DegreeTime) -> System:
    machine, devices, size = split.machine, split.base, split.engines
    engine = machine.engine(devices, (1, size), devices)
    times = {1: machine.step_time(devices, size=1), size: lane}
    system = system_of(machine, POLICIES["static-dp"], options, engine, times)
    migration = split.migration()

    def sender(cluster: Cluster, mean_outputs: Callable[[], float]) -> PromptLane:
        return PromptLane(cluster, migration)

    return replace(system, sender=sender)
