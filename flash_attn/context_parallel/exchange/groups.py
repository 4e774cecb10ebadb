"""Which communicator the arguments `mesh` and `group` name."""

from __future__ import annotations

from typing import Protocol, Union

import torch
import torch.distributed as dist

from flash_attn.context_parallel.exchange.local_group import LocalRank, current_rank
from flash_attn.context_parallel.exchange.peer_copies import CopyTransport
from flash_attn.context_parallel.exchange.transport import GroupTransport

Transport = Union[GroupTransport, LocalRank]
Group = Union[dist.ProcessGroup, LocalRank]


class Mesh(Protocol):
    """A DeviceMesh, or what `LocalRank.mesh` returns."""

    @property
    def ndim(self) -> int: ...
    @property
    def mesh(self) -> torch.Tensor: ...
    def get_group(self, dim: int, /) -> Group: ...


class MeshCommunicator:
    """A mesh of two dimensions: K and V move along `outer`, heads along `inner`, nothing between other ranks."""

    def __init__(self, outer: Transport, inner: Transport):
        self.outer, self.inner = outer, inner
        self.rank, self.size = outer.rank * inner.size + inner.rank, outer.size * inner.size
        self.checks_on_host = outer.checks_on_host and inner.checks_on_host

    def connect(self, device: torch.device) -> None:
        self.inner.connect(device)
        self.outer.connect(device)

    def all_gather_ints(self, values: list[int], seconds: float | None = None) -> list[list[int]]:
        row = [value for own in self.inner.all_gather_ints(values, seconds) for value in own]
        every = [value for own in self.outer.all_gather_ints(row, seconds) for value in own]
        return [every[i : i + len(values)] for i in range(0, len(every), len(values))]


Communicator = Union[Transport, MeshCommunicator]


class NotAMember(RuntimeError):
    """This rank is not in the group: no other rank waits for it."""


def communicator_of(
    mesh: Mesh | None, group: Group | None, copies: bool = False, dimensions: tuple[int, ...] = (1,)
) -> Communicator:
    """The communicator of a DeviceMesh, a ProcessGroup, a rank of a LocalGroup, or by default of all ranks.

    copies: one that writes to the other ranks' memory; all plans of a group share it. dimensions: how many the mesh may
    have; a mesh of two gives a MeshCommunicator.
    """
    if mesh is not None and group is not None:
        raise TypeError("group: expected None, for mesh is given, got both")
    if mesh is not None:
        return _of_mesh(mesh, copies, dimensions)
    if isinstance(group, LocalRank):
        return group
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("group: expected torch.distributed to be initialised or a rank of a LocalGroup, got neither")
    if group is None:
        group = dist.group.WORLD
    elif group is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]  # an int
        raise NotAMember("group: expected a group that this rank belongs to, got another")
    elif not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup or a rank of a LocalGroup, got {type(group).__name__}")
    assert group is not None
    if dist.get_rank(group) < 0:
        raise NotAMember("group: expected a group that this rank belongs to, got another")
    return _of_group(group, copies)


def _of_mesh(mesh: Mesh, copies: bool, dimensions: tuple[int, ...]) -> Communicator:
    if getattr(mesh, "ndim", None) not in dimensions:
        numbers = {(1,): "one dimension", (1, 2): "one dimension or two"}[dimensions]
        raise NotImplementedError(f"mesh: expected a DeviceMesh of {numbers}, got {mesh!r}")
    if getattr(mesh, "get_coordinate", tuple)() is None:
        raise NotAMember(f"mesh: expected a DeviceMesh that this rank belongs to, got {mesh!r}")
    if mesh.ndim == 1:
        return _of_group(mesh.get_group(0), copies)
    ranks = mesh.mesh
    if any((ranks.diff(dim=dim) <= 0).any() for dim in (0, 1)):  # groups sort their ranks, rows of the mesh would not
        raise RuntimeError(f"mesh: expected ranks that ascend along both dimensions, got {ranks.tolist()}")
    return MeshCommunicator(_of_group(mesh.get_group(0), copies), _of_group(mesh.get_group(1), False))


def _of_group(group: Group, copies: bool) -> Transport:
    if isinstance(group, LocalRank):
        return group
    return CopyTransport.of(group) if copies else GroupTransport(group)


def reachable(mesh: Mesh | None, group: Group | None, error: BaseException) -> list[Communicator]:
    """Communicators in which other ranks may wait for the one that has this error.

    Those of mesh and group. If neither is valid, the LocalGroup of this thread or the default group of
    torch.distributed if that has a CPU backend.
    """
    if isinstance(error, NotAMember):
        return []
    given = [pair for pair in ((mesh, None), (None, group)) if pair != (None, None)] or [(None, None)]
    found = [communicator for pair in given if (communicator := _valid(*pair)) is not None]
    if len(found) == 2 and getattr(found[0], "group", found[0]) is getattr(found[1], "group", found[1]):
        found.pop()
    default = current_rank() or _valid(None, None)
    return found or ([default] if default is not None and default.checks_on_host else [])


def _valid(mesh: Mesh | None, group: Group | None) -> Communicator | None:
    try:
        return communicator_of(mesh, group, dimensions=(1, 2))
    except Exception:
        return None
