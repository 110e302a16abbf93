import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from leret.config.sampling import RewardSettings
from leret.core.errors import ConfigError
from leret.core.types import Outcome, Passage, Task
from leret.extras.answer_likelihood import answer_likelihood
from leret.rewards import scoring
from tests.tiny import tiny_policy

RANKING = tuple(Passage(str(i), title, f"{title} was born in paris", 1.0) for i, title in enumerate(["alice", "bob"]))
TASK = Task("q", {"question": "where was alice born ?"}, answers=("new york", "paris"))


@pytest.fixture(scope="module", params=["llama", "gpt2"])  # with and without a chat template
def reader(request, tmp_path_factory):
    return str(tiny_policy(tmp_path_factory.mktemp("reader"), request.param))


def by_hand(reader, passages):
    tokenizer, model = AutoTokenizer.from_pretrained(reader), AutoModelForCausalLM.from_pretrained(reader)
    task = "question: where was alice born ?"
    if tokenizer.chat_template:
        prompt = "<|user|>" + "\n".join([*passages, task, "Answer in a few words."]) + "<|assistant|>"
    else:
        prompt = "\n".join([*passages, task, "answer:"])
    values = []
    for answer in TASK.answers:
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        target = tokenizer.encode(answer, add_special_tokens=False)
        logp = model(torch.tensor([ids + target])).logits[0].detach().double().log_softmax(-1)
        values.append(sum(float(logp[len(ids) + i - 1, token]) for i, token in enumerate(target)) / len(target))
    return math.exp(max(values))


def test_it_is_the_mean_probability_of_the_likeliest_answer_after_the_passages(reader):
    texts = ["alice: alice was born in paris", "bob: bob was born in paris"]
    outcome = Outcome(TASK, ranking=RANKING)
    assert answer_likelihood(outcome, reader) == pytest.approx(by_hand(reader, texts), rel=1e-5)
    one = answer_likelihood(outcome, reader, passages=1, words=3)
    assert one == pytest.approx(by_hand(reader, ["alice: alice was"]), rel=1e-5)
    assert answer_likelihood(Outcome(Task("q", {"question": "?"})), reader) is None
    long = Outcome(TASK, ranking=(*RANKING, Passage("x", "", "a " * 5000, 0.0)))
    assert answer_likelihood(long, reader, words=5000) == answer_likelihood(outcome, reader, words=5000)
    whole = scoring(RewardSettings(parts={"likely": {"function": "answer_likelihood", "model": reader}}))
    assert (whole.applies(TASK), whole.applies(Task("q", {}))) == (True, False)


@pytest.mark.parametrize("model", ["leret-english-6m", "no/such-model-here"])
def test_a_model_that_is_no_reader_is_refused(model, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=f"answer_likelihood: model '{model}'"):
        answer_likelihood(Outcome(TASK), model=model)
