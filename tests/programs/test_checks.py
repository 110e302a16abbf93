"""What leret sends is what the DSPy program sends: proven for every adapter, hop and prompt, and refused otherwise."""

import asyncio
import re
import time
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
    sent = {request.messages for request in map(Frozen, policy.requests)}
    n = 0
    for question in asked:
        path = [group for group in groups if group.state.question_id == question.id]
        parents = [after.state.parent for after in path[1:]] + [path[-1].samples[0].id]
        completions = [
            next(one.completion for one in group.samples if one.id == parent)
            for group, parent in zip(path, parents, strict=True)
        ]
        for prompt in prompts:
            steps = [Answered(text) for text in completions]
            fresh = load_program(ROOT / "pipelines/multihop.py", "MultiHop", {"hops": 3}, k=2)
            theirs = program_messages(fresh, runner, question, prompt, steps)
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
        from dataclasses import replace

        plain = await super().complete(request)
        return [replace(c, text=self.formatter.completion(self.predictor, {"query": c.text})) for c in plain]


class Answered:
    def __init__(self, completion):
        self.completion = completion


class Frozen:
    def __init__(self, request):
        self.messages = frozen(request.messages)


def frozen(messages):
    return tuple((m["role"], m["content"]) for m in messages)


class Straying(dspy.Module):
    """Looks the same from outside, and asks something else every time that it runs."""

    def __init__(self):
        super().__init__()
        self.write = dspy.Predict("question -> query")
        self.runs = 0

    def forward(self, question):
        self.runs += 1
        self.write(question=f"{question} ({self.runs})")
        return dspy.Prediction()


def test_a_program_that_sends_something_else_is_refused_with_the_difference():
    one, two = Straying(), Straying()
    formatter = Formatter(two, make_adapter(AdapterSettings(kind="compact")))
    two.runs = 4
    with pytest.raises(ProgramError, match="Nothing was sampled") as caught:
        check(one, Replay(two), formatter, [ZERO_SHOT], questions(1))
    told = str(caught.value)
    assert "question q00, prompt 0, LM call 1 (predictor write)" in told
    assert re.search(r"leret:   \.\.\.'\w+ alpha number 0 \(5\)'", told)
    assert re.search(r"program: \.\.\.'\w+ alpha number 0 \(1\)'", told)


def test_a_program_that_calls_less_is_refused():
    class Once(dspy.Module):
        def __init__(self, times):
            super().__init__()
            self.times, self.write = times, dspy.Predict("question -> query")

        def forward(self, question):
            for _ in range(self.times):
                question = self.write(question=question).query

    formatter = Formatter(Once(2), make_adapter(AdapterSettings(kind="chat")))
    with pytest.raises(ProgramError, match="program: nothing is sent there"):
        check(Once(1), Replay(Once(2)), formatter, [ZERO_SHOT], questions(1))


def test_the_stage_refuses_before_it_asks_the_policy(tmp_path, monkeypatch):
    write_data(tmp_path)
    made = open_fakes(monkeypatch)
    (tmp_path / "straying.py").write_text(
        "import random\nimport dspy\nfrom leret.programs import Search\n\n\nclass Straying(dspy.Module):\n"
        "    def __init__(self, k=3):\n        super().__init__()\n"
        "        self.write = dspy.Predict('question, n -> query')\n        self.search = Search(k=k)\n\n"
        "    def forward(self, question):\n"
        "        self.search(self.write(question=question, n=str(random.random())).query)\n"
    )
    recipe = recipe_of(prompts=1)
    program = ProgramSettings(path=f"{tmp_path}/straying.py:Straying", adapter=recipe.program.adapter)
    recipe = recipe.model_copy(update={"program": program})
    run = Run.create(tmp_path / "run")
    with pytest.raises(ProgramError, match="is not what the program sends"):
        sample(recipe, run, base_dir=tmp_path)
    assert not made[0].requests


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


class Timed(dspy.Module):
    """Puts the time of day into its second call."""

    def __init__(self, kind):
        super().__init__()
        self.first = dspy.Predict(dspy.Signature("question -> facts").with_updated_fields("facts", type_=kind))
        self.second = dspy.Predict("question, now -> query")

    def forward(self, question):
        self.first(question=question)
        self.second(question=question, now=str(time.time_ns()))


@pytest.mark.parametrize("kind", [dict[str, str], tuple[str, int], Found, Colour | None])
def test_what_strays_after_outputs_of_a_special_type_is_refused(kind):
    formatter = Formatter(Timed(kind), make_adapter(AdapterSettings(kind="chat")))
    with pytest.raises(ProgramError, match=r"LM call 2 \(predictor second\)"):
        check(Timed(kind), Replay(Timed(kind)), formatter, [ZERO_SHOT], questions(1))


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
    class Special(dspy.Module):
        def __init__(self):
            super().__init__()
            self.write = dspy.Predict("question -> image: dspy.Image")

        def forward(self, question):
            for _ in range(2):
                self.write(question=question)

    formatter = Formatter(Special(), make_adapter(AdapterSettings(kind="chat")))
    n, (stop,) = check(Special(), Replay(Special()), formatter, [ZERO_SHOT], questions(1))
    assert n == 1
    assert stop.startswith("question q00, after LM call 1: no outputs of predictor write")


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "asks nothing"])
def test_a_program_of_which_nothing_can_be_compared_is_refused(fails):
    class Silent(dspy.Module):
        def __init__(self):
            super().__init__()
            self.write = dspy.Predict("question -> query")

        def forward(self, question):
            if fails:
                raise KeyError("x")

    formatter = Formatter(Silent(), make_adapter(AdapterSettings(kind="chat")))
    with pytest.raises(ProgramError, match=r"Silent calls no LM for 2 questions \(question q00"):
        check(Silent(), Replay(Silent()), formatter, [ZERO_SHOT], questions(2))


def test_questions_that_call_no_lm_are_passed_over():
    class Choosy(dspy.Module):
        def __init__(self):
            super().__init__()
            self.write = dspy.Predict("question -> query")

        def forward(self, question):
            if "number 0" in question:
                raise KeyError("x")
            if "number 1" not in question:
                self.write(question=question)

    formatter = Formatter(Choosy(), make_adapter(AdapterSettings(kind="chat")))
    n, (stop,) = check(Choosy(), Replay(Choosy()), formatter, [ZERO_SHOT], questions(4))
    assert n == 1
    assert stop.startswith("question q00, after LM call 0: Choosy failed")


def test_the_stage_tells_where_the_comparison_had_to_stop(tmp_path, monkeypatch):
    write_data(tmp_path)
    open_fakes(monkeypatch)
    (tmp_path / "long.py").write_text(
        "import dspy\nfrom leret.programs import Search\n\n\nclass Long(dspy.Module):\n"
        "    def __init__(self, k=3):\n        super().__init__()\n"
        "        self.write = dspy.Predict('question -> query')\n        self.search = Search(k=k)\n\n"
        "    def forward(self, question):\n"
        "        query = self.write(question=question).query\n"
        "        if query[-1].isdigit():\n            raise KeyError(query)\n"
        "        self.search(query)\n"
    )
    recipe = recipe_of(prompts=1)
    program = ProgramSettings(path=f"{tmp_path}/long.py:Long", adapter=recipe.program.adapter)
    run = Run.create(tmp_path / "run")
    report = sample(recipe.model_copy(update={"program": program}), run, base_dir=tmp_path)
    assert "after LM call 1: Long failed" in report.notes[0]


def test_a_difference_is_told_at_its_first_place():
    one = ({"role": "system", "content": "a"}, {"role": "user", "content": "x" * 30 + "left"})
    two = ({"role": "system", "content": "a"}, {"role": "user", "content": "x" * 30 + "right"})
    told = message_difference(one, two)
    assert "message 1 (user), from character 30 on" in told
    assert "leret:   ...'xxxxxxxxxxxxxxxxxxxxleft'" in told
    assert message_difference(one, one[:1]) == "  2 messages (leret) and 1 (program)"
    assert "of role user (leret) and system (program)" in message_difference(one[1:], one[:1])
