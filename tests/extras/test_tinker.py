import asyncio

import pytest
from transformers import AutoTokenizer

from leret.config.policy import PolicySettings
from leret.core.errors import ConfigError, PolicyError
from leret.policies.load import compute_digest, make_policy, probe
from tests.extras.tinker_server import BASE
from tests.policies.conftest import ask

pytest.importorskip("tinker", reason="tinker is not installed")


@pytest.fixture
def settings(stub, base, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", stub.url)
    return PolicySettings.model_validate({"kind": "tinker", "model": BASE, "tokenizer": str(base), "timeout_s": 20})


def changed(settings, **keys):
    return settings.model_copy(update=keys)


def test_a_completion_has_the_ids_and_log_probabilities_of_the_server(settings, stub, base):
    policy = make_policy(settings)
    completions = asyncio.run(policy.complete(ask("the city", 1, 2, 3)))
    assert [(list(one.token_ids), list(one.logprobs)) for one in completions] == [one[1:] for one in stub.samples[-3:]]
    tokenizer = AutoTokenizer.from_pretrained(base)
    prompt = tokenizer.apply_chat_template(list(ask("the city").messages), add_generation_prompt=True)["input_ids"]
    assert stub.samples[-1][0] == prompt
    assert [one.text for one in completions] == tokenizer.batch_decode(
        [one.token_ids for one in completions], skip_special_tokens=True
    )
    assert compute_digest(settings) == policy.digest != compute_digest(changed(settings, model="other/model"))
    again = asyncio.run(policy.complete(ask("the city", 1, 2, 3)))
    assert again == completions
    greedy = asyncio.run(policy.complete(ask("the city", 1, 2, temperature=0)))
    assert greedy[0] == greedy[1]


def test_the_key_is_needed_and_stays_secret(settings, monkeypatch):
    asyncio.run(probe(settings))
    monkeypatch.setenv("OTHER_KEY", "tml-unknown-key")
    with pytest.raises(PolicyError, match=r"AuthenticationError.*401") as error:
        asyncio.run(probe(changed(settings, api_key_env="OTHER_KEY")))
    assert (error.value.exit_code, "tml-unknown" in str(error.value)) == (2, False)
    with pytest.raises(PolicyError, match=r"401.*name the variable .* in policy\.api_key_env"):
        asyncio.run(probe(changed(settings, api_key_env=None)))
    monkeypatch.delenv("TINKER_API_KEY")
    with pytest.raises(ConfigError, match="TINKER_API_KEY is not set"):
        make_policy(settings)


def test_what_the_server_lacks_is_said(settings, stub, monkeypatch):
    with pytest.raises(PolicyError, match=f"policy.model: .* has no model 'other/model'; available: {BASE}"):
        asyncio.run(probe(changed(settings, model="other/model")))
    with pytest.raises(PolicyError, match=r"policy\.url: http://127.0.0.1:9 does not answer"):
        asyncio.run(probe(changed(settings, url="http://127.0.0.1:9")))
    policy = make_policy(settings)
    asyncio.run(policy.complete(ask("the city", 1)))
    whole = stub.asample
    with monkeypatch.context() as patch:
        patch.setattr(stub, "asample", lambda body: whole({**body, "num_samples": 1}))
        with pytest.raises(PolicyError, match="3 sequence ids for 1 sequences"):
            asyncio.run(policy.complete(ask("the city", 1, 2, 3)))
    stub.samplers.clear()
    with pytest.raises(PolicyError, match=r"RequestFailedError: .*not found: sampler") as error:
        asyncio.run(policy.complete(ask("the city", 1)))
    assert error.value.exit_code == 1
