"""Multi-hop search over your own data: train the query writer and save the program.

    leret index build sample.yaml --out indexes/mine
    python examples/multihop.py questions.jsonl indexes/mine saved/multihop Qwen/Qwen2.5-0.5B-Instruct

questions.jsonl has one {"question": "...", "relevant_doc_ids": ["d7", "d2"]} a line. The model is a name on the Hugging
Face hub or a directory; `demo` knows only the words of leret's generated world. `examples/app.py` serves the result.
"""

import json
import sys
from pathlib import Path

import dspy

import leret
from leret.retrieval.load import open_retriever


class WriteQuery(dspy.Signature):
    """Write a search query for the document that is still missing to answer the question."""

    question: str = dspy.InputField()
    context: list[str] = dspy.InputField(desc="passages found so far, as `title | text`")
    query: str = dspy.OutputField(desc="a short search query")


class MultiHop(dspy.Module):
    def __init__(self, index: str, hops: int = 2):
        super().__init__()
        self.index, self.hops = index, hops
        self.write_query = dspy.Predict(WriteQuery)
        self.search = leret.Search(k=3, retriever=open_retriever(index).retriever)

    def forward(self, question):
        found = leret.Found()
        for _ in range(self.hops):
            query = self.write_query(question=question, context=found.passages).query
            found = self.search(query, found)
        return dspy.Prediction(context=found.passages, doc_ids=found.doc_ids)


def recall(example, prediction, trace=None):
    return len(set(example.gold) & set(prediction.doc_ids)) / len(example.gold)


def read(path):
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return [dspy.Example(question=r["question"], gold=r["relevant_doc_ids"]).with_inputs("question") for r in rows]


def main(questions, index, directory, model, **settings):
    # The shipped policy of 1M parameters needs short prompts; an instruction-tuned model uses DSPy's adapter.
    dspy.configure(adapter=leret.CompactAdapter() if model == "demo" else dspy.ChatAdapter())
    examples = read(questions)
    n_val = len(examples) // 3
    student = MultiHop(str(Path(index).resolve()))
    student.set_lm(leret.LM(model, temperature=0.0, max_tokens=16 if model == "demo" else 64))
    optimizer = leret.LeReT(reward="ap", metric=recall, **settings)
    optimized = optimizer.compile(student, trainset=examples[n_val:], valset=examples[:n_val])
    for candidate in optimized.candidate_programs:
        print(f"{candidate['stage']}: recall {candidate['score']:.1f} %")
    optimized.save(directory)
    return optimized


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
