"""Models as strangers write them: each is captured, planned and verified, or refused with a sentence that says what to change."""

import contextlib
import json
import sys
import threading
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoshard.api import autosharding_pass, plan, verify
from autoshard.capture import capture, capture_fx
from autoshard.capture.depth import shrunk
from autoshard.capture.huggingface import load_huggingface
from autoshard.capture.nested_tensors import copied, reachable, tensors_of
from autoshard.capture.turns import DEEPEST, FRAMES_PER_LEVEL, _levels, deep_enough
from autoshard.cli import main
from autoshard.cli.model import load_model
from autoshard.mesh import Mesh
from tests import helpers_models
from tests.helpers_models import refusal, right_plan
from tests.helpers_refusals import assert_refused

MESH = Mesh.from_bandwidths((2, 2))
BOTH = pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])


class Model(helpers_models.Model):
    """Of this file, so that refusals name its lines."""


def of_parts(function, *parts):
    """`function(parts, *inputs)` as a module."""
    return Model(lambda m, *args, **kwargs: function(m.parts, *args, **kwargs), parts=nn.ModuleList(parts))


class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs).float().pow(2).mean()


def linear(function):
    """A case whose function gets nn.Linear(8, 8) and [4, 8]."""
    return lambda: (of_parts(lambda parts, x: function(parts[0], x), nn.Linear(8, 8)), (torch.randn(4, 8),))


def last(layer):
    return of_parts(lambda parts, x: parts[0](x)[0], layer)


# -- what works ------------------------------------------------------------------------------------------------------------------

LOCK = threading.Lock()


class Timed:
    def __enter__(self):
        self.began = time.monotonic()

    def __exit__(self, *error):
        return False


def in_its_lock(m, x):
    with m.lock:
        return m.linear(x)


def locked():
    return Model(in_its_lock, linear=nn.Linear(8, 8), lock=threading.Lock())


def under(context):
    def function(layer, x):
        with context():
            return layer(x)

    return linear(function)


def convnext():
    def forward(m, x):
        y = m.down(F.gelu(m.up(m.norm(m.conv(x).permute(0, 2, 3, 1))))).permute(0, 3, 1, 2)
        return m.pool(x + y).flatten(1)

    conv, pool = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.AdaptiveAvgPool2d(1)
    return Model(forward, conv=conv, norm=nn.LayerNorm(8), up=nn.Linear(8, 16), down=nn.Linear(16, 8), pool=pool)


def pooled():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8))
    return model.to(memory_format=torch.channels_last), (torch.randn(4, 4, 8, 8).to(memory_format=torch.channels_last),)


def nested(depth):
    model = nn.Linear(8, 8)
    for _ in range(depth):
        model = nn.Sequential(model)
    return model


def decoder(**options):
    layer = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = of_parts(lambda parts, x, y, mask: parts[0](x, y, tgt_mask=mask, **options), nn.TransformerDecoder(layer, 1))
    return model, (torch.randn(4, 4, 8), torch.randn(4, 4, 8), nn.Transformer.generate_square_subsequent_mask(4))


class Pair:
    """What a stranger keeps tensors in: slots, one of them empty, a list, and things that can't be copied."""

    __slots__ = ("first", "rest", "lock", "empty")

    def __init__(self, *tensors):
        self.first, self.rest, self.lock = tensors[0], list(tensors[1:]), threading.Lock()


class Written:
    def __init__(self, cache):
        self.cache, self.seen = cache, 0


def write(parts, x, held):
    held.seen += 1
    held.cache[:, :1] = parts[0](x)[:, None]
    return held.cache.sum(1)


def pooled_dims():
    return of_parts(lambda parts, x: parts[0](x).relu(), nn.Linear(4, 4)), (torch.randn([1] * 18 + [4, 4]),)


WORKS = {
    "rms_norm": lambda: (nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)), (torch.randn(4, 8),)),
    "gru": lambda: (last(nn.GRU(8, 8, batch_first=True)), (torch.randn(4, 4, 8),)),
    "rnn": lambda: (last(nn.RNN(8, 8, batch_first=True)), (torch.randn(4, 4, 8),)),
    "roll": linear(lambda layer, x: torch.roll(layer(x), (-1, -1), (0, 1))),
    "pooled in channels_last": pooled,
    "convnext": lambda: (convnext(), (torch.randn(4, 8, 8, 8),)),
    "a lock": under(lambda: LOCK),
    "a lock of the module": lambda: (locked(), (torch.randn(4, 8),)),
    "a context": under(Timed),
    "a generator's context": under(contextlib.nullcontext),
    "no_grad, then more": linear(lambda layer, x: layer(torch.no_grad()(layer)(x))),
    "a checkpoint": linear(lambda layer, x: checkpoint(layer, x, use_reentrant=False)),
    "100 Sequentials": lambda: (nested(100), (torch.randn(4, 8),)),
    "400 Sequentials": lambda: (nested(400), (torch.randn(4, 8),)),
    "20 dims": pooled_dims,
    "a mask that is said to be causal": lambda: decoder(tgt_is_causal=True),
    "an object of tensors": lambda: (
        of_parts(lambda parts, x: parts[0](x.first) + x.rest[0], nn.Linear(8, 8)),
        (Pair(torch.randn(4, 8), torch.randn(8)),),
    ),
    "an object by keyword": lambda: (
        of_parts(lambda parts, x, *, pair: parts[0](x) + pair.rest[0], nn.Linear(8, 8)),
        {"x": torch.randn(4, 8), "pair": Pair(torch.randn(4, 8), torch.randn(8))},
    ),
}


# a target ends at its first -1: none, all, one that is repeated behind the end
MARGINS = torch.tensor([[1, 2, -1, 0, 0, 0, 0, 0], [3, -1, 3, 4, 0, 0, 0, 0], [-1] * 8, list(range(8))])
WORKS |= {
    "a loss of labels": lambda: (of_parts(lambda p, x: F.multilabel_margin_loss(p[0](x), MARGINS), nn.Linear(8, 8)), (torch.randn(4, 8),)),
    "a loss of one row's labels": lambda: (
        of_parts(lambda p, x, t: F.multilabel_margin_loss(p[0](x), t), nn.Linear(8, 8)),
        (torch.randn(8), MARGINS[0]),
    ),
    "a loss of one label": lambda: (
        of_parts(lambda p, x, t: F.cross_entropy(p[0](x), t), nn.Linear(8, 8)), (torch.randn(8), torch.tensor(2))
    ),
}


def built(make, training):
    torch.manual_seed(0)
    model, inputs = make()
    return (Loss(model) if training else model).eval(), inputs


@BOTH
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name[:3] == "400" else name for name in WORKS])
def test_it_is_captured_planned_and_verified(name, training):
    model, inputs = built(WORKS[name], training)
    graph = capture(model, inputs, training=training)
    assert set(graph.parameters) == {name for name, _ in model.named_parameters()}
    assert not [op.target for op in graph.ops if "as_strided" in op.target]
    right_plan(model, inputs, MESH, training=training)
    assert not torch._dynamo.config.allow_rnn  # set for the time of a capture only


TURNED = {"batch_first": True, "bidirectional": True}


@pytest.mark.parametrize(("kind", "options"), [
    (nn.LSTM, {}), (nn.RNN, TURNED),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in ((nn.LSTM, TURNED), (nn.GRU, {}), (nn.GRU, TURNED), (nn.RNN, {}))),
])  # fmt: skip
def test_recurrent_layers_drop_out_between_them(kind, options):
    shape = (4, 2, 8) if options else (2, 4, 8)  # two steps
    layers = 2 if options else 3  # of two directions each
    model, inputs = built(lambda: (last(kind(8, 8, layers, dropout=0.5, **options)), (torch.randn(shape),)), True)
    model.train()
    targets = [op.target for op in capture(model, inputs, training=True).ops]
    assert targets.count("aten.native_dropout.default") == layers - 1
    right_plan(model, inputs, MESH, training=True)  # the model draws the same numbers


@BOTH
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_layers_of_many_steps_are_captured(kind, training):
    model, inputs = built(lambda: (last(kind(8, 8, 2, bidirectional=True)), (torch.randn(4, 2, 8),)), training)
    assert set(capture(model, inputs, training=training).parameters) == {name for name, _ in model.named_parameters()}


def test_what_the_forward_writes_into_an_object_is_a_result_and_the_object_stays():
    held = Written(torch.zeros(4, 2, 8))
    graph = capture(of_parts(write, nn.Linear(8, 8)), (torch.randn(4, 8), held), training=False)
    assert [(result.kind, result.name) for result in graph.results] == [("buffer", "input_1"), ("output", "0")]
    assert held.seen == 0 and not held.cache.any()


def test_objects_in_what_is_returned_are_their_tensors():
    graph = capture(of_parts(lambda parts, x: (x, Pair(parts[0](x), x + 1)), nn.Linear(8, 8)), (torch.randn(4, 8),), training=False)
    assert [result.name for result in graph.results] == ["0", "1", "2"]


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
def test_caches_of_transformers_are_inputs(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
    config = transformers.LlamaConfig(num_hidden_layers=1, max_position_embeddings=32, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    cache = getattr(transformers, kind)(config=config, **({"max_cache_len": 16} if kind == "StaticCache" else {}))
    with torch.no_grad():
        model(torch.zeros(4, 4, dtype=torch.int64), past_key_values=cache, use_cache=True)
    before = [tensor.clone() for tensor in tensors_of(cache)]
    inputs = {"input_ids": torch.zeros(4, 1, dtype=torch.int64), "past_key_values": cache, "use_cache": True}
    right_plan(model, inputs, MESH, training=False)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors_of(cache), strict=True))


def test_layers_that_hold_a_lock_are_shrunk():
    model = nn.Sequential(nn.Sequential(*(locked() for _ in range(6))))
    small = shrunk(model, {"0": 2})
    assert len(small[0]) == 2 and small[0][0].lock is model[0][0].lock and small[0][0].linear.weight is model[0][0].linear.weight


def test_a_copy_has_its_own_tensors_and_shares_locks():
    pair = Pair(torch.ones(2), torch.ones(3))
    pair.rest.append(pair.first)
    copy = copied(pair, lambda tensor: tensor * 2)
    assert copy is not pair and copy.lock is pair.lock and copy.first is copy.rest[1] and copy.rest[0].tolist() == [2, 2, 2]
    assert pair.first.tolist() == [1, 1] and copy.lock in list(reachable(copy))


# -- as_strided --------------------------------------------------------------------------------------------------------------------

X = torch.randn(4, 1, 8)
STRIDED = [
    (lambda x: x.as_strided((4, 1, 8), (8, 99, 1)), 0),
    (lambda x: x.as_strided((4, 8), (8, 1)), 0),
    (lambda x: x.as_strided((4, 1, 8), (8, 8, 1), 0), 0),
    (lambda x: x.as_strided((8, 4), (1, 8)), 1),  # from here on elements move
    (lambda x: x.as_strided((2, 1, 8), (8, 8, 1)), 1),
    (lambda x: x.as_strided((3, 8), (8, 1), 8), 1),
]


@pytest.mark.parametrize(("function", "left"), STRIDED, ids=range(len(STRIDED)))
def test_as_strided_goes_where_it_moves_no_element(function, left):
    graph = capture_fx(make_fx(lambda x: function(x).exp())(X)).graph
    assert [op.target for op in graph.ops].count("aten.as_strided.default") == left
    assert graph.tensor(graph.results[0].value).shape == tuple(function(X).shape)


# -- what is refused -----------------------------------------------------------------------------------------------------------------


def endless(layer, x):
    return endless(layer, layer(x))


def keeps(m, x):
    """Writes into a tensor that is no buffer."""
    m.kept[0].add_(m.linear(x).detach())
    return m.linear(x) + m.kept[0]


@torch.library.custom_op("tests::doubled", mutates_args=("x",))
def doubled(x: torch.Tensor) -> None:
    x.mul_(2)


def doubles(layer, x):
    y = layer(x)
    doubled(y)
    return layer(x) + y


def test_batch_norm_that_counts_batches_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None))
    assert_refused("weighs a batch by the number of batches .*give it a momentum", capture, Loss(model), (torch.ones(4, 8),), training=True)


def buffer8():
    return nn.Buffer(torch.ones(8, 8).to(torch.float8_e4m3fn))


def bag(kind):
    return of_parts(lambda parts, i: parts[1](parts[0](i)).sum(), kind(16, 8, sparse=True), nn.Linear(8, 8)), (torch.ones(4, 2).long(),)


@pytest.mark.parametrize("kind", [nn.Embedding, partial(nn.EmbeddingBag, mode="sum")], ids=str)
def test_sparse_gradients_are_refused(kind):
    assert_refused("the program has a sparse tensor .*give embeddings sparse=False", capture, *bag(kind), training=True)
    assert capture(*bag(kind), training=False).ops


def script():
    return torch.jit.script(nn.Linear(8, 8)), (torch.randn(4, 8),)


HERE = rf"at {__file__}:\d+"
REFUSED = {
    "a mask": (decoder, rf"{HERE}: torch compares the values of the mask with a causal one .*say what it is: tgt_is_causal=True"),
    "a lazy layer": (lambda: (nn.LazyLinear(8), (torch.randn(4, 8),)), "a parameter has no shape yet .*run the model on one batch first"),
    "nested": (lambda: (nn.Linear(8, 8), (torch.nested.nested_tensor([torch.randn(2, 8)]),)), "a nested tensor .*pad it"),
    "jagged": (
        lambda: (nn.Linear(8, 8), (torch.nested.nested_tensor([torch.randn(2, 8)], layout=torch.jagged),)),
        "a nested tensor .*pad it",
    ),
    "quantized": (
        lambda: (nn.Linear(8, 8), (torch.quantize_per_tensor(torch.randn(4, 8), 0.1, 0, torch.qint8),)),
        "a tensor of torch.qint8 is quantized",
    ),
    "sparse": (lambda: (nn.Linear(8, 8), (torch.eye(8).to_sparse(),)), "a tensor of layout torch.sparse_coo is sparse"),
    "float8": (
        lambda: (Model(lambda m, x: m.linear(x) @ m.w.float(), linear=nn.Linear(8, 8), w=buffer8()), (torch.randn(4, 8),)),
        r"a tensor of torch.float8_e4m3fn .*plan with tensor.to\(torch.bfloat16\)",
    ),
    "an operator that writes": (linear(doubles), "the program calls tests.doubled.default.*writes into its arguments"),
    "no end": (linear(endless), "nested deeper than Python's recursion limit .*setrecursionlimit"),
    "torch.jit": (script, "is compiled by torch.jit"),
    "cond": (
        linear(lambda layer, x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (layer(x),))),
        "the program calls cond.* cond with torch.where",
    ),
    "an unregistered tensor": (
        lambda: (Model(keeps, linear=nn.Linear(8, 8), kept=[torch.zeros(4, 8)]), (torch.randn(4, 8),)),
        "writes into a tensor that is no buffer .*register_buffer",
    ),
    "the data decide": (
        linear(lambda layer, x: layer(x) if x.sum() > 0 else x),
        rf"{HERE}: its shapes or its control flow depend on the data",
    ),
    "selected by the data": (linear(lambda layer, x: torch.combinations(layer(x)[0])), rf"{HERE}: its shapes .* depend on the data"),
    "counted by the data": (
        linear(lambda layer, x: layer(x) * sum((x > 0).sum(0).tolist())),
        r"(?s)^(?!.*nested).*depends? on the data",
    ),
}


@pytest.mark.parametrize(
    ("name", "training"),
    [  # a loss above a forward without end takes seconds more
        pytest.param(name, training, marks=pytest.mark.slow if (name, training) == ("no end", True) else ())
        for name in REFUSED for training in (False, True)
    ],
)  # fmt: skip
def test_it_is_refused_with_what_to_change(name, training, capfd):
    make, sentence = REFUSED[name]
    limit = sys.getrecursionlimit()
    with pytest.raises(ValueError, match=sentence) as caught:
        model, inputs = make()
        if name == "no end":
            sys.setrecursionlimit(limit // 2)  # the end is met in a quarter of the time
        try:
            capture(Loss(model) if training else model, inputs, training=training)
        finally:
            sys.setrecursionlimit(limit)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err


class OwnError(Exception):
    pass


RAISED = [
    *[kind("what went wrong") for kind in (OwnError, ValueError, RuntimeError, KeyError, ZeroDivisionError, OSError, ImportError)],
    *[kind("what went wrong") for kind in (StopIteration, UnicodeError, LookupError, EOFError, RecursionError, SystemExit)],
    *[kind() for kind in (OwnError, ValueError, MemoryError, AssertionError, TypeError)],
    SystemExit(0),
]  # fmt: skip
MODEL_FILE = """
import torch

class Raises(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        raise ERROR

def model():
    return Raises(), (torch.zeros(4, 8),)
"""
LINE = MODEL_FILE.splitlines().index("        raise ERROR") + 1


@BOTH
@pytest.mark.parametrize("error", RAISED, ids=lambda error: f"{type(error).__name__}-{error}")
def test_whatever_a_forward_raises_is_a_sentence_with_its_line_below_a_loss_of_another_file(error, training, tmp_path):
    (tmp_path / "raises.py").write_text(MODEL_FILE)
    model, inputs = load_model(f"{tmp_path}/raises.py:model", {})
    type(model).forward.__globals__["ERROR"] = error.with_traceback(None)  # the other mode has raised it too
    sentence = refusal(capture, Loss(model), inputs, training=training)
    assert sentence.startswith(f"Loss can't be captured at {tmp_path}/raises.py:{LINE}: ")
    assert (str(error) or type(error).__name__) in sentence and "Observed exception" not in sentence


def test_our_own_sentences_are_left_alone():
    with pytest.raises(ValueError, match="^the module has no parameter that gets a gradient"):
        capture(of_parts(lambda parts, x: x.sum()), (torch.zeros(4),), training=True)


@pytest.mark.parametrize("written", ["import sys; sys.exit(0)\ndef model(): pass", "def model():\n    raise SystemExit"])
def test_a_model_file_that_exits_is_an_error(written, tmp_path, capsys):
    (tmp_path / "exits.py").write_text(written)
    assert main(["plan", f"{tmp_path}/exits.py:model", "--mesh", "2"]) == 2
    assert "SystemExit" in capsys.readouterr().err


# -- hf: -----------------------------------------------------------------------------------------------------------------------------

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
VIDEO = TINY | {"image_size": 16, "patch_size": 8, "num_frames": 2}
SPEECH = TINY | {"conv_dim": [8, 8], "conv_kernel": [3, 3], "conv_stride": [2, 2], "num_feat_extract_layers": 2}
OTHER = "hf: makes input_ids, .* give file.py:function"
SEGMENTS = {"hidden_sizes": [8, 8, 8, 8], "num_attention_heads": [1, 1, 1, 1], "depths": [1, 1, 1, 1]} | {
    "decoder_hidden_size": 8,
    "image_size": 32,
}
MAMBA = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 32, "state_size": 2}
HF = [
    ("timesformer", "TimesformerForVideoClassification", VIDEO, {"pixel_values": (2, 2, 3, 16, 16)}, {"labels": (2,)}),
    ("segformer", "SegformerForSemanticSegmentation", SEGMENTS, {"pixel_values": (2, 3, 32, 32)}, {"labels": (2, 32, 32)}),
    ("mamba", "MambaForCausalLM", MAMBA, {"input_ids": (2, 4)}, {"labels": (2, 4)}),
    ("bert", "BertForNextSentencePrediction", TINY, {"input_ids": (2, 4)}, {"labels": (2,)}),
    ("wav2vec2", "Wav2Vec2ForCTC", SPEECH, f"Wav2Vec2ForCTC needs input_values, and {OTHER}", None),
    ("decision_transformer", "DecisionTransformerModel", {"hidden_size": 16}, f"DecisionTransformerModel needs states, and {OTHER}", None),
    ("resnet", "ResNetForImageClassification", {}, "ResNetConfig tells no image_size; give one, for example --set image_size=224", None),
]  # fmt: skip


@BOTH
@pytest.mark.parametrize(("kind", "name", "config", "expected", "labels"), HF, ids=[row[1] for row in HF])
def test_a_class_that_needs_other_inputs_gets_them_or_says_which(kind, name, config, expected, labels, training, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [name]} | config))
    if labels is None:
        assert_refused(expected, load_huggingface, str(tmp_path), {}, training=training)
        return
    model, inputs = load_huggingface(str(tmp_path), {"batch": 2, "seq": 4}, training=training)
    assert {key: tuple(tensor.shape) for key, tensor in inputs.items()} == expected | (labels if training else {})
    assert capture(model, inputs, training=training).results[0].value is not None


def test_a_class_that_returns_no_loss_for_its_labels_says_so(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertForPreTraining"]} | TINY))
    model, inputs = load_huggingface(str(tmp_path), {}, training=True)
    assert_refused("BertForPreTraining returns no loss for the inputs input_ids, labels", capture, model, inputs, training=True)


# -- depth ----------------------------------------------------------------------------------------------------------------------------


def test_pythons_recursion_limit_is_as_before_and_a_very_deep_model_does_not_raise_it_without_end():
    before = sys.getrecursionlimit()
    with deep_enough(nested(20)):
        assert before < sys.getrecursionlimit() < before + 30 * FRAMES_PER_LEVEL
    with deep_enough(nested(5 * DEEPEST)):
        assert sys.getrecursionlimit() == before + DEEPEST * FRAMES_PER_LEVEL
    assert sys.getrecursionlimit() == before


def test_plan_says_that_a_lazy_model_has_no_shapes():
    """Before the capture, layers of a container are compared, and a lazy one has no shape to compare."""
    with pytest.raises(ValueError, match="a parameter has no shape yet .*run the model on one batch first"):
        plan(nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(8)), (torch.randn(4, 8),), MESH, training=False, baselines=False)


class WithConstants(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return (self.linear(x) + torch.arange(8) * torch.ones(8)).sum()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad(), torch.inference_mode(), torch.device("meta")], ids=["no_grad", "inference_mode", "meta"])
def test_a_capture_is_the_same_in_every_mode_of_the_caller(mode, training):
    expected, plain = capture(WithConstants(), (torch.zeros(4, 8),), training=training).fingerprint(), (torch.zeros(4, 8),)
    with mode:
        assert capture(WithConstants(), (torch.zeros(4, 8),), training=training).fingerprint() == expected
        _, info = autosharding_pass(WithConstants(), mesh_shape=(2,), example_inputs=plain, training=training)
        assert verify(WithConstants(), plain, info["solution"])["ok"]


def test_levels_of_modules_are_counted_where_one_is_missing_shared_or_holds_itself():
    root, shared = nn.Module(), nn.Sequential(nn.Linear(2, 2))
    assert _levels(root) == 0
    root.first, root.missing, root.again, root.shared = nn.Sequential(shared), None, root, shared
    root.register_module("none", None)
    assert _levels(root) == 2
    root.first.append(nn.Sequential(nn.Sequential(nn.Sequential())))
    assert _levels(root) == 4
