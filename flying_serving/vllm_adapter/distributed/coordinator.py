"""vLLM's coordinator of a group that needs no torch world: engines come and go one by one."""

from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import GroupCoordinator

from flying_serving.comm.communicator import COMMUNICATORS
from flying_serving.comm.parts import byte_parts
from flying_serving.config import Collectives
from flying_serving.errors import NoProcessGroup

REFUSED = (
    "make_sibling_device_group",
    "create_mq_broadcaster",
    "create_single_reader_mq_broadcasters",
    "graph_capture",
    "all_gatherv",
    "reduce_scatter",
    "reduce_scatterv",
    "reduce_scatterv_into_output",
    "_reduce_scatter_out_place",
    "broadcast_object",
    "broadcast_object_list",
    "send_object",
    "recv_object",
    "isend_object",
    "broadcast_tensor_dict",
    "send_tensor_dict",
    "isend_tensor_dict",
    "recv_tensor_dict",
    "irecv_tensor_dict",
    "barrier",
    "send",
    "recv",
    "dispatch_router_logits",
    "dispatch",
    "combine",
    "allocate_combine_input",
    "combine_into_output",
)
"""Methods of GroupCoordinator that need a process group. No model that lanes serve calls one of
them.
"""
CPU = torch.device("cpu")
_WITH_GROUPS = {"cpu": "--cpu-collectives gloo"}
"""Settings with which groups have torch process groups, by the type of their device."""
REFUSED_ATTRIBUTES = ("cpu_group", "torch_distributed_backend")


class AbsentGroup:
    """Stands for the process group of a lane's coordinator. A model may keep it, and any use of it
    raises NoProcessGroup.

    Before each operation torch compares the group with the default one or looks it up, and both
    raise.
    """

    def __init__(self, refuse: Callable[[], NoReturn]) -> None:
        self._refuse = refuse

    def __getattr__(self, name: str) -> NoReturn:
        # a copy has no attributes yet, and is asked how to set its state
        if name.startswith("__") or name == "_refuse":
            raise AttributeError(name)
        self._refuse()

    def __eq__(self, other: object) -> bool:
        self._refuse()

    def __hash__(self) -> int:
        self._refuse()


class LaneCoordinator(GroupCoordinator):
    """The coordinator of a group of several ranks without torch process groups.

    The torch world of a rank then need not hold the others. It sums, gathers and broadcasts tensors
    as GroupCoordinator does; all other methods of that class raise NoProcessGroup.
    """

    def __init__(
        self,
        rank: int,
        group_ranks: list[list[int]],
        name: str,
        local_rank: int,
        *,
        device: torch.device = CPU,
        collectives: Collectives = "shm",
    ) -> None:
        """Make the group of `rank` among `group_ranks`, a partition of all ranks of all engines.

        `device`: of the rank's tensors. `collectives`: one of `COMMUNICATORS`.
        """
        self.unique_name = parallel_state._get_unique_name(name)
        parallel_state._register_group(self)
        self.rank, self.group_ranks = rank, group_ranks
        self.ranks = next(ranks for ranks in group_ranks if rank in ranks)
        self.world_size, self.rank_in_group = len(self.ranks), self.ranks.index(rank)
        self.local_rank = self.device_index = local_rank
        self.device = device
        self.use_device_communicator = True
        self.device_communicator = COMMUNICATORS[collectives](
            f"group {name} of ranks {self.ranks}", device
        )
        self.mq_broadcaster = None
        self.use_custom_op_call = self.use_cpu_custom_send_recv = False
        self._pending_isends: deque[Any] = deque()

    @property
    def device_group(self) -> AbsentGroup:
        """The stand-in for torch's process group."""
        return AbsentGroup(lambda: _refused("device_group")(self))

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite a tensor with the tensor of rank `src` of the group."""
        return self.device_communicator.broadcast(input_, src)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of each rank's tensor, which has shape (world, ...)."""
        return self.device_communicator.all_to_all(x)

    def destroy(self) -> None:
        """Do nothing: shared memory belongs to the communicator pool, which closes it."""


def exchange(coordinator: GroupCoordinator, x: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of each tensor of a coordinator's ranks, of shape (world, ...).

    Part j of the result is of rank j. Coordinators that are vLLM's own exchange by their torch
    process group, and one of a single rank returns `x`. Raises ValueError if `x` has another number
    of parts.
    """
    if isinstance(coordinator, LaneCoordinator):
        return coordinator.all_to_all(x)
    world = coordinator.world_size
    sent = byte_parts(x, world)  # gloo takes no float8
    if world == 1:
        return x
    received = x.new_empty(x.shape)
    torch.distributed.all_to_all_single(
        byte_parts(received, world), sent.contiguous(), group=coordinator.device_group
    )
    return received


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(self: LaneCoordinator, *args: Any, **kwargs: Any) -> NoReturn:
        raise NoProcessGroup(
            f"{name} of {self.unique_name}: this group has no torch process group; "
            f"with {_WITH_GROUPS.get(self.device.type, '--cuda-collectives nccl')} it has one"
        )

    return refuse


for _name in REFUSED:
    setattr(LaneCoordinator, _name, _refused(_name))
for _name in REFUSED_ATTRIBUTES:
    setattr(LaneCoordinator, _name, property(_refused(_name)))
