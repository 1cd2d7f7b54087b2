"""Tensors that wait in the host's memory: `autoshard::offload`, `autoshard::reload`, and `autoshard::await_reload` before the first reader.

On CUDA the copies run on a stream of their own, beside the kernels, from and to pinned memory:

    offload         the stream waits for the kernels so far, then copies; the tensor's bytes are free for others once it has (record_stream)
    reload          the target is allocated on the stream of the kernels, so that its bytes are those of the plan; the copy runs beside them
    await_reload    the kernels wait for that copy

Elsewhere they are plain copies. `exposed` is the plan's share of the transfer that the step waits for; it changes nothing here.
"""

from functools import cache

import torch
from torch import Tensor, fx

torch.library.define("autoshard::offload", "(Tensor x, *, float exposed) -> Tensor")
torch.library.define("autoshard::reload", "(Tensor x, *, Device device, float exposed) -> Tensor")
torch.library.define("autoshard::await_reload", "(Tensor(a) x) -> Tensor(a)")
OFFLOAD, RELOAD = torch.ops.autoshard.offload.default, torch.ops.autoshard.reload.default
AWAIT = torch.ops.autoshard.await_reload.default


@torch.library.register_fake("autoshard::offload")
def _fake_offload(x: Tensor, *, exposed: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


@torch.library.register_fake("autoshard::reload")
def _fake_reload(x: Tensor, *, device: torch.device, exposed: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=device)


class _Copies:
    """The stream of copies of one device, and the copies to it that nobody has waited for, by address."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self.running: dict[int, torch.cuda.Event] = {}

    def out(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self.stream):
            host.copy_(x, non_blocking=True)
        x.record_stream(self.stream)
        return host

    def back(self, host: Tensor, device: torch.device) -> Tensor:
        x = torch.empty(host.shape, dtype=host.dtype, device=device)
        self.stream.wait_stream(torch.cuda.current_stream(device))  # its bytes may be those of a tensor that kernels still read
        with torch.cuda.stream(self.stream):
            x.copy_(host, non_blocking=True)
            self.running[x.data_ptr()] = self.stream.record_event()
        return x

    def wait(self, x: Tensor) -> None:
        if (copied := self.running.pop(x.data_ptr(), None)) is not None:
            torch.cuda.current_stream(x.device).wait_event(copied)


@cache
def _copies(index: int) -> _Copies:
    return _Copies(torch.device("cuda", index))


@torch.library.impl("autoshard::offload", "CPU")
def _offload(x: Tensor, *, exposed: float) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@torch.library.impl("autoshard::offload", "CUDA")
def _offload_from_cuda(x: Tensor, *, exposed: float) -> Tensor:
    return _copies(x.device.index).out(x)


@torch.library.impl("autoshard::reload", "CPU")
def _reload(x: Tensor, *, device: torch.device, exposed: float) -> Tensor:
    if torch.device(device).type != "cuda":
        return x.to(device, copy=True)
    index = torch.device(device).index
    where = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    return _copies(where.index).back(x, where)


@torch.library.impl("autoshard::await_reload", "CPU")
def _await_on_cpu(x: Tensor) -> Tensor:
    return x.view_as(x)


@torch.library.impl("autoshard::await_reload", "CUDA")
def _await(x: Tensor) -> Tensor:
    _copies(x.device.index).wait(x)
    return x.view_as(x)


def with_waits(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Every reloaded tensor is waited for right before its first reader."""
    graph = graph_module.graph
    order = {node: k for k, node in enumerate(graph.nodes)}
    for node in graph.find_nodes(op="call_function", target=RELOAD):
        readers = sorted(node.users, key=order.__getitem__)
        with graph.inserting_before(readers[0]):
            arrived = graph.call_function(AWAIT, (node,))
        arrived.meta = dict(node.meta)
        for reader in readers:
            reader.replace_input_with(node, arrived)
    graph_module.recompile()
    return graph_module
