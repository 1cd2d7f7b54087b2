"""Kernels of compiled programs: how torch's inductor groups pointwise ops and reductions on an H100, beside autoshard.strategies.fusion.

    PYTHONPATH=. python benchmarks/inductor_kernels.py [MODEL ...] [--json]

A training step is traced by dynamo and AOTAutograd with fake tensors on the device "cuda", lowered by inductor's lowerings for CUDA, and
fused by inductor's own Scheduler and TritonScheduling; the nodes are recorded where code generation would begin, and there the compilation
ends. So no GPU is needed, only g++: nothing is allocated and nothing runs. Bytes of a kernel are what its indices reach of each buffer.
Kernels that look up an embedding are left out, as autoshard has them as ops of their own; those of its gradient are in inductor's figures
of the backward.

This module has to be imported before torch: a small library, without which a build of torch without CUDA can't differentiate fake tensors
on "cuda", is loaded first.
"""

# ruff: noqa: E402  (a library is loaded before torch)
import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile

# What a build of torch without CUDA lacks so that autograd can differentiate fake tensors on "cuda": a device guard for CUDA
# (here of one device, and doing nothing), and hooks that say CUDA exists (the autograd engine asks for the accelerator).
GUARD = r"""
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <ATen/detail/CUDAHooksInterface.h>
using namespace c10;
static const Device D(DeviceType::CUDA, 0);
static Stream S() { return Stream(Stream::DEFAULT, D); }
struct G final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return D; }
  Device getDevice() const override { return D; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return S(); }
  Stream getDefaultStream(Device) const override { return S(); }
  Stream getNewStream(Device, int) const override { return S(); }
  Stream exchangeStream(Stream) const override { return S(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};
struct H final : at::CUDAHooksInterface {
  H(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
};
using R = c10::Registerer<std::string, std::unique_ptr<at::CUDAHooksInterface>, at::CUDAHooksArgs>;
static R r("CUDAHooks", at::CUDAHooksRegistry(), R::DefaultCreator<H>);
extern "C" void register_guard() { static G g; impl::registerDeviceGuard(DeviceType::CUDA, &g); }
"""


def _load_guard() -> ctypes.CDLL:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    where = os.path.dirname(spec.origin)
    stamp = hashlib.sha256((GUARD + where).encode()).hexdigest()[:12]
    library = os.path.join(tempfile.gettempdir(), f"inductor_kernels_guard_{os.getuid()}_{stamp}.so")
    if not os.path.exists(library):
        made = f"{library}.{os.getpid()}"
        command = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", f"-I{where}/include", "-x", "c++", "-", "-o", made]
        command += [f"-L{where}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{where}/lib"]
        subprocess.run(command, input=GUARD, text=True, check=True)
        os.replace(made, library)
    return ctypes.CDLL(library)


if "torch" in sys.modules:
    raise ImportError("import inductor_kernels before torch")
_scratch = tempfile.TemporaryDirectory(prefix="inductor_kernels_")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _scratch.name
_guard = _load_guard()

import torch

_guard.register_guard()

import argparse
import contextlib
import copy
import json
import types
from unittest import mock

import torch._functorch.config as functorch_config
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config as inductor_config
import torch._inductor.scheduler as scheduler
import torch.nn.functional as F
from torch._dynamo import device_interface
from torch._inductor.constant_folding import ConstantFolder
from torch._inductor.dependencies import MemoryDep
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.capture import capture_module
from autoshard.strategies import fused
from autoshard.strategies.fusion import MATMULS

_fold = ConstantFolder.run

H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_multiprocessor=233472,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, L2_cache_size=50 << 20, gcnArchName="",
)  # fmt: skip


class _Recorded(Exception):
    """Raised where code generation would begin."""


class _Done(Exception):
    """Raised where the compiled program would run."""


class _OnCPU(TorchDispatchMode):
    """Single constants, which inductor computes on the graph's device to fold them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = {k: torch.device("cpu") if isinstance(v, torch.device) else v for k, v in (kwargs or {}).items()}
        return func(*(torch.device("cpu") if isinstance(a, torch.device) else a for a in args), **kwargs)


def _fold_on_cpu(self):
    with _OnCPU():
        return _fold(self)


class _Interface(device_interface.CudaInterface):
    class Worker(device_interface.CudaInterface.Worker):
        current_device = staticmethod(lambda: 0)
        set_device = staticmethod(lambda device: None)
        get_device_properties = staticmethod(lambda device=None: H100)

    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    is_available = staticmethod(lambda: True)
    get_device_properties = staticmethod(lambda device=None: H100)
    get_compute_capability = staticmethod(lambda device=None: 90)
    is_bf16_supported = staticmethod(lambda including_emulation=False: True)
    is_triton_capable = staticmethod(lambda device=None: True)
    raise_if_triton_unavailable = staticmethod(lambda device=None: None)
    synchronize = staticmethod(lambda device=None: None)
    get_raw_stream = staticmethod(lambda device=0: 0)


@contextlib.contextmanager
def _as_if_on_h100():
    """Everything in Python that inductor asks of a GPU between the capture and the code generation."""
    with contextlib.ExitStack() as stack:

        def patch(where: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(where, name, value, create=True))

        patch(torch.cuda, "is_available", lambda: True)
        patch(torch.cuda, "get_device_properties", lambda device=None: H100)
        patch(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch(torch.cuda, "current_device", lambda: 0)
        patch(torch.cuda, "device_count", lambda: 1)
        patch(torch.cuda, "_lazy_init", lambda: None)
        patch(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
        patch(torch.cuda, "get_rng_state", lambda device="cuda": torch.zeros(16, dtype=torch.uint8))
        patch(torch.cuda, "set_rng_state", lambda state, device="cuda": None)
        patch(torch.cuda, "_exchange_device", lambda index: 0)
        patch(torch.cuda, "_maybe_exchange_device", lambda index: 0)
        patch(ConstantFolder, "run", _fold_on_cpu)
        patch(FakeTensorMode, "avoid_device_init", True)  # else it computes with constants "on" the device
        patch(torch.version, "cuda", "12.8")
        for module in list(sys.modules.values()):  # `from torch.utils._triton import has_triton` in many files
            for name in ("has_triton",):
                if (getattr(module, "__name__", "") or "").startswith("torch") and name in vars(module):
                    patch(module, name, lambda: True)
        device_interface.get_registered_device_interfaces()
        stack.enter_context(mock.patch.dict(device_interface.device_interfaces, {"cuda": _Interface, "cuda:0": _Interface}))
        DeviceProperties.create.cache_clear()
        yield
        DeviceProperties.create.cache_clear()


def _flash(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """What F.scaled_dot_product_attention takes on a GPU in half precision: the choice is made by code this build lacks."""
    if attn_mask is not None or query.dtype not in (torch.bfloat16, torch.float16):
        out = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)
    else:
        out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    return out[0]


def _touched(node, names) -> int:
    """Bytes of these buffers that the kernel can reach: of each no more than it indexes, also where it indexes by a value.

    For a fused node get_read_write_buffers_sizes() counts buffers whole: the table of an embedding, logits of which one per row
    is gathered, a tensor of which a slice is read; and of none more than 1e9 elements.
    """

    def elements(dep: MemoryDep) -> int:
        used = [n for v, n in dep.ranges.items() if v in dep.index.free_symbols or dep.is_indirect()]
        return V.graph.sizevars.optimization_hint(sympy_product(used), fallback=0)

    written = max((elements(dep) for dep in node.read_writes.writes if isinstance(dep, MemoryDep)), default=0)
    total = 0
    for name in names:
        buffer = V.graph.try_get_buffer(name)
        size = V.graph.sizevars.optimization_hint(sympy_product(buffer.get_size()), fallback=0)
        forms = set()
        for dep in node.read_writes.reads_and_writes():
            if dep.name == name:
                forms.add(dep.normalize() if isinstance(dep, MemoryDep) else dep)
        reached = 0
        for dep in forms:
            reached += elements(dep) if isinstance(dep, MemoryDep) else written  # not: a buffer it adds into
        total += buffer.get_dtype().itemsize * min(size, reached)
    return total


OF_TABLES = ("embedding", "index_put", "_unsafe_index_put", "embedding_dense_backward")


def _describe(node) -> tuple[int, bool]:
    """Bytes, and whether the kernel is of an embedding's table."""
    origins = [origin.name for part in node.get_nodes() if part.node is not None for origin in part.node.get_origins()]
    touched = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    return _touched(node, touched), any(name.startswith(OF_TABLES) for name in origins)


def _record(nodes) -> list[tuple[int, bool]]:
    return [_describe(node) for node in nodes if not isinstance(node, scheduler.NopKernelSchedulerNode) and not node.is_extern()]


def counts(module: torch.nn.Module, inputs: tuple) -> dict[str, tuple[int, int]]:
    """Kernels and bytes of the forward and the backward of a training step; the module returns the loss. All may be on the meta device."""
    graphs: list[tuple[bool, list[tuple[int, bool]]]] = []
    recorded: list[list[tuple[int, bool]]] = []

    def codegen(self) -> None:
        recorded.append(_record(self.nodes))
        raise _Recorded

    def compile_inner(gm, example_inputs, **kwargs):
        before = len(recorded)
        try:
            compile_fx.compile_fx_inner(gm, example_inputs, **kwargs)
        except Exception:
            if len(recorded) == before:
                raise
        graphs.append((bool(kwargs.get("is_backward")), recorded.pop()))

        def run(*args):
            raise _Done

        return run

    def backend(gm, example_inputs):
        with _as_if_on_h100():
            return compile_fx.compile_fx(gm, example_inputs, inner_compile=compile_inner)

    mode = FakeTensorMode()
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            with mode:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
                fakes[id(tensor)] = torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made
        return fakes[id(tensor)]

    module = copy.deepcopy(module, {id(t): fake(t) for t in (*module.parameters(), *module.buffers())}).train()
    inputs = tuple(fake(t) for t in inputs)
    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", _flash))
        stack.enter_context(mock.patch.object(scheduler.Scheduler, "codegen", codegen))
        stack.enter_context(inductor_config.patch(force_disable_caches=True, shape_padding=False, compile_threads=1))
        stack.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False))
        compiled = torch.compile(module, backend=backend, dynamic=False)
        try:
            with mode:
                compiled(*inputs)
        except _Done:
            pass
    torch._dynamo.reset()
    if len(graphs) != 2:
        raise RuntimeError(f"{len(graphs)} graphs were compiled, not 2: the program was broken into pieces")
    kernels = {
        side: [size for is_backward, found in graphs if is_backward == backward for size, of_table in found if not of_table]
        for backward, side in enumerate(("forward", "backward"))
    }
    return {side: (len(found), sum(found)) for side, found in kernels.items()}


def grouped(module: torch.nn.Module, inputs: tuple) -> dict[str, tuple[int, int]]:
    """The same as strategies.fusion has it."""
    graph = fused(capture_module(module, inputs, training=True).graph)
    answer = {}
    for backward, side in enumerate(("forward", "backward")):
        ops = [op for op in graph.ops if op.fused is not None and op.target not in MATMULS and op.backward == bool(backward)]
        read = sum(share * graph.tensor(value).bytes for op in ops for share, value in zip(op.fused.reads, op.inputs))
        written = sum(share * t.bytes for op in ops for share, t in zip(op.fused.writes, op.outputs) if t is not None)
        answer[side] = (sum(op.fused.launches for op in ops), int(read + written))
    return answer


def models() -> dict:
    """By name: () -> (module, inputs), two layers, of sizes in use: several of inductor's decisions depend on them."""
    from models import bert, gpt2, llama, mlp, moe

    common = {"loss": True, "dtype": "bfloat16", "layers": 2}
    return {
        "llama": lambda: llama.llama3_8b(batch=2, seq=8192, **common),
        "gpt2": lambda: gpt2.small(batch=16, seq=1024, vocab=50304, **common),
        "bert": lambda: bert.base(batch=32, seq=512, vocab=30528, **common),
        "mlp": lambda: mlp.mlp(batch=8192, width=4096, hidden=16384, **common),
        "moe": lambda: moe.moe(batch=64, seq=512, **common),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for name, built in models().items():
        if arguments.models and name not in arguments.models:
            continue
        ours, theirs = grouped(*built()), counts(*built())
        for side in ours:
            row = {"model": name, "side": side, "kernels": ours[side][0], "inductor_kernels": theirs[side][0]}
            row |= {"bytes": ours[side][1], "inductor_bytes": theirs[side][1], "error": ours[side][1] / theirs[side][1] - 1}
            rows.append(row)
            if not arguments.json:
                sizes = f"{row['bytes'] / 1e6:9.0f} MB of {row['inductor_bytes'] / 1e6:9.0f} MB {100 * row['error']:+6.1f} %"
                print(f"{name:8} {side:9} {row['kernels']:4} of {row['inductor_kernels']:4} kernels {sizes}", flush=True)
    if arguments.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
