"""Train a small GPT-2 on the bytes of a text file as a pipeline that was planned before; save, and go on, perhaps with other stages.

    autoshard pipeline models/gpt2.py:tiny --set vocab=256 --batch 8 --devices 4 --stages 2 --microbatches 4 --out two.json
    torchrun --nproc-per-node 4 examples/train_pipeline.py two.json README.md --steps 30 --checkpoint run
    torchrun --nproc-per-node 4 examples/train_pipeline.py two.json README.md --steps 60 --resume run --schedule zb_h1
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # the models live beside the package, not in it

import autoshard
from models import gpt2


def batch_of(text: torch.Tensor, step: int, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and those that follow them, drawn for this step: the same on every rank and for every pipeline."""
    begins = torch.randint(0, len(text) - shape[1], (shape[0],), generator=torch.Generator().manual_seed(step))
    windows = text.unfold(0, shape[1] + 1, 1)[begins]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def train(options: argparse.Namespace) -> None:
    pipeline = autoshard.load(options.pipeline)
    module, inputs = gpt2.tiny(**pipeline.assumptions["set"])  # the full batch, which the pipeline splits into microbatches
    device_mesh = autoshard.device_mesh(pipeline)
    torch.manual_seed(0)
    model = autoshard.parallelize(gpt2.initialised(module), pipeline, device_mesh, example_inputs=inputs, schedule=options.schedule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # of the parameters of this rank's stages
    text = torch.tensor(list(Path(options.text).read_bytes()))
    begin = autoshard.load_checkpoint(options.resume, model, optimizer)["step"] if options.resume else 0
    for step in range(begin, options.steps):
        loss = model.step(*batch_of(text, step, inputs[0].shape))  # forward and backward of all microbatches
        model.clip_grad_norm_(1.0)  # of all stages together
        optimizer.step()
        optimizer.zero_grad()
        if torch.distributed.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
    if options.checkpoint:
        autoshard.save_checkpoint(options.checkpoint, model, optimizer, extra={"step": options.steps})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("pipeline", help="a pipeline of models/gpt2.py:tiny with --set vocab=256")
    parser.add_argument("text", help="any file; its bytes are the tokens")
    parser.add_argument("--steps", type=int, default=30, help="train up to this step (default 30)")
    parser.add_argument("--schedule", help="another schedule than the planned one: gpipe, 1f1b, zb_h1, or a file .csv")
    parser.add_argument("--checkpoint", help="folder to save to")
    parser.add_argument("--resume", help="folder to begin from")
    try:
        train(parser.parse_args())
    except (ValueError, OSError, autoshard.RankLost) as error:
        sys.exit(f"error: {error}")
