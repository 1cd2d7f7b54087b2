"""Options of the verbs about launchers as values: the model's sizes, the site, and a builder of the model for a batch."""

from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from autoshard import report
from autoshard.cli.loading import load_api
from autoshard.cli.model import load_model
from autoshard.cli.model_source import config_folder
from autoshard.cli.output import Output
from autoshard.cli.table import CONFIGURATIONS
from autoshard.cli.verbs import Asked
from autoshard.mesh import DEVICES, of_one_node
from autoshard.reading import content_of, data_of, text_of
from autoshard.writing import write_atomically


def load_launchers() -> ModuleType:
    from autoshard import launch  # here: numpy takes a moment to import

    return launch


def launcher_of(path: str, launcher: str | None) -> str:
    """The launcher that a file is a configuration of: `launcher` where it is given. ValueError where the file's ending doesn't say it."""
    if (known := launcher or CONFIGURATIONS.get(Path(path).suffix)) is None:
        names = "accelerate, nanotron, deepspeed, automodel, megatron or torchtitan"
        raise ValueError(f"{path} may be of several launchers; add --launcher {names}")
    return known


def checked_launch(output: Output, asked: Asked, path: str, **options: Any) -> tuple[Any, str, Any]:
    """What `check_launch` says of a configuration, its text, and what the command line adds to it."""
    launcher = launcher_of(path, asked.launcher)
    described, text, added = read_launch(path, asked, launcher)
    output.progress("pricing launches", 0.2)
    return load_launchers().check_launch(described, launcher, site_of(asked, launcher), **options), text, added


def as_in(path: str, text: str) -> str:
    """The text with the line ends and the byte order mark of a launcher's configuration."""
    content = content_of(path, "launch")
    ends = "\r\n" if 2 * content.count(b"\r\n") > content.count(b"\n") else "\n"
    return "\ufeff" * content.startswith(BOM_UTF8) + text.replace("\n", ends)


def write_page(output: Output, path: str | None, record: Mapping[str, Any], title: str, **more: Any) -> None:
    """Write the page of a launch, where a path is given."""
    output.write(path, lambda out: write_atomically(report.page_of_launch.launch_page(record, title, **more), out))


def site_of(asked: Asked, launcher: str) -> Any:
    """The site; a node's link to the others is shared by its devices."""
    memory = asked.memory or DEVICES[asked.device].memory
    is_new = getattr(asked, "observed", None) is not None  # then the file may be written
    bias = 1.0 if asked.evidence is None else load_api().read_evidence(asked.evidence, is_new).bias(launcher)
    inside, between = asked.intra_node_bandwidth, asked.inter_node_bandwidth / asked.per_node
    return load_launchers().Site(asked.device, asked.per_node, memory, between, inside, bias)


def sizes_of(model: str, settings: Mapping[str, Any]) -> Any:
    """The sizes of MODEL: of hf:DIR from its config alone, else from the module's shapes on the meta device."""
    if model.startswith("hf:"):
        room, file = load_launchers(), config_folder(model.removeprefix("hf:")) / "config.json"
        config = data_of(file, "config")
        layers = settings.get("layers")
        of_layers = {} if layers is None else {"num_hidden_layers": layers, "n_layer": layers}
        of_text = {"text_config": {**text, **of_layers}} if isinstance(text := config.get("text_config"), Mapping) else {}
        try:
            return room.sizes_of_config({**config, **of_layers, **of_text}, str(file))
        except room.MissingSize as error:
            from autoshard.capture import config_with_defaults  # here: torch and transformers take seconds to import

            try:
                return room.sizes_of_config(config_with_defaults(file.parent, settings), str(file))
            except ValueError:
                raise error from None
    module, _ = load_model(model, settings, training=True)
    return load_launchers().sizes_of_module(module)


def read_launch(path: str, asked: Asked, launcher: str) -> tuple[Any, str, Any]:
    """What a launcher's configuration describes, with what the command line adds to it; its text; and what was added."""
    room, text = load_launchers(), text_of(path, "launch")
    known = {name: getattr(asked, name) for name in ("devices", "per_node", "seq", "microbatch", "global_batch")}
    sizes = None if asked.model is None else sizes_of(asked.model, asked.settings)
    added = room.Overrides(**known, sizes=sizes)
    described = room.read_configuration(launcher, text, path, added)
    of_one_node(described.launch.devices, asked.per_node, "--per-node")
    return described, text, added


def model_builder(model: str, settings: Mapping[str, Any], seq: int) -> Callable[[int], tuple[Any, Any]]:
    """batch -> (module, example inputs) of MODEL with that batch and sequence, in 16 bits where it is an hf: model."""
    dtype = {"dtype": "bfloat16"} if model.startswith("hf:") else {}
    return lambda batch: load_model(model, {**dtype, **settings, "batch": batch, "seq": seq}, training=True)
