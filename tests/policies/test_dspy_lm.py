import asyncio
from concurrent.futures import ThreadPoolExecutor

import dspy
import pytest
from dspy.utils.exceptions import ContextWindowExceededError, LMProviderError, LMUnsupportedFeatureError

from leret.config.policy import LocalPolicySettings, OpenAIPolicySettings
from leret.core.errors import PolicyError
from leret.policies import load
from leret.policies.base import Request
from leret.policies.dspy_lm import PolicyEngine, policy_lm, policy_of
from leret.programs.adapters import CompactAdapter
from tests.sampling.fakes import FakePolicy
from tests.tiny import tiny_policy

pytestmark = pytest.mark.filterwarnings("error::DeprecationWarning:dspy")


@pytest.fixture
def lm(policy):
    lm = policy_lm(policy, temperature=1.0, max_tokens=6)
    with dspy.context(lm=lm, adapter=CompactAdapter()):
        yield lm


def test_calls_from_threads_are_batched(policy):
    predict = dspy.Predict("question -> query")
    pairs = [(predict, {"question": f"who wrote book {i}?"}) for i in range(32)]
    before = policy.n_batches
    with dspy.context(lm=policy_lm(policy, temperature=0.0, max_tokens=4), adapter=CompactAdapter()):
        results = dspy.Parallel(num_threads=32, disable_progress_bar=True)(pairs)
    assert len([result for result in results if result.query]) == 32
    assert policy.n_batches - before <= 16


def test_draws_differ_unless_seed_or_rollout_id_is_set(lm, policy):
    before = policy.n_batches
    assert len(set(lm("who wrote the book", n=6))) == 6
    assert policy.n_batches - before == 1
    assert lm.history[-1]["usage"]["completion_tokens"] <= 6 * 6
    assert lm.cache is False
    assert lm("the city") != lm("the city")
    for name in ("seed", "rollout_id"):
        assert lm("the city", **{name: 3}) == lm("the city", **{name: 3}) != lm("the city", **{name: 4})
    assert lm("the city", temperature=0.0) == lm("the city", temperature=0.0)


@pytest.mark.filterwarnings("ignore:Passing OpenAI-style message")
def test_settings_and_roles_reach_the_policy():
    served = FakePolicy()
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": f"the city {i}"} for i, role in enumerate(roles)]
    policy_lm(served, temperature=0.7, max_tokens=9, top_p=0.5)(messages=messages, n=2, stop=["\n"])
    [request] = served.requests
    assert len(set(request.seeds)) == 2
    assert request == Request(tuple(messages), request.seeds, 0.7, 9, 0.5, ("\n",))


def test_copies_share_the_policy_until_their_name_changes(policy, tmp_path):
    lm = policy_lm(policy, temperature=0.0, max_tokens=6)
    predict = dspy.Predict("question -> query")
    predict.lm = lm
    assert policy_of(predict.deepcopy().lm) is policy
    other = tiny_policy(tmp_path / "other", seed=1)
    first, copied = lm("the city"), lm.copy(model=f"leret/{other}")
    assert copied.engine is lm.engine
    trained = policy_lm(LocalPolicySettings(model=str(other)), temperature=0.0, max_tokens=6)
    assert copied("the city") == trained("the city") != first
    name, lm.model = lm.model, copied.model
    assert (policy_of(lm), lm("the city")) == (policy_of(copied), copied("the city"))
    assert asyncio.run(lm.acall("the city")) == copied("the city")
    lm.model = name
    assert lm("the city") == first


def test_a_closed_model_is_loaded_again(llama_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "N_OPEN", 1)
    one = policy_lm(LocalPolicySettings(model=str(llama_dir)), temperature=0.0, max_tokens=6)
    policy, first = policy_of(one), one("the city")
    two = one.copy(model=f"leret/{tiny_policy(tmp_path / 'other', seed=1)}")
    assert two("the city") != first
    assert policy.closed
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda i: (one, two)[i % 2]("the city"), range(8)))
    assert results == [first, two("the city")] * 4


def test_failures_are_dspy_errors_without_retries(lm):
    with pytest.raises(ContextWindowExceededError, match="512 tokens"):
        lm("book " * 600)
    with pytest.raises(LMUnsupportedFeatureError, match="frequency_penalty"):
        lm("the city", frequency_penalty=0.5)
    served = FakePolicy(fail=lambda request: True)
    with pytest.raises(LMProviderError, match="the server is away"):
        policy_lm(served)("the city")
    assert len(served.requests) == 1


def test_one_served_url_is_a_plain_lm():
    lm = policy_lm(OpenAIPolicySettings(model="tiny", urls=("http://a/v1",)), max_tokens=7)
    assert type(lm) is dspy.LM
    assert (lm.engine, lm.cache, lm.kwargs["api_base"], lm.kwargs["max_tokens"]) == ("litellm", False, "http://a/v1", 7)
    with pytest.raises(PolicyError, match=r"openai/tiny .* leret\.LM\(DIRECTORY\)"):
        policy_of(lm)
    several = policy_lm(OpenAIPolicySettings(model="tiny", urls=("http://a/v1", "http://b/v1")))
    assert isinstance(several.engine, PolicyEngine)
    tools = policy_lm(OpenAIPolicySettings(model="tiny", urls=("http://a/v1",)), tools=True)
    assert tools.supports_function_calling  # a plain LM does not send tools to a model that DSPy does not know
