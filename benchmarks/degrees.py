"""CPU seconds of `autoshard degrees` with its bound, beside a limit: models x devices, each a command of its own.

    python benchmarks/degrees.py [--only llama3_8b ...] [--devices 8 64 512 1024] [--limit 30] [--json]
    python benchmarks/degrees.py --only mixtral --devices 64 --more "--global-batch 256 --seq 8192"

Configurations of Mixtral 8x7B and DeepSeek-V3 are the sizes of their classes in transformers, which are those of the models.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from commands import ROOT, cpu_seconds

LLAMAS = ("llama3_8b", "llama3_70b", "llama3_405b")
CLASSES = {"mixtral": ("MixtralConfig", "MixtralForCausalLM"), "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM")}


def model_word(name: str, folder: Path) -> str:
    """The model as the command takes it."""
    if name in LLAMAS:
        return f"models/llama.py:{name}"
    import transformers  # here: the Llamas don't need it

    config, architecture = CLASSES[name]
    sizes = {**getattr(transformers, config)().to_dict(), "architectures": [architecture]}
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "config.json").write_text(json.dumps(sizes))
    return f"hf:{folder / name}"


def measured(name: str, devices: int, more: str, folder: Path) -> dict:
    defaults = [f"{word} {value}" for word, value in (("--seq", 4096), ("--global-batch", 1024)) if word not in more.split()]
    command = " ".join(["autoshard degrees", model_word(name, folder), f"--devices {devices}", *defaults, "--quiet", more])
    seconds, code = cpu_seconds(command, str(folder))
    if code not in (0, 1):
        raise SystemExit(f"{command} ended with {code}")
    return {"model": name, "devices": devices, "cpu_seconds": seconds, "fits": code == 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[*LLAMAS, *CLASSES], default=[*LLAMAS, *CLASSES])
    parser.add_argument("--devices", nargs="*", type=int, default=[8, 64, 512, 1024])
    parser.add_argument("--limit", type=float, default=30.0, help="CPU seconds")
    parser.add_argument("--more", default="", help="further words of the command")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models").symlink_to(ROOT / "models")
        for name in given.only:
            for devices in given.devices:
                rows.append(row := measured(name, devices, given.more, Path(folder)))
                if not given.json:
                    said = "fits" if row["fits"] else "fits nowhere"
                    over = "" if row["cpu_seconds"] <= given.limit else f", over {given.limit:g}"
                    print(f"{name:<14}{devices:>6}{row['cpu_seconds']:>8.1f} CPU s   {said}{over}", flush=True)
    if given.json:
        print(json.dumps({"rows": rows}))
    sys.exit(any(row["cpu_seconds"] > given.limit for row in rows))


if __name__ == "__main__":
    main()
