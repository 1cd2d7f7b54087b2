"""Writes docs/api.md and docs/api/*.md: every public name with its signature, its fields with their units, and its docstring.

    python docs/api.py

The pages are committed; tests/test_api_pages.py fails where they are not what this makes now. A name is public where AREAS lists it, and
what `autoshard.__all__`, README, docs and examples import must be listed. The pages depend on the source alone: no addresses, no paths.
"""

import ast
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

import autoshard.api  # noqa: E402
from autoshard.options import Options, having  # noqa: E402
from autoshard.writing import write_atomically  # noqa: E402

WIDTH = 120  # of a signature's line
COMMAND = "python docs/api.py"

AREAS = {  # page: (title, what it is for, {where the names are imported from: names})
    "plan": ("Planning", "A model and a mesh in, a plan out; and questions about the plan.", {
        "autoshard": "plan Infeasible NoAnswer Solution load verify check explain kept_layouts mesh_shapes "
                     "frontier Plan Program autosharding_pass Precision serve_plan problem_of write_problem certificate_of",
        "autoshard.api": "Options PassOptions Frontier FrontierPoint plan_meshes load_one edited_layouts html_report "
                         "robustness PlanCache from_text",
        "autoshard.certify": "certify",
        "autoshard.api.annotating": "NodeSharding Operand",
        "autoshard.explain": "Redistribution CandidateCost",
        "autoshard.planning.options": "Demand",
        "autoshard.explain.explanations": "Explanation Alternative",
        "autoshard.explain.staleness": "Checked",
        "autoshard.planning.mesh_shapes": "MeshPlan MeshPlans",
        "autoshard.solution": "ProgramsSolution Placed differences misfits changes",
        "autoshard.pytest_plugin": "autoshard_check",
    }),
    "mesh": ("Meshes and layouts", "A cluster as named axes of devices, and the layouts of tensors on it.", {
        "autoshard": "Mesh Axis Device",
        "autoshard.mesh": "LinkCurve parse_shape check_shape",
        "autoshard.layout": "parse text S P local_shape local_numel why_illegal is_legal all_layouts",
    }),
    "run": ("Running a plan", "On the processes of torch.distributed, or in the format of another launcher.", {
        "autoshard": "parallelize device_mesh save_checkpoint load_checkpoint RankLost export dry_run backend",
        "autoshard.api": "as_plain measure_this_cluster",
        "autoshard.runtime.programs": "ProgramsModule ProgramModule",
        "autoshard.lower.unsharded": "materialized",
        "autoshard.exports": "Export Left sharding_map apply_recipe",
    }),
    "launchers": ("Launchers", "Launches of torchtitan, Megatron-LM, accelerate and nanotron: read, checked, priced, ranked and written.", {
        "autoshard.api": "will_fit Fitting degrees Degrees check_launch CheckedLaunch observed read_evidence",
        "autoshard.launch": "Launch ModelSizes LaunchConfig Overrides Site read_configuration configuration_text why_illegal "
                            "sizes_of_config sizes_of_module",
        "autoshard.launch.ranking": "Ranking",
        "autoshard.launch.best_changes": "Change",
        "autoshard.cost": "CachingAllocator replayed",
    }),
    "rules": ("Rules and prices of operators", "Which layouts an operator may have, and what it takes.", {
        "autoshard": "register_rule Row register_price DefaultCosts",
    }),
    "solve": ("The numeric core", "A problem of choices and costs, its evaluation and its solvers. Nothing here imports torch.", {
        "autoshard": "Problem evaluate solve",
        "autoshard.problem": "Edge Usage NodeUsage EdgeUsage Evaluation usage_profile read_contest write_choice",
        "autoshard.solvers": "Answer Status Infeasibility Auto ILP DP Dual Exhaustive hull Hull HullPoint",
    }),
    "simulate": ("Simulator and pipelines", "What a step will take, and how to divide a model into stages.", {
        "autoshard": "Cluster",
        "autoshard.api": "simulate simulate_grid Parallel Simulation",
        "autoshard.options": "PipelineOptions",
        "autoshard.pipeline.submeshes": "Kind",
        "autoshard.solution.stage_records": "Pipeline PipelineStage",
        "autoshard.simulate.timeline": "Timeline",
        "autoshard.pipeline": "schedule_of Schedule Unit run ScheduleRun Span",
        "autoshard.report.timeline": "trace_of trace_of_run save_trace draw_run draw_timeline",
    }),
    "redistribute": ("Redistribution", "The cheapest route of a tensor from one layout to another, and carrying it out.", {
        "autoshard.relayout": "BlockProblem BlockLayout BlockRoute BlockStep read_problem read_problems Prices MeshPrices "
                              "astar naive from_placements to_placements",
        "autoshard.relayout.execute": "BlockGroups shard_blocks simulate",
    }),
    "tables": ("Embedding tables", "Sharding and devices of embedding tables, by the slowest device.", {
        "autoshard": "Table plan_tables plan_with_tables",
        "autoshard.tables": "Option TablePlan PlacedTable dp_proposals",
        "autoshard.tables.records": "DeviceLoad",
        "autoshard.api.with_tables": "Together WithTables",
        "autoshard.tables.torchrec": "TableProposer TablePartitioner parameter_constraints sharding_plan",
    }),
    "prices": ("Prices", "Measured seconds as curves, and meshes made of them.", {
        "autoshard.calibrate": "fit Errors held_out summary",
        "autoshard.cost.curves": "Curve Series save load load_cluster",
        "autoshard.calibrate.cluster": "mesh_of",
        "autoshard.calibrate.importers": "parse",
    }),
}  # fmt: skip


@dataclass(frozen=True)
class Definition:
    """Where a public name is defined, read and not imported: extras need not be installed, and Python's version changes nothing."""

    path: Path
    node: ast.ClassDef | ast.FunctionDef

    @property
    def docstring(self) -> str:
        """As it stands in the source; none of those that dataclass, NamedTuple or a base class would put there."""
        return ast.get_docstring(self.node) or ""


def public() -> Iterator[tuple[str, str, Definition]]:
    """(page, qualified name, definition) of every name in AREAS, in its order."""
    for page, (_, _, homes) in AREAS.items():
        for home, names in homes.items():
            yield from ((page, f"{home}.{name}", definition(f"{home}.{name}")) for name in names.split())


def definition(name: str) -> Definition:
    """Of a qualified name, through the modules that hand it on. ValueError where there is no class or function of that name."""
    home, _, short = name.rpartition(".")
    for door in (autoshard, autoshard.api):  # which load names when they are used
        if home == door.__name__ and short in door._HOMES:
            return definition(f"autoshard.{door._HOMES[short]}.{short}")
    path, tree = module_of(home)
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == short and not _is_overload(node):
            return Definition(path, node)
    package = home.split(".") if path.name == "__init__.py" else home.split(".")[:-1]
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == short and isinstance(node.value, ast.Attribute):
            return definition(".".join([*package, ast.unparse(node.value)]))  # apply_recipe = fully_shard.apply
    for node in tree.body:
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            if (alias.asname or alias.name) == short:
                base = package[: len(package) - node.level + 1] if node.level else []
                return definition(".".join([*base, *filter(None, (node.module or "").split(".")), alias.name]))
    raise ValueError(f"there is no class or function {name}; expected one that {path.name} defines or imports")


def _is_overload(node: ast.ClassDef | ast.FunctionDef) -> bool:
    return any(ast.unparse(one) == "overload" for one in node.decorator_list)


@cache
def module_of(home: str) -> tuple[Path, ast.Module]:
    """Its file and what is in it."""
    path = ROOT / home.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return path, ast.parse(path.read_text())


def pages() -> dict[str, str]:
    """Text by path below docs/."""
    bodies: dict[str, list[str]] = {page: [] for page in AREAS}
    rows: dict[str, list[str]] = {page: [] for page in AREAS}
    seen: list[tuple[str, str]] = []
    for page, name, found in public():
        bodies[page].append(entry(name, found))
        again = seen.count((page, anchor(name)))  # headings that differ in case alone: GitHub numbers them
        seen.append((page, anchor(name)))
        there = f"api/{page}.md#{anchor(name)}" + (f"-{again}" if again else "")
        rows[page].append(f"| [`{name}`]({there}) | {first_sentence(found.docstring)} |")
    made = {f"api/{page}.md": "\n".join([heading(page), *bodies[page]]) for page in AREAS}
    lines = ["# API reference", "", f"Made from the docstrings by `{COMMAND}`. Seconds, bytes and FLOP are plain numbers in SI units.", ""]
    for page, (title, purpose, _) in AREAS.items():
        lines += [f"## {title}", "", purpose, "", "| name | what it is |", "|---|---|", *rows[page], ""]
    return {"api.md": "\n".join(lines), **made}


def heading(page: str) -> str:
    title, purpose, _ = AREAS[page]
    return f"# {title}\n\n{purpose} [All names](../api.md)\n"


def entry(name: str, found: Definition) -> str:
    """A heading, and below it what `help` would say."""
    node, short = found.node, name.rpartition(".")[2]
    if isinstance(node, ast.ClassDef):
        parts = class_text(short, node, found.path.read_text().splitlines())
    else:
        parts = [signature(short, node), textwrap.indent(found.docstring, "    ")]
    text = "\n\n".join(part for part in parts if part)
    return f"## `{name}`\n\n```text\n{text}\n```\n"


def anchor(name: str) -> str:
    """What GitHub makes of a heading that is a name in code."""
    return name.replace(".", "").lower()


def first_sentence(text: str) -> str:
    """Of the first paragraph, as one cell of a table."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    end = next((i for i, c in enumerate(paragraph) if c in ".:;" and paragraph[i + 1 : i + 2] in ("", " ")), len(paragraph))
    return paragraph[:end].replace("|", "\\|")


# -- as it stands in the source ------------------------------------------------------------------------------------------------------


def signature(name: str, node: ast.FunctionDef, *, returns: bool = True) -> str:
    """As it is called, over several lines where one is too long."""
    end = f" -> {ast.unparse(node.returns)}" if returns and node.returns is not None else ""
    each = [one for one in one_by_one(node.args) if one not in ("self", "cls")]
    line = f"{name}({', '.join(each)}){end}"
    return line if len(line) <= WIDTH else "\n".join([f"{name}(", *(f"    {one}," for one in each), f"){end}"])


def one_by_one(arguments: ast.arguments) -> Iterator[str]:
    """Each argument as text, and the marks between them."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    for given, default in zip(plain, defaults, strict=True):
        yield with_default(given, default)
    if arguments.vararg is not None:
        yield "*" + ast.unparse(arguments.vararg)
    elif arguments.kwonlyargs:
        yield "*"
    for given, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield with_default(given, default)
    if arguments.kwarg is not None:
        yield "**" + ast.unparse(arguments.kwarg)


def with_default(given: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(given) + ("" if default is None else f" = {ast.unparse(default)}")


def class_text(name: str, node: ast.ClassDef, lines: list[str]) -> list[str]:
    """Its head, docstring, fields with the comments that say their units, and public members with theirs."""
    made = [one for one in node.body if isinstance(one, ast.FunctionDef) or is_fact(one)]
    init = next((one for one in made if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    head = f"class {name}({bases})" if bases else f"class {name}"
    if init is not None:
        head = signature(f"class {name}", init, returns=False)
    rows = [one for one in node.body if isinstance(one, (ast.AnnAssign, ast.Assign)) and ast.unparse(one)[0] != "_" and not is_fact(one)]
    fields = textwrap.dedent("\n".join(line for one in rows for line in field_lines(one, lines)))
    if bases == "Options":
        fields += f"\nof Options: {', '.join(having(Options, 'in_pass'))}"
    public = [one for one in made if not name_of(one).startswith("_")]
    members = [fact_text(one) if isinstance(one, ast.Assign) else member_text(name, one) for one in public]
    return [head, *(textwrap.indent(part, "    ") for part in (ast.get_docstring(node) or "", fields, *members))]


def is_fact(node: ast.stmt) -> bool:
    """`microbatches = Fact[int]("How many ...")`: what reads like a property."""
    call = node.value if isinstance(node, ast.Assign) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript) and ast.unparse(call.func.value) == "Fact"


def name_of(node: ast.FunctionDef | ast.Assign) -> str:
    return ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else node.name


def fact_text(node: ast.Assign) -> str:
    said = textwrap.fill(ast.literal_eval(node.value.args[0]), 140 - 8)
    return f".{name_of(node)}: {ast.unparse(node.value.func.slice)}" + textwrap.indent("\n" + said, "    ")


def field_lines(node: ast.AnnAssign | ast.Assign, lines: list[str]) -> list[str]:
    """As written; a declared option with its type, its default and the comment above it."""
    value = node.value
    if not (isinstance(node, ast.AnnAssign) and isinstance(value, ast.Call) and ast.unparse(value.func) == "declared"):
        return lines[node.lineno - 1 : node.end_lineno]
    default, above = ast.unparse(value.args[0]), lines[node.lineno - 2].strip()
    field = f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)} = {'{}' if default == 'dict' else default}"
    return [f"    {field}  {above}" if above.startswith("# ") and not above.endswith("fmt: skip") else f"    {field}"]


def member_text(name: str, node: ast.FunctionDef) -> str:
    kinds = [ast.unparse(one) for one in node.decorator_list]
    if any(kind.endswith("property") for kind in kinds):
        said = f".{node.name}" + (f": {ast.unparse(node.returns)}" if node.returns is not None else "")
    else:
        said = signature(f"{name if 'staticmethod' in kinds or 'classmethod' in kinds else ''}.{node.name}", node)
    return said + textwrap.indent("\n" + (ast.get_docstring(node) or ""), "    ").rstrip()


def write(made: Mapping[str, str]) -> None:
    (DOCS / "api").mkdir(exist_ok=True)
    for path, text in made.items():
        write_atomically(text, DOCS / path)
    for old in sorted((DOCS / "api").glob("*.md")):
        if f"api/{old.name}" not in made:
            old.unlink()


if __name__ == "__main__":
    write(pages())
