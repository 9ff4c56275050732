"""Every exception that Flying Serving raises on purpose, in one tree with FlyingError as its
root.
"""

UNSERVED = "cannot be served by Flying Serving yet"
"""The end of a refusal, behind a flag and what it asks for."""


class FlyingError(Exception):
    """Root of everything that Flying Serving raises on purpose."""


class ConfigError(FlyingError, ValueError):
    """A setting that cannot be used; the message names field, value and what is allowed."""


class Unsupported(ConfigError):
    """A vLLM feature that this version refuses at start; the message names the flag."""


class NotInstalled(FlyingError, ImportError):
    """A package that is not installed by default and is needed for what was asked; the message says
    how to.
    """


class LayoutError(FlyingError, ValueError):
    """A layout or a switch that is not possible; the message names field, value and what is
    allowed.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}={value!r}: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class OrderDropped(FlyingError):
    """An operator's order that is not carried out; the message says why."""


class WeightError(FlyingError):
    """A parameter of the model that cannot be shared between lanes without a copy."""


class LaneError(FlyingError):
    """A lane that cannot be served from: a made-up step fails in it, or gives another result than
    in lane 1.
    """


class RequestError(FlyingError, ValueError):
    """A request that no layout of this server can run."""


class PoolFull(FlyingError):
    """More requests would wait than may."""


class ServerFailed(FlyingError):
    """A server process that did not start; the message has the end of its log."""


class IntegrityError(FlyingError):
    """The block bookkeeping does not add up."""


class SharedMemoryFull(FlyingError):
    """There is no room for what engines share; the message names the file and the bytes that are
    needed and free.
    """


class WeightFileError(FlyingError):
    """The file from which weights are fetched back cannot be written or read; the message names its
    directory.
    """


class PeerMemory(FlyingError):
    """Memory of another process of the server that cannot be mapped; the message says whose and
    why.
    """


class DeviceMemory(FlyingError):
    """A call of CUDA's driver about memory that failed; the message names the call, its code and
    the device.
    """


class HookError(FlyingError):
    """The installed vLLM is not the one that the hooks were written for."""


class NoProcessGroup(FlyingError):
    """A call of vLLM that a group in shared memory cannot serve, as only torch process groups can;
    the message names it.
    """


class EngineLost(FlyingError):
    """Another engine did not answer, or said that it is going away."""


class AdapterNotLoaded(FlyingError):
    """An adapter that was not loaded in time, or has files that cannot be used; the message names
    the adapter and the problem.
    """


class GroupBroken(EngineLost):
    """A group lacks a member: it exchanges nothing, and its step is void. The message says why."""


class CollectiveTimeout(GroupBroken):
    """A collective did not complete before its deadline; the message names the missing members."""


class ServerEnds(EngineLost):
    """The server is shutting down."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class TooFewEngines(EngineLost):
    """The server ends because fewer engines are left than --min-engines; the message says which was
    the last lost.
    """
