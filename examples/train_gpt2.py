"""Train a small GPT-2 on the bytes of a text file from a plan that was made before; save, and go on, perhaps on another mesh.

    autoshard plan models/gpt2.py:tiny --set vocab=256 --mesh 2x2 --train --out gpt2-2x2.json     # and the same with 4x1
    torchrun --nproc-per-node 4 examples/train_gpt2.py gpt2-2x2.json README.md --steps 30 --checkpoint run
    torchrun --nproc-per-node 4 examples/train_gpt2.py gpt2-4x1.json README.md --steps 60 --resume run
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # the models live beside the package, not in it

import autoshard
from models import gpt2


def batch_of(text: torch.Tensor, step: int, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and those that follow them, drawn for this step: the same on every rank and mesh, so the loss curve is, too."""
    begins = torch.randint(0, len(text) - shape[1], (shape[0],), generator=torch.Generator().manual_seed(step))
    windows = text.unfold(0, shape[1] + 1, 1)[begins]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def train(options: argparse.Namespace) -> None:
    solution = autoshard.load(options.solution)
    module, (tokens, _) = gpt2.tiny(**solution.model_settings)
    text = torch.tensor(list(Path(options.text).read_bytes()))
    model = autoshard.parallelize(gpt2.initialised(module), solution, autoshard.device_mesh(solution))
    if options.compile:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    begin = autoshard.load_checkpoint(options.resume, model, optimizer)["step"] if options.resume else 0
    for step in range(begin, options.steps):
        loss = model(*batch_of(text, step, tokens.shape))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if torch.distributed.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
    if options.checkpoint:
        autoshard.save_checkpoint(options.checkpoint, model, optimizer, extra={"step": options.steps})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("solution", help="a plan of models/gpt2.py:tiny with --set vocab=256")
    parser.add_argument("text", help="any file; its bytes are the tokens")
    parser.add_argument("--steps", type=int, default=30, help="train up to this step (default 30)")
    parser.add_argument("--checkpoint", help="folder to save to")
    parser.add_argument("--resume", help="folder to begin from")
    parser.add_argument("--compile", action="store_true", help="run the graphs through inductor")
    try:
        train(parser.parse_args())
    except (ValueError, OSError, autoshard.RankLost) as error:
        sys.exit(f"error: {error}")
