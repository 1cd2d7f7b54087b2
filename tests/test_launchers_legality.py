"""Legality of random configurations, as text, against the launchers' own rules, each with where it stands in their source; and against
megatron-core's config where it is installed (docs/launchers.md says how)."""

import random
import warnings
from collections import Counter
from math import ceil, prod

import pytest
import yaml

from autoshard.launch import ModelSizes, Overrides, read_configuration, why_illegal
from autoshard.launch.texts import arguments_text, nested, toml_text

FIRST = [1, 1, 1, 2, 2, 3, 4, 8]  # degrees


def megatron(a, world):
    """NVIDIA/Megatron-LM d98e8a6; arguments.py is in megatron/training, the others in megatron/core."""
    tp, pp, cp = a["tensor-model-parallel-size"], a["pipeline-model-parallel-size"], a["context-parallel-size"]
    yield world % (tp * pp * cp) == 0  # parallel_state.py:822
    dp = max(world // (tp * pp * cp), 1)
    microbatches, rest = divmod(a["global-batch-size"], a["micro-batch-size"] * dp)
    yield rest == 0  # num_microbatches_calculator.py, ConstantNumMicroBatches
    yield a["num-attention-heads"] % tp == 0  # transformer_config.py:1446
    yield a["hidden-size"] % a["num-attention-heads"] == 0  # arguments.py:1332
    groups = a["num-query-groups"]
    yield groups % tp == 0 or tp % groups == 0  # transformer_config.py:1461
    yield a["ffn-hidden-size"] % tp == 0  # tensor_parallel/layers.py, divide
    yield cp == 1 or a["seq-length"] % (2 * cp) == 0  # arguments.py:1336
    yield not a.get("sequence-parallel") or tp == 1 or a["seq-length"] % (tp * cp) == 0  # schedules.py:1190, mappings.py
    ep, etp = a["expert-model-parallel-size"], a.get("expert-tensor-parallel-size", tp)  # arguments.py:580
    if a.get("num-experts"):
        yield a["num-experts"] % ep == 0 and a["moe-ffn-hidden-size"] % etp == 0  # moe/moe_layer.py
        yield world % (etp * ep * pp) == 0  # parallel_state.py:881
        yield tp == 1 or bool(a.get("sequence-parallel"))  # moe/moe_layer.py:636
        yield etp == 1 or a["disable-bias-linear"]  # transformer_config.py: Bias in Moe is only supported when ETP==1
    else:
        yield ep == 1  # transformer_config.py:1595
        yield (dp * cp * tp) % etp == 0
    layout, virtual, per = (a.get(name) for name in NAMES)
    first, last = a.get("decoder-first-pipeline-num-layers"), a.get("decoder-last-pipeline-num-layers")
    ends = [bool(a.get(f"account-for-{end}-in-pipeline-split")) for end in ("embedding", "loss")]
    yield sum(value is not None for value in (layout, virtual, per)) <= 1  # arguments.py:928
    yield not ((first or last) and any(ends))  # transformer_config.py:2229
    layers = a["num-layers"]
    if layout:
        stages = layout.split("|")
        yield not (first or last or any(ends))  # transformer_config.py:2242
        yield len(stages) % pp == 0 and layout.count("t") == layers  # pipeline_parallel_layer_layout.py:44, :108
        virtual = len(stages) // pp
    elif per:
        yield not (first or last)  # arguments.py:955
        rank, rest = divmod(layers + sum(ends), pp)
        yield rest == 0 and rank % per == 0  # arguments.py:968
        virtual = max(rank // per, 1)
    virtual = virtual or 1
    if not layout and (first or last):
        middle, stages = layers - (first or 0) - (last or 0), pp - bool(first) - bool(last)
        yield all(count is None or count % virtual == 0 for count in (first, last))  # transformer_config.py:2306
        yield stages >= 0 and bool(middle) == bool(stages)  # transformer_config.py:2345; below 0 a model that lacks layers is built
        yield stages <= 0 or middle % stages == 0 and middle // stages % virtual == 0  # transformer_config.py:2353
    elif not layout:
        yield (layers + (sum(ends) if pp > 1 else 0)) % (pp * virtual) == 0  # transformer_config.py:2370, transformer_block.py:157
    granularity = a.get("recompute-granularity")
    yield not granularity or (granularity == "full") == ("recompute-method" in a)  # transformer_config.py:1840
    if virtual > 1:
        yield pp > 1  # arguments.py:1002
        group = a.get("microbatch-group-size-per-virtual-pipeline-stage", pp)
        yield pp <= group <= microbatches and not 0 < microbatches % group < pp  # pipeline_parallel/schedules.py:1160
    if a.get("overlap-moe-expert-parallel-comm") and ep > 1:
        yield (pp == 1 or virtual > 1) and a.get("recompute-granularity") != "full"  # transformer_config.py:3006


NAMES = ("pipeline-model-parallel-layout", "num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage")


def random_megatron(r):
    pp, layers = r.choice([1, 2, 3, 4, 8]), r.choice([8, 12, 14, 16, 61])
    a = {
        "num-layers": layers, "hidden-size": r.choice([256, 384, 384]), "ffn-hidden-size": r.choice([512, 768]),
        "num-attention-heads": r.choice([8, 12]),
        "num-query-groups": r.choice([1, 2, 4, 8]), "group-query-attention": True, "vocab-size": 1024,
        "seq-length": r.choice([60, 64, 4096]),
        "micro-batch-size": r.choice([1, 2]), "global-batch-size": r.choice([16, 32, 48]), "bf16": True, "swiglu": True,
        "tensor-model-parallel-size": r.choice([1, 1, 2, 3, 4, 8]), "pipeline-model-parallel-size": pp,
        "context-parallel-size": r.choice(FIRST[:6]), "expert-model-parallel-size": 1, "sequence-parallel": r.random() < 0.3,
        "disable-bias-linear": r.random() < 0.7,
    }  # fmt: skip
    if r.random() < 0.4:
        a |= {"num-experts": r.choice([8, 12]), "moe-ffn-hidden-size": 96, "expert-model-parallel-size": r.choice(FIRST)}
        a |= {"expert-tensor-parallel-size": r.choice([1, 2])} if r.random() < 0.5 else {}
        a |= {"overlap-moe-expert-parallel-comm": True} if r.random() < 0.3 else {}
    if r.random() < 0.3:
        a["recompute-granularity"] = r.choice(["full", "selective"])
        a |= {"recompute-method": "uniform", "recompute-num-layers": 1} if r.random() < 0.5 else {}
    kind = r.random()
    if kind < 0.2:
        a["num-virtual-stages-per-pipeline-rank"] = r.choice([1, 2, 4])
    elif kind < 0.35:
        a["num-layers-per-virtual-pipeline-stage"] = r.choice([1, 2, 4])
    elif kind < 0.5:
        stages = [""] * (pp * r.choice([1, 2]) + (r.random() < 0.1))
        for k in range(layers + r.choice([0, 0, 0, 1])):
            stages[k * len(stages) // layers % len(stages)] += "t"
        a["pipeline-model-parallel-layout"] = f"E{'|'.join(stages)}L"
    if r.random() < 0.2:
        a |= {f"decoder-{end}-pipeline-num-layers": r.choice([1, 2, 4]) for end in r.choice([["first"], ["last"], ["first", "last"]])}
    if r.random() < 0.2:
        a |= {f"account-for-{end}-in-pipeline-split": True for end in r.choice([["embedding"], ["loss"], ["embedding", "loss"]])}
    if r.random() < 0.1:
        a["microbatch-group-size-per-virtual-pipeline-stage"] = r.choice([2, 4, 5])
    model = a["tensor-model-parallel-size"] * pp * a["context-parallel-size"]
    return a, r.choice([model, model * 2, model * 4, 16])


def torchtitan(s, world):
    """torchtitan 0.2.2: parallel_dims.py and pipeline_parallel.py of torchtitan/distributed, train.py; schedules.py of torch 2.13."""
    p, t, m = s["parallelism"], s["training"], MIXTURE
    replicate, shard, cp, tp, pp, ep, etp = (p[f"{name}_degree"] for name in DEGREES)
    shard = max(world // (replicate * cp * tp * pp), 1) if shard == -1 else shard
    yield replicate * shard * cp * tp * pp == world  # parallel_dims.py:57
    yield ep == 1 or (etp in (1, tp) and shard * cp * tp % (ep * etp) == 0)  # parallel_dims.py:63, :134
    yield m.experts % ep == 0 and m.expert_ffn % etp == 0  # an even Shard(0) of grouped experts; expert_parallel.py
    yield m.heads % tp == 0 and m.kv_heads % tp == 0 and m.ffn % tp == 0  # views of local heads in model.py; ColwiseParallel
    yield t["seq_len"] % (2 * tp * cp) == 0  # parallel_dims.py, seq_len_divisor
    dp = replicate * shard
    total = t["global_batch_size"] if t["global_batch_size"] > 0 else t["local_batch_size"] * dp
    yield total % (t["local_batch_size"] * dp) == 0  # train.py:203
    yield shard * cp > 1 or dp == 1 or tp * cp * pp == 1  # models/llama3/infra/parallelize.py: DDP goes with nothing else
    if pp > 1:
        yield t["local_batch_size"] % p["pipeline_parallel_microbatch_size"] == 0  # pipeline_parallel.py:187
        microbatches, schedule = t["local_batch_size"] // p["pipeline_parallel_microbatch_size"], p["pipeline_parallel_schedule"]
        single = schedule in ("1F1B", "GPipe")
        stages = pp * (1 if single else 2)  # pipeline_parallel.py:107
        weights = [p.get(f"pipeline_parallel_{end}_stage_less_layers", 1) for end in ("first", "last")]
        if "pipeline_parallel_layers_per_stage" in p:
            stages = ceil((m.layers + sum(weights)) / p["pipeline_parallel_layers_per_stage"])
            yield stages % pp == 0 and (stages == pp if single else stages >= 2 * pp)  # pipeline_parallel.py:84 to :104
        yield stages <= m.layers + sum(weights) and max(weights) <= (m.layers + sum(weights)) // stages  # pipeline_parallel.py:285
        if schedule in ("1F1B", "DualPipeV"):
            yield microbatches >= stages  # schedules.py, Schedule1F1B; DualPipeV
        elif schedule == "Interleaved1F1B":
            yield microbatches % max(1, microbatches // pp) == 0  # schedules.py, ScheduleInterleaved1F1B
        if schedule in ("ZBVZeroBubble", "DualPipeV"):
            yield stages == 2 * pp  # schedules.py
        yield not (schedule == "DualPipeV" and ep > 1 and s["activation_checkpoint"]["mode"] != "none")  # dual_pipe_v.py:45


DEGREES = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel", "pipeline_parallel", "expert_parallel",
           "expert_tensor_parallel")  # fmt: skip
MIXTURE = ModelSizes(14, 256, 512, 8, 4, 1024, experts=8, active=2, expert_ffn=96)


def random_torchtitan(r):
    degrees = {f"{name}_degree": r.choice(FIRST) for name in DEGREES} | {"expert_tensor_parallel_degree": r.choice([1, 1, 2])}
    degrees["expert_parallel_degree"] = r.choice([1, 1, 2, 4, 8])
    model = prod(degrees[f"{name}_degree"] for name in DEGREES[:5])
    if r.random() < 0.3:
        degrees["data_parallel_shard_degree"] = -1
    p = {
        **degrees, "pipeline_parallel_microbatch_size": r.choice([1, 1, 2, 3]),
        "pipeline_parallel_schedule": r.choice(["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"]),
    }  # fmt: skip
    if r.random() < 0.3:
        p["pipeline_parallel_layers_per_stage"] = r.choice([1, 2, 4, 8])
    if r.random() < 0.2:
        p["pipeline_parallel_last_stage_less_layers"] = r.choice([0, 2])
    training = {"local_batch_size": r.choice([2, 4, 8, 16]), "global_batch_size": r.choice([-1, 64, 96]), "seq_len": r.choice([96, 128])}
    sections = {"parallelism": p, "training": training, "activation_checkpoint": {"mode": r.choice(["none", "full"])}}
    return sections, r.choice([model, model, model * 2])


def nanotron(s, world):
    """huggingface/nanotron 2411b02: config/config.py and parallel/context.py of src/nanotron, models/qwen.py."""
    p, c, seq = s["parallelism"], s["model"]["model_config"], s["tokens"]["sequence_length"]
    tp, cp = p["tp"], p["context_parallel_size"]
    yield p["dp"] * tp * p["pp"] * cp == world  # context.py:26
    yield c["num_attention_heads"] % tp == 0 and c["num_key_value_heads"] >= tp  # config.py:536, :542
    yield c["num_key_value_heads"] % tp == 0 and c["intermediate_size"] % tp == 0  # TensorParallelColumnLinear: even shards
    yield c["hidden_size"] % c["num_attention_heads"] == 0  # models/qwen.py: a head's dim is their quotient, and all are the width
    yield p["pp"] <= c["num_hidden_layers"]  # a stage without a block has no parameters of its own (base.py:225 divides by cost)
    yield p["tp_mode"] == "ALL_REDUCE" or tp == 1 or seq % (tp * cp) == 0  # distributed_differentiable_primitives.py


def random_nanotron(r):
    p = {"dp": r.choice(FIRST), "tp": r.choice(FIRST), "pp": r.choice([1, 1, 2, 4, 9]), "context_parallel_size": r.choice(FIRST[:5]),
         "tp_mode": r.choice(["ALL_REDUCE", "REDUCE_SCATTER"])}  # fmt: skip
    config = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": r.choice([8, 12]), "num_hidden_layers": 8,
              "num_key_value_heads": r.choice([2, 4]), "vocab_size": 256}  # fmt: skip
    tokens = {"micro_batch_size": 1, "sequence_length": r.choice([60, 64])}
    world = p["dp"] * p["tp"] * p["pp"] * p["context_parallel_size"]
    return {"parallelism": p, "model": {"model_config": config}, "tokens": tokens}, world * r.choice([1, 1, 1, 2])


def accelerate(s, world):
    """huggingface/accelerate 16cb6eb, parallelism_config.py; transformers' tensor parallel plans divide heads and features."""
    replicate, shard, tp, cp = (s[f"parallelism_config.parallelism_config_{name}_size"] for name in ACCELERATES)
    yield replicate * shard * tp * cp == world  # parallelism_config.py:366
    yield not ((tp > 1 or cp > 1) and replicate > 1 and shard == 1)  # parallelism_config.py:327
    yield MIXTURE.heads % tp == 0 and MIXTURE.kv_heads % tp == 0 and MIXTURE.ffn % tp == 0
    yield cp == 1 or SEQ % (2 * cp) == 0  # torch's context_parallel, load balanced


SEQ, ACCELERATES = 72, ("dp_replicate", "dp_shard", "tp", "cp")


def random_accelerate(r):
    sizes = {f"parallelism_config.parallelism_config_{name}_size": r.choice(FIRST) for name in ACCELERATES}
    return {"distributed_type": "FSDP", "fsdp_config.fsdp_version": 2, **sizes}, prod(sizes.values()) * r.choice([1, 1, 1, 2])


DENSE = ModelSizes(14, 256, 512, 8, 4, 1024)
CASES = {  # rules, random settings, how many, how they are written, what is known beside them
    "megatron": (megatron, random_megatron, 400, "a.sh", lambda s: arguments_text(s), {}),
    "torchtitan": (torchtitan, random_torchtitan, 400, "a.toml", toml_text, {"sizes": MIXTURE}),
    "nanotron": (nanotron, random_nanotron, 100, "a.yaml", yaml.safe_dump, {}),
    "accelerate": (accelerate, random_accelerate, 100, "a.yaml", lambda s: yaml.safe_dump(nested(s)),
                   {"sizes": DENSE, "seq": SEQ, "microbatch": 1}),
}  # fmt: skip


def is_legal(launcher, path, text, known):
    """As we say; and our reasons."""
    try:
        one = read_configuration(launcher, text, path, known)
    except ValueError as refusal:
        return False, str(refusal)
    reasons = why_illegal(one.launch, one.sizes, launcher)
    return not reasons, reasons


@pytest.mark.parametrize("launcher", CASES)
def test_legality_is_that_of_the_launchers_rules(launcher):
    rules, settings, count, path, written, more = CASES[launcher]
    r, seen = random.Random(20260), Counter()
    for _ in range(count):
        values, world = settings(r)
        theirs = all(rules(values, world))
        ours, reasons = is_legal(launcher, path, written(values), Overrides(devices=world, **more))
        assert ours == theirs, (values, world, reasons, [k for k, ok in enumerate(rules(values, world)) if not ok])
        seen[theirs] += 1
    assert min(seen[True], seen[False]) > count / 10


def test_megatron_cores_own_config_is_ours():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without Transformer Engine and Apex
        pytest.importorskip("megatron.core.transformer.transformer_config", exc_type=ImportError)
    from tests.test_launchers_parsers import config_of

    r, seen = random.Random(11), Counter()
    for _ in range(400):
        values, world = random_megatron(r)
        values = {name: value for name, value in values.items() if "expert" not in name and "moe" not in name}
        values["sequence-parallel"] &= values["tensor-model-parallel-size"] > 1  # validate_args switches it off
        ours, reasons = is_legal("megatron", "a.sh", arguments_text(values), Overrides(devices=world))
        try:
            config_of(arguments_text(values))
            theirs = True
        except (ValueError, AssertionError):
            theirs = False
        assert theirs or not ours, (values, world)  # it builds no groups and no batches: what it refuses, we refuse
        seen[theirs] += 1
    assert min(seen.values()) > 40
