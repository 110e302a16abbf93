import ast
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import figures

MODULES = figures.sources()

LAYERS = [
    {"core", ""},  # "" is leret/__init__.py itself
    {"config", "http"},
    {"rewards"},
    {"datasets", "retrieval", "policies"},
    *({name} for name in ("programs", "rollouts", "sampling", "training", "evaluation", "viewer", "optimize")),
    *({name} for name in ("demo", "extras", "cli")),
    {"__main__"},
]
"""Lowest first; those of one layer do not import one another."""

NEVER = {("evaluation", "training")}
"""Down, and still not allowed: what evaluates knows nothing of how a policy was trained."""

SHELF = "extras"
"""Imported by nobody: recipes name its kinds."""

SHORT_NAMES = {
    "leret.config.data",
    "leret.config.retriever",
    "leret.config.policy",
    "leret.config.sampling",
    "leret.config.training",
    "leret.training.algorithms",
}
"""Modules that map the short names of the shelf's kinds to their paths, as strings."""

FORWARDS = "leret"
"""leret/__init__.py is lazy: it names what it hands out, and imports nothing."""


def room(module):
    return [*module.split("."), ""][1]


def layer(name):
    return next((i for i, names in enumerate(LAYERS) if name in names), -1)


def strings(path):
    nodes = (node for node in ast.walk(figures.tree(path)) if isinstance(node, ast.Constant))
    named = ((node.lineno, node.value.partition(":")[0]) for node in nodes if isinstance(node.value, str))
    return [(line, name) for line, name in named if name in MODULES]


def faults(path, module):
    found, imports = [], figures.imports(path, module)
    named = [(line, f"{base}.{name}" if base == "leret" else base) for line, base, name in imports]
    texts = [] if module == FORWARDS else strings(path)
    if module in SHORT_NAMES:
        texts = [(line, name) for line, name in texts if room(name) != SHELF]
    for line, there in [*named, *texts]:
        if room(there).startswith("__") or there == "leret":
            continue
        place, mine, other = f"{module}:{line} names {there}", room(module), room(there)
        if layer(other) < 0:
            found.append(f"{place}, which is in no layer; give it one in tests/test_layers.py")
        elif layer(other) > layer(mine):
            found.append(f"{place}: upward")
        elif other == SHELF != mine:
            found.append(f"{place}: nobody imports the shelf; recipes name its kinds")
        elif (mine, other) in NEVER:
            found.append(f"{place}: {mine} never imports {other}")
        elif mine != other and layer(mine) == layer(other):
            found.append(f"{place}: neighbours do not import one another")
    return found


def test_imports_point_down():
    assert [fault for module, path in MODULES.items() for fault in faults(path, module)] == []


@pytest.mark.parametrize(
    ("module", "text", "says"),
    [
        ("leret.datasets.x", "def f():\n    from leret.sampling import store\n", "upward"),
        ("leret.datasets.x", "if TYPE_CHECKING:\n    import leret.cli\n", "upward"),
        ("leret.datasets.x", "from leret.policies.base import Policy\n", "neighbours"),
        ("leret.config.x", 'TABLE = "leret.retrieval.load:ENGINES"\n', "upward"),
        ("leret.evaluation.x", "from leret.training import stage\n", "never"),
        ("leret.core.x", "from leret import config\n", "upward"),
        ("leret.cli.x", 'KIND = "leret.extras.pubmed:PUBMED"\n', "nobody imports the shelf"),
    ],
)
def test_an_import_that_points_up_is_found(tmp_path, module, text, says):
    path = tmp_path / "x.py"
    path.write_text(text)
    assert len(faults(path, module)) == 1
    assert says in faults(path, module)[0]


def test_no_module_imports_itself_through_others():
    assert figures.circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [["b", "c"]]
    assert figures.circles(figures.graph(MODULES)) == []


def test_the_library_is_small_and_not_dense():
    house, shelf = figures.rooms(MODULES)
    n_nodes, n_statements = figures.nodes(MODULES.values()), figures.statements(MODULES.values())
    assert figures.nodes(house.values()) <= 300_700, "remove code before adding more; lines and statements are free"
    assert figures.nodes(shelf.values()) <= 32_000
    assert n_nodes / n_statements <= 12.0, "write out what is squeezed: an `if` of three lines is three lines"


def test_little_is_squeezed():
    counts = Counter(kind for path in MODULES.values() for kind, _ in figures.squeezed(path))
    assert counts["nested or conditional comprehensions"] <= 2
    assert counts["walrus expressions"] <= 4
    assert counts["lists or strings multiplied by a truth value"] == 0
    assert counts["empty words as variables"] <= 3
    assert figures.wide_lines(MODULES.values()) <= 0.012


def test_what_is_squeezed_is_found(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(
        "a = [x for y in z for x in y]\n"
        "b = [x if x else y for x in z]\n"
        "c = [x for x in z if x]\n"
        "if d := len(a): pass\n"
        "e = [a] * bool(b)\n"
        "f = 'x' * (a > 1)\n"
        "g = 'x' * 3\n"
        "for one in a: pass\n"
    )
    assert sorted(figures.squeezed(path), key=lambda item: item[1]) == [
        ("nested or conditional comprehensions", 1),
        ("nested or conditional comprehensions", 2),
        ("walrus expressions", 4),
        ("lists or strings multiplied by a truth value", 5),
        ("lists or strings multiplied by a truth value", 6),
        ("empty words as variables", 8),
    ]


def test_recipes_have_few_keys():
    assert sum(map(len, figures.keys(MODULES.values()).values())) <= 340


def test_the_library_its_folders_and_its_functions_stay_small():
    house, _ = figures.rooms(MODULES)
    assert len(house) <= 195
    assert {
        name: n for name, n in figures.folders().items() if n > 13 and name not in {"leret", f"leret/{SHELF}"}
    } == {}
    assert sum(size > figures.LARGE for size, _ in figures.functions(MODULES.values())) <= 25


def test_a_class_name_means_one_thing():
    assert figures.class_names(MODULES) == {}


def test_a_module_of_more_than_500_nodes_has_a_test_of_its_own():
    assert figures.without_twin(MODULES) == []


def test_the_top_folders_hold_no_machinery():
    assert not (figures.ROOT / "pipelines" / "__init__.py").exists()
    for folder in ("sampling", "training", "eval"):
        assert not list((figures.ROOT / folder).rglob("*.py"))


FORBIDDEN = frozenset(
    {"told", "found", "own", "made", "given", "kept", "opened", "settled"}
    | {"bench", "fellow", "mend", "partly", "front", "thrift", "here"}
)
"""Participles, adverbs and metaphors: they do not say what a thing is."""

OPENINGS = frozenset({"What", "Of", "As", "By", "Who", "Whose", "Where", "That", "Whether", "Whatever"})
"""First words of a docstring that answers a question instead of naming an action."""


def identifiers(node):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.id if isinstance(node, ast.Name) else node.attr
    elif isinstance(node, ast.ExceptHandler) and node.name:
        yield node.name


def faults_of_names(tree):
    for node in ast.walk(tree):
        for name in identifiers(node):
            if name.strip("_") in FORBIDDEN:
                yield f"{node.lineno}: {name}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            opening = re.match(r"\w+", ast.get_docstring(node) or "")
            if opening and opening[0] in OPENINGS:
                yield f"{node.lineno}: {node.name}: {opening[0]} ..."


def test_names_and_docstrings_follow_the_style_guide():
    found = [f"{module}:{fault}" for module, path in MODULES.items() for fault in faults_of_names(figures.tree(path))]
    assert found == []
