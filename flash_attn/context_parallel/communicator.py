"""Which communicator the arguments `mesh` and `group` name."""

from __future__ import annotations

import torch.distributed as dist

from flash_attn.context_parallel.copies import CopyTransport
from flash_attn.context_parallel.local_group import current_rank
from flash_attn.context_parallel.transport import GroupTransport, MeshTransport


class NotAMember(RuntimeError):
    """This rank is none of the group's: no other one waits for it."""


def communicator_of(mesh, group, copies: bool = False, dimensions: tuple[int, ...] = (1,)):
    """The communicator of a DeviceMesh, a ProcessGroup, a rank of a LocalGroup, or of all ranks.

    copies: one that reaches the other ranks' memory; a group has one for all plans. dimensions: those that the mesh may
    have; two make a MeshTransport.
    """
    if mesh is not None and group is not None:
        raise TypeError("group: expected None, for mesh is given, got both")
    if mesh is not None:
        return _of_mesh(mesh, copies, dimensions)
    if hasattr(group, "all_gather_ints"):
        return group
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("group: expected torch.distributed to be initialised or a rank of a LocalGroup, got neither")
    if group is None:
        group = dist.group.WORLD
    elif group is dist.GroupMember.NON_GROUP_MEMBER:
        raise NotAMember("group: expected a group that this rank belongs to, got another")
    elif not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup or a rank of a LocalGroup, got {type(group).__name__}")
    if dist.get_rank(group) < 0:
        raise NotAMember("group: expected a group that this rank belongs to, got another")
    return _of_group(group, copies)


def _of_mesh(mesh, copies: bool, dimensions: tuple[int, ...]):
    if getattr(mesh, "ndim", None) not in dimensions:
        numbers = {(1,): "one dimension", (1, 2): "one dimension or two"}[dimensions]
        raise NotImplementedError(f"mesh: expected a DeviceMesh of {numbers}, got {mesh!r}")
    if getattr(mesh, "get_coordinate", tuple)() is None:
        raise NotAMember(f"mesh: expected a DeviceMesh that this rank belongs to, got {mesh!r}")
    if mesh.ndim == 1:
        return _of_group(mesh.get_group(), copies)
    ranks = mesh.mesh
    if any((ranks.diff(dim=dim) <= 0).any() for dim in (0, 1)):  # groups count ranks in this order, rows would not
        raise RuntimeError(f"mesh: expected ranks that ascend along both dimensions, got {ranks.tolist()}")
    return MeshTransport(_of_group(mesh.get_group(0), copies), _of_group(mesh.get_group(1), False))


def _of_group(group, copies: bool):
    if hasattr(group, "all_gather_ints"):
        return group
    return CopyTransport.of(group) if copies else GroupTransport(group)


def reachable(mesh, group, error: BaseException):
    """Communicators in which other ranks may wait for the one that has this error.

    Those of mesh and of group; where neither is one, the LocalGroup of this thread or, if it has a CPU backend, the
    default group of torch.distributed.
    """
    if isinstance(error, NotAMember):
        return []
    given = [pair for pair in ((mesh, None), (None, group)) if pair != (None, None)] or [(None, None)]
    found = [transport for pair in given if (transport := _if_any(*pair)) is not None]
    if len(found) == 2 and getattr(found[0], "group", found[0]) is getattr(found[1], "group", found[1]):
        found.pop()
    default = current_rank() or _if_any(None, None)
    return found or ([default] if default is not None and default.checks_on_host else [])


def _if_any(mesh, group):
    try:
        return communicator_of(mesh, group, dimensions=(1, 2))
    except Exception:
        return None
