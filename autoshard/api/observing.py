"""What a user's own run needed, and the next answers corrected by it: files of `fits --observed` and `--evidence`."""

from pathlib import Path

from autoshard.launch import Evidence, Observed
from autoshard.options import SIZE
from autoshard.reading import content_of, parsed, text_of
from autoshard.solution import unpickled

MOST_OPCODES = 100_000_000  # of a snapshot's pickle: one of 3 MB has 900,000


def observed(written: str) -> Observed:
    """Of a size that torch.cuda.max_memory_reserved told (71.2GB), a memory snapshot (.pickle, .pkl or .json), or a log.

    ValueError where it is none of these.
    """
    path = Path(written)
    if path.suffix in (".pickle", ".pkl"):
        return Observed.of_snapshot(unpickled(content_of(path, "snapshot"), path, "snapshot", {}, MOST_OPCODES), written)
    if path.suffix == ".json":
        return Observed.of_snapshot(parsed(content_of(path, "snapshot"), path, "snapshot"), written)
    if path.exists():
        return Observed.of_log(text_of(path, "log"), written)
    try:
        return Observed("reserved", SIZE.read("--observed", written), f"--observed {written}")
    except ValueError as error:
        raise ValueError(f"{error}; or a memory snapshot (.pickle or .json), or a run's log: there is no file {written}") from None


def read_evidence(path: str | None, new: bool = False) -> Evidence:
    """Of a file, none where there is no path. new: it may not be there yet."""
    if path is None or (new and not Path(path).exists()):
        return Evidence({})
    return Evidence(parsed(content_of(path, "evidence"), path, "evidence"), path)
