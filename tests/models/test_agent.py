import re
from dataclasses import replace
from functools import cache
from typing import Any

import dspy
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from leret.core.dspy_internals import EngineLM, messages_of, text_response
from leret.core.progress import Progress
from leret.policies.checkpoints import policy_directory
from leret.programs.adapters import CompactAdapter
from models import agent, words
from models.agent import TOOLS, agent_rows, vocabulary
from models.gate import make_gate
from models.worlds import StreamSettings, start

SMALL = StreamSettings(seed=3, questions=12)


@cache
def tokenizer():
    return words.build_tokenizer(vocabulary())


def test_rows_are_fixed_have_no_unknown_word_to_write_and_fit():
    assert vocabulary()[: len(words.vocabulary())] == words.vocabulary()
    made = agent_rows(tokenizer(), 7, SMALL)
    assert made == agent_rows(tokenizer(), 7, SMALL)
    end, unknown = tokenizer().eos_token_id, tokenizer().unk_token_id
    for row in made:
        assert len(row.prompt) < 900
        assert all(target[-1] == end and len(target) > 1 and unknown not in target for target in row.targets)


def test_the_rows_of_an_agent_are_the_calls_of_react():
    begun, retriever = start(5, SMALL)
    paths = [list(agent._agent_calls(draft, retriever, SMALL)) for draft in begun]
    calls = next(
        calls for calls in paths if len(calls) > 2 and re.search(r"observation_0:\n[A-Z]", calls[1][1]["trajectory"])
    )
    *_, (asked, question), (_, trajectory) = [*calls[-1][1].items()]
    steps = re.findall(r"thought_\d: (.*)\ntool_name_\d: (.*)\ntool_args_\d: (.*)", trajectory)
    replies = [f"next_thought: {t}\nnext_tool_name: {name}\nnext_tool_args: {args}" for t, name, args in steps]
    k, name, sent = calls[1][1]["trajectory"].count(" | "), steps[0][1], list[Any]()

    def write(request):
        sent.append(list(messages_of(request)))
        return text_response(request, [*replies, "reasoning: so\nanswer: x"][len(sent) - 1])

    def look_up(query: str) -> list[str]:
        return [f"{p.title} | {p.text}" for p in retriever.search([query], k)[0]]

    adapter = CompactAdapter(outputs=True)
    with dspy.context(lm=EngineLM("scripted", write), adapter=adapter):
        react = dspy.ReAct(f"{asked} -> answer", tools=[dspy.Tool(look_up, name=name)], max_iters=len(steps))
        assert react(**{asked: question}).answer == "x"
    made = [adapter.format(signature, (), inputs) for signature, inputs, _ in calls]
    assert sent[: len(calls) - 1] + sent[-1:] == made


def test_two_steps_leave_a_half_precision_policy_that_starts_from_the_demos(tmp_path, monkeypatch):
    monkeypatch.setattr(agent, "make_gate", lambda tokenizer: make_gate(tokenizer, n=2))
    monkeypatch.setattr(agent, "_MIX", replace(agent._MIX, questions=12))
    small = {"pool_rows": 8, "batch_tokens": 256, "lr": 0.0, "matrix_lr": 0.0}
    monkeypatch.setattr(agent, "_TRAINING", replace(agent._TRAINING, **small))
    monkeypatch.setattr("models.pretrain.stage._MAX_TOKENS", 4)
    out = agent.pretrain_agent(tmp_path / "policy", Progress(), seed=1, steps=2)
    before, after = (load_file(path / "model.safetensors") for path in (policy_directory("demo"), out))
    n_words = len(words.vocabulary())
    assert {weight.dtype for weight in after.values()} == {torch.float16}
    assert all(torch.equal(after[name][:n_words] if "embed" in name or "head" in name else after[name], weight.half())
               for name, weight in before.items())  # fmt: skip
    assert AutoTokenizer.from_pretrained(out).get_vocab()["next_thought"] >= n_words
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "seed 1" in card
    assert all(tool in card for tool in TOOLS)
