import csv
import json

import pyarrow
import pyarrow.parquet

from leret.config.data import DataSettings
from leret.datasets import load as data
from leret.datasets.describe import inspect as inspect_data

DOCUMENTS = [
    {"doc_id": "A", "title": "Ada", "text": "Ada wrote the first program."},
    {"doc_id": "B", "title": "Byron", "text": "Byron was a poet."},
    {"doc_id": "C", "title": "Café", "text": "A café is a place."},
]
QUESTIONS = [
    {"id": "q1", "question": "Who wrote the first program?", "answer": "Ada", "relevant_doc_ids": ["A"],
     "type": "bridge", "hops": 2},
    {"id": "q2", "question": "Who was a poet?", "answer": None, "relevant_doc_ids": ["B", "A", "B"]},
]  # fmt: skip
_BYRON, _CAFE = ["Byron", ["Byron was a poet."]], ["Café", ["A place."]]
HOTPOT = [
    {"_id": "5a", "question": "Whose father was a poet?", "answer": "Ada", "type": "bridge", "level": "hard",
     "supporting_facts": [["Ada", 0], ["Byron", 1], ["Ada", 2]],
     "context": [["Ada", ["Ada wrote.", " She was Byron's."]], _BYRON, _CAFE]},
    {"_id": "5b", "question": "Is Byron older than the café?", "answer": "yes", "type": "comparison", "level": "easy",
     "supporting_facts": [["Byron", 0], ["Café", 0]], "context": [_BYRON, _CAFE]},
]  # fmt: skip
HOVER = [
    {"uid": "u1", "claim": "Ada was Byron's.", "supporting_facts": [["Ada", 0], ["Byron", 0]], "label": "SUPPORTED",
     "num_hops": 2, "hpqa_id": "5a"},
]  # fmt: skip
_PARAGRAPHS = [("Ada", "Ada was a programmer.", True), ("Ada", "Ada is a language.", False),
               ("Annabella", "The mother of Ada.", True)]  # fmt: skip
MUSIQUE = [
    {"id": "2hop__1_2", "question": "Who is the mother of the first programmer?", "answer": "Annabella",
     "answerable": True, "question_decomposition": [{"id": 1}, {"id": 2}],
     "paragraphs": [{"idx": i, "title": title, "paragraph_text": text, "is_supporting": gold}
                    for i, (title, text, gold) in enumerate(_PARAGRAPHS)]},
]  # fmt: skip


def json_lines(path, records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return str(path)


def array(path, records, indent=None):
    path.write_text(json.dumps(records, ensure_ascii=False, indent=indent), encoding="utf-8")
    return str(path)


def _cell(value):
    return json.dumps(value) if isinstance(value, list) else value


def csv_table(path, rows):
    with path.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return str(path.with_suffix(".csv"))


def tsv_table(path, rows):
    lines = [[*rows[0]], *(["" if value is None else str(_cell(value)) for value in row.values()] for row in rows)]
    path.with_suffix(".tsv").write_text("".join("\t".join(line) + "\n" for line in lines), encoding="utf-8")
    return str(path.with_suffix(".tsv"))


def parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path.with_suffix(".parquet"))
    return str(path.with_suffix(".parquet"))


PLACES = {json_lines: "{}:2: ", array: "{}: item 2: ", csv_table: "{}:3: ", tsv_table: "{}:3: ", parquet: "{}: row 2: "}
"""The place of the second record in a message, by the function that writes the file."""


def settings(kind, questions=None, corpus=None, **keys):
    files = {name: path for name, path in (("questions", questions), ("corpus", corpus)) if path is not None}
    return DataSettings.model_validate({"kind": kind, "split": "all", **files, **keys})


def load(kind, questions=None, corpus=None, **keys):
    return data.load(settings(kind, questions, corpus, **keys))


def load_tasks(kind, questions=None, **keys):
    return data.load_tasks(settings(kind, questions, **keys))


def inspect(kind, questions=None, corpus=None, **keys):
    return inspect_data(settings(kind, questions, corpus, **{"skip_invalid": True, **keys}))
