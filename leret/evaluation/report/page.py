"""R/report.html: a report on a run in one self-contained file."""

from __future__ import annotations

from collections import defaultdict
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
"""Returns a section as HTML, for a run, an evaluation's name, and the maximum size in bytes."""


def write_page(
    run: Run,
    path: Path,
    summary: Mapping[str, Any],
    examples: Mapping[str, Any] | None,
    trees: Trees | None = None,
) -> None:
    """Write the report from the summary and the run's files.

    The manifest, store, preferences and policies are used if they exist.
    """
    manifest = run.record()
    training = training_facts(run)
    name = run.path.resolve().name
    if summary["name"]:
        name += f" · {summary['name']}"
    page = render(
        summary,
        _details(manifest, summary, training),
        training_data(run),
        training,
        examples,
        name=name,
        subtitle=_subtitle(manifest, summary),
    )
    if trees is not None:
        room = MAX_BYTES - len(page.encode())
        section = trees(run, summary["name"] or "", room)
        page = page.replace(_TREES, section)
    with run.writing():
        write_atomically(path, page)


def render(
    summary: Mapping[str, Any],
    details: Sequence[tuple[str, str]],  # label, text
    learned: TrainingData,
    training: Mapping[str, Mapping[str, Any]],
    examples: Mapping[str, Any] | None,
    *,
    name: str,
    subtitle: str,
) -> str:
    """Return the report on the summary's ``focus`` as HTML without external files.

    All text is escaped. ``examples`` is the content of examples.json. ``training`` maps policies to
    their training.json.
    """
    options: dict[str, Any] = {"undefined": StrictUndefined, "finalize": visible}
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, trim_blocks=True, autoescape=True, **options)
    template = environment.get_template("report.html.j2")
    return template.render(
        summary=summary,
        name=name,
        headline=headline(summary) or name,
        subtitle=subtitle,
        cards=_cards(summary),
        **_columns(summary),
        compared=_compared(summary),
        level=LEVEL,
        labels={measure: LABELS.get(measure, measure) for measure in summary["measures"]},
        percent=lambda share: f"{100 * share:g} %",
        any_failed=any(row["failed"] for row in summary["rows"]),
        sampled=_sampled(learned),
        rounds=learned.rounds,
        **_plots(summary, learned, training),
        examples=examples,
        facts=details,
        version=__version__,
    )


def _columns(summary: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the columns of the tables: main measures after each hop, others after the last."""
    last = summary["n_hops"]
    measures = summary["measures"]
    columns = []
    for measure in measures:
        first = 1 if measure in _EVERY_HOP else last
        for hop in range(first, last + 1):
            columns.append({"measure": measure, "hop": hop})
    of_types = [measure for measure in _DUMBBELLS if measure in measures]
    if not of_types:
        of_types = measures[:1]
    return {
        "columns": columns,
        "types": [{"name": name, "n": n} for name, n in summary["n_by_type"].items()],
        "type_columns": [{"measure": measure, "hop": last} for measure in of_types],
    }


def _plots(
    summary: Mapping[str, Any], learned: TrainingData, training: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[dict[str, str]]]:
    """Return the titles and the SVG of all plots."""
    by_hop = []
    for measure, title in _DUMBBELLS.items():
        if summary["rows"] and measure in summary["measures"]:
            svg = dumbbells(summary["rows"], measure, LABELS[measure])
            by_hop.append({"title": title, "svg": svg})
    histograms = []
    if any(learned.rewards.values()):
        svg = bars_by_step("rewards", "reward", learned.rewards)
        histograms.append({"title": "Rewards of the samples", "svg": svg})
    if any(learned.margins.values()):
        svg = bars_by_step("margins", "chosen minus rejected reward", learned.margins)
        histograms.append({"title": "Margins of the pairs", "svg": svg})
    by_step = []
    for i, (name, panels) in enumerate(curves_of(training)):
        svg = curves(f"curves-{i}", "Training curves by step, or by round", panels)
        by_step.append({"title": f"Training of {name}", "svg": svg})
    return {"dumbbells": by_hop, "histograms": histograms, "curves": by_step}


def _cards(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare the policy with the baseline, or with the raw question if that beats the policy."""
    focus = summary["focus"]
    rows = {row["system"]: row["hops"][-1] for row in summary["rows"]}
    baseline = summary["baseline"]
    if focus in rows and RAW in rows:
        raw_recall = rows[RAW].get("recall") or 0.0
        if raw_recall > (rows[focus].get("recall") or 0.0):
            baseline = RAW
    measures: Sequence[str] = _CARDS
    if "recall" not in summary["measures"]:
        measures = main_measures(summary["measures"])[:4]
    compared = {(pair["a"], pair["b"], pair["measure"]): pair for pair in summary["comparisons"]}
    cards = []
    for measure in measures:
        pair = compared.get((focus, baseline, measure))
        if pair is None or pair["difference"] is None:
            continue
        card = {
            "measure": measure,
            "what": f"{LABELS.get(measure, measure)}, {baseline} to {focus}",
            "before": rows[baseline][measure],
            "after": rows[focus][measure],
        }
        for key in ("difference", "ci", "p", "p_holm"):
            card[key] = pair[key]
        cards.append(card)
    return cards


def _compared(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Arrange the comparisons in a row per pair (a, b)."""
    by_hop: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for pair in summary["comparisons_by_hop"]:
        by_hop[pair["hop"]].append(pair)
    return {
        "last": _pairs(summary, summary["comparisons"]),
        "types": _pairs(summary, summary["comparisons_by_type"]),
        "hops": [{"hop": hop, "pairs": _pairs(summary, by_hop[hop])} for hop in sorted(by_hop)],
    }


def _pairs(
    summary: Mapping[str, Any], comparisons: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a row per pair: those of the page's focus first, of systems without an LM last."""
    kinds = {row["system"]: row["kind"] for row in summary["rows"]}
    rows: dict[tuple[str | None, str, str], dict[str, Any]] = {}
    for pair in comparisons:
        key = (pair.get("type"), pair["a"], pair["b"])
        if key not in rows:
            cells = dict.fromkeys(summary["measures"])
            rows[key] = {"type": key[0], "a": key[1], "b": key[2], "n": 0, "cells": cells}
        row = rows[key]
        row["cells"][pair["measure"]] = pair
        row["n"] = max(row["n"], pair["n"])

    def order(row: Mapping[str, Any]) -> tuple[bool, int]:
        return row["a"] != summary["focus"], _KINDS.index(kinds[row["a"]])

    return sorted(rows.values(), key=order)


def _sampled(learned: TrainingData) -> str | None:
    if not learned.n_states:
        return None
    n_samples = sum(map(len, learned.rewards.values()))
    spread = learned.n_spread / learned.n_states
    text = f"{n_samples:,} rewarded samples at {learned.n_states:,} states; "
    text += f"rewards differ at {spread:.0%} of the states."
    n_pairs = sum(map(len, learned.margins.values()))
    if n_pairs:
        text += f" {n_pairs:,} pairs."
    if learned.failures:
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in sorted(learned.failures.items()))
        text += f" Samples without a reward: {kinds}."
    if learned.n_cut:
        share = learned.n_cut / learned.n_samples
        text += f" {learned.n_cut:,} completions ({share:.1%}) were cut at max_tokens."
    for note in cut_notes(learned.n_cut, learned.n_samples):
        text += f" Warning: {note}."
    return text


def _subtitle(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    sampling = manifest["sampling"]
    data_kind = sampling["data"]["kind"]
    over = "the corpus"
    if data_kind in GENERATED:
        over = "a generated world"
    elif data_kind != "jsonl":  # the name of a data set
        over = data_kind
    retriever = sampling["retriever"]
    searches = retriever["kind"] != "none"
    hops = summary["n_hops"]
    action = "searches" if hops > 1 else "search"
    if not searches:
        action = "picks" if hops > 1 else "pick"
    program = sampling["program"]["path"].rpartition(":")[2]
    text = f"{program} makes up to {hops} {action} per question over {over}"
    if searches:
        kind = retriever["kind"].upper()
        text += f"; {kind} returns {retriever['k']} passages per search"
        if retriever.get("exclude_seen"):
            text += ", excluding passages already seen"
    text += f". {summary['n_questions']:,} held-out questions."
    for row in summary["rows"]:
        recall = row["hops"][-1].get("recall")
        if row["system"] == RAW and recall:
            share = f"{recall:.0%} of the gold documents"
            text += f" Searching with the question itself finds {share}."
    return text


def _details(
    manifest: Mapping[str, Any],
    summary: Mapping[str, Any],
    training: Mapping[str, Mapping[str, Any]],
) -> list[tuple[str, str]]:
    """Return labels and texts on the settings of the run and its evaluation."""
    sampling = manifest["sampling"]
    bank = sampling["sampling"]
    policy = sampling["policy"]
    decoding = "greedy"
    if summary["temperature"]:
        decoding = f"temperature {summary['temperature']:g}, {summary['samples']} runs per question"
    details = [("evaluated", f"{summary['when']} on split {summary['split']}, {decoding}")]
    for section in ("program", "retriever", "data"):
        details.append((section, _settings(sampling[section])))
    base = f"{policy['model']} ({policy['kind']})"
    base += f", at most {policy['max_tokens']} tokens per completion"
    details.append(("base policy", base))
    for name, settings in manifest["eval"].get("retrievers", {}).items():
        details.append((f"retriever {name}", _settings(settings)))
    for name, settings in sampling.get("policies", {}).items():
        details.append((f"policy of {name}", _settings(settings)))
    samples = f"{bank['prompts']} prompts with {bank['samples']} samples each"
    samples += f" at temperature {policy['temperature']}, reward {bank['reward']}"
    samples += f", pairs {bank['strategy']}, seed {bank['seed']}"
    details.append(("sampling", samples))
    for note in summary.get("notes", ()):
        details.append(("note", note))
    if summary.get("leaks"):
        details.append(("note", summary["leaks"]["verdict"]))
    for name, note in training.items():
        details.append((name, _training(note)))
    versions = []
    for name, version in manifest.get("versions", {}).items():
        if version:
            versions.append(f"{name} {version}")
    details.append(("versions", ", ".join(versions)))
    return [(label, text) for label, text in details if text]


def _training(note: Mapping[str, Any]) -> str:
    """Describe the training.json of a policy."""
    recipe = note["key"]["recipe"]
    rate = (recipe.get("writer") or recipe)["learning_rate"]
    text = f"{recipe['algorithm']} from {note['parent']}: {note['examples']:,} examples"
    text += f", {note['steps']:,} steps"
    if note.get("rounds"):
        text += f" in {note['rounds']:,} rounds"
    text += f", learning rate {rate:g}, seed {recipe['seed']}, {note['seconds']:,.0f} s"
    return text


def _settings(values: Mapping[str, Any]) -> str:
    settings: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            for name, setting in value.items():
                settings[f"{key}.{name}"] = setting
        else:
            settings[key] = value
    texts = []
    for key, value in settings.items():
        if value is not None and value is not False:
            texts.append(f"{key}: {value}")
    return ", ".join(texts)
