from dataclasses import replace

import pytest
from dspy.lm15 import ContextLengthError

from leret.core.dspy_internals import EngineLM, text_response
from leret.core.errors import PolicyError, ProgramError, RetrievalError
from leret.programs.adapters import CompactAdapter
from leret.rewards import REWARDS
from leret.sampling.bank.bootstrap import BankPlan, bootstrap_prompts
from tests.sampling.fakes import WORDS, FakeRetriever, questions

PLAN = BankPlan(n_prompts=4, max_demos=2, candidates=5, threshold=0.4)


def good_if_even(word, number):
    return word if number % 2 == 0 else WORDS[number % 3]


def scripted(write=good_if_even):
    def answer(request):
        asked, number = request.messages[-1].text.split("number")
        text = write(asked.split()[-1], int(number.split()[0]))
        if isinstance(text, Exception):
            raise text
        return text_response(request, text)

    return lambda temperature: EngineLM("scripted", answer, temperature=temperature)


def bank(program, lm=scripted(), plan=PLAN, retriever=None):  # noqa: B008
    asked, retriever = questions(24), retriever or FakeRetriever()
    settings = CompactAdapter(), [lm(0.0)], retriever, REWARDS["ap"]
    return bootstrap_prompts(program, *settings, asked[:12], asked[12:], plan, teacher=[lm(0.7)])


def test_prompts_are_distinct_ordered_by_score_and_of_runs_that_retrieved_well(program, capsys):
    prompts = bank(program)
    assert [p.name for p in prompts] == [str(i) for i in range(len(prompts))]
    assert 2 <= len(prompts) == len({p.digest for p in prompts}) <= 4
    scores = [p.score for p in prompts[1:]]
    assert scores == sorted(scores, reverse=True)
    assert 1 >= scores[0] >= scores[-1] >= 0
    gold = {q.text: set(q.gold) for q in questions(12)}
    for demos in (prompt.demos["write_query"] for prompt in prompts[1:]):
        assert 1 <= len(demos) <= 2
        for demo in demos:
            assert set(demo) <= {"question", "context", "query"}
            assert gold[demo["question"]] & {p.doc_id for p in FakeRetriever().search([demo["query"]], 2)[0]}
    assert tuple(capsys.readouterr()) == ("", "")


def test_the_zero_shot_prompt_may_be_all(program):
    too_long = scripted(lambda *_: ContextLengthError("a prompt of 517 tokens does not fit"))
    for plan, lm in ((replace(PLAN, threshold=1.1), scripted()), (PLAN, scripted(lambda *_: " ")), (PLAN, too_long)):
        assert [prompt.name for prompt in bank(program, lm, plan)] == ["0"]


def test_an_outage_or_a_crashing_program_is_not_a_bad_prompt(program, monkeypatch):
    for failure, says in ((PolicyError("it is away"), "it is away"), (ValueError("boom"), "LMUnexpectedError: .*boom")):
        with pytest.raises(PolicyError, match=f"bank could not be made: {says}"):
            bank(program, scripted(lambda *_, failure=failure: failure))
    with pytest.raises(RetrievalError, match="bank could not be made: the index is away"):
        bank(program, retriever=FakeRetriever(["alpha"]))
    monkeypatch.setattr(type(program), "forward", lambda self, question: 1 / 0)
    with pytest.raises(ProgramError, match=r"bank could not be made: .* failed on every question .ZeroDivisionError"):
        bank(program)
