"""R/report.html: a report on a run in one self-contained file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from leret import __version__
from leret.config.data import GENERATED
from leret.core.files import write_atomically
from leret.core.progress import visible
from leret.core.runs import Run
from leret.evaluation.measures import LABELS
from leret.evaluation.report.content import TrainingData, curves_of, training_data
from leret.evaluation.report.plots import bars_by_step, curves, dumbbells
from leret.evaluation.summary import LEVEL, headline, main_measures
from leret.evaluation.systems import RAW, training_facts
from leret.rollouts.failures import cut_notes

_EVERY_HOP = ("recall", "ap")
_DUMBBELLS = {"recall": "Recall by hop", "all_found": "All gold documents found, by hop"}
_CARDS = ("recall", "all_found", "bridge_found", "ap")
_KINDS = ("policy", "prompt", "base", "baseline")


MAX_BYTES = 5_000_000
_TREES = "<!-- trees -->"  # their place in the template

Trees = Callable[[Run, str, int], str]
"""Function that returns a section as HTML, given a run, the name of an evaluation, and the maximum size in bytes."""


def write_page(
    run: Run,
    path: Path,
    summary: Mapping[str, Any],
    examples: Mapping[str, Any] | None,
    trees: Trees | None = None,
) -> None:
    """Write the report from the summary and the run's manifest, store, preferences and policies, if they exist."""
    manifest, training = run.record(), training_facts(run)
    page = render(
        summary,
        _facts(manifest, summary, training),
        training_data(run),
        training,
        examples,
        name=" · ".join(filter(None, (run.path.resolve().name, summary["name"]))),
        subtitle=_subtitle(manifest, summary),
    )
    if trees is not None:
        room = MAX_BYTES - len(page.encode())
        page = page.replace(_TREES, trees(run, summary["name"] or "", room))
    with run.writing():
        write_atomically(path, page)


def render(
    summary: Mapping[str, Any],
    facts: Sequence[tuple[str, str]],  # label, text
    learned: TrainingData,
    training: Mapping[str, Mapping[str, Any]],
    examples: Mapping[str, Any] | None,
    *,
    name: str,
    subtitle: str,
) -> str:
    """Return the report on the summary's ``focus`` as HTML without external files, with all text escaped.

    ``examples`` is the content of examples.json. ``training`` maps policies to their training.json.
    """
    options: dict[str, Any] = {
        "autoescape": True,
        "undefined": StrictUndefined,
        "finalize": visible,
    }
    loader = FileSystemLoader(Path(__file__).parent)
    return (
        Environment(loader=loader, trim_blocks=True, **options)
        .get_template("report.html.j2")
        .render(
            summary=summary,
            name=name,
            headline=headline(summary) or name,
            subtitle=subtitle,
            cards=_cards(summary),
            **_columns(summary),
            compared=_compared(summary),
            level=LEVEL,
            labels={m: LABELS.get(m, m) for m in summary["measures"]},
            percent=lambda share: f"{100 * share:g} %",
            any_failed=any(row["failed"] for row in summary["rows"]),
            sampled=_sampled(learned),
            rounds=learned.rounds,
            **_plots(summary, learned, training),
            examples=examples,
            facts=facts,
            version=__version__,
        )
    )


def _columns(summary: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the columns of the tables: main measures of systems after each hop, others after the last."""
    last, measures = summary["n_hops"], summary["measures"]
    columns = []
    for measure in measures:
        first = 1 if measure in _EVERY_HOP else last
        columns += [{"measure": measure, "hop": hop} for hop in range(first, last + 1)]
    of_types = [measure for measure in _DUMBBELLS if measure in measures] or measures[:1]
    return {
        "columns": columns,
        "types": [{"name": type_, "n": n} for type_, n in summary["n_by_type"].items()],
        "type_columns": [{"measure": measure, "hop": last} for measure in of_types],
    }


def _plots(
    summary: Mapping[str, Any], learned: TrainingData, training: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[dict[str, str]]]:
    """Return the titles and the SVG of all plots."""
    samples = (
        ("rewards", "Rewards of the samples", "reward", learned.rewards),
        ("margins", "Margins of the pairs", "chosen minus rejected reward", learned.margins),
    )
    return {
        "dumbbells": [
            {"title": title, "svg": dumbbells(summary["rows"], measure, LABELS[measure])}
            for measure, title in _DUMBBELLS.items()
            if summary["rows"] and measure in summary["measures"]
        ],
        "histograms": [
            {"title": title, "svg": bars_by_step(id, label, by_step)}
            for id, title, label, by_step in samples
            if any(by_step.values())
        ],
        "curves": [
            {
                "title": f"Training of {name}",
                "svg": curves(f"curves-{i}", "Training curves by step, or by round", panels),
            }
            for i, (name, panels) in enumerate(curves_of(training))
        ],
    }


def _cards(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare the policy after the last hop with the baseline, or with the raw question if that beats the policy."""
    focus, baseline = summary["focus"], summary["baseline"]
    rows = {row["system"]: row["hops"][-1] for row in summary["rows"]}
    if (
        focus in rows
        and RAW in rows
        and (rows[RAW].get("recall") or 0.0) > (rows[focus].get("recall") or 0.0)
    ):
        baseline = RAW
    compared = {(c["a"], c["b"], c["measure"]): c for c in summary["comparisons"]}
    return [
        {
            "measure": measure,
            "what": f"{LABELS.get(measure, measure)}, {baseline} to {focus}",
            "before": rows[baseline][measure],
            "after": rows[focus][measure],
            **{key: comparison[key] for key in ("difference", "ci", "p", "p_holm")},
        }
        for measure in (
            _CARDS if "recall" in summary["measures"] else main_measures(summary["measures"])[:4]
        )
        if (comparison := compared.get((focus, baseline, measure)))
        and comparison["difference"] is not None
    ]


def _compared(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Arrange the comparisons in a row per pair (a, b), by a: the page's focus first, systems without an LM last."""
    kinds = {row["system"]: row["kind"] for row in summary["rows"]}

    def pairs(comparisons: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        rows: dict[tuple[str | None, str, str], dict[str, Any]] = {}
        for c in comparisons:
            key = (c.get("type"), c["a"], c["b"])
            empty = dict(zip(("type", "a", "b"), key, strict=True))
            row = rows.setdefault(
                key, {**empty, "n": 0, "cells": dict.fromkeys(summary["measures"])}
            )
            row["cells"][c["measure"]] = c
            row["n"] = max(row["n"], c["n"])
        return sorted(
            rows.values(),
            key=lambda row: (row["a"] != summary["focus"], _KINDS.index(kinds[row["a"]])),
        )

    by_hop = summary["comparisons_by_hop"]
    return {
        "last": pairs(summary["comparisons"]),
        "types": pairs(summary["comparisons_by_type"]),
        "hops": [
            {"hop": hop, "pairs": pairs(c for c in by_hop if c["hop"] == hop)}
            for hop in sorted({c["hop"] for c in by_hop})
        ],
    }


def _sampled(learned: TrainingData) -> str | None:
    if not learned.n_states:
        return None
    n_samples = sum(len(values) for values in learned.rewards.values())
    spread = f"{learned.n_spread / learned.n_states:.0%}"
    text = f"{n_samples:,} rewarded samples at {learned.n_states:,} states; rewards differ at {spread} of the states."
    if n_pairs := sum(len(values) for values in learned.margins.values()):
        text += f" {n_pairs:,} pairs."
    if learned.failures:
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in sorted(learned.failures.items()))
        text += f" Samples without a reward: {kinds}."
    if learned.n_cut:
        text += f" {learned.n_cut:,} completions ({learned.n_cut / learned.n_samples:.1%}) were cut at max_tokens."
    for note in cut_notes(learned.n_cut, learned.n_samples):
        text += f" Warning: {note}."
    return text


def _subtitle(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    data, retriever, program = (
        manifest["sampling"][key] for key in ("data", "retriever", "program")
    )
    hops = summary["n_hops"]
    over = "the corpus"
    if data["kind"] in GENERATED:
        over = "a generated world"
    elif data["kind"] != "jsonl":  # the name of a data set
        over = data["kind"]
    raw = [row["hops"][-1].get("recall") for row in summary["rows"] if row["system"] == RAW]
    without = (
        f" Searching with the question itself finds {raw[0]:.0%} of the gold documents."
        if raw and raw[0]
        else ""
    )
    seen = ", excluding passages already seen" if retriever.get("exclude_seen") else ""
    picks = retriever["kind"] == "none"
    action = ("picks" if picks else "searches") if hops > 1 else "pick" if picks else "search"
    each = (
        ""
        if picks
        else f"; {retriever['kind'].upper()} returns {retriever['k']} passages per search{seen}"
    )
    return (
        f"{program['path'].rpartition(':')[2]} makes up to {hops} {action} per question over {over}{each}. "
        f"{summary['n_questions']:,} held-out questions.{without}"
    )


def _facts(
    manifest: Mapping[str, Any],
    summary: Mapping[str, Any],
    training: Mapping[str, Mapping[str, Any]],
) -> list[tuple[str, str]]:
    sampling = manifest["sampling"]
    bank, policy = sampling["sampling"], sampling["policy"]
    runs = f"temperature {summary['temperature']:g}, {summary['samples']} runs per question"
    facts = [
        (
            "evaluated",
            f"{summary['when']} on split {summary['split']}, {runs if summary['temperature'] else 'greedy'}",
        ),
        *((section, _settings(sampling[section])) for section in ("program", "retriever", "data")),
        (
            "base policy",
            f"{policy['model']} ({policy['kind']}), at most {policy['max_tokens']} tokens per completion",
        ),
        *(
            (f"retriever {name}", _settings(one))
            for name, one in manifest["eval"].get("retrievers", {}).items()
        ),
        *(
            (f"policy of {name}", _settings(values))
            for name, values in sampling.get("policies", {}).items()
        ),
        (
            "sampling",
            f"{bank['prompts']} prompts with {bank['samples']} samples each at temperature {policy['temperature']}, "
            f"reward {bank['reward']}, pairs {bank['strategy']}, seed {bank['seed']}",
        ),
    ]
    leaks = summary.get("leaks")
    facts += [
        ("note", note)
        for note in (*summary.get("notes", ()), *([leaks["verdict"]] if leaks else []))
    ]
    for name, value in training.items():
        recipe = value["key"]["recipe"]
        rate = (recipe.get("writer") or recipe)["learning_rate"]
        rounds = f" in {value['rounds']:,} rounds" if value.get("rounds") else ""
        text = (
            f"{recipe['algorithm']} from {value['parent']}: {value['examples']:,} examples, {value['steps']:,} steps"
            f"{rounds}, "
            f"learning rate {rate:g}, seed {recipe['seed']}, {value['seconds']:,.0f} s"
        )
        facts.append((name, text))
    versions = (
        f"{name} {version}" for name, version in manifest.get("versions", {}).items() if version
    )
    return [(label, text) for label, text in (*facts, ("versions", ", ".join(versions))) if text]


def _settings(values: Mapping[str, Any]) -> str:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            {f"{key}.{k}": v for k, v in value.items()}
            if isinstance(value, Mapping)
            else {key: value}
        )
    return ", ".join(
        f"{key}: {value}" for key, value in flat.items() if value is not None and value is not False
    )
