"""Arguments, flags and output shared by commands. Results go to stdout, progress and errors to stderr."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leret.core.bundled import ENGLISH, ROOT, SCOPES
from leret.core.errors import LeretError
from leret.core.files import require_writable
from leret.core.progress import visible

if TYPE_CHECKING:
    from leret.config.sampling import SamplingRecipe

_JSON: ContextVar[bool] = ContextVar("leret_json", default=False)
_NAME = 16  # minimum width of a table's first column
_HEAD = 8  # headings up to this width are not wrapped
_LABELS = {
    "no_spread": "states without spread",
    "cut": "completions cut at max_tokens",
    "histogram": "samples per tenth of the reward range",
    "waiting": "questions stopped by an outage",
    "rounded": "equal up to the last bits",
    "completions": "new completions",
    "largest": "largest difference of a log-probability",
    "peak_gib": "peak memory (GiB)",
}
_FOR_MACHINES = {"notes", "new_questions", "new_samples", "total_steps", "loss_first", "loss_last"}
"""Fields that only ``--json`` prints; ``notes`` go to stderr."""
_EXCEPTIONAL = {
    "cut",
    "waiting",
    "no_spread",
    "unscored",
    "resumed_from",
    "resumes_at",
    "dropped",
    "stored_samples",
    "rounded",
}
"""Counts that are shown only if they are not 0."""


def as_json(wanted: bool) -> None:
    """Handle ``--json``: `facts` and `table` print a JSON object; `say` and `done` print nothing."""
    _JSON.set(wanted)


def is_json() -> bool:
    """Return whether the command prints a JSON object."""
    return _JSON.get()


def _writable(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Check before any work that an output can be written; ``-`` is stdout."""
    if path is not None and str(path) != "-":
        require_writable(path if option.metavar == "DIR" else path.parent, option.opts[0])
    return path


def output_directory(help: str) -> Any:
    """Return a flag for a directory that a command writes."""
    return typer.Option(metavar="DIR", callback=_writable, help=help)


def output_file(help: str) -> Any:
    """Return a flag for a file that a command writes."""
    return typer.Option(metavar="FILE", callback=_writable, help=help)


RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A YAML file or the name of a shipped recipe.")
]
RunOption = Annotated[Path, typer.Option("--run", metavar="DIR", help="The run directory.")]
NewRunOption = Annotated[
    Path | None,
    typer.Option("--run", metavar="DIR", help="The run directory.", show_default="runs/RECIPE"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting by its dotted key. Repeatable."
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show the planned work and its cost, then exit.")
]
FormatOption = Annotated[
    str | None, typer.Option("--format", help="Data format: jsonl, beir, hotpotqa, chunks, ...")
]
Host = Annotated[
    str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines connect.")
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free port.")]
IndexOrUrl = Annotated[
    str, typer.Argument(metavar="INDEX", help="An index directory or a retrieval server's URL.")
]
TokenEnv = Annotated[
    str | None,
    typer.Option("--token-env", metavar="VAR", help="Variable with the server's token."),
]
QuestionsOption = Annotated[
    str | None,
    typer.Option("--questions", metavar="PATH", help="The question file, or hf:NAME."),
]
CorpusOption = Annotated[
    str | None, typer.Option("--corpus", metavar="PATH", help="The corpus file, or hf:NAME.")
]


def run_path(run: Path | None, recipe: str) -> Path:
    """Return the run directory, by default ``runs/`` with the recipe's name."""
    return run or Path("runs") / Path(recipe).stem


def say(text: str = "", style: str | None = None) -> None:
    """Print text to stdout. On a terminal, break lines at spaces; commands and flags break only before a flag."""
    if not _JSON.get():
        _print(visible(text), style)


def complain(text: str, label: str = "error: ") -> None:
    """Print a message to stderr."""
    style = {"error: ": "red", "warning: ": "yellow"}.get(label)
    _print(f"{label}{visible(text)}", style, stderr=True)


def _print(text: str, style: str | None = None, indent: str = "", *, stderr: bool = False) -> None:
    """Print text; on a terminal, with a style and with long lines wrapped. Rich is imported only for a style."""
    stream = sys.stderr if stderr else sys.stdout
    is_terminal = stream.isatty() or os.environ.get("FORCE_COLOR")
    if is_terminal:
        width = shutil.get_terminal_size().columns
        text = "\n".join(_folded(line, width, indent) for line in text.split("\n"))
    if is_terminal and style:
        _console(stderr=stderr).print(text, soft_wrap=True, style=style)
    else:
        print(text, file=stream, flush=True)


def _folded(line: str, width: int, indent: str) -> str:
    """Break a line at spaces; commands and flags only before a flag, with a backslash at the end of the line."""
    fill = partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)
    if not line.startswith(("  leret ", "  python ", "  --")):
        if not indent and line.startswith("  "):
            indent = "    "
        return fill(line, width, subsequent_indent=indent)
    whole = re.sub(r" (?!--)", "\0", line)
    folded = fill(whole, width - 2, subsequent_indent="    ")
    return folded.replace("\n", " \\\n").replace("\0", " ")


def done(text: str) -> None:
    """Print the result of a command."""
    say(text, style="bold")


def warn_of_scope(policy: str, data: str, program: str) -> None:
    """Warn if a shipped policy, local or served, is used with data or a program that it does not know."""
    from leret.config.data import GENERATED

    name = re.sub("-[0-9a-f]{8}$", "", policy)
    if name not in SCOPES:
        return
    fits = program.endswith(":ExpandWrite") if name == ENGLISH else data in GENERATED
    if not fits:
        complain(
            f"policy.model {policy} {SCOPES[name]}; "
            "choose another policy (see `leret init --help`)",
            "warning: ",
        )


def warn_of_skipped(source: str, skipped: Mapping[str, int]) -> None:
    """Warn of skipped and doubtful records of a file."""
    from leret.datasets.load import skipped_notes

    for note in skipped_notes(source, skipped):
        complain(note, "warning: ")


def known_names() -> Callable[[Any], Iterator[tuple[tuple[str, ...], str]]]:
    """Return a check for `leret.config.load` that reports unknown data formats and rewards.

    The imports below register the settings of retrievers and policies.
    """
    import leret.policies.load
    import leret.retrieval.load  # noqa: F401
    from leret.config.sampling import SamplingRecipe
    from leret.datasets.formats import reader_of
    from leret.rewards import faults

    def check(recipe: Any) -> Iterator[tuple[tuple[str, ...], str]]:
        if not isinstance(recipe, SamplingRecipe):
            return
        try:
            reader_of(recipe.data.kind)
        except LeretError as error:
            yield ("data.kind",), str(error)
        for key in ("reward", "final"):
            spec = getattr(recipe.sampling, key)
            if spec is None:
                continue
            for fault in faults(spec, f"sampling.{key}"):
                place, _, message = fault.partition(": ")
                yield (place,), message

    return check


def sampling_recipe(
    recipe: str | Path, overrides: Sequence[str] = (), optional: Sequence[str] = ()
) -> SamplingRecipe:
    """Load a sampling recipe and check it with `known_names`."""
    from leret.config.load import load_recipe
    from leret.config.sampling import SamplingRecipe

    return load_recipe(recipe, SamplingRecipe, overrides, optional=optional, check=known_names())


def facts(values: Any, shown: Mapping[str, Any] | None = None) -> None:
    """Print a dataclass or mapping, one field per line, without empty values and zero counts of exceptions.

    ``notes`` go to stderr. ``shown``, if set, is printed in place of ``values``, except with ``--json``.
    """
    for note in getattr(values, "notes", ()):
        complain(note, "note: ")
    if _JSON.get():
        print(json.dumps(_fields(values), default=_plain))
        return
    rows = []
    for name, value in _fields(values if shown is None else shown).items():
        if not _hidden(name, value):
            label = _LABELS.get(name, name).replace("_", " ")
            rows.append((label, value))
    width = max((len(label) for label, _ in rows), default=0)
    for label, value in rows:
        _print(visible(f"  {label:<{width}}  {_shown(value)}"), indent=" " * (width + 4))


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    values: Any = None,
) -> None:
    """Print a table, or ``values`` with ``--json``. Numbers are never cut or wrapped.

    On a narrow terminal, the first column is wrapped. If that is not enough, the last columns are dropped with a note.
    """
    from rich import box
    from rich.table import Table

    if _JSON.get():
        if values is not None:
            facts(values)
        return
    shown = Table(
        title=visible(title or "") or None,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        pad_edge=False,
    )
    shown.padding = (0, 1, 0, 0)
    lines = [tuple(map(visible, row)) for row in rows]
    widths = []
    for name, *cells in zip(columns, *lines, strict=True):
        words = name.split()
        widths.append(max(min(len(name), _HEAD), *map(len, words), *map(len, cells)))
    least = min(widths[0], _NAME) + 2
    n_shown = 1
    console = _console(stderr=False)
    for width in widths[1:]:
        if console.is_terminal and n_shown > 1 and least + width + 2 > console.width:
            break
        least += width + 2
        n_shown += 1
    for i, (name, width) in enumerate(zip(columns[:n_shown], widths, strict=False)):
        head = textwrap.fill(name, width, break_on_hyphens=False)
        shown.add_column(head, justify="right" if i else "left", no_wrap=i > 0, overflow="fold")
    for row in lines:
        shown.add_row(*row[:n_shown])
    draw(shown, least=least)
    if n_shown < len(columns):
        complain(
            f"columns hidden in this narrow terminal: {', '.join(columns[n_shown:])}", "note: "
        )


def draw(shown: Any, least: int = 0) -> None:
    """Print a Rich table at least ``least`` characters wide, without trailing spaces."""
    console = _console(stderr=False)
    console.width = max(console.width if console.is_terminal else 1000, least)
    with console.capture() as captured:
        console.print(shown)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def next_command(stage: str, recipe: str, run: Path) -> None:
    """Name the command of ``stage`` that follows a finished stage.

    It comes from the evaluation recipe that `leret init` wrote for the run, the recipe's header, or
    the shipped recipes.
    """
    from leret.config.load import find_recipe

    at_run = f"--run {shlex.quote(str(run))}"
    for file in (Path(run.name, "eval.yaml"), Path("eval.yaml")):
        if stage == "eval" and file.is_file() and f"{at_run}\n" in file.read_text("utf-8"):
            return say(f"next:\n  leret eval {shlex.quote(str(file))} {at_run}")
    file = find_recipe(recipe, "sampling", "training")
    text = file.read_text(encoding="utf-8")
    listed = re.search(rf"^#\s+(leret {stage} .+) --run (?:'[^']*'|\S+)(.*)$", text, re.MULTILINE)
    if listed:
        command, options = listed.groups()
    elif re.search(r"^(train|eval):", text, re.MULTILINE):  # a whole run goes on where it stopped
        command = f"leret run {shlex.quote(recipe)}"
        options = ""
    else:
        folder = {"train": "training"}.get(stage, stage)
        shipped = ROOT / folder / f"{file.stem}.yaml"
        name = file.stem if shipped.is_file() else "RECIPE"
        command = f"leret {stage} {name}"
        options = ""
    return say(f"next:\n  {command} {at_run}{options}")


def _hidden(name: str, value: Any) -> bool:
    """Return True for fields for machines, empty values, and exceptions that did not occur."""
    return name in _FOR_MACHINES or _empty(value) or (value == 0 and name in _EXCEPTIONAL)


def _empty(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(item is None for item in value.values())
    return value is None or value is False or (isinstance(value, (tuple, list)) and not value)


def _fields(values: Any) -> dict[str, Any]:
    if isinstance(values, Mapping):
        return dict(values)
    return {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _fields(value)
    return str(value)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
        items = [(name, item) for name, item in _fields(value).items() if item is not None]
        return ", ".join(f"{name}: {_shown(item)}" for name, item in items)
    if isinstance(value, (list, tuple)):
        return ", ".join(_shown(item) for item in value)
    return str(value)


def _console(*, stderr: bool) -> Any:
    """Return a console that prints markup and emoji codes as text; a new one per call, as tests replace the streams."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
