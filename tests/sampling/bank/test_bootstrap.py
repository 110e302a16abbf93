"""Bootstrapping few-shot prompts."""

import asyncio
from dataclasses import replace

import dspy
import pytest
from dspy.lm15 import ContextLengthError, Message, Response, TextPart, Usage

from leret.core.errors import PolicyError, ProgramError, RetrievalError
from leret.policies.dspy_lm import policy_lm
from leret.programs.adapters import CompactAdapter
from leret.programs.load import load_program
from leret.rewards import REWARDS
from leret.sampling.bank.bootstrap import BankPlan, bootstrap_prompts, cached_completion_lm
from tests.sampling.fakes import ROOT, WORDS, FakePolicy, FakeRetriever, questions
from tests.sampling.rollouts.test_rollout import roll

PLAN = BankPlan(n_prompts=4, max_demos=2, candidates=5, threshold=0.4, threads=4)


class Scripted:
    """Writes the question's word, or another one where the question has an odd number."""

    def __init__(self, text=None):
        self.text = text

    def complete(self, request):
        words, number = request.messages[-1].text.split("number")
        text = self.text or (
            words.split()[-1] if int(number.split()[0]) % 2 == 0 else WORDS[int(number.split()[0]) % 3]
        )
        if isinstance(text, Exception):
            raise text
        usage = Usage(input_tokens=0, output_tokens=0, total_tokens=0)
        message = Message.assistant([TextPart(text)])
        return Response(id=None, model="scripted", message=message, finish_reason="stop", usage=usage)


def scripted(temperature, text=None):
    return dspy.LM("scripted/lm", engine=Scripted(text), cache=False, temperature=temperature, num_retries=0)


def bank(program, lm=scripted, plan=PLAN, retriever=None, train=None):
    return bootstrap_prompts(
        program,
        CompactAdapter(),
        lm(0.0),
        retriever or FakeRetriever(),
        REWARDS["ap"],
        train or questions(12),
        questions(24)[12:],
        plan,
        teacher=lm(0.7),
    )


def test_prompts_are_distinct_and_ordered_by_score(program, capsys):
    prompts = bank(program)
    assert [p.name for p in prompts] == [str(i) for i in range(len(prompts))]
    assert 2 <= len(prompts) <= 4
    assert len({p.digest for p in prompts}) == len(prompts)
    scores = [p.score for p in prompts[1:]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_demos_are_steps_of_runs_that_retrieved_well(program):
    asked = {q.text: q for q in questions(12)}
    for prompt in bank(program)[1:]:
        demos = prompt.demos["write_query"]
        assert 1 <= len(demos) <= 2
        for demo in demos:
            assert set(demo) <= {"question", "context", "query"}
            found = [p.doc_id for p in FakeRetriever().search([demo["query"]], 2)[0]]
            assert set(found) & set(asked[demo["question"]].gold)


class Slow(FakePolicy):
    """A server that samples by the seed at temperature 0 too, and answers some questions later than others."""

    def __init__(self, slow):
        super().__init__()
        self.slow = slow

    async def complete(self, request):
        number = int(request.messages[-1]["content"].split("number")[1].split()[0])
        await asyncio.sleep(0.02 if number % 3 == self.slow else 0.0)
        return [self._one(replace(request, temperature=1.0), seed) for seed in request.seeds]


def test_the_order_in_which_completions_come_changes_no_bank(program):
    def made(slow):
        policy = Slow(slow)
        return bank(program.deepcopy(), lambda t: policy_lm(policy, temperature=t))

    assert made(0) == made(1) == made(2)


def test_one_prompt_needs_no_bootstrapping(program):
    assert [p.name for p in bank(program, lambda t: None, BankPlan(1, 2, 5, 0.4))] == ["0"]


def test_no_run_that_is_good_enough_leaves_the_zero_shot_prompt(program):
    prompts = bank(program, plan=BankPlan(4, 2, 5, threshold=1.1))
    assert [p.name for p in prompts] == ["0"]


def test_an_outage_of_the_policy_is_not_a_bad_prompt(program):
    with pytest.raises(PolicyError, match="the prompt bank could not be made: the server is away"):
        bank(program, lambda t: scripted(t, PolicyError("the server is away")))


def test_a_prompt_that_does_not_fit_costs_its_own_run_alone(program):
    class Narrow(Scripted):
        def complete(self, request):
            if request.messages[-1].text.split("number")[1].split()[0] == "12":
                raise ContextLengthError("a prompt of 517 tokens does not fit")
            return super().complete(request)

    prompts = bank(program, lambda t: dspy.LM("scripted/lm", engine=Narrow(), cache=False, temperature=t))
    scores = {prompt.digest: prompt.score for prompt in bank(program)}
    assert prompts[1].score < scores[prompts[1].digest]


def test_an_outage_of_the_retriever_is_not_a_bad_prompt(program):
    with pytest.raises(RetrievalError, match="the prompt bank could not be made: the index is away"):
        bank(program, retriever=FakeRetriever(broken=["alpha"]))


def test_an_error_of_the_lm_is_an_outage_of_the_policy(program):
    with pytest.raises(PolicyError, match=r"could not be made: LMUnexpectedError: .*boom"):
        bank(program, lambda t: scripted(t, ValueError("boom")))


class Crashing(dspy.Module):
    def __init__(self):
        super().__init__()
        self.ask = dspy.Predict("question -> query")

    def forward(self, question):
        raise ValueError("boom")


def test_a_program_that_always_crashes_is_named():
    with pytest.raises(ProgramError, match="failed on every question of the bank: ValueError: boom"):
        bank(Crashing())


def test_a_completion_that_does_not_parse_is_a_bad_run(program):
    assert [p.name for p in bank(program, lambda t: scripted(t, " "))] == ["0"]


def test_cached_completions_repeat_the_rollout(program, replay, formatter):
    rollouts, _ = roll(replay, formatter, FakePolicy(), temperature=1.0)
    lm = cached_completion_lm(rollouts, lambda: None)
    fresh = load_program(ROOT / "pipelines/multihop.py", "MultiHop", {"hops": 2}, k=2)
    with dspy.context(lm=lm, adapter=CompactAdapter(), rm=FakeRetriever()):
        for question, rollout in zip(questions(), rollouts, strict=True):
            assert fresh(question=question.text).doc_ids == [p.doc_id for p in rollout.ranking]


def test_unknown_prompt_is_asked_with_the_same_settings():
    seen = []

    class Noting(Scripted):
        def complete(self, request):
            seen.append((request.config.temperature, request.config.max_tokens))
            return super().complete(request)

    def other():
        return dspy.LM("scripted/lm", engine=Noting("asked"), cache=False, num_retries=0)

    lm = cached_completion_lm([], other, temperature=0.7, max_tokens=9)
    assert lm("what number 1") == ["asked"]
    assert seen == [(0.7, 9)]
