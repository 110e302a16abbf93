"""Pages of the viewer as HTML or CSV text, for the server and for `leret view --static`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import unified_diff
from itertools import combinations
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.filters import do_mark_safe

from leret.core.progress import visible
from leret.viewer.collect import main_measure, summaries
from leret.viewer.index import RunIndex
from leret.viewer.lists import LISTS, PAGE, csv_lines, select
from leret.viewer.tree import Tree, word_difference

ASSETS = Path(__file__).parent / "assets"
MENU = ("questions", "groups", "pairs", "trainings", "prompts", "coverage")
NOTES = "SELECT text FROM notes"
_STATIC_ROWS = 2000
_DOTS = re.compile(r"~*\.\.?")

Parts = tuple[str, ...]
"""Segments of a page's path: ``("q", ID, STATE)``; those of a run after the first begin with ``("r", NAME)``."""

Url = Callable[..., str]
"""Function that returns the address of a page, given its parts, an ``anchor`` and filters."""

_COUNTS = (
    "SELECT p.name, sum(step = 0) AS questions, sum(sampled) AS states, sum(n) FILTER (WHERE sampled) AS samples, "
    "sum(failures) AS failures, sum(total) FILTER (WHERE sampled) / sum(rewarded) FILTER (WHERE sampled) AS mean, "
    "avg(best > worst) FILTER (WHERE sampled) AS spread FROM policies p "
    "CROSS JOIN groups g ON g.policy_digest = p.digest GROUP BY p.place"
)

_GOLD = "SELECT count(recall) AS n, avg(recall) AS best, sum(recall = 1) AS complete FROM questions"
_COSTS = {"LM calls": "lm_calls", "tokens": "tokens", "searches": "searches", "seconds": "seconds"}


def segment(part: str) -> str:
    """Return a part as a segment of a path: ``~.`` and ``~..`` for ``.`` and ``..``, which mean other directories."""
    return f"~{part}" if _DOTS.fullmatch(part) else part


def part_of(segment: str) -> str:
    """Return the part that a segment stands for."""
    return segment.removeprefix("~") if _DOTS.fullmatch(segment) else segment


def server_url(*parts: str, anchor: str = "", **query: Any) -> str:
    """Return the address of a page on the server."""
    text = urlencode({name: value for name, value in query.items() if value not in (None, "")})
    path = "/" + "/".join(quote(segment(part), safe="") for part in parts)
    return path + (f"?{text}" if text else "") + (f"#{anchor}" if anchor else "")


@dataclass
class Pages:
    """Pages of several runs; in a static site, only the questions in ``static`` have pages."""

    runs: Mapping[str, RunIndex]
    notes: Mapping[str, str]  # by run
    static: Collection[str] = ()

    def __post_init__(self) -> None:
        options: dict[str, Any] = {
            "autoescape": True,
            "undefined": StrictUndefined,
            "finalize": visible,
        }
        loader = FileSystemLoader(ASSETS)
        self._jinja = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, **options)
        self._jinja.globals |= {"word_difference": word_difference, "main_measure": main_measure}

    def page(
        self, parts: Parts, query: Mapping[str, str], url: Url = server_url
    ) -> str | Iterator[str] | None:
        """Return a page's HTML, or blocks of CSV; None if there is no such page. ConfigError for invalid filters."""
        name, local = self._local(parts)
        index, first = self.runs[name], next(iter(self.runs))
        prefixes = {run: () if run == first else ("r", run) for run in self.runs}
        kind, _, suffix = local[0].partition(".") if local else ("overview", "", "")
        shared = {
            "url": lambda *more, **query: url(*prefixes[name], *more, **query),
            "asset": lambda file: url("assets", file),
            "runs": {run: url(*prefix, *self._twin(run, local)) for run, prefix in prefixes.items()},
            "notes": [*self.notes.get(name, "").splitlines(), *(text for [text] in index.read(NOTES))],
            "run": name, "index": index, "kind": kind, "version": self.version(parts), "menu": MENU,
            "static": self.static, "query": dict(query), "prefix": "",
        }  # fmt: skip

        def render(template: str, **values: Any) -> str:
            return self._jinja.get_template(f"{template}.html.j2").render(**shared, **values)

        if kind == "q" and len(local) in {2, 3}:
            question = self.question(name, local[1], "".join(local[2:]), query.get("policy", ""))
            return render("question", **question) if question else None
        if len(local) > 1:
            return None
        if kind in LISTS:
            systems, defaults = systems_of(index)
            selection = select(kind, query, systems, defaults)
            limit = _STATIC_ROWS if self.static else PAGE
            if suffix == "csv":
                return selection.csv(index)
            ids = selection.ids(index)
            rows = selection.rows(index, ids[selection.page * limit :][:limit])
            values = {
                "selection": selection,
                "systems": systems,
                "total": len(ids),
                "page_size": limit,
            }
            return render("list", rows=rows, **values)
        if kind == "overview" and suffix == "csv":
            return _summary_csv(summaries(index.run))
        content = {"overview": _overview, "trainings": _trainings, "prompts": _prompts}.get(kind)
        return render(kind, **content(index)) if content else None

    def part(self, template: str, **values: Any) -> str:
        """Return a part of report.html, which has no links to pages."""
        return do_mark_safe(
            self._jinja.get_template(f"{template}.html.j2").render(url=None, **values)
        )

    def version(self, parts: Parts) -> str:
        """Return a text that changes with the content of a page."""
        name, local = self._local(parts)
        if local[:1] != ("q",):
            return str(self.runs[name].version)
        sql = "SELECT sum(n) || ' ' || (SELECT count(*) FROM facts.figures) FROM groups WHERE question_id = ?"
        return " ".join(str(index.one(sql, ("".join(local[1:2]),))) for index in self.runs.values())

    def _twin(self, run: str, local: Parts) -> Parts:
        """Return the page of another run that corresponds to a page: the same question, or else the overview."""
        exists = "SELECT 1 FROM questions WHERE question_id = ?"
        return (
            local
            if local[:1] != ("q",)
            else local[:2]
            if self.runs[run].one(exists, local[1:2] or ("",))
            else ()
        )

    def _local(self, parts: Parts) -> tuple[str, Parts]:
        if parts[:1] == ("r",) and parts[1:] and parts[1] in self.runs:
            return parts[1], parts[2:]
        return next(iter(self.runs)), parts

    def question(
        self, run: str, question_id: str, state_id: str = "", policy: str = ""
    ) -> dict[str, Any] | None:
        """Return the values of tree.html.j2 for a question, or a state; None if there is no such question or state."""
        trees = {name: Tree(index, question_id) for name, index in self.runs.items()}
        tree, policies = trees[run], trees[run].policies()
        digest = policy or (policies[-1]["digest"] if policies else "")
        if state_id:  # under every policy of every run
            groups = [
                (name, one, group)
                for name, one in trees.items()
                for group in one.groups(None, state_id)
            ]
        else:
            groups = [(run, tree, group) for group in tree.groups(digest)]
        if tree.text is None or (state_id and not groups):
            return None
        paths: dict[str, Any] = {}
        for name, one in trees.items():
            systems, defaults = systems_of(self.runs[name])
            steps = one.paths()
            for label in dict.fromkeys(
                [*(n for n in steps if n not in systems), *defaults.values(), *systems]
            ):
                if label in steps:
                    paths[f"{name} · {label}" if len(trees) > 1 else label] = steps[label]
        values = {
            "tree": tree,
            "groups": groups,
            "policies": policies,
            "digest": digest,
            "state_id": state_id,
        }
        return {
            **values,
            "paths": paths,
            "hops": sorted({step["hop"] for path in paths.values() for step in path}),
        }


def systems_of(index: RunIndex, evaluation: str = "") -> tuple[list[str], dict[str, str]]:
    """Return all evaluated systems, and an evaluation's default systems to compare: delivered policy and baseline."""
    every = summaries(index.run)
    rows = [(name, row["system"]) for name, one in every.items() for row in one["rows"]]
    systems = ["/".join(filter(None, row)) for row in rows]
    summary = every.get(evaluation, {})
    pair = {"b": summary.get("baseline") or "", "a": summary.get("focus") or ""}
    defaults = {name: "/".join(filter(None, (evaluation, system))) for name, system in pair.items()}
    return systems, {name: system for name, system in defaults.items() if system in systems}


def _overview(index: RunIndex) -> dict[str, Any]:
    figures = index.read("SELECT * FROM figures WHERE page = 'overview'")
    counts = {"policies": index.cached(_COUNTS, {}, list), "gold": index.cached(_GOLD, {}, list)[0]}
    counts["n_questions"] = index.one("SELECT count(*) FROM questions")
    return {"summaries": summaries(index.run), "figures": figures, "costs": _COSTS, **counts}


def _summary_csv(every: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    costs = [f"{name} per question" for name in _COSTS]
    yield csv_lines([["evaluation", "system", "hop", "measure", "value", "low", "high", *costs]])
    for name, one in every.items():
        for row in one["rows"]:
            cost = [row.get("cost", {}).get(key) for key in _COSTS.values()]
            cells = [
                (hop["hop"], m, hop[m], *hop[f"{m}_ci"], *cost)
                for hop in row["hops"]
                for m in one["measures"]
            ]
            yield csv_lines([[name, row["system"], *more] for more in cells])


def _trainings(index: RunIndex) -> dict[str, Any]:
    figures = dict(
        map(tuple, index.read("SELECT title, svg FROM figures WHERE page = 'trainings'"))
    )
    paths = sorted(
        index.run.policies.glob("*/training.json"), key=lambda path: path.stat().st_mtime
    )
    trainings = [(path.parent.name, json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    return {"trainings": trainings, "figures": figures, "rounds": index.run.manifest.rounds}


def _prompts(index: RunIndex) -> dict[str, Any]:
    """Return the text of each prompt of the bank, and the line differences of each pair of prompts."""
    paths = sorted(index.run.prompts.glob("*.json"), key=lambda path: (len(path.name), path.name))
    texts = {path.stem: path.read_text(encoding="utf-8").replace("\\n", "\n") for path in paths}
    lines = {name: text.splitlines() for name, text in texts.items()}
    pairs = {
        (a, b): list(unified_diff(lines[a], lines[b], lineterm="", n=1))[2:]
        for a, b in combinations(texts, 2)
    }
    return {"texts": texts, "differences": pairs}
