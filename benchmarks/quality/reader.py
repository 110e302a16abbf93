"""Train the reader of the table "Small models that search": SmolLM2-135M-Instruct learns to answer from passages.

    python benchmarks/quality/reader.py OUT --data DIR [--questions N]

Takes `--questions` questions of HotpotQA's training split, searches for each (BM25, the question itself, six passages),
and fine-tunes the LM on the reference answers, with the prompts that `reader` in `leret eval` sends. Half of the
prompts first show the gold passages among the best 100, so that the reader learns to use what it is shown. Writes a
model directory for `reader.policy`:

    leret eval eval/hotpotqa.yaml --run RUN --set reader.policy.kind=local --set reader.policy.model=OUT \\
        --set reader.policy.max_tokens=12 --set reader.words=40 --set "measures=[recall, em, f1]" --set evaluation=read
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from leret.config.load import load_recipe
from leret.config.sampling import SamplingRecipe
from leret.core.types import Task
from leret.policies.checkpoints import find_model
from leret.programs.prompts import reader_lines
from leret.rollouts.environment import Environment

WORDS, PASSAGES, BATCH = 40, 6, 8
MICRO_BATCH = 2  # rows in memory at once
ROOT = Path(__file__).resolve().parents[2]


def prompts(recipe: SamplingRecipe, n: int, seed: int) -> list[tuple[str, str]]:
    """Return prompts with a reference answer for ``n`` questions of the training split."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as cache, Environment(recipe, Path(cache)) as environment:
        tasks = [task for task in environment.tasks("train", 2 * n) if task.answers][:n]
        rankings = environment.retriever.search([task.text for task in tasks], 100)
    rows = []
    for task, found in zip(tasks, rankings, strict=True):
        shown = list(found)
        if rng.random() < 0.5:
            found_gold = [passage for passage in found if passage.doc_id in task.gold]
            shown = [*found_gold, *(passage for passage in found if passage.doc_id not in task.gold)]
        rows.append(row(task, shown[:PASSAGES], rng))
    return rows


def row(task: Task, passages: Sequence[Any], rng: random.Random) -> tuple[str, str]:
    """Return a prompt and its answer; the order of the passages says nothing."""
    shuffled = rng.sample(list(passages), len(passages))
    return "\n".join(reader_lines(task, shuffled, WORDS, chat=True)), task.answers[0]


def batch(tokenizer: Any, rows: Sequence[tuple[str, str]]) -> tuple[dict[str, torch.Tensor], int]:
    """Return left-padded inputs, whose last tokens are the answers, and how many logits to keep."""
    sequences, answers = [], []
    for prompt, answer in rows:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        target = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        sequences.append(tokenizer.encode(text, add_special_tokens=False) + target)
        answers.append(len(target))
    width = max(map(len, sequences))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for index, (sequence, length) in enumerate(zip(sequences, answers, strict=True)):
        ids[index, width - len(sequence) :] = torch.tensor(sequence)
        mask[index, width - len(sequence) :] = 1
        labels[index, width - length :] = ids[index, width - length :]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": labels}
    return inputs, max(answers) + 1


def train(model: Any, tokenizer: Any, rows: list[tuple[str, str]], rate: float, seed: int) -> None:
    """Take one pass over the rows, with the rate falling to zero."""
    random.Random(seed).shuffle(rows)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.0)
    steps = len(rows) // BATCH
    for step in range(steps):
        chosen = rows[step * BATCH : (step + 1) * BATCH]
        total = 0.0
        for start in range(0, BATCH, MICRO_BATCH):
            inputs, keep = batch(tokenizer, chosen[start : start + MICRO_BATCH])
            labels = inputs.pop("labels")[:, -keep + 1 :]
            logits = model(**inputs, logits_to_keep=keep).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            (loss * MICRO_BATCH / BATCH).backward()
            total += float(loss.detach()) * MICRO_BATCH / BATCH
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}/{steps}, loss {total:.3f}", flush=True)


def main() -> None:
    """Train and save the reader."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--questions", type=int, default=160)
    parser.add_argument("--rate", type=float, default=4e-5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    data = arguments.data.resolve()
    keys = [f"data.questions={data / 'queries_all.jsonl.gz'}", f"data.corpus={data / 'corpus.jsonl.gz'}"]
    recipe = load_recipe(
        ROOT / "sampling/smollm2-hotpotqa.yaml", SamplingRecipe, [*keys, f"policy.model={arguments.model}"]
    )
    rows = prompts(recipe, arguments.questions, arguments.seed)
    place = find_model(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(place)
    model = AutoModelForCausalLM.from_pretrained(place, dtype="float32").train()
    train(model, tokenizer, rows, arguments.rate, arguments.seed)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
