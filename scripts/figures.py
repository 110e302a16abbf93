"""Prints what the size and the shape of the code are measured by: ``python scripts/figures.py [--details]``.

AST nodes, nodes per statement and the constructs in `squeezed` measure size and density; lines are printed for
information and have no limit. A function's size is its AST nodes. An import counts wherever it stands: in a
function and for type checking too. ``tests/test_layers.py`` holds the limits.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LARGE = 450  # AST nodes of a function that is too long to read at once


def sources(package: str = "leret") -> dict[str, Path]:
    """Module names with their files."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "_recipes" not in parts:
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file, parsed once."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path, module: str) -> Iterator[tuple[int, str, str]]:
    """Line, module and name (or "") of every import of leret in a file."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names if alias.name.split(".")[0] == "leret")
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base.split(".")[0] == "leret":
                yield from ((node.lineno, base, alias.name) for alias in node.names)


def graph(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Which modules each module imports."""
    arrows: dict[str, set[str]] = {}
    for module, path in modules.items():
        named = {there for _, base, name in imports(path, module) for there in (base, f"{base}.{name}")}
        arrows[module] = {there for there in named if there in modules and there not in {module, "leret"}}
    return arrows


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import one another, directly or not (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for there in arrows[module]:
            if there not in index:
                visit(there)
                low[module] = min(low[module], low[there])
            elif there in stack:
                low[module] = min(low[module], index[there])
        if low[module] == index[module]:
            at = stack.index(module)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for module in arrows:
        if module not in index:
            visit(module)
    return found


def functions(paths: Iterable[Path]) -> Iterator[tuple[int, str]]:
    """AST nodes and place of every function and method."""
    for path in paths:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield sum(1 for _ in ast.walk(node)), f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def with_whole_recipes(paths: Iterable[Path]) -> Iterator[str]:
    """Place of every function with a parameter that is a whole recipe, which may read any of its keys."""
    for path in paths:
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            types = [ast.unparse(argument.annotation) for argument in arguments if argument.annotation]
            if any(argument.arg == "recipe" for argument in arguments) or any(
                name.endswith("Recipe") for text in types for name in text.split(" | ")
            ):
                yield f"{path.name}:{node.lineno} {node.name}"


EMPTY_WORDS = frozenset({"one", "other", "known", "facts", "entry", "places"})
"""Names that do not say what a thing is."""

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def squeezed(path: Path) -> Iterator[tuple[str, int]]:
    """Kind and line of every construct that has to be decoded, and of every empty word used as a variable."""
    for node in ast.walk(tree(path)):
        if isinstance(node, COMPREHENSIONS) and is_dense(node):
            yield "nested or conditional comprehensions", node.lineno
        elif isinstance(node, ast.NamedExpr):
            yield "walrus expressions", node.lineno
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and is_switch(node):
            yield "lists or strings multiplied by a truth value", node.lineno
        for name in bound(node):
            if name in EMPTY_WORDS:
                yield "empty words as variables", node.lineno


def is_dense(comprehension: ast.expr) -> bool:
    """Return whether a comprehension holds another, or chooses its element with ``if ... else``."""
    inner = (node for node in ast.walk(comprehension) if node is not comprehension)
    several = len(getattr(comprehension, "generators", ())) > 1
    chooses = isinstance(getattr(comprehension, "elt", None), ast.IfExp)
    return several or chooses or any(isinstance(node, COMPREHENSIONS) for node in inner)


def is_switch(product: ast.BinOp) -> bool:
    """Return whether a product is a list or string times a comparison, ``not``, or ``bool(...)``."""
    sides = (product.left, product.right)
    has_sequence = any(
        isinstance(side, ast.List | ast.Tuple | ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in sides
    )
    has_truth = any(
        isinstance(side, ast.Compare | ast.BoolOp)
        or (isinstance(side, ast.UnaryOp) and isinstance(side.op, ast.Not))
        or (isinstance(side, ast.Call) and isinstance(side.func, ast.Name) and side.func.id == "bool")
        for side in sides
    )
    return has_sequence and has_truth


def bound(node: ast.AST) -> Iterator[str]:
    """Return the names that a node binds."""
    if isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id


def wide_lines(paths: Iterable[Path], columns: int = 100) -> float:
    """Share of lines with more than ``columns`` characters."""
    widths = [len(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    return sum(width > columns for width in widths) / len(widths)


def class_names(modules: dict[str, Path]) -> dict[str, list[str]]:
    """Public class names that are defined more than once, with their modules."""
    homes = defaultdict(list)
    for module, path in modules.items():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    return {name: where for name, where in sorted(homes.items()) if len(where) > 1}


def folders(package: str = "leret") -> dict[str, int]:
    """Entries of every folder of Python files: modules, packages and templates, without ``__init__.py``."""
    found = {}
    for folder in [ROOT / package, *(ROOT / package).rglob("*")]:
        if folder.is_dir() and any(folder.glob("*.py")) and "_recipes" not in folder.parts:
            names = [path for path in folder.iterdir() if path.name not in {"__init__.py", "__pycache__"}]
            found[str(folder.relative_to(ROOT))] = len(names)
    return found


def without_twin(modules: dict[str, Path], least: int = 500) -> list[str]:
    """Modules of more than ``least`` AST nodes that have no test file of their own."""
    missing = []
    for module, path in modules.items():
        inside = path.relative_to(ROOT / "leret")
        twins = [ROOT / "tests" / inside.parent / f"test_{inside.name}"]
        twins += [ROOT / "tests" / f"test_{inside.name}"] if len(inside.parts) == 1 else []
        if path.name == "__init__.py":
            twins = [ROOT / "tests" / inside.parent / f"test_{inside.parent.name}.py"]
        if not any(twin.is_file() for twin in twins) and nodes([path]) > least:
            missing.append(module)
    return missing


def rooms(modules: dict[str, Path]) -> tuple[dict[str, Path], dict[str, Path]]:
    """Return the modules without the shelf, and those of the shelf (leret/extras/)."""
    shelf = {module: path for module, path in modules.items() if module.startswith("leret.extras")}
    return {module: path for module, path in modules.items() if module not in shelf}, shelf


def nodes(paths: Iterable[Path]) -> int:
    """AST nodes of all files, as ``ast.walk`` visits them."""
    return sum(sum(1 for _ in ast.walk(tree(path))) for path in paths)


def statements(paths: Iterable[Path]) -> int:
    """Statements of all files, without docstrings and other lone strings."""
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for path in paths for node in ast.walk(tree(path)))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def lines(path: Path) -> int:
    """Lines of a file, blank ones and comments too."""
    return len(path.read_text(encoding="utf-8").splitlines())


def surface() -> dict[str, int]:
    """Number of commands of `leret`, and of their options and arguments, without `--help` and the global flags."""
    from typer.main import get_command

    from leret.cli.app import app

    numbers = Counter({"commands": 0, "options": 0, "arguments": 0})

    def visit(command: Any) -> None:
        inside = getattr(command, "commands", {})
        for child in inside.values():
            visit(child)
        if not inside:
            numbers["commands"] += 1
            numbers.update(f"{parameter.param_type_name}s" for parameter in command.params)

    visit(get_command(app))
    return dict(numbers)


def keys(paths: Iterable[Path]) -> dict[str, set[str]]:
    """Return the recipe keys that each settings class adds; an inherited key with another default is not added.

    The settings of `leret serve retriever` are no recipe.
    """
    classes = {}
    for path in paths:
        if path.parent.name == "server":
            continue
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = node

    def bases(name: str) -> list[str]:
        found = []
        for base in classes[name].bases if name in classes else ():
            named = ast.unparse(base)
            found += [named, *bases(named)]
        return found

    added = {}
    for name, node in classes.items():
        if "Settings" in bases(name):
            inherited = set().union(*(_annotated(classes[base]) for base in bases(name) if base in classes))
            added[name] = _annotated(node) - inherited
    return added


def _annotated(node: ast.ClassDef) -> set[str]:
    names = set()
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
            names.add(ast.unparse(statement.target))
    return names


def main(details: bool) -> None:
    """Print the figures; with ``details`` also what they are made of."""
    modules = sources()
    long = sorted((size, place) for size, place in functions(modules.values()) if size > LARGE)
    n_functions = sum(1 for _ in functions(modules.values()))
    sizes = {module: lines(path) for module, path in modules.items()}
    tests = sources("tests")
    n_nodes, n_statements = nodes(modules.values()), statements(modules.values())
    house, shelf = rooms(modules)
    print(f"leret/ AST nodes without extras   {nodes(house.values()):,} in {len(house)} files")
    print(f"leret/extras/ AST nodes           {nodes(shelf.values()):,} in {len(shelf)} files")
    print(f"leret/ statements                 {n_statements:,} ({n_nodes / n_statements:.2f} nodes each)")
    print(f"leret/ lines                      {sum(sizes.values()):,}")
    print(f"leret/ files                      {len(modules)}")
    print(f"leret/ files under 80 lines       {sum(size < 80 for size in sizes.values())}")
    print(f"tests/ lines                      {sum(lines(path) for path in tests.values()):,}")
    print(f"tests/ files                      {len(tests)}")
    print(f"functions over {LARGE} nodes          {len(long)} of {n_functions} ({len(long) / n_functions:.1%})")
    print(f"functions that take a whole recipe {len(list(with_whole_recipes(modules.values())))}")
    largest = max(folders().items(), key=lambda item: item[1])
    print(f"entries of the largest folder     {largest[1]} ({largest[0]})")
    print(f"import circles                    {len(circles(graph(modules)))}")
    print(f"class names of two meanings       {len(class_names(modules))}")
    print(f"modules of 500+ nodes, no twin    {len(without_twin(modules))}")

    dense = Counter(kind for path in modules.values() for kind, _ in squeezed(path))
    for kind, n in sorted(dense.items()):
        print(f"{kind:45} {n}")
    print(f"lines over 100 columns            {wide_lines(modules.values()):.1%}")
    for kind, n in surface().items():
        print(f"{kind:33} {n}")
    added = keys(modules.values())
    print(f"keys of recipes                   {sum(map(len, added.values()))} in {len(added)} settings classes")
    n_house = sum(map(len, keys(house.values()).values()))
    print(f"keys of recipes without extras    {n_house}")

    if details:
        print("\ncircles:", *circles(graph(modules)), sep="\n  ")
        print("\nfolders above 12:", *(f"{name} {n}" for name, n in folders().items() if n > 12), sep="\n  ")
        print(
            "\nclass names:",
            *(f"{name}: {', '.join(where)}" for name, where in class_names(modules).items()),
            sep="\n  ",
        )
        print("\nunder 80 lines:", *(f"{size:3} {module}" for module, size in sizes.items() if size < 80), sep="\n  ")
        print("\nno twin:", *(f"{sizes[module]:3} {module}" for module in without_twin(modules)), sep="\n  ")
        print("\nlarge functions:", *(f"{size:3} {place}" for size, place in long), sep="\n  ")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # count the commands of this checkout, not of an installed leret
    main("--details" in sys.argv)
