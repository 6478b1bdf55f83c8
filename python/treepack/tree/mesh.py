"""A dimension of a torch DeviceMesh where a number of ranks, or the number of one, is asked for.

Read by its attributes: torch is not imported.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from .._core import PackError

__all__ = ["Mesh", "group_of", "number_of", "rank_of"]

Other = TypeVar("Other")


class Mesh(Protocol):
    """What is read of a `torch.distributed.device_mesh.DeviceMesh`."""

    @property
    def ndim(self) -> int: ...
    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...
    def size(self) -> int: ...
    def get_local_rank(self) -> int: ...
    def get_coordinate(self) -> Any: ...
    def get_group(self) -> Any: ...


def number_of(ranks: Mesh | Other) -> int | Other:
    """The number of ranks of a mesh dimension; what is no mesh as it is."""
    mesh = _dimension(ranks, "ranks")
    return ranks if mesh is None else mesh.size()  # type: ignore[return-value]


def rank_of(rank: Mesh | int, ranks: int) -> int:
    """The rank of this process along a mesh dimension of so many ranks; what is no mesh as it is."""
    mesh = _dimension(rank, "rank")
    if mesh is None:
        return rank  # type: ignore[return-value]
    if mesh.size() != ranks:
        raise PackError(f"the mesh dimension has {mesh.size()} ranks; this packing is for {ranks}")
    if mesh.get_coordinate() is None:
        raise PackError("this process is on no rank of the mesh")
    return mesh.get_local_rank()


def group_of(group: Any) -> Any:
    """The process group of a mesh dimension; what is no mesh as it is."""
    mesh = _dimension(group, "group")
    return group if mesh is None else mesh.get_group()


def _dimension(value: Any, what: str) -> Mesh | None:
    """A mesh of one dimension, or None for what is no mesh.

    Raises:
        PackError: a mesh of several dimensions.
    """
    if isinstance(value, int) or not (hasattr(value, "mesh_dim_names") and hasattr(value, "get_local_rank")):
        return None
    mesh: Mesh = value
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        shown = f" ({', '.join(names)})" if names else ""
        raise PackError(
            f"{what} is a mesh of {mesh.ndim} dimensions{shown}; samples go over one of them, that of data "
            f'parallelism: mesh["{names[0] if names else "dp"}"], say. Ranks that run one tree together get the same '
            "trees"
        )
    return mesh
