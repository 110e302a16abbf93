"""What leret sends is what the DSPy program sends: proven for every adapter, hop and prompt, and refused otherwise."""

import asyncio
import re
import time
from dataclasses import replace
from enum import Enum
from pathlib import Path

import dspy
import pytest
from pydantic import BaseModel

from leret.config.sampling import AdapterSettings, ProgramSettings
from leret.core.errors import ProgramError
from leret.core.runs import Run
from leret.programs import Search
from leret.programs.adapters import make_adapter
from leret.programs.checks import check_messages, made_up, message_difference, program_messages
from leret.programs.load import load_program
from leret.programs.prompts import ZERO_SHOT, Formatter, Prompt
from leret.programs.replay import Replay
from leret.programs.runner import ProgramRunner
from leret.retrieval.batching import SearchBatcher
from leret.sampling.rollouts.branching import SamplingPlan, StateSampler
from leret.sampling.rollouts.scheduler import Scheduler
from leret.sampling.stage import sample
from leret.sampling.store.store import Store
from tests.sampling.fakes import FakePolicy, FakeRetriever, open_fakes, questions, recipe_of, write_data

ROOT = Path(__file__).parents[2]
KINDS = ("chat", "json", "xml", "compact")
DEMOS = [
    {"question": "what follows alpha", "context": [], "query": "alpha beta"},
    {"question": "what follows \"gamma\"?", "context": ["Gamma | gamma leads to {delta}", "Ünïcode | [[ ## x ## ]]"],
     "query": "gamma\ndelta"},
]  # fmt: skip


def check(program, replay, formatter, prompts, tasks, retriever=None):
    searches = SearchBatcher(retriever or FakeRetriever())
    try:
        return asyncio.run(check_messages(program, ProgramRunner(replay, formatter, searches), prompts, tasks))
    finally:
        searches.close()


def opened(kind, reason=False, hops=3):
    path = ROOT / "pipelines/multihop.py"
    program, other = (load_program(path, "MultiHop", {"hops": hops, "reason": reason}, k=2) for _ in range(2))
    adapter = make_adapter(AdapterSettings(kind=kind))
    return program, Replay(other, adapter), Formatter(other, adapter)


def prompts_for(formatter, program):
    name = program.named_predictors()[0][0]
    demos = [{**demo, "reasoning": "Let me see."} for demo in DEMOS]
    return [
        ZERO_SHOT,
        Prompt("1", {name: demos[:1]}),
        Prompt("2", {name: demos}),
        Prompt("3", {name: demos}, {name: "Be brief: two words."}),
    ]


@pytest.mark.parametrize("reason", [False, True], ids=["predict", "reason"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_call_of_the_program_is_sent_as_the_program_sends_it(kind, reason):
    program, replay, formatter = opened(kind, reason)
    prompts = prompts_for(formatter, program)
    # Many questions: a formatter may take a short cut once it has seen a prompt a few times.
    for question in questions(3):
        assert check(program, replay, formatter, prompts, [question]) == (3 * 4, ())


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_sampler_sends_and_stores_is_what_the_program_sends(kind, tmp_path):
    """The whole sampler against the program, at the completions that the policy really wrote."""
    program, replay, formatter = opened(kind)
    name = program.named_predictors()[0][0]
    prompts, asked = prompts_for(formatter, program)[:3], questions(3)
    retriever, policy = FakeRetriever(), Writing(formatter, name)
    front = SearchBatcher(retriever)
    runner = ProgramRunner(replay, formatter, front)
    with Store(tmp_path / "rollouts.db") as store:
        sampler = StateSampler(runner, policy, store, SamplingPlan(tuple(prompts), 1, 1, 1.0, 1.0, 16))
        scheduler = Scheduler(runner, sampler, store, policy.digest, seed=1, max_error_rate=0.0)
        asyncio.run(scheduler.run(asked, 4))
        groups = list(store.groups())
    front.close()
    sent = {frozen(request.messages) for request in policy.requests}
    n = 0
    for question in asked:
        path = [group for group in groups if group.state.question_id == question.id]
        parents = [after.state.parent for after in path[1:]] + [path[-1].samples[0].id]
        completions = [
            next(one.completion for one in group.samples if one.id == parent)
            for group, parent in zip(path, parents, strict=True)
        ]
        for prompt in prompts:
            fresh = load_program(ROOT / "pipelines/multihop.py", "MultiHop", {"hops": 3}, k=2)
            theirs = program_messages(fresh, runner, question, prompt, completions)
            assert len(theirs) == len(path)
            for group, messages in zip(path, theirs, strict=True):
                assert frozen(messages) in sent
                n += 1
                if prompt is ZERO_SHOT:
                    assert frozen(group.state.messages) == frozen(messages)  # the prompt of every preference
    assert n == len(sent)  # and nothing else was sent


class Writing(FakePolicy):
    """Writes in the adapter's format."""

    def __init__(self, formatter, predictor):
        super().__init__()
        self.formatter, self.predictor = formatter, predictor

    async def complete(self, request):
        plain = await super().complete(request)
        return [replace(c, text=self.formatter.completion(self.predictor, {"query": c.text})) for c in plain]


def frozen(messages):
    return tuple((m["role"], m["content"]) for m in messages)


def asking(forward, signature="question -> query"):
    """A program with one predictor, ``write``, and this ``forward``."""

    class Asking(dspy.Module):
        def __init__(self):
            super().__init__()
            self.write = dspy.Predict(signature)

    Asking.forward = forward
    return Asking


def compare(program, replayed, n=1):
    formatter = Formatter(replayed, make_adapter(AdapterSettings(kind="chat")))
    return check(program, Replay(replayed), formatter, [ZERO_SHOT], questions(n))


def test_a_program_that_sends_something_else_is_refused_with_the_difference():
    def forward(self, question):  # looks the same from outside, and asks something else every time that it runs
        self.runs = getattr(self, "runs", 0) + 1
        self.write(question=f"{question} ({self.runs})")

    one, two = asking(forward)(), asking(forward)()
    two.runs = 4
    with pytest.raises(ProgramError, match="Nothing was sampled") as caught:
        compare(one, two)
    told = str(caught.value)
    assert "question q00, prompt 0, LM call 1 (predictor write)" in told
    assert re.search(r"leret:   .*number 0 \(5\)", told)
    assert re.search(r"program: .*number 0 \(1\)", told)


def test_a_program_that_calls_less_is_refused():
    def forward(self, question):
        for _ in range(self.times):
            question = self.write(question=question).query

    once, twice = asking(forward)(), asking(forward)()
    once.times, twice.times = 1, 2
    with pytest.raises(ProgramError, match="program: nothing is sent there"):
        compare(once, twice)


def recipe_with(tmp_path, forward):
    """A recipe for a program with this ``forward``, in a file of its own."""
    write_data(tmp_path)
    (tmp_path / "own.py").write_text(
        "import random\nimport dspy\nfrom leret.programs import Search\n\n\nclass Own(dspy.Module):\n"
        "    def __init__(self, k=3):\n        super().__init__()\n"
        "        self.write = dspy.Predict('question, n -> query')\n        self.search = Search(k=k)\n\n"
        f"    def forward(self, question):\n        {forward}\n"
    )
    recipe = recipe_of(prompts=1)
    program = ProgramSettings(path=f"{tmp_path}/own.py:Own", adapter=recipe.program.adapter)
    return recipe.model_copy(update={"program": program})


def test_the_stage_refuses_before_it_asks_the_policy(tmp_path, monkeypatch):
    made = open_fakes(monkeypatch)
    recipe = recipe_with(tmp_path, "self.search(self.write(question=question, n=str(random.random())).query)")
    with pytest.raises(ProgramError, match="is not what the program sends"):
        sample(recipe, Run.create(tmp_path / "run"), base_dir=tmp_path)
    assert not made[0].requests


def test_the_stage_tells_where_the_comparison_had_to_stop(tmp_path, monkeypatch):
    open_fakes(monkeypatch)
    only_words = "query = self.write(question=question, n='1').query; 1 / (not query[-1].isdigit()); self.search(query)"
    report = sample(recipe_with(tmp_path, only_words), Run.create(tmp_path / "run"), base_dir=tmp_path)
    assert "after LM call 1: Own failed" in report.notes[0]


def test_outputs_are_made_up_by_their_types():
    class Many(dspy.Signature):
        question: str = dspy.InputField()
        text: str = dspy.OutputField()
        texts: list[str] = dspy.OutputField()
        n: int = dspy.OutputField()
        yes: bool = dspy.OutputField()
        maybe: str | None = dspy.OutputField()
        pair: tuple[str, int] = dspy.OutputField()
        counts: dict[str, list[int]] = dspy.OutputField()
        colour: Colour = dspy.OutputField()
        found: Found = dspy.OutputField()

    assert made_up(Many, "x") == {
        "text": "x",
        "texts": ["x"],
        "n": 1,
        "yes": True,
        "maybe": "x",
        "pair": ("x", 1),
        "counts": {"x": [1]},
        "colour": Colour.RED,
        "found": Found(query="x", weights={"x": 1.0}),
    }
    assert made_up(dspy.Signature("question -> image: dspy.Image"), "x") is None
    assert made_up(dspy.Signature("question -> tree").with_updated_fields("tree", type_=Tree), "x") is None


class Colour(Enum):
    RED = "red"


class Found(BaseModel):
    query: str
    weights: dict[str, float]
    note: str = "none"


class Tree(BaseModel):
    branches: list["Tree"]


@pytest.mark.parametrize("kind", [dict[str, str], tuple[str, int], Found, Colour | None])
def test_what_strays_after_outputs_of_a_special_type_is_refused(kind):
    def forward(self, question):
        self.write(question=question)
        self.write(question=f"{question} {time.time_ns()}")

    program = asking(forward, dspy.Signature("question -> facts").with_updated_fields("facts", type_=kind))
    with pytest.raises(ProgramError, match=r"LM call 2 \(predictor write\)"):
        compare(program(), program())


class Reacting(dspy.Module):
    """Asks dspy.settings for the adapter that lays out its trajectory."""

    def __init__(self, k=3):
        super().__init__()
        self.search = Search(k=k)
        self.react = dspy.ReAct("question -> answer", tools=[self.look_up], max_iters=3)

    def look_up(self, query: str = "alpha") -> list[str]:
        """Search."""
        return self.search(query).passages

    def forward(self, question):
        return self.react(question=question)


@pytest.mark.parametrize("kind", ["chat", "json", "xml"])
def test_a_program_that_asks_for_the_adapter_is_replayed_under_the_runs(kind):
    adapter = make_adapter(AdapterSettings(kind=kind))
    formatter = Formatter(Reacting(), adapter)
    replay = Replay(Reacting(), adapter)
    prompts = [ZERO_SHOT, Prompt("1", {}, {"react.react": "Be brief."})]
    assert check(Reacting(), replay, formatter, prompts, questions(2)) == (2 * 4, ())


def test_a_type_that_cannot_be_made_up_ends_the_comparison_and_says_so():
    def forward(self, question):
        self.write(question=question)
        self.write(question=question)

    special = asking(forward, "question -> image: dspy.Image")
    n, (stop,) = compare(special(), special())
    assert n == 1
    assert stop.startswith("question q00, after LM call 1: no outputs of predictor write")


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "asks nothing"])
def test_a_program_of_which_nothing_can_be_compared_is_refused(fails):
    silent = asking(lambda self, question: {}["x"] if fails else None)
    with pytest.raises(ProgramError, match=r"Asking calls no LM for 2 questions \(question q00"):
        compare(silent(), silent(), 2)


def test_questions_that_call_no_lm_are_passed_over():
    def forward(self, question):
        if "number 0" in question:
            raise KeyError("x")
        if "number 1" not in question:
            self.write(question=question)

    n, (stop,) = compare(asking(forward)(), asking(forward)(), 4)
    assert n == 1
    assert stop.startswith("question q00, after LM call 0: Asking failed")


def test_a_difference_of_roles_or_numbers_is_told():
    one, two = [({"role": role, "content": "a"},) for role in ("user", "system")]
    assert message_difference(one + two, one) == "  2 messages (leret) and 1 (program)"
    assert "of role user (leret) and system (program)" in message_difference(one, two)
