"""Count rollouts with native tool calls for which the trained token ids are the sampled ids.

    python benchmarks/correctness/tool_calls.py [--rollouts 1000]

Makes a small policy with the chat template of Qwen3-Instruct-2507 and teaches it, in a minute, to call the tools of a
`dspy.ReActV2`. Samples rollouts in this process, and through a server that parses tool calls and sends token ids as
vLLM does. A rollout counts if at every step the prompt and completion ids for training are the ids that the model read
and wrote: for online algorithms (`grpo`, `rloo`, `ppo`) and for algorithms that read stored text (`sft`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import tempfile
import time
from contextlib import aclosing, asynccontextmanager, closing
from importlib.resources import files
from pathlib import Path
from typing import Any

import dspy
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer

from leret.config.policy import LocalPolicySettings, OpenAIPolicySettings
from leret.core.dspy_internals import EngineLM, messages_of, text_response
from leret.core.types import Passage, Task
from leret.policies.base import Completion, Request
from leret.policies.local.chat_template import PromptEncoder, apply_template, end_token
from leret.policies.local.policy import LocalPolicy
from leret.policies.tool_calls import read_calls, write_calls
from leret.programs.prompts import Formatter
from leret.programs.replay import Replay
from leret.programs.runner import ProgramRunner
from leret.programs.search import Search
from leret.retrieval.batching import SearchBatcher
from leret.rollouts.actors import Decoding, PolicyActor
from leret.rollouts.walk import RolloutRunner
from leret.training.data import TokenEncoder, TrainingExample, plain
from leret.training.rounds.writing import ServedPolicy

WORDS = [
    "river", "bridge", "garden", "harbor", "lantern", "mirror", "window", "forest", "castle", "market", "singer",
    "painter", "valley", "island",
]  # fmt: skip
PIECES = r"\w+\W|\W"  # every sequence of these pieces is the only split of its text
ADAPTER = dspy.ChatAdapter(use_native_function_calling=True, use_json_adapter_fallback=False)
THOUGHT = "[[ ## next_thought ## ]]\nI need the {}.\n\n[[ ## completed ## ]]"


class Agent(dspy.Module):
    """An agent with one search tool."""

    def __init__(self) -> None:
        super().__init__()
        self.search = Search(k=2)
        self.agent = dspy.ReActV2("question -> answer", tools=[self.look_up], max_iters=3)

    def look_up(self, query: str, k: int = 2) -> list[str]:
        """Return passages."""
        return self.search(query).passages[:k]

    def forward(self, question: str) -> Any:
        return self.agent(question=question)


class Shelf:
    """A retriever that knows a passage about each word."""

    digest = "shelf"

    def search(self, queries: list[str], k: int) -> list[tuple[Passage, ...]]:
        return [tuple(Passage(f"{q}-{i}", WORDS[i], f"near the {q}", 5.0 - i) for i in range(k)) for q in queries]


def task(number: int) -> Task:
    draw = random.Random(number)
    return Task.question(f"q{number}", f"{draw.choice(WORDS)} of {draw.choice(WORDS)}")


def written(n_results: int, draw: random.Random) -> str:
    """Write a completion after ``n_results`` tool results: one or two searches, or the answer."""
    text = THOUGHT.format(draw.choice(WORDS)) if draw.random() < 0.3 else ""
    if n_results and draw.random() < 0.5 + n_results / 4:
        return write_calls(text, [("submit", json.dumps({"answer": draw.choice(WORDS)}))])
    n = draw.choice((1, 1, 2))
    calls = [{"query": draw.choice(WORDS)} | ({"k": 1} if draw.random() < 0.3 else {}) for _ in range(n)]
    return write_calls(text, [("look_up", json.dumps(one)) for one in calls])


def made_up(n: int) -> list[tuple[Any, str]]:
    """Return the prompts and completions of ``n`` runs of the program by `written`."""
    rows: list[tuple[Any, str]] = []
    for number in range(n):
        draw = random.Random(number)

        def answer(request: Any, draw: random.Random = draw) -> Any:
            messages = messages_of(request)
            rows.append((messages, written(sum(one["role"] == "tool" for one in messages), draw)))
            return text_response(request, rows[-1][1], read=read_calls)

        program = Agent()
        program.search.retriever = Shelf()
        with dspy.context(lm=EngineLM("written", answer), adapter=ADAPTER, disable_history=True):
            program(question=task(number).text)
    return rows


def tokenizer_of(texts: list[str]) -> Any:
    """Return a tokenizer with Qwen's marks and template; a token is a word with the sign after it, or a single sign."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = dict.fromkeys(["<|pad|>", "<|unk|>", *re.findall(PIECES, re.sub("</?tool_call>", "\n", "\n".join(texts)))])
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<|unk|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    backend.decoder = decoders.Fuse()
    template = (files("trl") / "chat_templates/qwen3_instruct_2507.jinja").read_text()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<|unk|>", pad_token="<|pad|>", eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"], clean_up_tokenization_spaces=False, chat_template=template,
    )  # fmt: skip
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])  # not special, as in Qwen's tokenizer
    return tokenizer


def tool_policy(directory: Path, *, n_steps: int = 160, n_runs: int = 150) -> Path:
    """Train a policy of 0.1M parameters that calls tools, and write it to ``directory``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rows = made_up(n_runs)
    how = {"tokenize": False, "add_generation_prompt": True}
    prompts = [apply_template(tokenizer_of([]), messages, "tools", **how) for messages, _ in rows]
    tokenizer = tokenizer_of([*prompts, *(text for _, text in rows)])
    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=4096, pad_token_id=0, bos_token_id=None, eos_token_id=end,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config.suppress_tokens = [tokenizer.unk_token_id, tokenizer.pad_token_id]
    encoder = PromptEncoder(tokenizer, None, "tools")
    examples = [(list(encoder.encode(m).token_ids), [*tokenizer(text)["input_ids"], end]) for m, text in rows]
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    draw = random.Random(0)
    for _ in range(n_steps):
        batch = draw.sample(examples, 8)
        width = max(len(prompt) + len(ids) for prompt, ids in batch)
        ids = torch.tensor([[*p, *c] + [0] * (width - len(p) - len(c)) for p, c in batch])
        labels = torch.tensor([[-100] * len(p) + c + [-100] * (width - len(p) - len(c)) for p, c in batch])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for part in (model.eval(), tokenizer):
        part.save_pretrained(directory)
    return directory


class Recorder:
    """A policy that also records the ids its model reads and writes, by the seed of the completion."""

    def __init__(self, policy: LocalPolicy) -> None:
        self.policy, self.name, self.digest = policy, policy.name, policy.digest
        self.ids: dict[int, tuple[list[int], list[int]]] = {}
        run = policy.model.decoder.run

        def recorded(jobs: Any) -> Any:
            answers = run(jobs)
            for job, generated in zip(jobs, answers, strict=True):
                for seed, one in zip(job.seeds, generated, strict=True):
                    self.ids[seed] = list(job.token_ids), list(one.token_ids)
            return answers

        policy.model.decoder.run = recorded  # type: ignore[method-assign]

    async def complete(self, request: Request) -> list[Completion]:
        return await self.policy.complete(request)

    async def aclose(self) -> None:
        await self.policy.aclose()


class Through:
    """A policy that completes on a server as a training with ``served: true`` does."""

    def __init__(self, served: ServedPolicy) -> None:
        self.served, self.name, self.digest = served, served.name, served.digest

    async def complete(self, request: Request) -> list[Completion]:
        [answer] = await asyncio.to_thread(self.served.complete_many, [request])
        if isinstance(answer, BaseException):
            raise answer
        return list(answer)

    async def aclose(self) -> None:
        """Do nothing."""


@asynccontextmanager
async def tool_server(recorder: Recorder, *, ids: bool = True) -> Any:
    """Start a chat completions server that parses tool calls as vLLM does; yield its URL."""

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        first, *rest = body["messages"]
        messages = ({**first, "tools": json.dumps(body["tools"], ensure_ascii=False)}, *rest)
        [one] = await recorder.complete(
            Request(messages, (body["seed"],), body["temperature"], body["max_tokens"], body["top_p"])
        )
        text, calls = read_calls(one.text)
        functions = [{"name": call["name"], "arguments": json.dumps(call["arguments"])} for call in calls]
        parsed = [{"id": f"c{i}", "type": "function", "function": part} for i, part in enumerate(functions)]
        reason = "length" if one.finish_reason == "length" else "tool_calls" if calls else "stop"
        choice = {"index": 0, "finish_reason": reason, "message": {"content": text or None, "tool_calls": parsed}}
        if ids and body.get("return_token_ids"):
            values = [{"logprob": value} for value in one.logprobs or ()]
            choice |= {"token_ids": list(one.token_ids or ()), "logprobs": {"content": values}}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": one.n_prompt_tokens}})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def count(rollouts: Any, recorder: Recorder, seeds: Any, directory: Path) -> dict[str, int]:
    """Count the rollouts in which training, online and from text, gets the ids of the model at every step."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    encoder = TokenEncoder(tokenizer, end_token(tokenizer, [tokenizer.eos_token_id]))
    figures = dict.fromkeys(("rollouts", "finished", "steps", "tool calls", "online", "text"), 0)
    for rollout in rollouts:
        same = {"online": True, "text": True}
        for step in rollout.steps:
            prompt, completion, seed = seeds[json.dumps(step.messages), step.completion]
            truth = recorder.ids[seed]
            same["online"] &= (prompt, completion) == truth
            [trained] = encoder.encode([TrainingExample("", plain(step.messages), (step.completion,))])
            ends = completion[-1] == encoder.end
            same["text"] &= (trained.prompt, trained.completions[0][: None if ends else -1]) == truth
            figures["tool calls"] += len(read_calls(step.completion)[1])
        figures["rollouts"] += 1
        figures["finished"] += rollout.failure is None
        figures["steps"] += len(rollout.steps)
        figures |= {name: figures[name] + value for name, value in same.items()}
    return figures


async def roll_out(directory: Path, n: int, *, served: bool, ids: bool = True) -> dict[str, int]:
    """Sample ``n`` rollouts at temperature 1 and return their counts."""
    recorder = Recorder(LocalPolicy(LocalPolicySettings(model=str(directory))))
    replay = Replay(Agent(), ADAPTER)
    seeds: dict[tuple[str, str], tuple[list[int], list[int], int]] = {}

    async def sampled(policy: Any) -> Any:
        class Noting:
            name, digest = policy.name, policy.digest

            async def complete(self, request: Request) -> list[Completion]:
                [one] = await policy.complete(request)
                ids = list(recorder.policy.prompt_ids(request.messages)), list(one.token_ids)
                seed = request.seeds[0] & (2**31 - 1 if served else 2**64 - 1)
                seeds[json.dumps(request.messages), one.text] = *ids, seed
                return [one]

        with closing(SearchBatcher(Shelf())) as searches:
            runner = ProgramRunner(replay, Formatter(replay), searches)
            actor = PolicyActor(Noting(), runner.formatter, Decoding(64, temperature=1.0))
            return await RolloutRunner(runner, actor).run([task(number) for number in range(n)], concurrency=32)

    async with aclosing(recorder):
        if not served:
            return count(await sampled(recorder), recorder, seeds, directory)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
        async with tool_server(recorder, ids=ids) as url:
            settings = OpenAIPolicySettings(model="tools", urls=(url,), retry_for_s=0)
            policy = ServedPolicy(settings, model, tokenizer, directory, name="tools", digest="tools")
            return count(await sampled(Through(policy)), recorder, seeds, directory)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=1000)
    n = parser.parse_args().rollouts
    with tempfile.TemporaryDirectory() as name:
        began = time.monotonic()
        directory = tool_policy(Path(name) / "policy")
        print(f"policy trained in {time.monotonic() - began:.0f} s")
        for served in (False, True):
            began = time.monotonic()
            figures = asyncio.run(roll_out(directory, n, served=served))
            print("server    " if served else "in process", figures, f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
