"""The examples run, and say what is true."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["compiler_pipeline", "serve_llama"])
def test_an_example_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60


def test_the_pass_in_a_compiler_pipeline():
    example = load("compiler_pipeline")
    graph, info = example.pipeline(example.MLP(64), (torch.empty(512, 64),))
    held = example.local_bytes(graph)
    assert {"x", "up", "gelu", "down", "add"} <= set(held) and info["gap"] == 0
    cut = [node.meta["autoshard"].num_shards for node in graph.graph.nodes if node.name == "x"]
    assert held["x"] == 512 * 64 * 4 // cut[0]


@pytest.mark.slow
def test_a_served_llama_answers_as_the_whole_one(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **load("serve_llama").TINY)).eval()
    model.save_pretrained(tmp_path)
    tokens = torch.tensor([[1, 7, 42]])
    with torch.no_grad():
        for _ in range(8):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", str(EXAMPLES / "serve_llama.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    said = re.search(r"tokens \[(.*)\]", done.stdout)
    assert said and [int(token) for token in said[1].split(",")] == tokens[0].tolist()
    assert "s as exported" in done.stdout
