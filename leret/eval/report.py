"""R/report.html: one file that shows a run to whoever has no leret."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from leret import __version__
from leret.eval.learned import Learned, curves_of
from leret.eval.plots import bars_by_hop, dumbbells, training_curves
from leret.eval.systems import RAW
from leret.eval.wording import GLOSSARY, LABELS

__all__ = ["render"]

_EVERY_HOP = ("recall", "ap")
_SURE = 0.05
"""A difference of a smaller adjusted p is told as one."""

_CARDS = ("recall", "all_found", "bridge_found", "ap")


def render(
    summary: Mapping[str, Any],
    facts: Sequence[tuple[str, str]],
    learned: Learned,
    training: Mapping[str, Mapping[str, Any]],
    examples: Mapping[str, Any] | None,
    *,
    name: str,
    subtitle: str,
) -> str:
    """The page.

    Args:
        summary: summary.json; with ``focus``, the policy that the page is about, or None.
        facts: what it was made with: label and text.
        learned: what the run was trained on.
        training: training.json by policy.
        examples: examples.json, or None where nothing is trained yet.
        name: of the run.
        subtitle: one sentence on the run.

    Returns:
        HTML that needs nothing beside it. All text is escaped; the plots are the only markup that is put in.
    """
    last = summary["n_hops"]
    measures = summary["measures"]
    columns = [{"measure": m, "hop": h} for m in measures for h in range(1, last + 1) if m in _EVERY_HOP or h == last]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    cards = _cards(summary)
    return environment.get_template("report.html.j2").render(
        summary=summary,
        name=name,
        headline=_beaten(summary) or _headline(summary, cards) or name,
        subtitle=subtitle,
        cards=cards,
        columns=columns,
        compared=_compared(summary),
        level=_SURE,
        types=[{"name": type_, "n": n} for type_, n in summary["n_by_type"].items()],
        type_columns=[{"measure": m, "hop": last} for m in ("recall", "all_found") if m in measures],
        labels={m: LABELS.get(m, m) for m in measures},
        percent=lambda share: f"{100 * share:g} %",
        any_failed=any(row["failed"] for row in summary["rows"]),
        dumbbells=_dumbbells(summary),
        histograms=_histograms(learned),
        sampled=_sampled(learned),
        curves=[
            {"title": f"Training of {policy}", "svg": training_curves(f"curves-{i}", panels)}
            for i, (policy, panels) in enumerate(curves_of(training))
        ],
        examples=examples,
        facts=facts,
        glossary=GLOSSARY,
        version=__version__,
    )


def _headline(summary: Mapping[str, Any], cards: Sequence[Mapping[str, Any]]) -> str | None:
    """What happened, in a line; None before there is anything to say."""
    if not cards or cards[0]["what"] != _card_title("recall", summary):
        return None
    card = cards[0]
    low, high = card["ci"]
    verb = "finds more" if low is not None and low > 0 else ("finds less" if high is not None and high < 0 else None)
    if verb is None:
        return f"{summary['focus']} finds about as much as {summary['baseline']}"
    shares = f"{card['after']:.0%} of the gold documents, against {card['before']:.0%}"
    return f"{summary['focus']} {verb} than {summary['baseline']}: {shares}"


def _beaten(summary: Mapping[str, Any]) -> str | None:
    """That the raw question finds more than every system with an LM, where it surely finds more than the best."""
    found = {row["system"]: row["hops"][-1]["recall"] or 0.0 for row in summary["rows"]}
    best = max(
        (r["system"] for r in summary["rows"] if r["kind"] != "baseline"), key=lambda name: found[name], default=RAW
    )
    pairs = {(c["a"], c["b"]): c for c in summary["comparisons"] if c["measure"] == "recall"}
    p = (pairs.get((best, RAW)) or pairs.get((RAW, best)) or {"p_holm": None})["p_holm"]
    if found.get(RAW, 0.0) <= found.get(best, 0.0) or p is None or p >= _SURE:
        return None
    shares = f"{found[RAW]:.0%} of the gold documents, against {found[best]:.0%} by {best}"
    return f"The question itself, searched for without an LM, finds more than every system with an LM: {shares}"


def _cards(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The policy's figures after the last hop beside the baseline's."""
    focus, baseline = summary["focus"], summary["baseline"]
    rows = {row["system"]: row for row in summary["rows"]}
    compared = {(c["a"], c["b"], c["measure"]): c for c in summary["comparisons"]}
    cards = []
    for measure in _CARDS:
        comparison = compared.get((focus, baseline, measure))
        if comparison is None or comparison["difference"] is None:
            continue
        cards.append(
            {
                "what": _card_title(measure, summary),
                "before": rows[baseline]["hops"][-1][measure],
                "after": rows[focus]["hops"][-1][measure],
                **{key: comparison[key] for key in ("difference", "ci", "p", "p_holm")},
            }
        )
    return cards


def _card_title(measure: str, summary: Mapping[str, Any]) -> str:
    return f"{LABELS[measure]}, {summary['baseline']} to {summary['focus']}"


def _compared(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The comparisons with a row a pair; the policy that the page is about first, systems without an LM last."""
    kinds = {row["system"]: row["kind"] for row in summary["rows"]}
    order = ["policy", "prompt", "base", "baseline"]

    def pairs(comparisons: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        rows: dict[tuple[str | None, str, str], dict[str, Any]] = {}
        for c in comparisons:
            empty = {
                "a": c["a"],
                "b": c["b"],
                "type": c.get("type"),
                "n": 0,
                "cells": dict.fromkeys(summary["measures"]),
            }
            row = rows.setdefault((c.get("type"), c["a"], c["b"]), empty)
            row["cells"][c["measure"]] = c
            row["n"] = max(row["n"], c["n"])
        return sorted(rows.values(), key=lambda row: (row["a"] != summary["focus"], order.index(kinds[row["a"]])))

    by_hop = summary["comparisons_by_hop"]
    return {
        "last": pairs(summary["comparisons"]),
        "types": pairs(summary["comparisons_by_type"]),
        "hops": [
            {"hop": hop, "pairs": pairs(c for c in by_hop if c["hop"] == hop)}
            for hop in sorted({c["hop"] for c in by_hop})
        ],
    }


def _dumbbells(summary: Mapping[str, Any]) -> list[dict[str, str]]:
    if not summary["rows"]:
        return []
    titles = {"recall": "Recall by hop", "all_found": "All gold documents found, by hop"}
    return [
        {"title": title, "svg": dumbbells(summary["rows"], measure, LABELS[measure])}
        for measure, title in titles.items()
        if measure in summary["measures"]
    ]


def _histograms(learned: Learned) -> list[dict[str, str]]:
    wanted = (
        ("rewards", "Rewards of the samples", "reward", learned.rewards),
        ("margins", "Margins of the pairs", "reward of chosen less rejected", learned.margins),
    )
    return [
        {"title": title, "svg": bars_by_hop(name, label, by_hop)}
        for name, title, label, by_hop in wanted
        if any(len(values) for values in by_hop.values())
    ]


def _sampled(learned: Learned) -> str | None:
    if not learned.n_states:
        return None
    n_samples = sum(len(values) for values in learned.rewards.values())
    spread = f"{learned.n_spread / learned.n_states:.0%}"
    text = f"{n_samples:,} rewarded samples at {learned.n_states:,} states; at {spread} of them the rewards differ."
    n_pairs = sum(len(values) for values in learned.margins.values())
    if n_pairs:
        text += f" {n_pairs:,} pairs."
    if learned.failures:
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in sorted(learned.failures.items()))
        text += f" Without a reward: {kinds}."
    return text
