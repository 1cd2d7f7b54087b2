"""Exported Python holds the words of a plan's file as literals and comments: whatever they are, none of them becomes code."""

import ast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import autoshard
from autoshard import exports
from autoshard.exports import source
from autoshard.mesh import Mesh
from tests.helpers_refusals import assert_refused
from tests.helpers_solutions import export_anyway as export
from tests.helpers_solutions import linear_solution

KINDS = ("parallelize_module", "fully_shard", "distribute_module")
PLANTED = "__import__('os').system('id')"
SNIPPETS = (
    '": 0}', "': 0}", "\n", "\r", "\x0c", "\u2028", "\\", '"""', "'''", "}", "{", f"{{{PLANTED}}}", f"\n{PLANTED}\n", "#",
    "\0", "\ud800", ".",
)  # fmt: skip
words = st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=4)), min_size=1, max_size=5).map("".join)
EXPECTED_CALLS = {
    "ColwiseParallel", "RowwiseParallel", "Replicate", "Shard", "parallelize_module", "fully_shard", "replicate", "tuple", "str", "list",
    "distribute_tensor", "ValueError", "_flatten", "get_submodule", "items", "register_parameter", "Parameter", "WeakIdKeyDictionary",
}  # fmt: skip


def solution_of(name, other, note, axes):
    """A plan whose parameters, axes and notes are these words."""
    mesh = Mesh.from_bandwidths((2, 2, 2), axis_names=axes)
    rows = {f"{name}.weight": "S(0),R,S(1)", f"{other}.weight": "S(0),S(1),R"}
    parameters = {key: {"layout": layout, "shape": [8, 8], "dtype": "float32", "local_bytes": 64} for key, layout in rows.items()}
    known = {
        "styles": {f"{name}.weight": "column", f"{other}.weight": "row"},
        "dropped": [{"weights": note, "why": note, "plan": note}],
        "seconds": {"modules": 1.0, "fully_shard": 1.0},
    }
    return linear_solution(mesh=mesh, parameters=parameters, modules={axes[0]: known}, layouts={}, results={})


def python_of(solution, kind):
    return exports.FORMATS[kind].python(export(solution, kind))


def shape_of(code):
    """The syntax tree with strings and lists of strings blank: what runs, without what it runs on."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.List) and all(isinstance(item, ast.Constant) for item in node.elts):
            node.elts = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


def calls(code):
    functions = [node.func for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    return {one.attr if isinstance(one, ast.Attribute) else one.id if isinstance(one, ast.Name) else "?" for one in functions}


def check(name, other, note, axes):
    plain = solution_of("h.0.up", "h.1.down", "note", ("data", "replica", "tensor"))
    for kind in KINDS:
        code = python_of(solution_of(name, other, note, axes), kind)
        assert calls(code) <= EXPECTED_CALLS
        assert shape_of(code) == shape_of(python_of(plain, kind))
        literals = {node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)}
        ends = ".weight" if kind == "distribute_module" else ""
        assert {name + ends, other + ends} <= literals


@settings(max_examples=60, deadline=None)
@given(words, words, words, st.lists(words.filter(bool), min_size=3, max_size=3, unique=True).map(tuple))
@example('x": 0}\n' + PLANTED + '\nPLAN = {"', "y", f"a\n{PLANTED}", ("a", f'b")\n{PLANTED}#', 'c"'))
def test_no_word_of_a_plan_becomes_code(name, other, note, axes):
    if name != other:
        check(name, other, note, axes)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(words, words, words, st.lists(words.filter(bool), min_size=3, max_size=3, unique=True).map(tuple))
def test_no_word_of_a_plan_becomes_code_in_many_plans(name, other, note, axes):
    if name != other:
        check(name, other, note, axes)


@pytest.mark.parametrize("part", ["literal", "comments"])
def test_the_check_sees_words_that_become_code(monkeypatch, part):
    """Without the escapes, the check finds the planted call in each place."""
    naive = {"literal": lambda words: f'"{words}"', "comments": lambda lines: "".join(f"# {line}\n" for line in lines)}[part]
    for module in (source, exports.modules, exports.fully_shard, exports.partition):
        if hasattr(module, part):
            monkeypatch.setattr(module, part, naive)
    with pytest.raises((AssertionError, SyntaxError)):
        check('x": 0}\n' + PLANTED + '\nPLAN = {"', "y", f"a\n{PLANTED}", ("a", "b", "c"))


def test_a_hostile_file_writes_python_that_runs_nothing(tmp_path):
    """The whole way: a plan's file with such names, loaded and exported to a file that is then run."""
    hostile = 'h": 0}\nopen(r"' + str(tmp_path / "ran") + '", "w")\nPLAN = {"x'
    path = tmp_path / "plan.json"
    solution_of(hostile, "y", hostile, ("a", "b", "c")).save(path)
    for kind in KINDS:
        export(autoshard.load(path), kind, tmp_path / f"{kind}.py")
        exec(compile((tmp_path / f"{kind}.py").read_text(), "exported", "exec"), {})
    assert not (tmp_path / "ran").exists()


def test_a_parameter_that_is_planned_as_a_sum_is_refused_as_python(tmp_path):
    solution = linear_solution(parameters={"w": {"layout": "R,P", "shape": [8, 8], "dtype": "float32", "local_bytes": 64}})
    assert_refused("parameter 'w' is planned as", export, solution, "distribute_module", tmp_path / "a.py")
    assert not (tmp_path / "a.py").exists()
