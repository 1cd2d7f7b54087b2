"""Plans beside other plans, or beside published figures: each study makes both for some cases, compares them and checks its limits.

    python benchmarks/study.py NAME [DATA] [--only CASE ...] [--json] [options of the study]
    python benchmarks/study.py NAME --help
    python benchmarks/study.py all [DATA]

NAME is a key of STUDIES. DATA is the folder of the models' files (default: models/), for `simulate` that of the published figures. --only
keeps the cases whose names hold one of these words. Figures are in seconds, GB and percent.
The exit code is 1 where a case misses what its study says.
"""

# ruff: noqa: E402  (its own folder has to leave sys.path first)
import argparse
import importlib
import json
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry).resolve() != ROOT / "benchmarks")]

from benchmarks.own_process import in_own_process
from benchmarks.studies import Study

STUDIES = {  # name: the module of benchmarks/studies that has it, under that name in capitals
    **dict.fromkeys(("limited", "frontier", "recompute"), "limits"), "memory": "peaks",
    **dict.fromkeys(("pipeline", "dlrm", "programs"), "searches"), "experts": "experts", "long_context": "long_context",
    **dict.fromkeys(("serving", "latent", "launcher_points", "large_models", "ranks", "degrees"), "launches"), "simulate": "simulated",
    **dict.fromkeys(("planning_time", "peer_problems"), "planning_time"), "redistribution": "redistribution", "tables": "tables",
    **dict.fromkeys(("commands", "startup", "checks"), "commands"), "dynamic": "dynamic",
    "warm_starts": "warm_starts", "protocol": "protocol",
}  # fmt: skip
PERCENT = ("gap", "error", "gain", "loss", "faster", "faster_simulated")
WIDTHS = {"case": 40, "plan": 20}  # at least, of a column


def study_called(name: str) -> Study:
    return getattr(importlib.import_module(f"benchmarks.studies.{STUDIES[name]}"), name.upper())


def asked(study: Study, words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=study.measure.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=ROOT / study.data)
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose names hold one of these")
    parser.add_argument("--json", action="store_true", help="one object instead of the table")
    parser.add_argument("--order", type=json.loads, help=argparse.SUPPRESS)
    for word, options in study.options.items():
        parser.add_argument(word, **options)
    return parser.parse_args(words)


def run(name: str, words: list[str]) -> dict:
    """The rows of a study with its totals; they are printed as they come."""
    study = study_called(name)
    given = asked(study, words)
    rows, before = [], []
    for case, what in study.cases(given).items():
        if not any(part in case for part in given.only):
            continue
        try:
            found = in_own_process(__file__, case, (name, *words)) if study.alone else study.measure(what, given)
        except subprocess.CalledProcessError as error:  # a case that ends without an answer is a row that missed
            print(f"{case}: crashed with exit code {error.returncode}", file=sys.stderr)
            rows.append({"case": case, "status": "crashed", "ok": False})
            continue
        for row in found if isinstance(found, list) else [found]:
            rows.append({"case": case, **study.judged(row, what, given)})
            shown = lines(rows[-1])
            if not given.json:
                print("\n".join(shown[1:] if shown[0].split() == before else shown), flush=True)
            before = shown[0].split()
    if not rows:
        print(f"{name}: there is no case in {given.data} with {' or '.join(given.only) or 'any name'}", file=sys.stderr)
        return {"rows": [], "ok": False}
    totals = study.totals(rows)
    result = {"rows": rows, **totals, "ok": totals.get("ok", all(row.get("ok", True) for row in rows))}
    if given.json:
        print(json.dumps(result))
    else:
        notes = [note for part, note in study.notes.items() if any(part in row["case"] for row in rows)]
        print(*filter(None, [textwrap.fill(in_words(totals), 140), *notes]), sep="\n")
    return result


# -- the table -------------------------------------------------------------------------------------------------------------------------


def lines(row: dict) -> list[str]:
    """The figures of the case and below them a table of its plans; without plans, titles and figures. Lists and dicts are in the JSON."""
    verdict = {True: "ok", False: "MISSED"}.get(row.get("ok"), "")
    common = plain({key: value for key, value in row.items() if key != "ok"})
    if "plans" not in row:
        titles, figures = table([common])
        return [titles, f"{figures}  {verdict}".rstrip()]
    case = common.pop("case")
    return [
        f"{case}: {in_words(common)}  {verdict}".rstrip(" :"),
        *table([plain({"plan": name, **plan}) for name, plan in row["plans"].items()]),
    ]


def plain(figures: dict) -> dict:
    return {key: value for key, value in figures.items() if value is None or isinstance(value, (str, bool, int, float))}


def table(rows: list[dict]) -> list[str]:
    """Titles, and a line per row; a column of text is aligned to the left."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[title(key), *(text(key, row[key]) if key in row else "" for row in rows)] for key in keys]
    left = [any(isinstance(row.get(key), str) for row in rows) for key in keys]
    widths = [max(WIDTHS.get(key, 8), *map(len, column)) for key, column in zip(keys, cells)]
    return ["  " + "  ".join(f"{c:{'<' if to_left else '>'}{w}}" for c, to_left, w in zip(row, left, widths)) for row in zip(*cells)]


def in_words(figures: dict) -> str:
    return ", ".join(f"{title(key)} {text(key, value)}" for key, value in figures.items())


def title(key: str) -> str:
    return key.replace("_bytes", "_GB").replace("seconds", "s").replace("_", " ")


def text(key: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, (str, bool)):
        return str(value)
    if key.endswith("bytes"):
        return f"{value / 1e9:.3f}"
    if key.rpartition("_")[2] in PERCENT or key in PERCENT:
        return f"{value:.2%}" if abs(value) >= 1e-4 or value == 0 else f"{value:.1e}"
    return f"{value:.6g}"


def main() -> int:
    name, words = (sys.argv[1:2] or ["--help"])[0], sys.argv[2:]
    if name not in (*STUDIES, "all"):
        print(__doc__, f"NAME is one of {', '.join(STUDIES)}.", sep="\n")
        return int(name not in ("-h", "--help"))
    if "--order" in words:
        study = study_called(name)
        given = asked(study, words)
        print(json.dumps(study.measure(study.cases(given)[given.order], given)))
        return 0
    good = [run(one, words)["ok"] for one in (STUDIES if name == "all" else [name])]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
