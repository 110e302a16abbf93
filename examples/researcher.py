"""A ReAct researcher: an agent with a search tool, trained on the documents it finds and on its answer.

    python examples/researcher.py questions.jsonl corpus.jsonl saved/researcher Qwen/Qwen2.5-0.5B-Instruct

questions.jsonl has one {"question": "...", "answer": "...", "relevant_doc_ids": ["d7"]} a line, corpus.jsonl one
{"doc_id": "d7", "title": "...", "text": "..."}. `leret.search_tool` accepts any function that returns rows.

The model is a name on the Hugging Face hub or a directory; `agent` knows only the words of leret's generated worlds.
"""

import json
import sys
from pathlib import Path

import bm25s
import dspy

import leret


class Researcher(dspy.Module):
    def __init__(self, corpus: str, max_iters: int = 4):
        super().__init__()
        self.corpus, self.max_iters = corpus, max_iters
        documents = read(corpus)
        index = bm25s.BM25()
        index.index(
            bm25s.tokenize([f"{d['title']}. {d['text']}" for d in documents], show_progress=False), show_progress=False
        )

        @leret.search_tool(ids=lambda row: row["doc_id"])
        def look_up(query: str) -> list[dict]:
            """Search the documents; returns the three best, with title and text."""
            words = bm25s.tokenize(query, show_progress=False)
            found, _ = index.retrieve(words, corpus=documents, k=3, show_progress=False)
            return list(found[0])

        self.agent = dspy.ReAct("question -> answer", tools=[look_up], max_iters=max_iters)

    def forward(self, question):
        return self.agent(question=question)


def read(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def same_answer(example, prediction, trace=None):
    return example.answer.strip().lower() == (prediction.answer or "").strip().lower()


def main(questions, corpus, directory, model, **settings):
    small = leret.CompactAdapter(outputs=True)  # short prompts: fields and output names
    dspy.configure(adapter=small if model == "agent" else dspy.ChatAdapter(use_json_adapter_fallback=False))
    fields = ("question", "answer", "relevant_doc_ids")
    examples = [dspy.Example({name: row[name] for name in fields}).with_inputs("question") for row in read(questions)]
    n_val = len(examples) // 3
    student = Researcher(corpus)
    student.set_lm(leret.LM(model, max_tokens=96 if model == "agent" else 256, temperature=0.7))
    optimizer = leret.LeReT(reward="recall", metric=same_answer, **settings)
    optimized = optimizer.compile(student, trainset=examples[n_val:], valset=examples[:n_val])
    optimized.save(directory)
    return optimized


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
