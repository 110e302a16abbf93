"""GRPO for a DSPy program on one page: replay, group, advantage, loss, step.

    python grpo_on_one_page.py

leret stands at any state of a program by running it again with the answers so far: `advance` runs the program until it
needs an answer that the list of steps does not have. At each state the policy writes a group of queries; each query's
reward is the average precision of all documents found so far; the advantage of a query is its reward minus the group's
mean. The path continues with the group's best query.

`leret train grpo` does the same. It also completes the requests of all questions in one batch, shares prompts between
completions, can take several clipped steps per round with a KL penalty, validates, resumes and raises alarms.
"""

import asyncio
import random
from dataclasses import dataclass

import dspy
import torch

import leret
from leret.core.types import Task
from leret.demo import example_data
from leret.policies.base import Request
from leret.policies.checkpoints import find_model, load_tokenizer
from leret.policies.local.model import load_weights
from leret.policies.local.policy import LocalPolicy
from leret.programs.needs import Finished
from leret.programs.runner import ProgramRunner
from leret.retrieval.batching import SearchBatcher
from leret.rollouts.walk import Point, begin


class MultiHop(dspy.Module):
    def __init__(self):
        super().__init__()
        self.write_query = dspy.Predict("question, context: list[str] -> query")
        self.search = leret.Search(k=3)

    def forward(self, question):
        found = leret.Found()
        for _ in range(2):
            query = self.write_query(question=question, context=found.passages).query
            found = self.search(query, found)
        return dspy.Prediction(doc_ids=found.doc_ids)


@dataclass
class Sample:
    prompt: list[int]  # tokens
    completion: list[int]
    reward: float
    after: Point  # where the program stands after this completion
    advantage: float = 0.0


def average_precision(doc_ids, gold):
    precisions = []
    for rank, doc_id in enumerate(doc_ids, 1):
        if doc_id in gold:
            precisions.append((len(precisions) + 1) / rank)
    return sum(precisions) / len(gold)


def doc_ids(point):
    """Return the documents of all searches so far, best first."""
    return [passage.doc_id for passage in point.outcome().ranking]


async def sample_group(runner, policy, point, n, rng, temperature=1.0):
    """Write ``n`` completions at the state where a program stands, and run the program on from each."""
    messages = runner.formatter.messages(point.need)
    seeds = tuple(rng.randrange(2**63) for _ in range(n))
    [completions] = policy.complete_many([Request(messages, seeds, temperature, max_tokens=16)])
    prompt = list(policy.prompt_ids(messages))
    group = []
    for completion in completions:
        after = await point.after(runner, runner.formatter.step(point.need, completion.text))
        reward = 0.0 if after.unparsed else average_precision(doc_ids(after), point.task.gold)
        group.append(Sample(prompt, list(completion.token_ids), reward, after))
    mean = sum(sample.reward for sample in group) / n
    for sample in group:
        sample.advantage = sample.reward - mean
    return group


async def walk(runner, policy, task, n, rng, temperature=1.0):
    """Return the groups of a task's states; each state follows the best sample of the state before."""
    point = await begin(runner, task)
    groups = []
    while not isinstance(point.need, Finished):
        groups.append(await sample_group(runner, policy, point, n, rng, temperature))
        point = max(groups[-1], key=lambda sample: sample.reward).after
    return groups


def loss(policy, samples):
    """Return minus the advantage-weighted log-probability per token. With one step per round, every ratio is 1."""
    total = torch.tensor(0.0)
    n_tokens = sum(len(sample.completion) for sample in samples)
    for sample in samples:
        if sample.advantage:
            logps = policy.model.logps(policy.model.network, sample.prompt, sample.completion)
            total = total - sample.advantage * logps.sum()
    return total / n_tokens


def recall(runner, policy, tasks):
    """Return the mean share of the gold documents that the greedy program finds."""
    rng, shares = random.Random(0), []
    for task in tasks:
        last = asyncio.run(walk(runner, policy, task, 1, rng, temperature=0.0))[-1][0]
        shares.append(len(set(doc_ids(last.after)) & set(task.gold)) / len(task.gold))
    return sum(shares) / len(shares)


def as_tasks(examples):
    return [Task.question(row.question, row.question, gold=row.gold) for row in examples]


def main(rounds=100, questions_per_round=4, group_size=8, n_test=100, rate=1e-3, seed=0):
    data, rng = example_data(), random.Random(seed)
    train, test = as_tasks(data.trainset), as_tasks(data.testset[:n_test])
    place = find_model("demo")
    network = load_weights(place, "float32")
    policy = LocalPolicy.over(network, load_tokenizer(place), name="demo", digest="0")
    runner = ProgramRunner.over(MultiHop(), leret.CompactAdapter(), SearchBatcher(data.retriever))
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.0)
    before = recall(runner, policy, test)
    for number in range(1, rounds + 1):
        samples = []
        for task in rng.sample(train, questions_per_round):
            for group in asyncio.run(walk(runner, policy, task, group_size, rng)):
                samples += group
        network.train()
        if any(sample.advantage for sample in samples):
            loss(policy, samples).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            policy.renew(str(number))
        reward = sum(sample.reward for sample in samples) / len(samples)
        print(f"round {number}: {len(samples)} completions, mean reward {reward:.3f}")
    after = recall(runner, policy, test)
    print(f"recall on held-out questions: {before:.3f} -> {after:.3f}")
    return before, after


if __name__ == "__main__":
    main()
