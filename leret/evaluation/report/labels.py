"""How results are called where people read them."""

from __future__ import annotations

LABELS = {
    "recall": "recall",
    "ap": "AP",
    "all_found": "all gold found",
    "bridge_found": "bridge found",
    "ndcg": "nDCG",
    "rr": "reciprocal rank",
    "success": "any gold found",
}
"""Measures as tables and plots write them."""

GLOSSARY = (
    ("hop", "One step of the program: the language model writes a query, the retriever answers it."),
    ("recall", "The share of a question's gold documents among all passages found by the end of a hop."),
    (
        "AP",
        "Average precision: also counts how far up in the ranking the gold documents stand.",
    ),
    ("all gold found", "The share of questions whose gold documents are all found."),
    (
        "bridge found",
        "Recall of the gold documents whose title the question does not name: one has to read about them first. "
        "Questions that name all their documents have no value.",
    ),
    ("raw-question", "No language model: the question itself is the query, at every hop."),
    (
        "oracle-titles",
        "No language model: the titles of the gold documents are the queries.",
    ),
    (
        "rm3",
        "No language model: the question, with words added that its first findings share (pseudo-relevance feedback).",
    ),
    ("fused:NAME", "What the raw question and the system NAME found, fused by reciprocal rank."),
    ("base", "The language model before training, with no examples in its prompt."),
    ("bank:1, bank:2 ...", "The same model with worked examples in its prompt: what was sampled with."),
    ("sft", "Trained to write, without examples, the best query that was sampled at each state."),
    ("ipo, dpo", "Trained further to prefer the better of two sampled queries to the worse."),
    ("sft-more", "A control: sft for as many steps as sft and the preference training take together."),
    ("failed", "Questions that an outage or a crash kept from an answer; counted, never scored."),
    (
        "unparsed",
        "Questions where the program could not read what the model wrote; the run ends there, with what it has.",
    ),
    ("interval", "Percentile bootstrap over questions: where the mean of another such set of questions would lie."),
    (
        "p",
        "How often so large a difference would come about if the systems were interchangeable on every question.",
    ),
)
"""The report's last section: a word, and what it means."""
