"""Megatron-LM: arguments as a shell script has them, or as keys of YAML or JSON with dashes or underscores.

Micro batches are those of --micro-batch-size; the data parallel degree is what tensor, pipeline and context parallelism leave of the
devices, which --nproc_per_node times --nnodes tell where the command line doesn't. Without a precision flag it trains in float32.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from .blocks_of_stages import counts_of, split_of
from .model_sizes import PADDED, ModelSizes
from .primus import experiment
from .runs import MODEL, MODULES, Launch, LaunchConfig, Overrides
from .texts import arguments_of, flat, integer, parsed

VOCABULARIES = {  # of tokenizers, by patterns of their type and model: as models published with them have it
    "GPT2BPETokenizer": 50257, "Llama2Tokenizer|MixtralTokenizer|.*(llama-2-|mixtral-8x).*": 32000, "Llama3Tokenizer|.*llama-3.*": 128256,
    "Llama4Tokenizer|.*llama-4-.*": 202048, "DeepSeekV2Tokenizer|.*deepseek-v2.*": 102400, "DeepSeekV3Tokenizer|.*deepseek-v3.*": 129280,
    "KimiK2Tokenizer|.*kimi-k2-.*": 163840, ".*qwen(2.5|3)-.*": 151936, ".*gpt-oss-.*": 201088,
}  # fmt: skip
MOST_LAYERS = 10_000
LATENT = {"q-lora-rank": 0, "kv-lora-rank": 512, "qk-pos-emb-head-dim": 64, "qk-head-dim": 128, "v-head-dim": 128}  # and their defaults
DATA = (".json", ".yaml", ".yml")
UNFUSED = "no-gradient-accumulation-fusion"
GROUP = "microbatch-group-size-per-virtual-pipeline-stage"
BY_HAND = "decoder-pipeline-manual-split-list"  # of Primus: the layers of each stage
LAYOUT, VIRTUAL, PER_VIRTUAL, *ENDS_OF = (
    "pipeline-model-parallel-layout", "num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage",
    *(f"decoder-{end}-pipeline-num-layers" for end in ("first", "last")),
    *(f"account-for-{end}-in-pipeline-split" for end in ("embedding", "loss")),
)  # fmt: skip
CONFLICTS = (
    ((LAYOUT,), (VIRTUAL, PER_VIRTUAL, *ENDS_OF)), ((VIRTUAL,), (PER_VIRTUAL,)), ((PER_VIRTUAL,), ENDS_OF[:2]), (ENDS_OF[:2], ENDS_OF[2:]),
    (("use-torch-fsdp2",), ("use-distributed-optimizer",)), (("fp4-format",), ("fp8-format",)),
)  # fmt: skip
EXCLUSIVE = (
    frozenset({LAYOUT, VIRTUAL, PER_VIRTUAL, BY_HAND, *ENDS_OF}),
    frozenset({"use-torch-fsdp2", "use-megatron-fsdp", "use-custom-fsdp", "data-parallel-sharding-strategy", "use-distributed-optimizer",
               "fsdp-manual-registration", "fsdp-double-buffer", UNFUSED}),  # which need --use-megatron-fsdp; FSDP 2 needs the last
    frozenset({"moe-token-dispatcher-type", "use-turbo-deepep", "turbo-sync-free-moe-stage"}),
    frozenset({"recompute-granularity", "recompute-activations", "checkpoint-activations", "activations-checkpoint-method"}),
)  # fmt: skip
OF_CORE = {  # fields of megatron-core's configs, as Megatron-Bridge's YAML has them
    "virtual-pipeline-model-parallel-size": VIRTUAL, "gated-linear-unit": "swiglu", "num-moe-experts": "num-experts",
    **{f"activations-checkpoint-{key}": f"recompute-{key}" for key in ("granularity", "method", "num-layers")},
    "sequence-length": "seq-length", "devices": "nproc-per-node", "num-nodes": "nnodes", "fp8": "fp8-format", "fp4": "fp4-format",
    **{f"num-layers-in-{end}-pipeline-stage": f"decoder-{end}-pipeline-num-layers" for end in ("first", "last")},
}  # fmt: skip
GATED = ("swiglu", "quick-geglu")
MULTIPLE = re.compile(r"\$\{multiply: ?(\d{1,6}), ?\$\{\.(hidden_size)\}\}")  # as NeMo's YAML has it
BALANCED = "moe-router-load-balancing-type"
EXPERT_OVERLAP, INSTANCES = "overlap-moe-expert-parallel-comm", "num-distributed-optimizer-instances"
EXCHANGE, LEVELS = "cp-comm-type", "hierarchical-context-parallel-sizes"
BLOCKS = "recompute-num-layers of method block"
UNTIED, PRECISE = "untie-embeddings-and-output-weights", "use-precision-aware-optimizer"
LEARNED = "learned_absolute"  # positions
NAMED_RECIPES = {"mxfp8": "mxfp8", "fp8_subchannel": "blockwise", "fp8_current": "tensorwise", "fp8_delayed": "delayed"}
FLAGS = frozenset({  # arguments that have no value: what stands behind them is something else
    "sequence-parallel", "bf16", "fp16", "fp8-param-gather", "grad-reduce-in-bf16", "use-distributed-optimizer", "use-torch-fsdp2",
    "use-megatron-fsdp", "use-custom-fsdp", "fsdp-manual-registration", "fsdp-double-buffer", "optimizer-cpu-offload", PRECISE,
    "recompute-activations", "checkpoint-activations", UNFUSED,
    EXPERT_OVERLAP, *ENDS_OF[2:],
})  # fmt: skip
RECOMPUTABLE = {"core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"}  # transformer_config.py
LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}  # of layouts
FP8_RECIPES = {"blockwise": "fp8_blockwise", "mxfp8": "mxfp8"}  # those with one scale per tensor, delayed or not, cost the same here


class Arguments(dict[str, list[str]]):
    """Options with their words, read as numbers, text and flags."""

    def number(self, name: str, default: int, least: int | None = None) -> int:
        if name not in self:
            return default
        if multiple := MULTIPLE.fullmatch(self.text(name)):
            return int(multiple[1]) * self.number(_name(multiple[2]), 0, least)
        return integer(self[name][0] if self[name] else "", f"--{name}", least)

    def known(self, name: str) -> int:
        """A number where it is written as one, else 0."""
        return int(text) if (text := self.text(name)).isdecimal() and len(text) < 10 else 0

    def text(self, name: str, default: str = "") -> str:
        return self[name][0] if self.get(name) else default


REFUSED: tuple[tuple[str, Callable[[Arguments], bool], str], ...] = (  # lines of training/arguments.py
    ("use-torch-fsdp2", lambda a: a.number("pipeline-model-parallel-size", 1) > 1, "goes with no pipeline"),  # 1034
    ("use-torch-fsdp2", lambda a: a.number("expert-model-parallel-size", 1) > 1, "goes with no expert parallelism"),  # 1036
    ("use-torch-fsdp2", lambda a: not {UNTIED, UNFUSED} <= a.keys(), f"needs --{UNTIED} and --{UNFUSED}"),  # 1040, 1044
    ("tp-comm-overlap", lambda a: "sequence-parallel" not in a or a.number("tensor-model-parallel-size", 1) == 1,
     "needs --sequence-parallel and tensor parallelism"),  # 1439
    ("distribute-saved-activations", lambda a: "sequence-parallel" in a and a.number("tensor-model-parallel-size", 1) > 1,
     "goes with no --sequence-parallel"),  # transformer_config.py:1875
    ("max-position-embeddings", lambda a: 0 < a.known("max-position-embeddings") < a.known("seq-length"),
     "is less than --seq-length"),  # 1354
    ("hidden-size", lambda a: not a.keys() & {"kv-channels", "multi-latent-attention"}
     and a.known("hidden-size") % (a.known("num-attention-heads") or 1) > 0, "does not divide by --num-attention-heads"),  # 1332
    ("moe-ffn-hidden-size", lambda a: "num-layers" in a and "num-experts" not in a and a.text("moe-layer-freq", "1") == "1",
     "needs --num-experts"),  # transformer_config.py:1702
    ("moe-router-topk", lambda a: a.number("moe-router-topk", 2) == 1 and "num-experts" in a and "moe-router-pre-softmax" not in a
     and a.text("moe-router-score-function", "softmax") == "softmax" and "sinkhorn" not in a.get(BALANCED, []),
     "of 1 needs --moe-router-pre-softmax"),  # transformer_config.py:2670
    ("cpu-offloading", lambda a: a.number("pipeline-model-parallel-size", 1) > 1 or "recompute-granularity" in a,
     "goes with neither a pipeline nor recomputation"),  # transformer_config.py:1846
    ("optimizer-cpu-offload", lambda a: "fp8-param-gather" in a and a.text("fp8-recipe", "delayed") != "delayed",
     "with --fp8-param-gather needs --fp8-recipe delayed"),  # 1889
    ("fp16", lambda a: "bf16" in a or "use-torch-fsdp2" in a, "goes with neither --bf16 nor --use-torch-fsdp2"),  # 1046, 1196
    ("optimizer-cpu-offload", lambda a: PRECISE not in a, f"needs --{PRECISE}"),  # 1885
    ("no-overlap-p2p-communication", lambda a: a.number("pipeline-model-parallel-size", 1) == 2 and (VIRTUAL in a or PER_VIRTUAL in a),
     "needs a pipeline of 3 devices or more where each has several stages"),  # 1006
)  # fmt: skip


def _of_data(data: Mapping[str, Any], path: str) -> Arguments:
    """Arguments of nested YAML or JSON; sections only group them. A recipe's `model` has fields of megatron-core's configs, which say some
    things the other way round, and go before those of the same name in other sections (the tokenizer's), but for its precision, which
    Megatron-Bridge takes from `mixed_precision`."""
    model, mixed = data["model"] if isinstance(data.get("model"), Mapping) else {}, data.get("mixed_precision", {})
    arguments, said = Arguments({**_of_sections(data), **_of_sections(model)}), {_name(key): value for key, value in model.items()}
    if {"encoder", "decoder"} <= said.keys():
        raise ValueError(f"{path} has an encoder and a decoder, which have no prices here; expected a decoder alone")
    named = mixed if isinstance(mixed, str) else arguments.text("precision")
    if isinstance(mixed, Mapping):
        arguments.update(_of_sections(mixed) | ({"grad-reduce-in-bf16": []} if mixed.get("grad_reduce_in_fp32") is False else {}))
    arguments.update(_of_precision(named))
    for field, argument in (("share-embeddings-and-output-weights", "untie-embeddings-and-output-weights"),
                            ("add-bias-linear", "disable-bias-linear"), ("bias", "disable-bias-linear"),
                            ("gradient-accumulation-fusion", UNFUSED)):  # fmt: skip
        if said.get(field) is False:
            arguments[argument] = []
    if isinstance(said.get(LAYOUT), list):
        stages = [stage if isinstance(stage, list) else [stage] for stage in said[LAYOUT]]
        arguments[LAYOUT] = ["|".join("".join(LETTERS.get(str(name), "") for name in stage) for stage in stages)]
    if "encoder-seq-length" in said:  # NeMo of 2023 and 2024
        arguments.update({"seq-length": arguments.get("encoder-seq-length", []), "tokenizer-type": arguments.get("type", ["?"])})
        sharded = "distributed" in str(said.get("optim"))
        switches = {"swiglu": "glu" in str(said.get("activation")), "use-distributed-optimizer": sharded, "overlap-grad-reduce": sharded}
        arguments.update({name: [] for name, is_on in switches.items() if is_on})
        for name in ("recompute-method", "recompute-num-layers") if arguments.text("recompute-granularity") != "full" else ():
            arguments.pop(name, None)
    if said.get("num-query-groups"):
        arguments["group-query-attention"] = []
    if said.get("should-pad-vocab") is False:
        arguments["make-vocab-size-divisible-by"] = ["1"]
    if said.get(LAYOUT):  # which tells as much
        arguments.pop(VIRTUAL, None)
    return arguments


def _of_precision(name: str) -> Arguments:
    """Of a name: "bf16-mixed", or a recipe of Megatron-Bridge, "bf16_with_mxfp8_mixed"."""
    words: dict[str, list[str]] = {"bf16": []} if "bf16" in name else {"fp16": []} if "16" in name else {}
    recipe = next((recipe for part, recipe in NAMED_RECIPES.items() if part in name.replace("-", "_")), "")
    words |= {"fp8-format": ["hybrid"], "fp8-recipe": [recipe]} if recipe else {"fp4-format": ["e2m1"]} if "fp4" in name else {}
    return Arguments(words | ({"fp8-param-gather": []} if recipe not in ("", "blockwise") else {}))


def _of_sections(data: Mapping[str, Any]) -> Arguments:
    arguments = Arguments()
    for key, value in data.items():
        if isinstance(value, Mapping):
            arguments.update(_of_sections(value))
        elif value is not None and (word := str(value).lower()) != "false" and not (word == "0" and _name(str(key)) in FLAGS):
            arguments[_name(str(key))] = [] if word == "true" else [str(value)]
    return arguments


def arguments_in(text: str, path: str) -> Arguments:
    a = _of_data(experiment(text, path), path) if path.endswith(DATA) else Arguments(arguments_of(text))
    if a.text("recompute-method") == "block":
        a[BLOCKS] = a.pop("recompute-num-layers", [])
    return a


def read(text: str, path: str, known: Overrides) -> LaunchConfig:
    a = arguments_in(text, path)
    tensor, pipeline = a.number("tensor-model-parallel-size", 1, 1), a.number("pipeline-model-parallel-size", 1, 1)
    context, expert = a.number("context-parallel-size", 1, 1), a.number("expert-model-parallel-size", 1, 1)
    devices = known.devices
    if devices is None and ("nproc-per-node" in a or "nnodes" in a or "world-size" in a):
        devices = a.number("world-size", a.number("nproc-per-node", known.per_node, 1) * a.number("nnodes", 1, 1))
    devices = devices or known.need("devices", path, "--devices")
    data = max(devices // (tensor * pipeline * context), 1)
    microbatch = a.number("micro-batch-size", known.microbatch or 1)
    sizes = known.sizes or _sizes(a, path)
    sizes = sizes.with_padded_vocab(a.number("make-vocab-size-divisible-by", PADDED["megatron"], least=1), tensor)
    zero, instances = _zero(a), a.number(INSTANCES, 1, 1)
    _check_conflicts(a, path)
    if zero and data * context % instances:
        raise ValueError(f"{path}: {data * context} data and context parallel ranks do not divide by --{INSTANCES} {instances}")
    virtual, split = _stages(a, sizes, pipeline)
    early = "activations-checkpoint-method" in a or "checkpoint-activations" in a  # before 2022: whole blocks
    granularity = a.text("recompute-granularity", "selective" if "recompute-activations" in a else "full" if early else "none")
    blocks = a.number(BLOCKS, 0, 0) if granularity == "full" else 0
    full = "full" if granularity == "full" and (blocks or BLOCKS not in a) else "none"
    recompute = _modules(a, sizes) if granularity == "selective" else full
    launch = Launch(
        devices=devices, seq=known.seq or a.number("seq-length", 2048),
        global_batch=known.global_batch or a.number("global-batch-size", microbatch * data), microbatch=microbatch, data=data,
        shard=max(data // instances, 1) if zero else 1, zero=zero, tensor=tensor, context=context, expert=expert,
        alltoall=_alltoall(a, context, path), sequence_parallel="sequence-parallel" in a and tensor > 1,
        expert_tensor=a.number("expert-tensor-parallel-size", tensor),
        pipeline=pipeline, virtual=virtual, schedule="Interleaved1F1B" if virtual > 1 else "1F1B",
        recompute=recompute, recomputed=blocks, precision=_precision(a), gather8="fp8-param-gather" in a,
        grads16="grad-reduce-in-bf16" in a, split=split, group=a.number(GROUP, 1, 1), offload="optimizer-cpu-offload" in a,
        async_expert=EXPERT_OVERLAP in a and expert > 1, deepep=a.text("moe-token-dispatcher-type") == "flex" and expert > 1,
    )  # fmt: skip
    return LaunchConfig(launch, sizes)


def _alltoall(a: Arguments, context: int, path: str) -> int:
    """Context parallel ranks that exchange heads: all with a2a, by a2a+p2p the first of the sizes."""
    kinds, levels = a.get(EXCHANGE, []), [int(number) for number in re.findall(r"\d{1,9}", " ".join(a.get(LEVELS, [])))]
    if levels and math.prod(levels) != context or ("a2a+p2p" in kinds and not levels):
        raise ValueError(f"{path}: --{LEVELS} are {levels}; expected numbers whose product is --context-parallel-size {context}")
    return {"a2a": context, "a2a+p2p": levels[0] if levels else 1}.get(kinds[0], 1) if len({*kinds}) == 1 else 1


def _modules(a: Arguments, sizes: ModelSizes) -> str:
    """Those of --recompute-modules that count: dense MLPs beside experts and shared experts are small, moe counts as moe_act."""
    named = {*re.findall(r"\w+", " ".join(a.get("recompute-modules", [])) or "core_attn")}
    if unknown := sorted(named - RECOMPUTABLE):
        raise ValueError(f"--recompute-modules has {unknown[0][:40]!r}; expected some of {', '.join(sorted(RECOMPUTABLE))}")
    named |= {name for name, other in (("attn", "core_attn"), ("moe_act", "moe")) if other in named}
    named -= {name for name, has in (("mla_up_proj", sizes.latent), ("mlp", not sizes.experts), ("moe_act", sizes.experts)) if not has}
    return "+".join(name for name in MODULES if name in named) or "none"


def _check_conflicts(a: Arguments, path: str) -> None:
    """ValueError for arguments that Megatron's validate_args and TransformerConfig refuse beside each other."""
    for ones, others in CONFLICTS:
        both = [next((name for name in names if name in a), None) for names in (ones, others)]
        if None not in both and both[0] != both[1]:
            raise ValueError(f"{path} has --{both[0]} and --{both[1]}; Megatron accepts one of them")
    for name, is_refused, why in REFUSED:
        if name in a and is_refused(a):
            raise ValueError(f"{path}: --{name} {why}")
    for name, known in (("recompute-granularity", ("full", "selective")), ("recompute-method", ("uniform", "block"))):
        if a.text(name, known[0]) not in known:
            raise ValueError(f"{path}: --{name} is {a.text(name)[:40]!r}; expected {' or '.join(known)}")
    granularity, more = a.text("recompute-granularity"), ["recompute-method" in a, bool({"recompute-num-layers", BLOCKS} & a.keys())]
    if granularity and "recompute-layer-ids" not in a and more != [granularity == "full"] * 2:
        raise ValueError(f"{path}: --recompute-method and --recompute-num-layers go with --recompute-granularity full, and with no other")
    divided = a.number("expert-tensor-parallel-size", a.number("tensor-model-parallel-size", 1))
    if divided > 1 and a.number("num-experts", 0) and "disable-bias-linear" not in a:
        raise ValueError(f"{path} has experts with biases on {divided} tensor parallel ranks each; that needs --disable-bias-linear")


def _stages(a: Arguments, sizes: ModelSizes, pipeline: int) -> tuple[int, str]:
    """The stages of a device, and the layers of each (blocks_of_stages). A list that misses layers tells that they don't divide."""
    layout, layers = a.text("pipeline-model-parallel-layout"), sizes.layers
    if layout:
        counts = [stage.count("t") for stage in layout_stages(layout)]
        return max(len(counts) // pipeline, 1), split_of(counts, layers, pipeline, sizes.mtp)
    if counts := [int(count) for count in re.findall(r"\d{1,5}", " ".join(a.get(BY_HAND, [])))]:
        return max(len(counts) // pipeline, 1), split_of(counts, layers, pipeline, sizes.mtp)
    ends = [int(f"account-for-{end}-in-pipeline-split" in a) for end in ("embedding", "loss")]
    per_stage = a.number("num-layers-per-virtual-pipeline-stage", 0, 0)
    virtual = a.number("num-virtual-stages-per-pipeline-rank", max((layers + sum(ends)) // pipeline // per_stage, 1) if per_stage else 1, 1)
    first, last = (a.number(f"decoder-{end}-pipeline-num-layers", 0, 0) for end in ("first", "last"))
    if pipeline == 1 and (first or last):
        return virtual, "" if (first or last) == layers else str(first or last)
    if pipeline == 1 or not (first or last or any(ends) or per_stage):
        return virtual, "" if per_stage <= layers else str(per_stage)
    middle, stages = pipeline - (first > 0) - (last > 0), pipeline * virtual
    each = max((layers - first - last) // max(middle, 1), 1)  # Megatron has no stage in the middle without layers
    devices = [first] * (first > 0) + [each] * middle + [last] * (last > 0)
    counts = [count // virtual for count in devices] * virtual
    if any(ends) or per_stage:
        counts = [per_stage or (layers + sum(ends)) // stages] * stages
        counts[0] -= ends[0]
        counts[-1] -= ends[1]
    return virtual, split_of(counts, layers, pipeline, sizes.mtp)


def layout_stages(layout: str) -> list[str]:
    """The stages of --pipeline-model-parallel-layout, a letter per module: E token table, t layer, m further prediction, L head.

    layout_stages("Et*3|(tt|)*2mL") -> ["Ettt", "tt", "tt", "mL"]
    """
    text = layout.replace(",", "").strip("\"' ")

    def repeated(part: re.Match) -> str:
        if len(part[1]) * integer(part[2], f"a factor of {layout[:40]}", 0) > 10_000:
            raise ValueError(f"--pipeline-model-parallel-layout {layout[:40]} has over 10000 modules; expected those of the model")
        return part[1] * int(part[2])

    for group in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(group, repeated, text)
    return text.split("|")


def layout_text(counts: Sequence[int], mtp: int = 0) -> str:
    """The layout whose stages have so many layers: `Et*3|(t*4|)*14t*2L`."""
    stages = [f"t*{count}" if count > 1 else "t" * count for count in counts]
    middle = "".join(f"({stage}|)*{n}" if (n := len(list(same))) > 1 else f"{stage}|" for stage, same in groupby(stages[1:-1]))
    return f"E{stages[0]}|{middle}{stages[-1]}{'m' * mtp}L"


def _zero(a: Arguments) -> int:
    if "use-torch-fsdp2" in a:
        return 3
    if "use-megatron-fsdp" in a or "use-custom-fsdp" in a:
        return {"optim_grads": 2, "optim": 1, "no_shard": 0}.get(a.text("data-parallel-sharding-strategy"), 3)
    return int("use-distributed-optimizer" in a)


def _precision(a: Arguments) -> str:
    if "fp8-format" in a:
        return FP8_RECIPES.get(a.text("fp8-recipe"), "fp8")
    return next((precision for flag, precision in (("fp4-format", "nvfp4"), ("bf16", "bf16"), ("fp16", "fp16")) if flag in a), "fp32")


def _sizes(a: Arguments, path: str) -> ModelSizes:
    missing = [name for name in ("num-layers", "hidden-size", "num-attention-heads") if not a.get(name)]
    if missing:
        raise ValueError(f"{path} has no --{missing[0]}; expected the arguments of Megatron's pretrain_gpt.py, or add {MODEL}")
    layers, width, heads = (a.number(name, 0) for name in ("num-layers", "hidden-size", "num-attention-heads"))
    gated = any(name in a for name in GATED)
    ffn = a.number("ffn-hidden-size", int(4 * width * 2 / 3 / 64) * 64 if "swiglu" in a else 4 * width)
    names = [a.text("tokenizer-type", "GPT2BPETokenizer"), a.text("tokenizer-model")]
    known = (size for kind, size in VOCABULARIES.items() if any(re.fullmatch(kind, name, re.IGNORECASE) for name in names))
    vocab = a.number("padded-vocab-size", a.number("vocab-size", next(known, 0)))
    if not vocab:
        tokenizer = f"the tokenizer {names[0]}"
        raise ValueError(f"{path} leaves the size of the vocabulary to {tokenizer}; add --vocab-size to it, or the model: add {MODEL}")
    experts = a.number("num-experts", a.number("num-moe-experts", 0))
    more: dict[str, Any] = {}
    if experts:
        more = {
            "experts": experts, "active": a.number("moe-router-topk", 2), "expert_ffn": a.number("moe-ffn-hidden-size", ffn),
            "shared_ffn": a.number("moe-shared-expert-intermediate-size", 0),
            "dense_layers": expert_pattern(" ".join(a.get("moe-layer-freq", [])) or "1", layers).count("0"),
        }  # fmt: skip
    more["mtp"] = a.number("mtp-num-layers", 0, 0)
    before = re.match(r"[\s(\[]*(\d+)", " ".join(a.get("window-size", [])))  # a token
    if before and a.text("softmax-type", "vanilla") == "vanilla" and "use-sink-attention" not in a:
        every = " ".join(a.get("window-attn-skip-freq", [])) or "0"
        windowed = layers - (layers // int(every) if int(every) else 0) if every.isdecimal() else expert_pattern(every, layers).count("1")
        more |= {"window": int(before[1]) + 1, "windowed": windowed}
    latent = tuple(a.number(name, default) for name, default in LATENT.items()) if "multi-latent-attention" in a else ()
    head_dim = latent[-1] if latent else a.number("kv-channels", 0)
    return ModelSizes(
        layers, width, ffn, heads, kv_heads=a.number("num-query-groups", heads) if "group-query-attention" in a else heads, vocab=vocab,
        head_dim=head_dim, tied="untie-embeddings-and-output-weights" not in a, gated=gated,
        learned_positions="use-rotary-position-embeddings" not in a and a.text("position-embedding-type", LEARNED) == LEARNED, **more,
        latent=latent, qk_norm="qk-layernorm" in a and not latent,
    )  # fmt: skip


def expert_pattern(frequency: str, layers: int) -> str:
    """A digit per layer of --moe-layer-freq, 1 with experts: every nth, or sums and products of lists. ValueError for other texts.

    expert_pattern("([0]*1+[1]*2)*2", 6) -> "011011"
    """
    text = re.sub(r"[\s'\"]", "", frequency)
    if text.isdecimal():
        return "".join("01"[i % max(int(text), 1) == 0] for i in range(layers))
    rest, before = re.sub(r"\[([01,]*)\]", lambda each: f"<{each[1].replace(',', '')}>", text), ""
    while rest != before and len(rest) <= MOST_LAYERS:  # products before sums
        before, rest = rest, re.sub(r"<(\d*)>\*(\d{1,3})(?!\d)", lambda each: f"<{each[1] * int(each[2])}>", rest)
        rest = re.sub(r"\((<\d*>)\)", r"\1", re.sub(r"<(\d*)>\+<(\d*)>", r"<\1\2>", rest))
    if not re.fullmatch(rf"<[01]{{{layers}}}>", rest):
        raise ValueError(f"--moe-layer-freq is {text[:40]}; expected a number, or a pattern of {layers} layers, ([0]+[1]*{layers - 1})")
    return rest[1:-1]


def place(text: str, path: str, name: str) -> str:
    """The name under which a configuration has an argument; in YAML and JSON with its sections."""
    if not path.endswith(DATA):
        return name
    names = {_name(key.rpartition(".")[2]): key for key in flat(parsed(text, path))}
    beside = names.get("tensor-model-parallel-size", next(iter(names.values()), ""))  # where new ones go
    written = name if "-" in beside or "_" not in beside else name.replace("-", "_")
    return names.get(name, f"{beside.rpartition('.')[0]}.{'--' * ('--' in beside)}{written}".lstrip("."))


def _name(key: str) -> str:
    name = key.lstrip("-").replace("_", "-")
    return OF_CORE.get(name, name)


def settings(config: LaunchConfig) -> dict[str, Any]:
    """The arguments of pretrain_gpt.py that the launch and the model's sizes decide; True is a flag."""
    launch, m = config.launch, config.sizes
    options: dict[str, Any] = {
        "num-layers": m.layers, "hidden-size": m.width, "ffn-hidden-size": m.ffn, "num-attention-heads": m.heads, "kv-channels": m.head_dim,
        "group-query-attention": m.kv_heads < m.heads, "num-query-groups": m.kv_heads if m.kv_heads < m.heads else None, "swiglu": m.gated,
        "disable-bias-linear": m.gated, "qk-layernorm": m.qk_norm,
        "untie-embeddings-and-output-weights": not m.tied, "position-embedding-type": LEARNED if m.learned_positions else "rope",
        "vocab-size": m.own_vocab, "make-vocab-size-divisible-by": PADDED["megatron"],
        "seq-length": launch.seq, "max-position-embeddings": launch.seq,
        "micro-batch-size": launch.microbatch, "global-batch-size": launch.global_batch,
        "tensor-model-parallel-size": launch.tensor, "pipeline-model-parallel-size": launch.pipeline,
        "num-virtual-stages-per-pipeline-rank": launch.virtual if launch.virtual > 1 and not launch.split else None,
        "pipeline-model-parallel-layout": layout_text(counts_of(launch, m.layers, m.mtp), m.mtp) if launch.split else None,
        GROUP: launch.group if launch.group > 1 else None, "context-parallel-size": launch.context,
        EXCHANGE: None if launch.alltoall == 1 else "a2a" if launch.alltoall == launch.context else "a2a+p2p",
        LEVELS: [launch.alltoall, launch.context // launch.alltoall] if 1 < launch.alltoall < launch.context else None,
        "expert-model-parallel-size": launch.expert if m.experts or launch.expert > 1 else None,
        "sequence-parallel": launch.sequence_parallel, "use-distributed-optimizer": launch.zero == 1, "use-torch-fsdp2": launch.zero == 3,
        UNFUSED: launch.zero == 3, "optimizer-cpu-offload": launch.offload, PRECISE: launch.offload,
        INSTANCES: launch.replicate if launch.zero and launch.replicate > 1 else None,
        "recompute-granularity": {"none": None, "full": "full"}.get(launch.recompute, "selective"),
        "recompute-modules": [{"attn": "core_attn"}.get(name, name) for name in launch.recompute.split("+")]
        if launch.recompute not in ("none", "full") else None,
        "bf16": launch.precision not in ("fp32", "fp16"), "fp16": launch.precision == "fp16",
        "fp8-format": "hybrid" if "fp8" in launch.precision else None, "fp4-format": "e2m1" if launch.precision == "nvfp4" else None,
        "fp8-recipe": next((name for name, precision in FP8_RECIPES.items() if precision == launch.precision), None),
        "fp8-param-gather": launch.gather8, "grad-reduce-in-bf16": launch.grads16,
    }  # fmt: skip
    if launch.recompute == "full":
        options |= {"recompute-method": "block" if launch.recomputed else "uniform", "recompute-num-layers": launch.recomputed or 1}
    if m.mtp:
        options["mtp-num-layers"] = m.mtp
    every = m.layers // max(m.layers - m.windowed, 1) if m.windowed < m.layers else 0  # all tokens are seen by every so many layers
    if m.windowed and not m.chunked and m.windowed == m.layers - (m.layers // every if every else 0):
        options |= {"window-size": f"{m.window - 1},0", "window-attn-skip-freq": every or None}
    if m.latent:
        options |= {"multi-latent-attention": True, **{name: rank or None for name, rank in zip(LATENT, m.latent)}}
    if m.experts:
        options |= {
            "num-experts": m.experts, "moe-router-topk": m.active, "moe-ffn-hidden-size": m.expert_ffn,
            "moe-shared-expert-intermediate-size": m.shared_ffn or None,
            "expert-tensor-parallel-size": launch.expert_tensor, "moe-token-dispatcher-type": "flex" if launch.deepep else "alltoall",
            "moe-flex-dispatcher-backend": "deepep" if launch.deepep else None,
            EXPERT_OVERLAP: launch.async_expert and launch.expert > 1,
            "moe-layer-freq": f"([0]*{m.dense_layers}+[1]*{m.layers - m.dense_layers})" if m.dense_layers else None,
        }  # fmt: skip
    elif launch.expert_tensor != launch.tensor:  # which Megatron checks without experts, too
        options["expert-tensor-parallel-size"] = launch.expert_tensor
    return {name: value for name, value in options.items() if value not in (None, False)}
