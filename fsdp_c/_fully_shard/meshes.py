"""Data parallel meshes: which ranks cut a group's parameters, which replicate them."""

import math
import sys
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp_c._torch_compat import (
    DataParallelMeshDims,
    flattened_mesh,
    is_cut,
    joined_meshes,
    strided_shard,
)
from fsdp_c._units.cuts import Cut, check_placements, cut_of, local_of


@dataclass(frozen=True, slots=True)
class DataMesh:
    """The data parallel mesh of a group.

    Attributes:
        mesh: 1-D, or 2-D ``(replicate, shard)``.
        shards: Whether its last dimension cuts parameters; else it replicates them.
        spmd: The mesh that all parameters are on; ``mesh`` is a part of it. None:
            parameters are plain tensors, or on another part of a common mesh.
        dims: Names of dimensions of ``spmd``: a DataParallelMeshDims.
    """

    mesh: DeviceMesh
    shards: bool = True
    spmd: DeviceMesh | None = None
    dims: Any = None

    @property
    def shard_group(self) -> ProcessGroup | None:
        """The group over which parameters are cut; None: each rank has the whole."""
        return self.mesh.get_group(self.mesh.ndim - 1) if self.shards else None

    @property
    def replica_group(self) -> ProcessGroup | None:
        """The group of the ranks with the same rows; None: no dimension is for them."""
        has_replicas = self.mesh.ndim == 2 or not self.shards
        return self.mesh.get_group(0) if has_replicas else None

    @property
    def num_shards(self) -> int:
        """Into how many parts a parameter is cut."""
        return self.mesh.size(self.mesh.ndim - 1) if self.shards else 1

    @property
    def shard_rank(self) -> int:
        """Which of them this rank has."""
        return self.mesh.get_local_rank(self.mesh.ndim - 1) if self.shards else 0

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The dimension that cuts, as a mesh."""
        if self.mesh.ndim == 1:
            return self.mesh
        names: Any = self.mesh.mesh_dim_names
        return self.mesh[names[-1]]

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """The placements on ``mesh`` of a parameter that is cut along ``dim``."""
        last = Shard(dim) if self.shards else Replicate()
        return (*[Replicate()] * (self.mesh.ndim - 1), last)

    def cut(self, name: str, param: nn.Parameter, dim: int) -> Cut:
        """Return how ``param`` is cut along ``dim``.

        Raises:
            ValueError: It cannot be; the message names it.
        """
        if self.spmd is None or self._is_replicated(name, param):
            return cut_of(name, param, dim, self.mesh, self.placements(dim))
        self.check(name, param)
        assert isinstance(param, DTensor)
        mesh, placements = self._spmd_cut(param, dim)
        parallel = (self.spmd, tuple(param.placements))
        return Cut(
            dim,
            mesh,
            placements,
            param.shape,
            local_of(param).shape,
            parallel,
            frozenset(self._data_dims()),
        )

    def _is_replicated(self, name: str, param: nn.Parameter) -> bool:
        """Whether spmd_types' annotations of a plain tensor say that it is whole.

        torch 2.14 takes such tensors, too; torchtitan annotates all parameters.

        Raises:
            ValueError: They say something else, or ``spmd`` has other dimensions.
        """
        types: dict[Any, Any] = vars(param).get("_local_type", {})
        if not types or isinstance(param, DTensor):
            return False
        assert self.spmd is not None
        whole = sys.modules["spmd_types"].R
        others = {axis: kind for axis, kind in types.items() if kind is not whole}
        if others or len(self._data_dims()) < self.spmd.ndim:
            raise ValueError(
                f"parameter {name!r} is a plain tensor with spmd_types' annotations "
                f"{types}, on a mesh {self.spmd.mesh_dim_names}: fully_shard takes "
                "those that are R everywhere, on a mesh whose dimensions are all in "
                "dp_mesh_dims. Make it a DTensor on the mesh (torchtitan: "
                "parallelism.spmd_backend full_dtensor or partial_dtensor)"
            )
        return True

    def check(self, name: str, param: nn.Parameter) -> None:
        """Check that ``param`` lies on ``spmd``, whole on all data parallel dimensions.

        Raises:
            ValueError: It does not.
        """
        if not isinstance(param, DTensor):  # torch's first words
            raise ValueError(
                "When dp_mesh_dims is provided, all parameters must be DTensors on the "
                f"full SPMD mesh. Got plain tensor for parameter {name!r}: call "
                "distribute_module() or distribute_tensor() before"
            )
        if param.device_mesh is not self.spmd:
            raise ValueError(
                "Expected param's DTensor mesh to be the same mesh passed to "
                f"fully_shard, but parameter {name!r} is on {param.device_mesh}"
            )
        check_placements(name, param)
        for index, kind in self._data_dims().items():
            if not isinstance(param.placements[index], Replicate):
                assert self.spmd.mesh_dim_names is not None
                raise ValueError(
                    f"Expected Replicate() on DP {kind} dim "
                    f"'{self.spmd.mesh_dim_names[index]}' (index {index}) but got "
                    f"{param.placements[index]}: parameter {name!r}"
                )

    def _data_dims(self) -> dict[int, str]:
        """Return the data parallel dimensions of ``spmd``, and what each is for."""
        assert self.spmd is not None
        assert self.dims is not None
        names: Any = self.spmd.mesh_dim_names
        return {
            **{names.index(name): "shard" for name in self.dims.shard_names},
            **{names.index(name): "replicate" for name in self.dims.replicate_names},
        }

    def _spmd_cut(
        self, param: DTensor, dim: int
    ) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Return mesh and placements of the sharded parameter.

        It is cut once over the data parallel ranks, so several dimensions that cut are
        one, in the place of the first of them; replicas then stand before it.
        """
        assert self.spmd is not None
        kinds, names = self._data_dims(), self.spmd.mesh_dim_names
        assert names is not None
        shard_dims = sorted(index for index, kind in kinds.items() if kind == "shard")
        placements = list(param.placements)
        if not shard_dims:
            return self.spmd, tuple(placements)
        first = shard_dims[0]
        # The local tensor is cut, after all other cuts, those to the right included.
        num_parts = math.prod(
            self.spmd.size(index)
            for index in range(first + 1, self.spmd.ndim)
            if is_cut(placements[index], dim)
        )
        placements[first] = (
            strided_shard(dim, num_parts) if num_parts > 1 else Shard(dim)
        )
        if len(shard_dims) == 1:
            return self.spmd, tuple(placements)
        meshes: list[DeviceMesh] = []
        joined: list[Placement] = []
        for index, name in enumerate(names):
            if index == first:
                meshes.append(self.mesh)
                joined += [*[Replicate()] * (self.mesh.ndim - 1), placements[index]]
            elif index not in kinds:
                meshes.append(self.spmd[name])
                joined.append(placements[index])
        return joined_meshes(meshes), tuple(joined)


def data_mesh_of(mesh: DeviceMesh, dims: Any) -> DataMesh:
    """Return what ``mesh`` and ``dp_mesh_dims`` of fully_shard() mean.

    All ranks of the mesh must call: several dimensions that are one get a group.

    Raises:
        AssertionError: A 2-D mesh has no names, as in torch.
        TypeError: ``dims`` is of a wrong type.
        ValueError: They do not fit.
    """
    if dims is None:
        if mesh.ndim not in (1, 2):  # torch's first words, in all of these
            raise ValueError(
                f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}: pass a "
                "1-D one, or (replicate, shard), or name its dimensions in dp_mesh_dims"
            )
        if mesh.ndim == 2 and mesh.mesh_dim_names is None:
            raise AssertionError(
                "Please init the 2D mesh for HSDP with mesh_dim_names specified, as "
                "('replicate', 'shard')"
            )
        return DataMesh(mesh)
    if not isinstance(dims, DataParallelMeshDims):
        raise TypeError(
            f"dp_mesh_dims must be a DataParallelMeshDims, got {type(dims).__name__}"
        )
    if mesh.mesh_dim_names is None:
        raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in mesh.mesh_dim_names:
            raise ValueError(
                f"Mesh dim name '{name}' not found in mesh.mesh_dim_names "
                f"{mesh.mesh_dim_names}"
            )
    parts = [
        flattened_mesh(mesh, names)
        for names in (dims.replicate_names, dims.shard_names)
        if names
    ]
    if not parts:
        raise ValueError(
            "At least one of shard or replicate must be set in dp_mesh_dims"
        )
    data = parts[0] if len(parts) == 1 else joined_meshes(parts)
    return DataMesh(data, bool(dims.shard_names), mesh, dims)


def data_mesh_from(info: Any, name: str) -> DataMesh:
    """Return what the ``mesh_info`` of a ShardPlacementResult means.

    ``info`` is torch's FSDPMeshInfo or HSDPMeshInfo; ``name`` is the parameter's.

    Raises:
        ValueError: It has dimensions that it does not name.
    """
    mesh: DeviceMesh = info.mesh
    replicates = info.replicate_mesh_dim is not None
    if (info.replicate_mesh_dim, info.shard_mesh_dim) != (
        0 if replicates else None,
        mesh.ndim - 1,
    ) or mesh.ndim != 1 + replicates:
        raise ValueError(
            f"shard_placement_fn returned a mesh_info of {mesh} for parameter {name!r} "
            f"with shard_mesh_dim={info.shard_mesh_dim} and "
            f"replicate_mesh_dim={info.replicate_mesh_dim}: pass FSDPMeshInfo(mesh, 0) "
            "of a 1-D mesh, or HSDPMeshInfo(mesh, 1, 0) of (replicate, shard)"
        )
    return DataMesh(mesh)
