"""Gathering what the report shows from the run directory, and writing it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leret.eval.learned import learned
from leret.eval.report import render
from leret.eval.systems import RAW, training_facts
from leret.runs import Run, write_atomically

__all__ = ["describe", "facts_of", "write_page"]


def write_page(run: Run, path: Path, summary: Mapping[str, Any], examples: Mapping[str, Any] | None) -> None:
    """Write the report.

    Args:
        run: its manifest, store, preferences and policies are read, as far as they are there.
        path: of the page.
        summary: summary.json.
        examples: examples.json, where a policy is trained.

    Raises:
        RunError: the run cannot be read or written.
    """
    manifest = run.record()
    training = training_facts(run)
    page = render(
        summary,
        facts_of(manifest, summary, training),
        learned(run),
        training,
        examples,
        name=" · ".join(filter(None, (run.path.resolve().name, summary["name"]))),
        subtitle=describe(manifest, summary),
    )
    with run.writing():
        write_atomically(path, page)


def describe(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """The run in a sentence."""
    sampling = manifest.get("sampling") or {}
    data, retriever, program = (sampling.get(key) or {} for key in ("data", "retriever", "program"))
    hops = summary["n_hops"]
    over = "a generated world" if data.get("kind") == "world" else data.get("kind", "unknown data")
    raw = [row["hops"][-1]["recall"] for row in summary["rows"] if row["system"] == RAW]
    without = f" Searching for the question itself finds {raw[0]:.0%} of the gold documents." if raw and raw[0] else ""
    seen = ", passages already seen excluded" if retriever.get("exclude_seen") else ""
    return (
        f"{_class(program)} writes {hops} {'queries' if hops > 1 else 'query'} a question over {over}; "
        f"{str(retriever.get('kind', '')).upper()} returns {retriever.get('k', '?')} passages for each{seen}. "
        f"{summary['n_questions']:,} held-out questions.{without}"
    )


def facts_of(
    manifest: Mapping[str, Any], summary: Mapping[str, Any], training: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """What the run was made with: label and text."""
    sampling = manifest.get("sampling") or {}
    bank = sampling.get("sampling") or {}
    policy = sampling.get("policy") or {}
    facts = [
        ("evaluated", f"{summary['when']} on split {summary['split']}, {_decoding(summary)}"),
        ("program", _settings(sampling.get("program") or {})),
        ("retriever", _settings(sampling.get("retriever") or {})),
        ("data", _settings(sampling.get("data") or {})),
        (
            "base policy",
            f"{policy.get('model')} ({policy.get('kind')}), at most {policy.get('max_tokens')} tokens a completion",
        ),
        (
            "sampling",
            f"{bank.get('prompts')} prompts of {bank.get('samples')} samples at temperature "
            f"{policy.get('temperature')}, reward {bank.get('reward')}, pairs {bank.get('strategy')}, "
            f"seed {bank.get('seed')}",
        ),
    ]
    for name, value in training.items():
        recipe = (value.get("key") or {}).get("recipe") or {}
        facts.append(
            (
                name,
                f"{recipe.get('algorithm')} from {value.get('parent')}: {value.get('examples'):,} examples, "
                f"{value.get('steps'):,} steps, learning rate {recipe.get('learning_rate'):g}, "
                f"seed {recipe.get('seed')}, {value.get('seconds'):,.0f} s",
            )
        )
    versions = ", ".join(f"{name} {version}" for name, version in (manifest.get("versions") or {}).items() if version)
    facts.append(("versions", versions))
    return [(label, text) for label, text in facts if text]


def _decoding(summary: Mapping[str, Any]) -> str:
    if not summary["temperature"]:
        return "greedy"
    return f"temperature {summary['temperature']:g}, {summary['samples']} runs a question"


def _class(program: Mapping[str, Any]) -> str:
    return str(program.get("path", "?")).rpartition(":")[2]


def _settings(values: Mapping[str, Any]) -> str:
    """Settings that are set, nested ones dotted."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            {f"{key}.{inner}": item for inner, item in value.items()} if isinstance(value, Mapping) else {key: value}
        )
    return ", ".join(f"{key}: {value}" for key, value in flat.items() if value is not None and value is not False)
