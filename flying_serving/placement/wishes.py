"""A user's wishes for the placement, from environment variables with vLLM's names and meanings."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from flying_serving.errors import ConfigError
from flying_serving.placement.topology import format_cpus, parse_cpus

BIND, RESERVED, SIMULATED = (
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_CPU_NUM_OF_RESERVED_CPU",
    "VLLM_CPU_SIM_MULTI_NUMA",
)
THREADS, MEMORY_NODES = "OMP_NUM_THREADS", "CPU_VISIBLE_MEMORY_NODES"
AUTO, NOBIND = "auto", "nobind"
PROC_BIND, PLACES, GOMP_AFFINITY, KMP_AFFINITY = (
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
)
_HARMLESS = {
    PROC_BIND: ("", "false"),
    PLACES: ("",),
    GOMP_AFFINITY: (),  # libgomp takes an empty value for one CPU
    KMP_AFFINITY: ("", "none", "disabled"),
}
"""Variables by which OpenMP's libraries bind threads, and their values that bind none."""
_WHOLE = re.compile(r"(\d+)")
_NESTED = re.compile(r"(\d+)(,\d+)*")
"""As OpenMP has it: threads of the outermost region, then of those inside."""


@dataclass(frozen=True)
class Wishes:
    """A user's wishes for the placement.

    `bind`: auto, nobind, or lists of CPUs with | between. `threads`: of each device.
    `reserved_cores`: of each engine, that its OpenMP threads do not use. `simulated`: one simulated
    NUMA node for each device. `memory_nodes`: the nodes that may be used.
    """

    bind: str = AUTO
    threads: int | None = None
    reserved_cores: int | None = None
    simulated: bool = False
    memory_nodes: tuple[int, ...] | None = None


def read_wishes(variables: Mapping[str, str]) -> Wishes:
    """Read a user's wishes from environment variables.

    Raises:
        ConfigError: naming the variable, its value and what is allowed.
    """
    _refuse_binding_by_openmp(variables)
    wishes = Wishes(
        bind=variables.get(BIND, AUTO).strip(),
        threads=_number(THREADS, variables.get(THREADS, ""), 1, _NESTED),
        reserved_cores=_number(RESERVED, variables.get(RESERVED, ""), 0),
        simulated=variables.get(SIMULATED, "0") != "0",
        memory_nodes=_nodes(variables.get(MEMORY_NODES, "")),
    )
    if wishes.simulated and wishes.bind != AUTO:
        raise ConfigError(
            f"{BIND}={wishes.bind!r}: must be {AUTO!r} with {SIMULATED}={variables[SIMULATED]}"
        )
    return wishes


def cpus_by_device(wishes: Wishes, devices: int, allowed: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the CPUs of each device that a user's `bind` lists.

    Raises:
        ConfigError: if it is not a list of CPUs for each device, all of them among the `allowed`
            ones.
    """
    parts = wishes.bind.split("|")
    try:
        found = [parse_cpus(part) for part in parts]
    except ValueError as error:
        raise _wrong(wishes.bind, str(error), devices) from None
    for cpu in (cpu for cpus in found for cpu in cpus if cpu not in allowed):
        raise ConfigError(
            f"{BIND}={wishes.bind!r}: CPU {cpu} is not one of those that this process may use, "
            f"{format_cpus(allowed)}"
        )
    if len(found) != devices:
        raise _wrong(wishes.bind, f"{len(found)} {'list' if len(found) == 1 else 'lists'}", devices)
    return found


def _refuse_binding_by_openmp(variables: Mapping[str, str]) -> None:
    """Raise ConfigError if OpenMP's library would bind the main thread to one place as it is
    loaded, with torch.

    The affinity that the plan then reads, and with which engines are forked, is that place alone.
    """
    given = {name: variables[name].strip().lower() for name in _HARMLESS if name in variables}
    binding = [name for name, value in given.items() if value not in _HARMLESS[name]]
    if given.get(PROC_BIND) == "false":  # libgomp then reads neither of these
        binding = [name for name in binding if name not in (PLACES, GOMP_AFFINITY)]
    if binding:
        name = binding[0]
        allowed = "must be unset or 'false'" if name == PROC_BIND else "must be unset"
        problem = "it would bind all engines to the same cores"
        raise ConfigError(
            f"{name}={variables[name]!r}: {allowed}, as {problem}; {BIND} gives each engine its own"
        )


def _wrong(bind: str, problem: str, devices: int) -> ConfigError:
    count = "one list of CPUs" if devices == 1 else f"{devices} lists of CPUs with | between"
    which = "for each device of each engine"
    return ConfigError(
        f"{BIND}={bind!r}: {problem}; must be {AUTO!r}, {NOBIND!r} or {count} {which}, like 0-3,8"
    )


def _number(name: str, text: str, least: int, form: re.Pattern[str] = _WHOLE) -> int | None:
    """Return the first number of the text, None if the text is empty.

    Raises ConfigError unless the text has this form and the number is at least `least`.
    """
    if not text.strip():
        return None
    found = form.fullmatch(text.strip())
    if found is None or int(found[1]) < least:
        raise ConfigError(f"{name}={text!r}: must be a whole number from {least}")
    return int(found[1])


def _nodes(text: str) -> tuple[int, ...] | None:
    """Return the numbers in a list with commas between, as vLLM reads nodes; None if the text is
    empty.
    """
    if not text.strip():
        return None
    try:
        return tuple(sorted({int(node) for node in text.split(",")}))
    except ValueError:
        raise ConfigError(
            f"{MEMORY_NODES}={text!r}: must be numbers of NUMA nodes with commas between"
        ) from None
