"""Builds a Hugging Face model from the config.json in a folder, on the meta device, without downloads.

    settings    batch, seq        sizes of the example inputs       image_size    where the config has none, or to override it
                layers            how many layers the model gets instead of the config's
                loss              the module returns its loss (default: when a training step is planned), else its first output
                attention         sdpa or eager       experts    grouped_mm or batched_mm       dtype    float32, bfloat16, ...
                cache             static or dynamic: the step is the decode of one token for each example, `seq` tokens are in the cache

The class is the config's `architectures[0]`. The module is that of transformers: same names, same numerics. Two things differ from a plain
call. Caches are off, unless `cache` asks for one. And where all layers see all earlier tokens no mask is built: under capture,
transformers would build one for packed sequences, of batch * seq * seq elements, instead of asking attention to be causal.
"""

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from autoshard.reading import data_of

SETTINGS = ("batch", "seq", "image_size", "layers", "loss", "attention", "experts", "dtype", "cache")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
UNMASKED = "sdpa_unmasked"
OTHER_INPUTS = (
    "hf: makes input_ids, decoder_input_ids, pixel_values, input_features and their labels only; "
    "write a function that returns (module, example_inputs) and give file.py:function"
)
# A config's values reach all of transformers and torch unchecked: what arithmetic, lookups and calls with them raise.
UNCHECKED = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError)
REINSTALL = "install what it names, or run: pip install --force-reinstall 'autoshard[hf]'"
PER_EXAMPLE = ("Classification", "NextSentencePrediction")  # classes with one label for each example


def load_huggingface(
    folder: str | Path, settings: Mapping[str, Any], *, training: bool = False, name: str = "", empty_cache: Callable | None = None
) -> tuple[Any, dict[str, Any]]:
    """`(module, example_inputs)` of the config in `folder`. ValueError in one sentence where that can't be.

    name: what messages call the folder. empty_cache: what makes the cache of a (model, kind, batch size, tokens) where `cache` is set.
    """
    transformers = _transformers()
    for key in settings:
        if key not in SETTINGS:
            raise ValueError(f"hf: models take no setting {key!r}; they take {', '.join(SETTINGS)}")
    for key in ("batch", "seq", "layers"):
        value = settings.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{key} is {value!r}; expected a whole number of 1 or more")
    loss = settings.get("loss")
    try:
        return _loaded(transformers, Path(folder), name or str(folder), settings, empty_cache, training if loss is None else bool(loss))
    except ValueError as error:
        if (broken := _broken_import(error)) is None:
            raise
        raise ValueError(f"transformers, or a package that it needs, is missing or broken ({_described(broken)}); {REINSTALL}") from error


def _loaded(
    transformers: Any, folder: Path, name: str, settings: Mapping[str, Any], empty_cache: Callable | None, loss: bool
) -> tuple[Any, dict[str, Any]]:
    try:
        config = _config(transformers, folder / "config.json", settings)
        module = _build(transformers, config, name, settings)
        try:
            return module, _example_inputs(module, config, settings, empty_cache, loss)
        except AttributeError as error:  # the sizes of its inputs are written elsewhere, or nowhere
            kind = type(module).__name__
            raise ValueError(f"{kind} needs inputs whose sizes its config doesn't tell ({error}): {OTHER_INPUTS}") from error
    except UNCHECKED as error:
        raise ValueError(f"transformers can't use a value in {name}/config.json ({_described(error)}); correct the config") from error


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(": ")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__


def _broken_import(error: BaseException | None) -> BaseException | None:
    """The first of an error and its causes that is an ImportError, or was raised while a module was imported: transformers imports its
    models when they are needed."""
    while error is not None:
        files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
        if isinstance(error, ImportError) or any(file.startswith("<frozen importlib") for file in files):
            return error
        error = error.__cause__ or error.__context__
    return None


def _transformers() -> Any:
    try:
        import transformers  # here: it takes seconds, and only hf: models need it
    except Exception as error:  # whatever a broken installation raises
        if not isinstance(error, ModuleNotFoundError) or error.name != "transformers":
            raise ValueError(f"transformers is installed, but it can't be imported ({_described(error)}); {REINSTALL}") from error
        raise ValueError("hf: models need the package transformers, which is not installed; run: pip install 'autoshard[hf]'") from None
    return transformers


def config_with_defaults(folder: str | Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The config in a folder with what it leaves to the defaults of its class. ValueError where that can't be."""
    return _config(_transformers(), Path(folder) / "config.json", settings).to_dict()


def _config(transformers: Any, file: Path, settings: Mapping[str, Any]) -> Any:
    written = data_of(file, "config")
    from huggingface_hub.errors import StrictDataclassError  # here: as transformers, which needs it

    try:
        config = transformers.AutoConfig.for_model(**{"model_type": written.get("model_type"), **written})
    except (ValueError, StrictDataclassError, *UNCHECKED) as error:
        message = f"{file} can't be read as a config by transformers {transformers.__version__}: {_first_line(error)}"
        raise ValueError(message) from error
    if (layers := settings.get("layers")) is not None:
        _set_layers(config, layers, file)
    for part in _parts(config):
        for name in ("use_cache", "output_attentions", "output_hidden_states"):
            if hasattr(part, name):
                setattr(part, name, False)
    return config


def _parts(config: Any) -> list[Any]:
    """The config and those inside it (CLIP has one for text and one for vision)."""
    inner = [getattr(config, name) for name in getattr(config, "sub_configs", {}) if getattr(config, name, None) is not None]
    return [config, *inner]


def _values(config: Any, *names: str) -> list[Any]:
    """What the parts of a config have under these names."""
    values = [getattr(part, name, None) for part in _parts(config) for name in names]
    return [value for value in values if value is not None]


def _set_layers(config: Any, layers: Any, file: Path) -> None:
    has_layers = False
    for part in _parts(config):
        known = part.to_dict()
        for name in LAYERS:
            if isinstance(known.get(name), int):
                setattr(part, name, layers)
                has_layers = True
        if isinstance(kinds := getattr(part, "layer_types", None), list):
            part.layer_types = [kinds[k % len(kinds)] for k in range(layers)]
    if not has_layers:
        raise ValueError(f"{file} has none of {', '.join(LAYERS)}; leave layers out, or change the config")


def _build(transformers: Any, config: Any, folder: str, settings: Mapping[str, Any]) -> Any:
    names = getattr(config, "architectures", None) or [None]
    if not isinstance(names, list) or not all(name is None or isinstance(name, str) for name in names):
        raise ValueError(f"{folder}/config.json has architectures {str(names)[:80]}; expected a list with the name of a class")
    named = names[0]
    kind = getattr(transformers, named, None) if named else None
    if named and not callable(getattr(kind, "_from_config", None)):
        raise ValueError(
            f"{folder}/config.json has architecture {named!r}, which transformers {transformers.__version__} has not; correct it"
        )
    dtype = getattr(torch, str(settings.get("dtype", "float32")), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype is {settings.get('dtype')!r}; expected a name of torch's, for example bfloat16")
    asked = settings.get("attention")
    best = asked or _attention(transformers, config, kind, settings)
    if not asked and best == UNMASKED and settings.get("cache") == "static":
        best = "sdpa"  # with its mask: the cache has room for tokens that are not there yet
    make = kind._from_config if kind else transformers.AutoModel.from_config
    options = {"experts_implementation": settings["experts"]} if "experts" in settings else {}
    failures: list[Exception] = []
    for attention in (best,) if asked else dict.fromkeys((best, "sdpa", "eager")):  # a part of the model may not know the best one
        try:
            with torch.device("meta"):
                module = make(config, dtype=dtype, attn_implementation=attention, **options)
            return module.eval()  # dropout off: random numbers of shards would differ from those of the full tensor
        except (ValueError, TypeError, KeyError, ImportError, AttributeError) as error:
            failures.append(error)
    message = f"transformers can't build {named or 'a model'} from {folder}/config.json: {_first_line(failures[0])}; correct it"
    raise ValueError(message) from failures[0]


def _attention(transformers: Any, config: Any, kind: Any, settings: Mapping[str, Any]) -> str:
    """sdpa without a mask where that is equivalent, plain sdpa where layers see a window only, eager where sdpa does not apply."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if _values(config, "attn_logit_softcapping") or (kind is not None and not getattr(kind, "_supports_sdpa", True)):
        return "eager"
    # a model that compares names itself, instead of looking its attention up by name, would treat UNMASKED as eager
    looks_up = kind is not None and hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS")
    if _window(config, settings) or _alibi(config, kind) or not looks_up:
        return "sdpa"
    transformers.AttentionInterface.register(UNMASKED, sdpa_attention_forward)  # no mask goes by that name
    return UNMASKED


def _alibi(config: Any, kind: type | None) -> bool:
    """Whether the model adds biases that it computes from a mask of tokens; Bloom, which always does, has no such word in its config."""
    return bool(getattr(config, "alibi", kind is not None and hasattr(sys.modules[kind.__module__], "build_alibi_tensor")))


def _window(config: Any, settings: Mapping[str, Any]) -> int | None:
    """The window of sliding attention in tokens, where it is shorter than the sequence."""
    return next((window for window in _values(config, "sliding_window") if _seq(config, settings) > window), None)


def _seq(config: Any, settings: Mapping[str, Any]) -> int:
    limits = _values(config, "max_position_embeddings", "n_positions", "max_target_positions")
    least = min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=16)
    return int(settings.get("seq", min(16, least)))


def cache_name(module: torch.nn.Module) -> str | None:
    """What a model of transformers calls its cache: `cache` from 5.24 on, before `past_key_values`. None where it takes none."""
    forwards = [vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind)]
    names = {name for forward in forwards for name in inspect.signature(forward).parameters}
    return next((name for name in ("cache", "past_key_values") if name in names), None)


def _example_inputs(module: Any, config: Any, settings: Mapping[str, Any], empty_cache: Callable | None, loss: bool) -> dict[str, Any]:
    """Meta tensors for every input that the model's forward needs, labels among them when it returns a loss.

    With labels the module returns the loss alone, without them the first output alone, so that a plan does not pay for outputs that
    are not read.
    """
    batch, seq = int(settings.get("batch", 8)), _seq(config, settings)
    parameters = inspect.signature(type(module).forward).parameters

    def ids(*shape: int) -> Any:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    def reals(*shape: int) -> Any:
        return torch.empty(shape, dtype=module.dtype, device="meta")

    if (cache := settings.get("cache")) is not None:
        if loss or (name := cache_name(module)) is None:
            raise ValueError(f"cache={cache} is for a step that generates text with {type(module).__name__}; leave it out")
        assert empty_cache is not None, "the setting `cache` needs what makes one"
        past = empty_cache(module, str(cache), batch, seq)
        _returns_one(module, parameters, loss=False)
        return {"input_ids": ids(batch, 1), name: past}
    inputs: dict[str, Any] = {}
    attends = any(_values(config, "num_attention_heads", "n_head"))
    is_causal = attends and any(part in type(module).__name__ for part in ("CausalLM", "LMHead"))
    if "pixel_values" in parameters:
        vision = getattr(config, "vision_config", config)
        size = settings.get("image_size") or getattr(vision, "image_size", None)
        if size is None:
            raise ValueError(f"{type(config).__name__} tells no image_size; give one, for example --set image_size=224")
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        frames = (vision.num_frames,) if hasattr(vision, "num_frames") else ()  # a model of videos
        inputs["pixel_values"] = reals(batch, *frames, getattr(vision, "num_channels", 3), height, width)
    if "input_features" in parameters:
        inputs["input_features"] = reals(batch, config.num_mel_bins, 2 * config.max_source_positions)
    elif "input_ids" in parameters:
        inputs["input_ids"] = ids(batch, seq)
    if "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = ids(batch, seq)
    elif is_causal and config._attn_implementation != UNMASKED and "attention_mask" in parameters and not _alibi(config, type(module)):
        inputs["attention_mask"] = _masks(module, config, settings)
    _check_needed(module, parameters, inputs)
    if loss:
        inputs |= _labels(module, parameters, inputs, ids)
    _returns_one(module, parameters, loss=loss)
    return inputs


def _check_needed(module: Any, parameters: Any, inputs: Mapping[str, Any]) -> None:
    """ValueError with the names of inputs that the model needs and whose sizes are not known here."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [name for name, p in parameters.items() if name != "self" and p.default is p.empty and p.kind not in variadic]
    if not inputs and module.main_input_name in parameters:
        needed.append(module.main_input_name)
    if missing := [name for name in dict.fromkeys(needed) if name not in inputs]:
        raise ValueError(f"{type(module).__name__} needs {' and '.join(missing)}, and {OTHER_INPUTS}")


def _masks(module: Any, config: Any, settings: Mapping[str, Any]) -> Any:
    """The causal mask with its values: [1, 1, seq, seq]. Where there are two kinds of layers, a mask for each kind."""
    seq, window = _seq(config, settings), _window(config, settings)
    seen = torch.ones(seq, seq, dtype=torch.bool).tril()
    near = seen.triu(1 - window) if window else seen

    def mask(allowed: Any) -> Any:
        allowed = allowed[None, None]
        if config._attn_implementation == "sdpa":
            return allowed
        return torch.zeros(allowed.shape, dtype=module.dtype).masked_fill(~allowed, -1e9)

    kinds = set(getattr(config, "layer_types", None) or ())
    return {kind: mask(near if "sliding" in kind else seen) for kind in sorted(kinds)} if len(kinds) > 1 else mask(near)


def _labels(module: Any, parameters: Any, inputs: Mapping[str, Any], ids: Any) -> dict[str, Any]:
    name = type(module).__name__
    if "return_loss" in parameters:
        return {}
    if "labels" not in parameters:
        raise ValueError(f"{name} computes no loss (its forward takes no labels); name a class with a head under architectures")
    first = next(iter(inputs.values()))
    if any(part in name for part in PER_EXAMPLE) and "Token" not in name:
        return {"labels": ids(first.shape[0])}
    text = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    if text is not None:
        return {"labels": ids(*text.shape)}
    if "SemanticSegmentation" in name:
        return {"labels": ids(first.shape[0], *first.shape[-2:])}
    raise ValueError(f"{name} needs labels of its own kind, and {OTHER_INPUTS}")


def _returns_one(module: Any, parameters: Any, *, loss: bool) -> None:
    """Makes the module return one tensor: its class becomes a subclass of the same name whose forward picks it."""
    original = type(module)
    asked = {"return_dict": True} | ({"return_loss": True} if loss and "return_loss" in parameters else {})

    def forward(self: Any, **inputs: Any) -> Any:
        outputs = original.forward(self, **inputs, **asked)
        if loss and outputs.loss is None:
            raise ValueError(f"{original.__name__} returns no loss for the inputs {', '.join(inputs)}: {OTHER_INPUTS}")
        return outputs.loss if loss else outputs.to_tuple()[0]

    module.__class__ = type(original.__name__, (original,), {"forward": forward, "__module__": original.__module__})
