"""A training loop with accumulation, clipping, parameter groups, a schedule, a moving average, evaluation with other batch sizes, and a
checkpoint written in the background, from a plan of models/gpt2.py. On GPUs with NCCL where torch sees some, else on CPUs with gloo.

    autoshard plan models/gpt2.py:tiny --set vocab=256 --mesh 2x2 --train --out gpt2-2x2.json
    torchrun --nproc-per-node 4 examples/train_loop.py gpt2-2x2.json README.md --accumulate 2 --clip 1 --evaluate 5 --save run
"""

import argparse
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from train_gpt2 import batch_of, gpt2  # beside this file

import autoshard


def train(options: argparse.Namespace) -> None:
    solution = autoshard.load(options.solution)
    module, (tokens, _) = gpt2.tiny(**solution.model_settings)
    model = autoshard.parallelize(gpt2.initialised(module), solution, autoshard.device_mesh(solution))
    text, (rows, length), times = torch.tensor(list(Path(options.text).read_bytes())), tokens.shape, options.accumulate
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3, **{options.adamw: True})
    scheduler, saving = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps), None
    for step in range(options.steps):
        total = 0.0
        for k in range(times):
            (loss := model(*batch_of(text, step * times + k, (rows, length))) / times).backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip).full_tensor()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        lines = [f"step {step}: loss {total:.6f}, norm {norm.item():.4f}"]
        if options.evaluate and (step + 1) % options.evaluate == 0:
            batch = model.shard_inputs(batch_of(text, 12345, (2 * rows, length)))  # twice the planned batch
            with torch.no_grad():
                lines.append(f"evaluated: loss {model.eval()(*batch).item():.6f}, of the average {average.eval()(*batch).item():.6f}")
            model.train()
        if options.save and step == options.steps // 2:  # written while the next steps run
            saving = autoshard.save_checkpoint(options.save, model, optimizer, extra={"step": step + 1}, wait=False)
        if torch.distributed.get_rank() == 0:
            print(*lines, sep="\n", flush=True)
    if saving is not None:
        saving.result()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    for name, default in {"steps": 10, "accumulate": 1, "clip": float("inf"), "evaluate": 0, "adamw": "foreach", "save": ""}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    [parser.add_argument(name) for name in ("solution", "text")]
    train(parser.parse_args())
