import asyncio

import pytest

from leret.config.policy import LocalPolicySettings
from leret.config.training import LoraSettings
from leret.core.errors import PolicyError
from leret.policies.base import Request
from leret.policies.checkpoints import load_tokenizer
from leret.policies.load import make_policy
from leret.training.algorithms.preference import IPORecipe
from leret.training.algorithms.sft import SFTRecipe
from leret.training.model import find_initial
from leret.training.stage import train
from tests.tiny import tiny_policy
from tests.training.training_runs import sampled_run

ASKED = (
    {"role": "user", "content": "question red"},
    {"role": "assistant", "content": "query blue"},
    {"role": "user", "content": "question green"},
)
FEW = {"learning_rate": 1e-3, "per_device_train_batch_size": 8}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("gpt2") / "gpt2", "gpt2")


@pytest.fixture
def run(tmp_path, gpt2):
    made = sampled_run(tmp_path / "run", gpt2)
    sampling = made.manifest.sampling
    made.update(sampling={**sampling, "policy": {**sampling["policy"], "template": "plain"}})
    return made


def sampled(directory, template):
    policy = make_policy(LocalPolicySettings(model=str(directory), template=template, device="cpu"))
    request = Request(ASKED, seeds=(1, 2, 3), temperature=1.0, max_tokens=8)
    try:
        return [completion.text for completion in asyncio.run(policy.complete(request))]
    finally:
        policy.close()


def test_plain_is_the_texts_of_the_messages_by_lines(gpt2):
    tokenizer = load_tokenizer(gpt2, "plain")
    how = {"tokenize": False, "add_generation_prompt": True}
    prompt = tokenizer.apply_chat_template(list(ASKED), **how)
    assert prompt == "question red\nquery blue\nquestion green\n"
    answer = {"role": "assistant", "content": "query sun"}
    assert tokenizer.apply_chat_template([*ASKED, answer], tokenize=False) == f"{prompt}query sun<|end|>"


def test_a_template_is_asked_for_and_none_is_replaced(gpt2, base):
    with pytest.raises(PolicyError, match=r"no chat template.*set policy\.template: plain"):
        sampled(gpt2, None)
    with pytest.raises(PolicyError, match=r"has one; leave policy\.template out"):
        sampled(base, "plain")


@pytest.mark.parametrize("lora", [None, LoraSettings(r=4)], ids=["full", "lora"])
def test_gpt2_is_trained_on_what_it_samples_and_opens_again(run, gpt2, lora):
    before = sampled(gpt2, "plain")
    assert len(set(before)) == 3
    sft = train(SFTRecipe(lora=lora, **FEW), run)
    ipo = train(IPORecipe(init_from="sft", lora=lora, **FEW), run)
    assert (sft.examples, ipo.examples, ipo.loss_first) == (24, 48, pytest.approx(100.0))
    assert find_initial(run, "ipo").template == "plain"
    after = sampled(ipo.path, "plain")
    assert after == sampled(ipo.path, None), "the saved policy has the template"
    assert after != before
