"""DSPy programs of the shapes that users write; none of them knows of leret beyond its searches."""

import asyncio
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import dspy

from leret.core.dspy_internals import EngineLM, messages_of, text_response
from leret.programs.search import Found, Search, search_tool
from tests.programs.zoo import Agent
from tests.sampling.fakes import WORDS, FakeRetriever

WORKS = "works"
SHAPES = {"Agent": (Agent, WORKS)}
"""Programs by name, with what comes of them: `WORKS`, or a pattern of the error that they get."""

QUERY, ANSWER = "question, context: list[str] -> query", "question, context: list[str] -> answer"


def value(kind, rng):
    """Make up a value of a type as DSPy's prompts name it."""
    word = " ".join(rng.choices(WORDS, k=2))
    if kind.startswith("Literal"):
        return rng.choice(re.findall(r"'([^']*)'", kind))
    if kind.startswith("list"):
        return [value(kind[5:-1], rng) for _ in range(2)]
    return word


def written(messages, seed=0):
    """A completion in the format that a prompt asks for; a function of prompt and seed."""
    rng, system = random.Random(f"{messages}|{seed}"), messages[0]["content"]
    outputs = system.partition("output fields are:")[2].partition("All interactions")[0]
    fields = {name: value(kind, rng) for name, kind in re.findall(r"^\d+\. `(\w+)` \((.+?)\)", outputs, re.M)}
    if "next_tool_args" in fields:
        fields["next_tool_args"] = {"query": " ".join(rng.choices(WORDS, k=2))}
    texts = {name: one if isinstance(one, str) else json.dumps(one) for name, one in fields.items()}
    if "Outputs will be a JSON object" in system:
        return json.dumps(fields)
    if "<" + next(iter(fields), "x") + ">" in system:
        return "\n".join(f"<{name}>\n{text}\n</{name}>" for name, text in texts.items())
    return "\n\n".join([*(f"[[ ## {name} ## ]]\n{text}" for name, text in texts.items()), "[[ ## completed ## ]]"])


def answer_strongly(request):
    messages = messages_of(request)
    text = written(messages, seed=9) if len(messages) > 1 else f"strong {messages[0]['content'][-5:]}"
    return text_response(request, text)


STRONG = EngineLM("strong", answer_strongly)


def shape(outcome=WORKS, **parts):
    """Make a program of a function ``forward(self, question)``; ``parts`` are signatures, or factories of modules."""

    def register(forward):
        def __init__(self):  # noqa: N807
            dspy.Module.__init__(self)
            self.search = Search(k=2)
            for name, part in ({"write": QUERY, "answer": ANSWER} | parts).items():
                if part is not None:
                    setattr(self, name, dspy.Predict(part) if isinstance(part, str) else part(self))

        method = "aforward" if asyncio.iscoroutinefunction(forward) else "forward"
        kind = type(forward.__name__, (dspy.Module,), {"__init__": __init__, method: forward, "__module__": __name__})
        SHAPES[forward.__name__] = (kind, outcome)
        return forward

    return register


def end(found, **more):
    return dspy.Prediction(found=found.doc_ids, **more)


@shape(retrieve=lambda self: dspy.Retrieve(k=2))
def retrieving(self, question):
    context = self.retrieve(self.write(question=question, context=[]).query).passages
    return self.answer(question=question, context=context)


class Innermost(dspy.Module):
    def __init__(self):
        super().__init__()
        self.write, self.search = dspy.Predict(QUERY), Search(k=2)

    def forward(self, question, found):
        return self.search(self.write(question=question, context=found.passages).query, found)


@search_tool
async def look_up_later(query: str) -> list[dict]:
    """Rows for a query, after a while."""
    await asyncio.sleep(0)
    return [{"doc_id": p.doc_id, "text": p.text} for p in FakeRetriever().search([query], 2)[0]]


def best(kind, n, reward):
    return lambda self: kind(module=Innermost(), N=n, reward_fn=reward, threshold=1.0)


@shape(best=best(dspy.Refine, 2, lambda inputs, found: 0.5), write=None)
def refine(self, question):
    return end(self.best(question=question, found=Found()))


@shape(best=best(dspy.BestOfN, 3, lambda inputs, found: float(len(found.doc_ids) > 1)), write=None)
def best_of_n_by_what_is_found(self, question):
    return end(self.best(question=question, found=Found()))


@shape(agent=lambda self: dspy.ReAct("question -> answer", tools=[look_up_later], max_iters=2))
async def async_agent(self, question):
    return await self.agent.acall(question=question)


@shape(inner=lambda self: Innermost(), write=None)
def parallel_modules(self, question):
    pairs = [(self.inner, {"question": f"{question} {i}", "found": Found()}) for i in range(3)]
    parts = dspy.Parallel(num_threads=3, disable_progress_bar=True)(pairs)
    return dspy.Prediction(found=sorted({doc for one in parts for doc in one.doc_ids}))


@shape()
async def gather_that_returns_exceptions(self, question):
    async def part(i):
        query = (await asyncio.wait_for(self.write.acall(question=f"{question} {i}", context=[]), 60)).query
        return await asyncio.to_thread(self.search, query)

    parts = await asyncio.gather(*map(part, range(2)), return_exceptions=True)
    return dspy.Prediction(found=[doc for one in parts if isinstance(one, Found) for doc in one.doc_ids])


@shape()
def threads_with_copied_context(self, question):
    with ThreadPoolExecutor(2) as pool:
        call = [pool.submit(copy_context().run, self.write, question=f"{question} {i}", context=[]) for i in range(2)]
        return end(self.search([one.result().query for one in call]))


@shape("in its own thread.*dspy.Parallel")
def threads_that_ask_an_lm(self, question):
    with ThreadPoolExecutor(2) as pool:
        call = [pool.submit(self.write, question=f"{question} {i}", context=[]) for i in range(2)]
        return end(self.search([one.result().query for one in call]))


@shape(strong=lambda self: STRONG)
def two_lms_and_two_adapters(self, question):
    with dspy.context(lm=self.strong):
        note = dspy.ChainOfThought("question -> note")(question=question).note
        with dspy.context(adapter=dspy.JSONAdapter()):
            other = dspy.Predict("question -> note")(question=note).note
    return end(self.search(self.write(question=question, context=[note, other]).query))


@shape("the same in every run.*do not set attributes in forward", strong=lambda self: STRONG, note="question -> note")
def lm_set_in_forward(self, question):
    self.note.set_lm(self.strong)
    note = self.note(question=question).note
    return end(self.search(self.write(question=question, context=[note]).query))


@shape("reads the history of its LM.*use what the predictor returns")
def reads_the_history_of_its_lm(self, question):
    query = self.write(question=question, context=[]).query
    return end(self.search(f"{query} {len(self.write.lm.history)}"))


@shape()
def adapter_set_inside(self, question):
    with dspy.context(adapter=dspy.XMLAdapter()):
        query = self.write(question=question, context=[]).query
    return end(self.search(query))


@shape("n > 1.*make several calls")
def several_completions_in_one_call(self, question):
    return end(self.search(self.write(question=question, context=[], config={"n": 3}).query))


@shape("streams.*without dspy.streamify")
def streaming_inside(self, question):
    async def run():
        return [part async for part in dspy.streamify(self.write)(question=question, context=[])][-1]

    return end(self.search(asyncio.run(run()).query))


@shape("called no search tool .*tools: look_up.*the LM never calls", tools=lambda self: {"look_up": None})
def an_agent_that_calls_no_tool(self, question):
    return dspy.Prediction(found=self.write(question=question, context=[]).query.split())


@shape("no search visible to leret.*leret.search_tool")
def search_that_leret_does_not_see(self, question):
    rows = FakeRetriever().search([self.write(question=question, context=[]).query], 2)[0]
    return dspy.Prediction(found=[row.doc_id for row in rows], answer=self.answer(question=question, context=[]).answer)


@shape("no search seen by leret found.*wrap every search with leret.search_tool")
def half_of_the_searches_unseen(self, question):
    query = self.write(question=question, context=[]).query
    rows = FakeRetriever().search([query], 2)[0]
    found = self.search(self.write(question=question, context=[row.text for row in rows]).query)
    ids = [row.doc_id for row in rows]
    return dspy.Prediction(found=ids, context=found.passages, doc_ids=ids)


@shape("is not deterministic.*do not set attributes in forward")
def state_on_itself(self, question):
    self.n = getattr(self, "n", 0) + 1
    return end(self.search(self.write(question=f"{question} {self.n}", context=[]).query))
