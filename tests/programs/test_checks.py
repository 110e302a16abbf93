"""What leret sends is what the DSPy program sends: proven for every adapter, hop and prompt, and refused otherwise."""

import asyncio
import re
from dataclasses import replace
from enum import Enum

import dspy
import pytest
from pydantic import BaseModel

from leret.config.sampling import AdapterSettings, ProgramSettings
from leret.core.errors import ProgramError
from leret.core.runs import Run
from leret.programs import Search
from leret.programs.adapters import make_adapter
from leret.programs.checks import check_messages, message_difference, program_messages
from leret.programs.load import load_program
from leret.programs.prompts import ZERO_SHOT, Formatter, Prompt
from leret.programs.replay import Replay
from leret.programs.runner import ProgramRunner
from leret.retrieval.batching import SearchBatcher
from leret.sampling.rollouts.branching import SamplingPlan, StateSampler
from leret.sampling.rollouts.scheduler import Scheduler
from leret.sampling.stage import sample
from leret.sampling.store.store import Store
from tests.sampling.fakes import ROOT, FakePolicy, FakeRetriever, open_fakes, questions, recipe_of, write_data

DEMOS = [
    {"question": "what follows alpha", "context": [], "query": "alpha beta", "reasoning": "Let me see."},
    {"question": "what follows \"gamma\"?", "context": ["Gamma | gamma leads to {delta}", "Ünïcode | [[ ## x ## ]]"],
     "query": "gamma\ndelta", "reasoning": "Let me see."},
]  # fmt: skip


class Writing(FakePolicy):
    """Writes in the adapter's format."""

    def __init__(self, formatter, predictor):
        super().__init__()
        self.formatter, self.predictor = formatter, predictor

    async def complete(self, request):
        plain = await super().complete(request)
        fields = ({"reasoning": "so", "query": c.text} for c in plain)
        texts = [self.formatter.completion(self.predictor, values) for values in fields]
        return [replace(c, text=text) for c, text in zip(plain, texts, strict=True)]


def frozen(messages):
    return tuple((m["role"], m["content"]) for m in messages)


@pytest.mark.parametrize("reason", [False, True], ids=["predict", "reason"])
@pytest.mark.parametrize("kind", ["chat", "json", "xml", "compact"])
def test_what_the_sampler_sends_and_stores_is_what_the_program_sends(kind, reason, tmp_path):
    """The whole sampler against the program, at the completions that the policy really wrote."""

    def load():
        return load_program(ROOT / "pipelines/multihop.py", "MultiHop", {"hops": 3, "reason": reason}, k=2)

    program, adapter = load(), make_adapter(AdapterSettings(kind=kind))
    ((name, _),) = program.named_predictors()
    prompts = [ZERO_SHOT, Prompt("1", {name: DEMOS[:1]}), Prompt("2", {name: DEMOS}, {name: "Be brief: two words."})]
    formatter, searches = Formatter(program, adapter), SearchBatcher(FakeRetriever())
    runner, policy = ProgramRunner(Replay(program, adapter), formatter, searches), Writing(formatter, name)
    with Store(tmp_path / "rollouts.db") as store:
        sampler = StateSampler(runner, policy, store, SamplingPlan(tuple(prompts), 1, 1, 1.0, 1.0, 16))
        scheduler = Scheduler(runner, sampler, store, policy.digest, seed=1, max_error_rate=0.0)
        asyncio.run(scheduler.run(questions(3), 4))
        groups = list(store.groups())
    searches.close()
    expected = set()
    for question in questions(3):
        path = [group for group in groups if group.state.question_id == question.id]
        parents = [after.state.parent for after in path[1:]] + [path[-1].samples[0].id]
        texts = {one.id: one.completion for group in path for one in group.samples}
        for prompt in prompts:
            theirs = program_messages(load(), runner, question, prompt, [texts[parent] for parent in parents])
            expected |= set(map(frozen, theirs))
            if prompt is ZERO_SHOT:  # the prompt of every preference
                assert [frozen(group.state.messages) for group in path] == list(map(frozen, theirs))
    assert {frozen(request.messages) for request in policy.requests} == expected


def check(program, replayed, n=1, kind="chat", prompts=(ZERO_SHOT,)):
    adapter, searches = make_adapter(AdapterSettings(kind=kind)), SearchBatcher(FakeRetriever())
    runner = ProgramRunner(Replay(replayed, adapter), Formatter(replayed, adapter), searches)
    try:
        return asyncio.run(check_messages(program, runner, prompts, questions(n)))
    finally:
        searches.close()


def asking(forward, signature="question -> query", **attributes):
    """A program with one predictor, ``write``, and this ``forward``."""

    def init(self):
        dspy.Module.__init__(self)
        self.write = dspy.Predict(signature)

    program = type("Asking", (dspy.Module,), {"__init__": init, "forward": forward})()
    program.__dict__.update(attributes)
    return program


class Colour(Enum):
    RED = "red"


class Fact(BaseModel):
    query: str
    weights: dict[str, float]
    note: str = "none"


class Tree(BaseModel):
    branches: list["Tree"]


MANY = dspy.Signature(
    "question -> text, texts: list[str], n: int, yes: bool, maybe: str | None, pair: tuple[str, int], "
    "counts: dict[str, list[int]], colour: Colour | None, fact: Fact",
    custom_types={"Colour": Colour, "Fact": Fact},
)


def test_a_program_that_sends_something_else_is_refused_with_the_difference():
    """At its second call: outputs of any type are made up for the first."""

    def forward(self, question):  # looks the same from outside, and asks something else every time that it runs
        self.write(question=question)
        self.runs += 1
        self.write(question=f"{question} ({self.runs})")

    with pytest.raises(ProgramError, match="Nothing was sampled") as caught:
        check(asking(forward, MANY, runs=0), asking(forward, MANY, runs=4))
    told = str(caught.value)
    assert "question q00, prompt 0, LM call 2 (predictor write)" in told
    assert re.search(r"leret:   .*number 0 \(5\)", told)
    assert re.search(r"program: .*number 0 \(1\)", told)


def test_a_program_that_calls_less_is_refused():
    def forward(self, question):
        for _ in range(self.times):
            question = self.write(question=question).query

    with pytest.raises(ProgramError, match="program: nothing is sent there"):
        check(asking(forward, times=1), asking(forward, times=2))


def test_a_difference_of_roles_or_numbers_is_told():
    one, two = [({"role": role, "content": "a"},) for role in ("user", "system")]
    assert message_difference(one + two, one) == "  2 messages (leret) and 1 (program)"
    assert "of role user (leret) and system (program)" in message_difference(one, two)


@pytest.mark.parametrize("kind", [dspy.Image, Tree])
def test_a_type_that_cannot_be_made_up_ends_the_comparison_and_says_so(kind):
    def forward(self, question):
        self.write(question=self.write(question=question).found)

    special = dspy.Signature("question -> found").with_updated_fields("found", type_=kind)
    n, (stop,) = check(asking(forward, special), asking(forward, special))
    assert (n, stop.partition(" of ")[0]) == (1, "question q00, after LM call 1: no outputs")


def test_questions_that_call_no_lm_are_passed_over_and_refused_where_there_are_no_others():
    def forward(self, question):
        if "number 0" in question:
            raise KeyError("x")
        if "number 1" not in question:
            self.write(question=question)

    n, (stop,) = check(asking(forward), asking(forward), 4)
    assert (n, stop.partition(":")[0]) == (1, "question q00, after LM call 0")
    with pytest.raises(ProgramError, match=r"Asking calls no LM for 2 questions \(question q00"):
        check(asking(forward), asking(forward), 2)


class Reacting(dspy.Module):
    """Asks dspy.settings for the adapter that lays out its trajectory."""

    def __init__(self):
        super().__init__()
        self.search = Search(k=3)
        self.react = dspy.ReAct("question -> answer", tools=[self.look_up], max_iters=3)

    def look_up(self, query: str = "alpha") -> list[str]:
        """Search."""
        return self.search(query).passages

    def forward(self, question):
        return self.react(question=question)


@pytest.mark.parametrize("kind", ["chat", "json", "xml"])
def test_a_program_that_asks_for_the_adapter_is_replayed_under_the_runs(kind):
    prompts = [ZERO_SHOT, Prompt("1", {}, {"react.react": "Be brief."})]
    assert check(Reacting(), Reacting(), 2, kind, prompts) == (2 * 4, ())


OWN = """
import random, dspy
from leret.programs import Search
class Own(dspy.Module):
    def __init__(self, k=3):
        super().__init__()
        self.write, self.search = dspy.Predict("question, n -> query"), Search(k=k)
    def forward(self, question):
"""


def test_the_stage_refuses_before_it_asks_the_policy_and_tells_where_the_comparison_had_to_stop(tmp_path, monkeypatch):
    policies = open_fakes(monkeypatch)
    write_data(tmp_path)
    recipe = recipe_of(prompts=1)
    program = ProgramSettings(path=f"{tmp_path}/own.py:Own", adapter=recipe.program.adapter)

    def run(name, forward):
        (tmp_path / "own.py").write_text(f"{OWN}        {forward}")
        return sample(recipe.model_copy(update={"program": program}), Run.create(tmp_path / name), base_dir=tmp_path)

    with pytest.raises(ProgramError, match="is not what the program sends"):
        run("one", "self.search(self.write(question=question, n=str(random.random())).query)")
    assert not policies[0].requests
    words = "query = self.write(question=question, n='1').query; 1 / (not query[-1].isdigit()); self.search(query)"
    assert "after LM call 1: Own failed" in run("two", words).notes[0]
