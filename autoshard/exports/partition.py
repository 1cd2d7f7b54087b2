"""A partition function for torch's `distribute_module`: every parameter as a DTensor in the plan's layout."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.utils.weak import WeakIdKeyDictionary

from autoshard.exports.record import Export, Left, sent_tokens
from autoshard.exports.source import comments, rows
from autoshard.layout import Layout, parse
from autoshard.solution import Solution

LEFT = (Left("layouts of activations, and routes between them", "DTensor propagates from the parameters on, op by op"),)


class Partition(Export):
    """`distribute_module(model, device_mesh, partition)`. It carries every parameter's layout on all axes.

    DTensor chooses the layouts of activations, op by op, so the cost of a step is not known. ValueError on another mesh, or for a
    parameter that the plan lacks or has in another shape. As a dict: {"h.0.mlp.up.weight": ["Replicate()", "Shard(dim=0)"]}.
    """

    def __init__(self, solution: Solution):
        self.mesh = solution.mesh.shape
        self.placed = WeakIdKeyDictionary()  # parameter -> the same as a DTensor, so that tied ones stay tied
        self.layouts = {name: (parse(row["layout"]), tuple(row["shape"])) for name, row in solution.parameters.items()}
        texts = {name: [repr(placement) for placement in layout] for name, (layout, _) in self.layouts.items()}
        super().__init__(texts, left=LEFT + sent_tokens(solution), plan_seconds=solution.cost)

    def __call__(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        if tuple(device_mesh.shape) != self.mesh:
            raise ValueError(f"the device mesh has shape {tuple(device_mesh.shape)}, but the plan is for {self.mesh}; plan again for it")
        for attribute, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            layout = self._layout(f"{name}.{attribute}" if name else attribute, tuple(parameter.shape))
            if parameter not in self.placed:
                placed = distribute_tensor(parameter.data, device_mesh, layout)
                self.placed[parameter] = nn.Parameter(placed, requires_grad=parameter.requires_grad)
            module.register_parameter(attribute, self.placed[parameter])

    def _layout(self, name: str, shape: tuple[int, ...]) -> Layout:
        if name not in self.layouts:
            raise ValueError(f"the plan has no parameter {name!r}; it was made for another model")
        layout, planned = self.layouts[name]
        if shape != planned:
            raise ValueError(f"parameter {name!r} is {shape}, planned was {planned}; plan again for this model")
        return layout


def as_python(partition: Partition) -> str:
    """A module with `partition_fn`, for a launcher without autoshard."""
    layouts = {name: f"[{', '.join(_source(name, placement) for placement in layout)}]" for name, (layout, _) in partition.layouts.items()}
    head = f"Written by autoshard, for a device mesh of shape {partition.mesh}: distribute_module(model, device_mesh, partition_fn)."
    return f'''{comments([head, *partition.said])}
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.weak import WeakIdKeyDictionary

LAYOUTS = {{
{rows(layouts)}}}
PLACED = WeakIdKeyDictionary()  # parameter -> the same as a DTensor, so that tied ones stay tied


def partition_fn(name, module, device_mesh):
    if tuple(device_mesh.shape) != {partition.mesh}:
        raise ValueError(f"the device mesh has shape {{tuple(device_mesh.shape)}}, but the plan is for {partition.mesh}")
    for attribute, parameter in list(module._parameters.items()):
        if parameter is not None:
            layout = LAYOUTS[f"{{name}}.{{attribute}}" if name else attribute]
            if parameter not in PLACED:
                placed = distribute_tensor(parameter.data, device_mesh, layout)
                PLACED[parameter] = nn.Parameter(placed, requires_grad=parameter.requires_grad)
            module.register_parameter(attribute, PLACED[parameter])
'''


def _source(name: str, placement: Placement) -> str:
    """ValueError for a placement that no parameter has."""
    if isinstance(placement, Shard):
        return f"Shard(dim={placement.dim:d})"
    if isinstance(placement, Replicate):
        return "Replicate()"
    raise ValueError(f"parameter {name!r} is planned as {placement!r}, a partial sum; expected R or S(dim), so plan again")
