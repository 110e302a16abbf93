from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import ContextWindowExceededError, LMProviderError, LMUnsupportedFeatureError

from leret.config.policy import LocalPolicySettings, OpenAIPolicySettings
from leret.core.errors import PolicyError
from leret.policies.base import Completion, Request
from leret.policies.dspy_lm import PolicyEngine, PolicyLM, policy_lm
from leret.policies.local.policy import LocalPolicy
from leret.programs.adapters import CompactAdapter

pytestmark = pytest.mark.filterwarnings("error::DeprecationWarning:dspy")


@pytest.fixture
def lm(policy: LocalPolicy) -> Iterator[dspy.LM]:
    lm = policy_lm(policy, temperature=1.0, max_tokens=6)
    with dspy.context(lm=lm, adapter=CompactAdapter()):
        yield lm


class Served:
    """An async policy that is no LocalPolicy; keeps what it was asked."""

    name, digest = "served", "d"

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.requests: list[Request] = []

    async def complete(self, request: Request) -> list[Completion]:
        self.requests.append(request)
        if self.fails:
            raise PolicyError("the server is gone")
        return [Completion(f"query {seed}", "stop", 3, 2) for seed in request.seeds]

    async def aclose(self) -> None:
        pass


def test_a_predictor_runs_on_a_policy(lm: dspy.LM, policy: LocalPolicy) -> None:
    prediction = dspy.Predict("question -> query")(question="who wrote the book?")
    assert prediction.query
    assert lm.history[-1]["usage"]["completion_tokens"] <= 6


def test_calls_from_many_threads_are_batched(policy: LocalPolicy) -> None:
    greedy = policy_lm(policy, temperature=0.0, max_tokens=4)
    predict = dspy.Predict("question -> query")
    calls = [(predict, {"question": f"who wrote book {i}?"}) for i in range(32)]
    before = policy.n_batches
    with dspy.context(lm=greedy, adapter=CompactAdapter()):
        results = dspy.Parallel(num_threads=32, disable_progress_bar=True)(calls)
    assert all(result.query for result in results)
    assert policy.n_batches - before <= 16


def test_async_calls_are_batched(policy: LocalPolicy) -> None:
    greedy = policy_lm(policy, temperature=0.0, max_tokens=4)
    predict = dspy.Predict("question -> query")

    async def together() -> list[Any]:
        return await asyncio.gather(*[predict.acall(question=f"who wrote book {i}?") for i in range(32)])

    before = policy.n_batches
    with dspy.context(lm=greedy, adapter=CompactAdapter()):
        assert len(asyncio.run(together())) == 32
    assert policy.n_batches - before <= 8


def test_the_candidates_of_a_call_are_one_batch_of_distinct_draws(lm: dspy.LM, policy: LocalPolicy) -> None:
    before = policy.n_batches
    assert len(set(lm("who wrote the book", n=6))) == 6
    assert policy.n_batches - before == 1


def test_equal_calls_differ_unless_a_seed_or_a_rollout_is_given(lm: dspy.LM) -> None:
    assert lm("the city") != lm("the city")
    assert lm("the city", seed=3) == lm("the city", seed=3)
    assert lm("the city", seed=3) != lm("the city", seed=4)
    assert lm("the city", rollout_id=1) == lm("the city", rollout_id=1)
    assert lm("the city", rollout_id=1) != lm("the city", rollout_id=2)
    assert lm("the city", temperature=0.0) == lm("the city", temperature=0.0)


def test_a_draw_follows_from_its_request_not_from_the_order_of_calls() -> None:
    def completions(prompts: str, temperature: float) -> list[str]:
        lm = policy_lm(Served(), temperature=temperature)
        return sorted(f"{prompt} {lm(prompt)}" for prompt in prompts)

    assert completions("abac", 0.0) == completions("caba", 0.0)
    assert completions("abac", 1.0) == completions("caba", 1.0)


def test_settings_reach_the_policy() -> None:
    served = Served()
    lm = policy_lm(served, temperature=0.7, max_tokens=9, top_p=0.5)
    lm("the city", n=2, stop=["\n"])
    [request] = served.requests
    assert (request.temperature, request.max_tokens, request.top_p, request.stop) == (0.7, 9, 0.5, ("\n",))
    assert len(set(request.seeds)) == 2
    assert request.messages == ({"role": "user", "content": "the city"},)
    assert policy_lm(served).kwargs["temperature"] == 1.0


def test_system_messages_and_demonstrations_keep_their_roles() -> None:
    served = Served()
    with dspy.context(lm=policy_lm(served), adapter=dspy.ChatAdapter(use_json_adapter_fallback=False)):
        predict = dspy.Predict("question -> query")
        predict.demos = [dspy.Example(question="where", query="there")]
        with pytest.raises(Exception, match="parse"):
            predict(question="who")
    assert [message["role"] for message in served.requests[0].messages] == ["system", "user", "assistant", "user"]


def test_the_cache_is_off_and_a_copy_shares_the_engine(lm: dspy.LM) -> None:
    assert lm.cache is False
    copied = lm.copy(temperature=0.0, rollout_id=5)
    assert copied.engine is lm.engine
    assert copied.kwargs["temperature"] == 0.0


def test_a_program_with_its_lm_can_be_deep_copied(lm: dspy.LM, policy: LocalPolicy) -> None:
    predict = dspy.Predict("question -> query")
    predict.lm = lm
    copied = predict.deepcopy()
    assert copied.lm is not None
    assert copied.lm.engine.policy is policy
    assert copied(question="who").query


def test_a_saved_program_comes_back_with_its_policy(llama_dir: Path, tmp_path: Path) -> None:
    predict = dspy.Predict("question -> query")
    predict.lm = policy_lm(LocalPolicySettings(model=str(llama_dir)), temperature=0.0)
    predict.save(str(tmp_path / "program.json"))
    loaded = dspy.Predict("question -> query")
    loaded.load(str(tmp_path / "program.json"), allow_unsafe_lm_state=True)
    assert isinstance(loaded.lm, PolicyLM)
    assert loaded.lm.engine.policy is predict.lm.engine.policy
    with dspy.context(adapter=CompactAdapter()):
        assert loaded(question="who").query == predict(question="who").query


def test_a_prompt_too_long_is_dspys_context_window_error(lm: dspy.LM) -> None:
    with pytest.raises(ContextWindowExceededError, match="512 positions"):
        lm("book " * 600)


def test_a_failing_policy_is_dspys_provider_error_and_is_not_tried_again() -> None:
    served = Served(fails=True)
    with pytest.raises(LMProviderError, match="the server is gone"):
        policy_lm(served)("the city")
    assert len(served.requests) == 1


def test_closing_an_engine_ends_what_waits_and_refuses_what_comes() -> None:
    begun = threading.Event()

    class Slow(Served):
        async def complete(self, request: Request) -> list[Completion]:
            begun.set()
            await asyncio.sleep(60)
            return []

    lm = policy_lm(Slow())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lm, "the city")
        assert begun.wait(20)
        lm.engine.close()
        with pytest.raises(LMProviderError, match="closed while it was asked"):
            waiting.result(20)
    with pytest.raises(LMProviderError, match="engine is closed"):
        lm("the city")


def test_what_a_policy_cannot_do_is_refused(lm: dspy.LM) -> None:
    with pytest.raises(LMUnsupportedFeatureError, match="frequency_penalty"):
        lm("the city", frequency_penalty=0.5)


def test_one_served_url_is_a_plain_lm_that_sends_n_in_one_request() -> None:
    lm = policy_lm(OpenAIPolicySettings(model="tiny", urls=("http://a/v1",)), max_tokens=7)
    assert type(lm) is dspy.LM
    assert lm.engine == "litellm"
    assert lm.cache is False
    assert lm.kwargs["api_base"] == "http://a/v1"
    assert lm.kwargs["max_tokens"] == 7
    several = policy_lm(OpenAIPolicySettings(model="tiny", urls=("http://a/v1", "http://b/v1")))
    assert isinstance(several.engine, PolicyEngine)
