"""Every verb on every format that it reads, with files of one fault each: an answer or one sentence, never a traceback."""

import json
import pickle
import random
import signal
import zlib
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import autoshard
from autoshard.cli import main
from autoshard.cost import CachingAllocator, curves
from autoshard.reading import FORMATS
from autoshard.runtime.checkpoint_files import Writer, contents, why_broken
from tests.helpers_mutations import bad_bytes, bad_csv, bad_json
from tests.test_schemas import MADE

DATA = Path(__file__).parent / "data"
MODEL = f"{Path(__file__).parent.parent}/models/mlp.py:tiny"
PATIENCE = 30.0  # seconds of the processor for one file; the slowest verb takes 2 on a good one


def bad_pickle(good: str, rng: random.Random) -> bytes:
    """A plan of one fault as a pickle, or a pickle of which bytes were changed."""
    text = bad_json(good, rng)
    try:
        content = pickle.dumps(json.loads(text), protocol=rng.randrange(6))
        return bad_bytes(content, rng) if rng.random() < 0.5 else content
    except (ValueError, RecursionError):
        return bad_bytes(pickle.dumps(json.loads(good)), rng)


TABLES = "name,rows,columns,pooling,features,optimizer\nuser,1000,16,2.5,1,adam\nitem,200000,64,1,2,sgd\n"
TABLES_JSON = {"tables": [
    {"name": "user", "rows": 1000, "columns": 16},
    {"name": "item", "options": [{"sharding": "table_wise", "seconds": 1e-3, "hbm_bytes": 1e6, "host_bytes": [0.0], "scope": "device"}]},
]}  # fmt: skip
ROUTES = {"problems": [
    {"id": "a", "shape": [8, 4], "mesh": [4, 2], "itemsize": 4, "src": [[0], []], "src_bs": [2, -1], "dst": [[], [1]], "dst_bs": [-1, 2]},
    {"problem": {"shape": [8, 4], "mesh": [2], "src": [[0], []], "dst": [[], []], "src_partial": [], "mem": None}},
]}  # fmt: skip

FITS = f"fits {DATA}/launchers/torchtitan/llama3_8b.toml --devices 8"

# a name of a good file: its ending, what it is, and how a fault is planted
GOOD = {
    "plan": (".json", lambda: written("plan.2"), bad_json),
    "plan as a pickle": (".pkl", lambda: written("plan.2"), bad_pickle),
    "programs": (".json", lambda: written("plan.2 of programs"), bad_json),
    "pipeline": (".json", lambda: written("plan.2 of stages"), bad_json),
    "frontier": (".json", lambda: written("frontier.1"), bad_json),
    "curves": (".json", lambda: written("curves.1"), bad_json),
    "cluster": (".json", lambda: written("cluster.1"), bad_json),
    "problem": (".json", lambda: (DATA / "iopddl" / "example.json").read_text(), bad_json),
    "tables.csv": (".csv", lambda: TABLES, bad_csv),
    "tables": (".json", lambda: json.dumps(TABLES_JSON), bad_json),
    "redistribution": (".json", lambda: json.dumps(ROUTES), bad_json),
    "measured.csv": (".csv", lambda: head("measured.csv", 9), bad_csv),
    "nccl-tests": (".txt", lambda: head("nccl_tests_all_reduce.txt", 40), lambda good, rng: bad_words(good, rng)),
    "PARAM": (".txt", lambda: head("all_to_all_4.txt", 20), lambda good, rng: bad_words(good, rng)),
    "nnscaler": (".json", lambda: head("intra_2.json", 1000), bad_json),
    "torchtitan.toml": (".toml", lambda: launch("torchtitan/llama3_8b.toml"), lambda good, rng: bad_words(good, rng)),
    "torchtitan.json": (".json", lambda: launch("torchtitan/deepseek_v3_671b.json"), bad_json),
    "megatron.sh": (".sh", lambda: launch("megatron/llama3_8b_fp8.sh"), lambda good, rng: bad_words(good, rng)),
    "accelerate.yaml": (".yaml", lambda: launch("accelerate/fsdp2.yaml"), lambda good, rng: bad_words(good, rng)),
    "nanotron.yaml": (".yaml", lambda: launch("nanotron/tiny_llama.yaml"), lambda good, rng: bad_words(good, rng)),
    "checkpoint": (".json", lambda: saved("manifest.json").decode(), bad_json),
    "index": (".metadata", lambda: saved(".metadata").decode("latin-1"), lambda good, rng: bad_bytes(good.encode("latin-1"), rng)),
    "certificate": (".json", lambda: certificate(), bad_json),
    "snapshot": (".json", lambda: snapshot(), bad_json),
    "log": (".log", lambda: "step: 10  loss: 7.1  memory: 70.12GiB(88.5%)  tps: 5,000\n", lambda good, rng: bad_words(good, rng)),
    "evidence": (".json", lambda: evidence(), bad_json),
    "config": (".json", lambda: (DATA / "hf" / "gpt2" / "config.json").read_text(), bad_json),
}  # fmt: skip

ENCODINGS = {"index": "latin-1"}  # of what is no text
KINDS = ("sharding_map", "json", "parallelize_module", "tp_plan", "fully_shard", "distribute_module")
# what reads it: (format, words, FILE in the place of the bad file and PLAN in that of a good plan)
QUICK = {
    "show": ("plan", "show FILE"),
    "show a pickle": ("plan as a pickle", "show FILE"),
    "diff": ("plan", "show FILE PLAN"),
    "page": ("plan", "show FILE --no-model --html OUT"),
    "explain": ("plan", "explain FILE"),
    "export": ("plan", "export FILE --format json"),
    "page with a frontier": ("frontier", "show PLAN --no-model --html OUT --frontier FILE"),
    "solve": ("problem", "solve FILE --time-limit 2 --out OUT"),
    "tables of CSV": ("tables.csv", "tables FILE --devices 2"),
    "tables": ("tables", "tables FILE --devices 2"),
    "redistribute": ("redistribution", "redistribute FILE"),
    "fit CSV": ("measured.csv", "calibrate fit FILE"),
    "fit nccl-tests": ("nccl-tests", "calibrate fit FILE --devices 8"),
    "fit PARAM": ("PARAM", "calibrate fit FILE --devices 4 --collective all_to_all"),
    "fit nnscaler": ("nnscaler", "calibrate fit FILE --devices 2"),
    "check torchtitan": ("torchtitan.toml", "check FILE --launcher torchtitan --devices 64"),
    "check megatron": ("megatron.sh", "check FILE --launcher megatron --devices 64"),
    "check accelerate": ("accelerate.yaml", f"check FILE hf:{DATA}/hf/llama --launcher accelerate --seq 64 --microbatch 1"),
    "check nanotron": ("nanotron.yaml", "check FILE --launcher nanotron"),
    "programs": ("programs", "show FILE"),
    "certify": ("certificate", "certify FILE"),
    "fits of a snapshot": ("snapshot", f"{FITS} --observed FILE"),
    "fits of a log": ("log", f"{FITS} --observed FILE"),
    "fits with evidence": ("evidence", f"{FITS} --evidence FILE"),
    "load curves": ("curves", ""),
    "load a cluster": ("cluster", ""),
    "load a pipeline": ("pipeline", ""),
    "load a checkpoint": ("checkpoint", ""),
    "load a checkpoint's index": ("index", ""),
}
SLOW = {
    **{f"export {kind}": ("plan", f"export FILE --format {kind}") for kind in KINDS},
    "diff to": ("plan", "show PLAN FILE"),
    "show as JSON": ("plan", "show FILE --json"),
    "export a pickle": ("plan as a pickle", "export FILE --format sharding_map --out OUT"),
}
WITH_MODEL = {
    "check torchtitan JSON": ("torchtitan.json", "check FILE --launcher torchtitan --devices 1024"),
    "verify": ("plan", f"verify FILE {MODEL}"),
    "check": ("plan", f"check FILE {MODEL}"),
    "simulate": ("plan", f"simulate FILE {MODEL}"),
    "page of a model": ("plan", f"show FILE --model {MODEL} --html OUT"),
    "explain --robust": ("plan", f"explain FILE --robust --model {MODEL}"),
    "plan --keep": ("plan", f"plan {MODEL} --keep FILE"),
    "plan --cluster": ("cluster", f"plan {MODEL} --cluster FILE"),
    "frontier --cluster": ("cluster", f"frontier {MODEL} --cluster FILE --points 2"),
    "check --cluster": ("cluster", f"check PLAN {MODEL} --cluster FILE"),
    "simulate --cluster": ("cluster", f"simulate PLAN {MODEL} --cluster FILE"),
    "plan hf": ("config", "plan hf:FOLDER --mesh 2 --set layers=1 --set seq=8 --set batch=2"),
}
VERBS = {**QUICK, **SLOW, **WITH_MODEL}
NUM_QUICK, NUM_SLOW, NUM_WITH_MODEL = 3, 110, 20


def written(kind: str, known: dict = {}) -> str:  # noqa: B006 (made once)
    if kind not in known:
        path = Path(_folder()) / f"{kind}.json"
        MADE[kind](path)
        data = json.loads(path.read_text())
        if kind == "curves.1":
            data["curves"] = data["curves"][:3]
        known[kind] = json.dumps(data)
    return known[kind]


@cache
def certificate() -> str:
    from models import mlp

    module, inputs = mlp.tiny()
    plan = autoshard.plan(module, inputs, autoshard.Mesh.from_bandwidths((2,)), objective="serial", baselines=False)
    return json.dumps(autoshard.certificate_of(module, inputs, plan))


def snapshot() -> str:
    allocator = CachingAllocator()
    allocator.run([("weights", 2**35), ("logits", 2**33), ("logits", 0), ("gradient", 2**33)])
    return json.dumps(allocator.snapshot())


@cache
def evidence() -> str:
    path = Path(_folder()) / "evidence.json"
    main([*FITS.split(), "--observed", "71.2GB", "--evidence", str(path), "--quiet"])
    return path.read_text()


def saved(name: str) -> bytes:
    """A file of a small checkpoint."""
    folder = Path(_folder()) / "saved"
    if not folder.exists():
        state = {"model": {"w": torch.zeros(4, 3), "b": torch.zeros((), dtype=torch.bfloat16)}, "extra": ({"step": 7},)}
        dcp.save(state, storage_writer=Writer(folder, "0123"), no_dist=True)
    return (folder / name).read_bytes()


def load_checkpoint(path: str) -> None:
    """What load_checkpoint reads of a folder before it loads anything."""
    folder = Path(path).with_suffix(".folder")
    folder.mkdir(exist_ok=True)
    for name in ("__0_0.distcp", ".metadata", "manifest.json"):
        (folder / name).write_bytes(saved(name))
    (folder / (".metadata" if path.endswith(".metadata") else "manifest.json")).write_bytes(Path(path).read_bytes())
    if (why := why_broken(folder, contents(folder), 0, 1)) is not None:
        raise ValueError(why)


@cache
def _folder() -> str:
    import tempfile

    return tempfile.mkdtemp(prefix="autoshard-mutations-")


def launch(name: str) -> str:
    return (DATA / "launchers" / name).read_text()


def head(name: str, lines: int) -> str:
    return "\n".join((DATA / "collectives" / name).read_text().splitlines()[:lines]) + "\n"


def bad_words(good: str, rng: random.Random) -> bytes:
    """A log of which one word was changed."""
    if rng.random() < 0.3:
        return bad_bytes(good.encode(), rng)
    words = good.split(" ")
    k = rng.randrange(len(words))
    bad = ["", "x", "-1", "0", "nan", "inf", "1e999", "1e308", "9" * 5000, "\x00", "#", "COMMS-RES", "\n", "1-2-x", "a" * 10**5]
    words[k] = rng.choice(bad)
    return " ".join(words).encode()


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "plan.json"
    path.write_text(written("plan.2"))
    return path


def run(verb: str, content: bytes, folder: Path, plan_path: Path, capsys) -> tuple[int, str]:
    """The exit code and what was said, of a verb on a file of this content."""
    form, words = VERBS[verb]
    path = folder / ("config.json" if form == "config" else f"all_reduce_8{GOOD[form][0]}")
    path.write_bytes(content)
    places = {"FILE": path, "PLAN": plan_path, "OUT": folder / "out.html", "hf:FOLDER": f"hf:{folder}"}
    capsys.readouterr()
    if words:
        code = main([str(places.get(word, word)) for word in words.split()])
    else:
        code = loaded(verb, path)
    return code, capsys.readouterr().err


LOADERS = {
    "load curves": curves.load, "load a cluster": curves.load_cluster, "load a pipeline": autoshard.load,
    "load a checkpoint": load_checkpoint, "load a checkpoint's index": load_checkpoint,
}  # fmt: skip


def loaded(verb: str, path: Path) -> int:
    """What no verb reads, or only one that needs a model."""
    import sys

    try:
        LOADERS[verb](str(path))
    except ValueError as error:
        print(f"autoshard: {error}", file=sys.stderr)
        return 2
    return 0


class Overtime(BaseException):
    """No verb catches it."""


def give_up(*_) -> None:
    raise Overtime(f"more than {PATIENCE:g} s of the processor")


def faults(verb: str, num: int, folder: Path, plan_path: Path, capsys) -> list[str]:
    """Of `num` bad files those that a verb did not take well, with their seeds."""
    form = VERBS[verb][0]
    _, good, plant = GOOD[form]
    rng_of = [random.Random(zlib.crc32(f"{verb}:{k}".encode())) for k in range(num)]
    found, refused = [], 0
    signal.signal(signal.SIGPROF, give_up)
    for k, rng in enumerate(rng_of):
        content = plant(good(), rng)
        signal.setitimer(signal.ITIMER_PROF, PATIENCE)
        try:
            code, said = run(verb, content, folder, plan_path, capsys)
        except (Exception, SystemExit, Overtime) as error:
            found.append(f"{k}: {type(error).__name__}: {str(error)[:200]}")
            continue
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        refused += code == 2
        sentence = said.startswith("autoshard: ") and said.count("\n") == 1 and len(said) < 2100 and "Traceback" not in said
        if code not in (0, 1, 2) or (code == 2 and not sentence):
            found.append(f"{k}: exit {code}: {said[:200]!r}")

    return found


@pytest.mark.parametrize("verb", [*QUICK, *(pytest.param(verb, marks=pytest.mark.slow) for verb in VERBS if verb not in QUICK)])
def test_the_good_file_is_read(verb, tmp_path, plan_path, capsys):
    text = GOOD[VERBS[verb][0]][1]()
    content = pickle.dumps(json.loads(text)) if "pickle" in VERBS[verb][0] else text.encode(ENCODINGS.get(VERBS[verb][0], "utf-8"))
    code, said = run(verb, content, tmp_path, plan_path, capsys)
    assert code in (0, 1) and (code == 0 or "autoshard:" in said or "--launcher" in VERBS[verb][1])  # a launch that doesn't fit is no error


@pytest.mark.parametrize("verb", QUICK)
def test_a_file_with_a_fault_is_answered_or_refused_in_one_sentence(verb, tmp_path, plan_path, capsys):
    assert faults(verb, NUM_QUICK, tmp_path, plan_path, capsys) == []


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_many_files_with_a_fault_are_answered_or_refused_in_one_sentence(verb, tmp_path, plan_path, capsys):
    num = NUM_WITH_MODEL if verb in WITH_MODEL else NUM_SLOW
    assert faults(verb, num, tmp_path, plan_path, capsys) == []


def test_the_suites_have_the_size_that_they_claim_and_every_format_is_met():
    assert len(QUICK) * NUM_QUICK <= 150 and (len(QUICK) + len(SLOW)) * NUM_SLOW + len(WITH_MODEL) * NUM_WITH_MODEL >= 3000
    kinds = dict.fromkeys(("measured.csv", "nccl-tests", "PARAM", "nnscaler"), "measurements")
    kinds |= {"tables.csv": "tables", "plan as a pickle": "plan", "programs": "plan", "pipeline": "plan"}
    kinds |= dict.fromkeys(("torchtitan.toml", "torchtitan.json", "megatron.sh", "accelerate.yaml", "nanotron.yaml"), "launch")
    outside = {"layouts", "model", "operators"}  # part of a plan; code; a file of torch
    assert {kinds.get(form, form) for form, _ in VERBS.values()} == set(FORMATS) - outside


def test_a_traceback_is_seen(tmp_path, plan_path, capsys, monkeypatch):
    monkeypatch.setattr("autoshard.cli.verbs_without_model.read_contest", lambda path: {}["missing"])
    found = faults("solve", 3, tmp_path, plan_path, capsys)
    assert len(found) == 3 and "KeyError" in found[0]
