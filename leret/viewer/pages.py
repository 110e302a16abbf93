"""Pages of the viewer as HTML or CSV text, for the server and for `leret view --static`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import unified_diff
from itertools import chain, combinations
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.filters import do_mark_safe

from leret import __version__
from leret.config.evaluation import label, main_measure
from leret.core.progress import visible
from leret.viewer.collect import label_of
from leret.viewer.index import RunIndex
from leret.viewer.lists import LISTS, PAGE, csv_lines, select
from leret.viewer.plots import MISMATCH, axis, curves_of
from leret.viewer.tree import Group, Tree

ASSETS = Path(__file__).parent / "assets"
MENU = ("questions", "groups", "pairs", "trainings", "prompts", "coverage")
NOTES = "SELECT text FROM notes"
_STATIC_ROWS = 2000
_TEMPLATES = Environment(
    loader=FileSystemLoader(ASSETS),
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=True,
    undefined=StrictUndefined,
    finalize=visible,
)
_TEMPLATES.filters |= {"shown": label, "exp": math.exp}
_TEMPLATES.globals |= {
    "axis": axis,
    "curves_of": curves_of,
    "mismatch_titles": MISMATCH,
    "main_measure": main_measure,
    "package_version": __version__,
}
_DOTS = re.compile(r"~*\.\.?")

Parts = tuple[str, ...]
"""Segments of a page's path: ``("q", ID, STATE)``.

Those of a run after the first begin with ``("r", NAME)``.
"""

Url = Callable[..., str]
"""Function that returns the address of a page, given its parts, an ``anchor`` and filters."""

_COUNTS = (
    "SELECT p.name, p.digest, sum(step = 0) AS questions, sum(sampled) AS states, sum(n) FILTER "
    "(WHERE sampled) AS samples, sum(failures) AS failures, sum(unparsed) AS unparsed, ifnull((SELECT "
    "n FROM facts.cuts WHERE policy_digest = p.digest), 0) AS cut, sum(total) FILTER (WHERE sampled) / "
    "sum(rewarded) FILTER (WHERE sampled) AS mean, avg(best > worst) FILTER (WHERE sampled) AS "
    "spread FROM policies p CROSS JOIN groups g ON g.policy_digest = p.digest GROUP BY p.place"
)

_GOLD = "SELECT count(recall) AS n, avg(recall) AS best, sum(recall = 1) AS complete FROM questions"
_COSTS = {"LM calls": "lm_calls", "tokens": "tokens", "searches": "searches", "seconds": "seconds"}


def segment(part: str) -> str:
    """Return a part as a segment of a path.

    ``.`` and ``..``, which mean other directories, become ``~.`` and ``~..``.
    """
    if _DOTS.fullmatch(part):
        return f"~{part}"
    return part


def part_of(segment: str) -> str:
    """Return the part that a segment stands for."""
    if _DOTS.fullmatch(segment):
        return segment.removeprefix("~")
    return segment


def server_url(*parts: str, anchor: str = "", **query: Any) -> str:
    """Return the address of a page on the server."""
    url = "/" + "/".join(quote(segment(part), safe="") for part in parts)
    filters = {name: value for name, value in query.items() if value not in (None, "")}
    if filters:
        url += f"?{urlencode(filters)}"
    if anchor:
        url += f"#{anchor}"
    return url


@dataclass
class Pages:
    """Pages of several runs; in a static site, only the questions in ``static`` have pages."""

    runs: Mapping[str, RunIndex]
    notes: Mapping[str, str]  # by run
    static: Collection[str] = ()

    def page(
        self, parts: Parts, query: Mapping[str, str], url: Url = server_url
    ) -> str | Iterator[str] | None:
        """Return a page's HTML, or blocks of CSV; None if there is no such page.

        ConfigError for invalid filters.
        """
        name, local = self._local(parts)
        index = self.runs[name]
        kind = "overview"
        suffix = ""
        if local:
            kind, _, suffix = local[0].partition(".")
        shared = self._shared(name, kind, query)
        shared |= {**self._links(name, local, url), "version": self.version(parts)}

        def render(template: str, **values: Any) -> str:
            return self.template(template, **shared, **values)

        if kind == "q" and len(local) in {2, 3}:
            question = self.question(name, local[1], "".join(local[2:]), query.get("policy", ""))
            if question is None:
                return None
            return render("question", **question)
        if len(local) > 1:
            return None
        if kind in LISTS:
            systems, defaults = systems_of(index)
            selection = select(kind, query, systems, defaults)
            limit = _STATIC_ROWS if self.static else PAGE
            if suffix == "csv":
                return selection.csv(index)
            ids = selection.ids(index)
            start = selection.page * limit
            return render(
                "list",
                rows=selection.rows(index, ids[start : start + limit]),
                selection=selection,
                systems=systems,
                total=len(ids),
                page_size=limit,
            )
        if kind == "overview" and suffix == "csv":
            return _summary_csv(index.run.summaries())
        content = {"overview": _overview, "trainings": _trainings, "prompts": _prompts}.get(kind)
        if content is None:
            return None
        return render(kind, **content(index))

    def _links(self, name: str, local: Parts, url: Url) -> dict[str, Any]:
        """Return the functions and addresses with which a page of a run links to pages."""
        prefixes: dict[str, Parts] = {run: ("r", run) for run in self.runs}
        prefixes[next(iter(self.runs))] = ()
        prefix = prefixes[name]
        runs = {run: url(*prefixes[run], *self._twin(run, local)) for run in self.runs}
        return {
            "url": lambda *more, **query: url(*prefix, *more, **query),
            "asset": lambda file: url("assets", file),
            "runs": runs,
        }

    def _shared(self, name: str, kind: str, query: Mapping[str, str]) -> dict[str, Any]:
        index = self.runs[name]
        return {
            "notes": self.notes.get(name, "").splitlines() + [row[0] for row in index.read(NOTES)],
            "run": name,
            "index": index,
            "kind": kind,
            "menu": MENU,
            "static": self.static,
            "query": dict(query),
            "prefix": "",
        }

    def template(self, name: str, **values: Any) -> str:
        return _TEMPLATES.get_template(f"{name}.html.j2").render(**values)

    def report(self, evaluation: str, **values: Any) -> str:
        """Return the overview of an evaluation of the first run, with its trainings, as one file."""
        name, index = next(iter(self.runs.items()))
        content = _overview(index, evaluation) | _trainings(index)
        shared = self._shared(name, "report", {}) | {"url": None, "version": ""}
        return self.template("report", **shared, **content, **values)

    def fold(self, run: str, number: int, row: Mapping[str, Any]) -> str:
        """Return the tree of a question for the report, as HTML that templates do not escape."""
        question = self.question(run, row["question_id"]) or {}
        html = self.template(
            "fold", url=None, static=self.static, prefix=f"t{number}-", row=row, **question
        )
        return do_mark_safe(html)

    def version(self, parts: Parts) -> str:
        """Return a text that changes with the content of a page."""
        name, local = self._local(parts)
        if local[:1] != ("q",):
            return str(self.runs[name].version)
        sql = (
            "SELECT sum(n) || ' ' || (SELECT count(*) FROM facts.tasks) || ' ' || (SELECT count(*) "
            "FROM facts.evaluations) FROM groups WHERE question_id = ?"
        )
        question_id = "".join(local[1:2])
        return " ".join(str(index.one(sql, (question_id,))) for index in self.runs.values())

    def _twin(self, run: str, local: Parts) -> Parts:
        """Return the page of another run that corresponds to a page.

        It has the same question, or else is the overview.
        """
        if local[:1] != ("q",):
            return local
        exists = "SELECT 1 FROM questions WHERE question_id = ?"
        if self.runs[run].one(exists, local[1:2] or ("",)):
            return local[:2]
        return ()

    def _local(self, parts: Parts) -> tuple[str, Parts]:
        if parts[:1] == ("r",) and parts[1:] and parts[1] in self.runs:
            return parts[1], parts[2:]
        return next(iter(self.runs)), parts

    def question(
        self, run: str, question_id: str, state_id: str = "", policy: str = ""
    ) -> dict[str, Any] | None:
        """Return the values of tree.html.j2 for a question, or a state.

        None if there is no such question or state.
        """
        trees = {name: Tree(index, question_id) for name, index in self.runs.items()}
        tree = trees[run]
        policies = tree.policies()
        digest = policy
        if policies and not policy:
            digest = policies[-1]["digest"]
        groups: list[tuple[str, Tree, Group]] = []
        if state_id:  # under every policy of every run
            for name, tree_of_run in trees.items():
                for group in tree_of_run.groups(None, state_id):
                    groups.append((name, tree_of_run, group))
        else:
            groups += [(run, tree, group) for group in tree.groups(digest)]
        if tree.text is None or (state_id and not groups):
            return None
        paths = {}
        for name, tree_of_run in trees.items():
            for path, steps in tree_of_run.paths().items():
                paths[f"{name} · {path}" if len(trees) > 1 else path] = steps
        return {
            "tree": tree,
            "groups": groups,
            "policies": policies,
            "digest": digest,
            "state_id": state_id,
            "paths": paths,
            "hops": sorted({step["hop"] for step in chain.from_iterable(paths.values())}),
        }


def systems_of(index: RunIndex, evaluation: str = "") -> tuple[list[str], dict[str, str]]:
    """Return all evaluated systems, and an evaluation's default systems to compare.

    The default systems are the delivered policy and the baseline.
    """
    by_evaluation = index.run.summaries()
    systems: list[str] = []
    for name, summary in by_evaluation.items():
        systems += [label_of(name, row["system"]) for row in summary["rows"]]
    compared = by_evaluation.get(evaluation, {})
    defaults: dict[str, str] = {}
    for name, key in {"b": "baseline", "a": "focus"}.items():
        label = label_of(evaluation, compared.get(key) or "")
        if label in systems:
            defaults[name] = label
    return systems, defaults


def _overview(index: RunIndex, evaluation: str = "") -> dict[str, Any]:
    """Return the values of the overview, which begins with an evaluation's headline."""
    by_name = index.run.summaries()
    if evaluation in by_name:
        by_name = {evaluation: by_name[evaluation], **by_name}
    first = next(iter(by_name), "")
    abouts = {name: json.loads(about) for name, about in index.read("SELECT * FROM evaluations")}
    return {
        "evaluation": evaluation,
        "summaries": by_name,
        "abouts": abouts,
        "about": abouts.get(first, {}),
        "delivered": by_name.get("", by_name.get(first, {})).get("focus"),
        "manifest": index.run.record(),
        "costs": _COSTS,
        "bars": index.read("SELECT * FROM bars"),
        "policies": index.cached(_COUNTS, {}, list),
        "gold": index.cached(_GOLD, {}, list)[0],
        "n_questions": index.one("SELECT count(*) FROM questions"),
    }


def _summary_csv(by_evaluation: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    costs = [f"{name} per question" for name in _COSTS]
    yield csv_lines([["evaluation", "system", "hop", "measure", "value", "low", "high", *costs]])
    for name, summary in by_evaluation.items():
        for row in summary["rows"]:
            cost = row.get("cost", {})
            costs_of_row = [cost.get(key) for key in _COSTS.values()]
            lines: list[list[Any]] = []
            for hop in row["hops"]:
                for measure in summary["measures"]:
                    cells = [name, row["system"], hop["hop"], measure, hop[measure]]
                    lines.append([*cells, *hop[f"{measure}_ci"], *costs_of_row])
            yield csv_lines(lines)


def _trainings(index: RunIndex) -> dict[str, Any]:
    return {"trainings": index.run.trainings(), "rounds": index.run.manifest.rounds}


def _prompts(index: RunIndex) -> dict[str, Any]:
    """Return the text of each prompt of the bank, and the line differences of each pair."""
    paths = sorted(index.run.prompts.glob("*.json"), key=lambda path: (len(path.name), path.name))
    texts = {path.stem: path.read_text(encoding="utf-8").replace("\\n", "\n") for path in paths}
    differences: dict[tuple[str, str], list[str]] = {}
    for a, b in combinations(texts, 2):
        lines = unified_diff(texts[a].splitlines(), texts[b].splitlines(), lineterm="", n=1)
        differences[a, b] = list(lines)[2:]
    return {"texts": texts, "differences": differences}
