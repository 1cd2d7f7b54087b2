"""One rank of a plan for several devices, on one GPU: its kernels run, what the others send is made up, and collectives take their prices.

The process group is torch's fake one, of all the ranks, and its functional collectives are replaced: each is a kernel on a stream of its
process group, as NCCL's are, that runs until the seconds of its price have passed. So the order of `parallelize`, its waits and the
allocator's bytes are those of a cluster. What NCCL, the network and launching NCCL's kernels take is not measured, and results are wrong.

    IDLE      no collective takes any time: what kernels take
    WAITING   a collective is one block of threads that waits: what is exposed, too
    MOVING    a collective is as many blocks as NCCL has channels, which write as many bytes as it would: it slows kernels beside it

A step is replayed as a CUDA graph, so that what Python takes for a made up collective is not in its seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

IDLE, WAITING, MOVING = "idle", "waiting", "moving"
# Blocks of ncclAllGather on eight H100 (forums.developer.nvidia.com/t/337991; NCCL_DEBUG=INFO of others says 16 or 24 channels).
CHANNELS, THREADS = 24, 512
SOURCE = r"""
#define MASK 0xffffff
extern "C" __global__ void collective(int nanoseconds, const float4* from, float4* into, int n, int per_us) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    int first = blockIdx.x * blockDim.x + threadIdx.x, all = gridDim.x * blockDim.x, i = first;
    long long copied = 0;
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        if ((long long)(now - begin) >= nanoseconds) return;
        if (first < n && copied < (long long)(now - begin) * per_us / 1000) {
            for (int k = 0; k < 4; ++k) {
                into[i] = from[i & MASK];
                i += all;
                if (i >= n) i = first;
            }
            copied += 4 * all;
        }
    } while (true);
}
"""


class Emulation:
    """The collectives of one rank. price: the seconds of a collective, its group's name and the bytes of its largest buffer."""

    def __init__(self, device: str):
        self.device, self.how = device, IDLE
        self.price: Callable[[str, str, int], float] = lambda collective, group, size: 0.0
        self.streams: dict[str, torch.cuda.Stream] = {}
        self.used: set[str] = set()  # groups with a collective in the graph that is captured
        self.pending: dict[int, tuple[torch.cuda.Event, torch.Tensor]] = {}
        self.asked: list[float] = []
        self.library = torch.library.Library("_c10d_functional", "IMPL")
        key = "CUDA" if device == "cuda" else "CPU"
        for name, run in (
            ("all_reduce", self.all_reduce),
            ("all_gather_into_tensor", self.all_gather),
            ("reduce_scatter_tensor", self.reduce_scatter),
            ("all_to_all_single", self.all_to_all),
            ("all_gather_into_tensor_out", self.all_gather_out),
            ("all_reduce_", self.all_reduce_),
            ("wait_tensor", self.wait),
        ):
            self.library.impl(name, run, key)
        if device == "cuda":
            self.kernel = torch.cuda._compile_kernel(SOURCE, "collective")
            self.scratch = torch.randn(2**27, device=device).mul_(0.02).bfloat16()  # 256 MB, more than the cache

    def all_gather_out(self, x: torch.Tensor, n: int, group: str, *, out: torch.Tensor) -> torch.Tensor:  # as inductor calls them
        return self.begun("all_gather", group, out, x, lambda out: out.view(n, *x.shape).copy_(x))

    def all_reduce_(self, x: torch.Tensor, reduce_op: str, group: str) -> torch.Tensor:
        return self.begun("all_reduce", group, x, x, lambda out: None)

    def all_reduce(self, x: torch.Tensor, reduce_op: str, group: str) -> torch.Tensor:
        return self.begun("all_reduce", group, torch.empty_like(x), x, lambda out: out.copy_(x))

    def all_gather(self, x: torch.Tensor, n: int, group: str) -> torch.Tensor:
        out = x.new_empty((n * x.shape[0], *x.shape[1:]))
        return self.begun("all_gather", group, out, x, lambda out: out.view(n, *x.shape).copy_(x))

    def reduce_scatter(self, x: torch.Tensor, reduce_op: str, n: int, group: str) -> torch.Tensor:
        out = x.new_empty((x.shape[0] // n, *x.shape[1:]))
        return self.begun("reduce_scatter", group, out, x, lambda out: out.copy_(x[: out.shape[0]]))

    def all_to_all(self, x: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> torch.Tensor:
        out = x.new_zeros((sum(received), *x.shape[1:]))
        rows = min(out.shape[0], x.shape[0])
        return self.begun("all_to_all", group, out, x, lambda out: out[:rows].copy_(x[:rows]))

    def begun(self, collective: str, group: str, out: torch.Tensor, x: torch.Tensor, fill: Callable) -> torch.Tensor:
        size = max(t.numel() * t.element_size() for t in (x, out))
        seconds = self.price(collective, group, size)
        self.asked.append(seconds)
        if self.device != "cuda" or not torch.cuda.is_current_stream_capturing() or not out.is_floating_point():
            fill(out)
            return out
        if self.how == IDLE:
            return out
        if group not in self.streams:
            self.streams[group] = torch.cuda.Stream(priority=-1)
        stream = self.streams[group]
        stream.wait_stream(torch.cuda.current_stream())
        self.run(seconds, stream, out if self.how == MOVING else None, size)
        event = torch.cuda.Event()
        event.record(stream)
        self.used.add(group)
        self.pending[out.data_ptr()] = event, x  # NCCL's work holds its input until then, too
        return out

    def run(self, seconds: float, stream: torch.cuda.Stream, out: torch.Tensor | None, size: int = 0, blocks: int = CHANNELS) -> None:
        """A kernel that takes so many seconds and writes `size` bytes meanwhile, into `out`, again and again where they are more."""
        n = 0 if out is None else out.numel() * out.element_size() // 16
        self.kernel(
            grid=(blocks if n else 1, 1, 1), block=(THREADS if n else 32, 1, 1), stream=stream,
            args=[int(seconds * 1e9), self.scratch, self.scratch if out is None else out, n, int(size / 16 / max(seconds * 1e6, 1.0))],
        )  # fmt: skip

    def wait(self, x: torch.Tensor) -> torch.Tensor:
        if (begun := self.pending.pop(x.data_ptr(), None)) is not None:
            torch.cuda.current_stream().wait_event(begun[0])
        return x

    def graph(self, how: str, run: Callable[[], object], pool: object = None) -> torch.cuda.CUDAGraph:
        """`run`, captured with such collectives. pool: a graph's memory, whose values collectives without results leave."""
        self.how, self.used, captured = how, set(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, pool=pool):
            run()
            for group in sorted(self.used):
                torch.cuda.current_stream().wait_stream(self.streams[group])
        self.pending.clear()
        return captured


def joined(n: int) -> None:
    """This process is the first rank of n."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)


def model_of_rank(module, solution, emulation: Emulation):
    """The parallel module of this rank; its collectives are those of `emulation`, at the prices of the plan's mesh."""
    import autoshard
    import autoshard.runtime.parallelize  # noqa: F401  (whose check is replaced)
    from autoshard.cost import collective_seconds

    joined(solution.mesh.num_devices)
    sys.modules["autoshard.runtime.parallelize"].check_gpus = lambda: None  # all ranks say that they have this one
    device_mesh = torch.distributed.device_mesh.init_device_mesh(emulation.device, solution.mesh.shape)
    axes = {tuple(dist.get_process_group_ranks(device_mesh.get_group(k))): axis for k, axis in enumerate(solution.mesh.axes)}

    def price(collective: str, group: str, size: int) -> float:
        ranks = tuple(dist.get_process_group_ranks(torch.distributed.distributed_c10d._resolve_process_group(group)))
        return float(collective_seconds(collective, axes[ranks], size))

    emulation.price = price
    return autoshard.parallelize(module, solution, device_mesh)
