"""The command line of `plan` and `frontier`, converted to values: the mesh or the meshes, the options, the plan whose layouts are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoshard.cli.loading import load_cluster, load_device
from autoshard.cli.verbs import Asked
from autoshard.mesh import MOST_DEVICES, Mesh
from autoshard.options import Options, having

Shape = tuple[int, ...]
AUTO = "auto"  # the --mesh that compares all shapes
WANTED_GAP = 1e-3  # relative: prices carry errors of several percent, so nobody waits for the digits behind it
ACCEPTED = (0.01, 60.0)  # (relative gap, seconds): after a minute this is enough


def wanted_gap(planning: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the gap at which planning ends: the one that is asked for, else a sensible one."""
    return {"gap": WANTED_GAP, "accepted": ACCEPTED, **planning} if "gap" not in planning else dict(planning)


def check_mesh_words(mesh: Shape | str | None, cluster: str | None, keep: str | None = None, devices: int | None = None) -> None:
    """ValueError on options that contradict each other about the mesh, or that name none."""
    if mesh is None and cluster is None and keep is None:
        raise ValueError("Missing option '--mesh': give the sizes of the mesh, as --mesh 2x4, or a measured --cluster cluster.json")
    if mesh == AUTO and devices is None:
        raise ValueError("--mesh auto compares the meshes of how many devices? Add for example --devices 16")
    if devices is not None and devices > MOST_DEVICES:
        raise ValueError(f"--devices is {devices}; expected {MOST_DEVICES} at most: make the cluster smaller")
    if mesh != AUTO and devices is not None:
        raise ValueError(f"--devices {devices} is for --mesh auto, the mesh here is {_by(mesh)}; leave one out")
    if mesh == AUTO and (cluster is not None or keep is not None):
        raise ValueError("--mesh auto compares meshes, but --cluster and --keep are for one; leave out the mesh")


def mesh_of(asked: Asked, shape: Shape | None, devices_per_node: int | None) -> Mesh:
    """The mesh of one shape: with published prices, as measured, or with the bandwidths that are passed."""
    if asked.cluster is not None:
        measured = load_cluster(asked.cluster)
        if shape is not None and shape != measured.shape:
            raise ValueError(f"--mesh is {_by(shape)}, but {asked.cluster} was measured as {_by(measured.shape)}; leave --mesh out")
        return measured
    assert shape is not None
    if asked.prices is not None:
        from autoshard.cost import presets  # here: scipy takes half a second to import

        return presets.mesh(asked.prices, shape, devices_per_node, tf32=asked.tf32)
    device = load_device(asked.device)
    return Mesh.from_bandwidths(shape, devices_per_node=devices_per_node, tf32=asked.tf32, device=device, **asked.links)


def one_mesh(asked: Asked, kept: Any) -> Mesh:
    """The mesh that the options describe, or that of the plan that is kept."""
    if kept is not None and asked.mesh is None and asked.cluster is None:
        return kept.mesh
    built = mesh_of(asked, asked.mesh, asked.devices_per_node)
    if kept is not None and built.shape != kept.mesh.shape:
        raise ValueError(f"the mesh is {_by(built.shape)}, but {asked.keep} shards tensors over {_by(kept.mesh.shape)}; leave the mesh out")
    return built


def inherited(planning: Mapping[str, Any], kept: Any) -> dict[str, Any]:
    """The options, and those of the kept plan where the command line has none."""
    if kept is None:
        return dict(planning)
    instead = {"microbatches"} if "global_batch" in planning else set()
    noted = {**kept.noted(*having(Options, "kept")), "training": kept.training}
    return {**{key: value for key, value in noted.items() if value is not None and key not in instead}, **planning}


def edits_note(kept: Mapping[str, str], edited: Mapping[str, list], path: str) -> str:
    """One line: how many layouts are kept, and which of them were edited."""
    changed = [f"{name} {had} -> {now}" for name, (had, now) in edited.items() if name in kept]
    return f"keeping {len(kept)} layouts of {path}, {len(changed)} of them edited" + (f": {'; '.join(changed)}" if changed else "")


def _by(shape: Any) -> str:
    return "None" if shape is None else "x".join(map(str, shape))
