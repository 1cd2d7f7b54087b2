"""Train a small GPT-2 on the bytes of a text file from a plan that was made before; save, and go on, perhaps on another mesh.

    autoshard plan models/gpt2.py:tiny --set vocab=256 --mesh 2x2 --train --out gpt2-2x2.json
    autoshard plan models/gpt2.py:tiny --set vocab=256 --mesh 4x1 --train --out gpt2-4x1.json
    torchrun --nproc-per-node 4 examples/train_gpt2.py gpt2-2x2.json README.md --steps 30 --checkpoint run
    torchrun --nproc-per-node 4 examples/train_gpt2.py gpt2-4x1.json README.md --steps 60 --checkpoint run --resume

Every rank reads the same batches, a function of the step alone, and runs its part: the curve does not depend on the mesh.
With --json the last line on stdout is one object: {"losses": {step: loss}, "mesh": ..., "seconds_per_step": ...}.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))  # the models live beside the package, not in it

import autoshard
from models import gpt2


def batch_of(data: torch.Tensor, step: int, shape: tuple[int, int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the tokens that follow them, both of `shape`, drawn for this step."""
    rows, length = shape
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    begins = torch.randint(0, len(data) - length - 1, (rows,), generator=generator)
    windows = torch.stack([data[b : b + length + 1] for b in begins.tolist()])
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def fresh(layers: int, batch: int, seq: int, seed: int) -> torch.nn.Module:
    """The model with its first weights."""
    torch.manual_seed(seed)
    module, _ = gpt2.tiny(batch=batch, seq=seq, vocab=256, layers=layers)
    module = module.to_empty(device="cpu")
    for name, p in module.named_parameters():
        with torch.no_grad():
            torch.nn.init.normal_(p, std=0.02) if p.dim() > 1 else p.fill_(float("ln" in name and name.endswith("weight")))
    return module


def train(options: argparse.Namespace) -> dict:
    solution = autoshard.load(options.solution)
    device_mesh = autoshard.device_mesh(solution)
    first = dist.get_rank() == 0
    batch, seq = solution.assumptions["inputs"]["input_0"]
    data = torch.tensor(list(Path(options.text).read_bytes()))
    if len(data) < seq + 2:
        raise ValueError(f"{options.text} has {len(data)} bytes; a batch needs at least {seq + 2}")
    layers = len({name.split(".")[1] for name in solution.parameters if name.startswith("h.")})
    model = autoshard.parallelize(fresh(layers, batch, seq, options.seed), solution, device_mesh)
    if options.compile:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    begin = 0
    if options.resume:
        begin = autoshard.load_checkpoint(options.checkpoint, model, optimizer)["step"]
    losses, took = {}, []
    for step in range(begin, options.steps):
        began = time.perf_counter()
        loss = model(*batch_of(data, step, (batch, seq), options.seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
        took.append(time.perf_counter() - began)
        if first and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step}: loss {losses[step]:.4f}, {took[-1] * 1e3:.0f} ms", file=sys.stderr)
        if options.checkpoint and ((step + 1) % options.every == 0 or step == options.steps - 1):
            autoshard.save_checkpoint(options.checkpoint, model, optimizer, extra={"step": step + 1})
    return {"losses": losses, "mesh": list(solution.mesh.shape), "seconds_per_step": sorted(took)[len(took) // 2] if took else None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("solution", help="a plan of models/gpt2.py:tiny with --set vocab=256")
    parser.add_argument("text", help="any file; its bytes are the tokens")
    parser.add_argument("--steps", type=int, default=30, help="train up to this step (default 30)")
    parser.add_argument("--checkpoint", help="folder to save to, and with --resume to begin from")
    parser.add_argument("--every", type=int, default=100, help="save after so many steps, and at the end (default 100)")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    parser.add_argument("--compile", action="store_true", help="run the graphs through inductor")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the losses as one object")
    options = parser.parse_args()
    if options.resume and not options.checkpoint:
        parser.error("--resume needs --checkpoint, the folder to begin from")
    try:
        report = train(options)
        if options.json and dist.get_rank() == 0:
            print(json.dumps(report))
        return 0
    except (ValueError, OSError, autoshard.RankLost) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
