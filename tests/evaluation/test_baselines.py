import dspy
import pytest

from leret.core.errors import ConfigError
from leret.core.types import STOP, Candidate, Choice, Document, Task
from leret.evaluation.baselines import (
    CandidateRanking,
    HydeActor,
    ScriptedPolicy,
    answer_fields,
    marked_question,
    oracle_titles,
    query_places,
    rank,
    raw_question,
    rm3_retriever,
)
from leret.evaluation.stage import evaluate
from leret.programs.prompts import Formatter
from leret.programs.replay import Replay
from leret.programs.search import Found, Search
from leret.rollouts.actors import Decoding
from leret.viewer.report import write_report
from tests.evaluation.eval_fakes import CORPUS, Rule, asks, parts_of, program
from tests.programs.zoo import Agent
from tests.rollouts.test_rollout import roll_by
from tests.sampling.fakes import FakeRetriever

ASKED = "what follows alpha and beta"


def roll(replay, formatter, script=None, actor=None):
    task = Task.question("q", ASKED, gold=("beta", "gamma"))
    (rollout,) = roll_by(actor or ScriptedPolicy(formatter, script), replay, formatter, [task])
    return rollout


@pytest.mark.parametrize(("written", "query"), [("beta\n leads on.", "beta leads on."), (" \n", ASKED)])
def test_hydes_query_is_the_passage_that_the_policy_writes(written, query):
    asked = []
    policy = Rule(lambda text: asked.append(text) or written, "d")
    rollout = roll(*program(hops=2), actor=HydeActor(policy, Decoding(8)))
    assert [hop.queries for hop in rollout.hops] == [(query,), (query,)]
    assert [call.completion for call in rollout.steps] == [written, written]
    assert all("passage" in text and ASKED in text for text in asked)


class Prefixed(dspy.Module):
    def __init__(self):
        super().__init__()
        self.plan = dspy.Predict("question, context: list[str] -> plan")
        self.write = dspy.Predict("question, plan -> query")
        self.answer = dspy.Predict("question, context: list[str] -> answer")
        self.write_all = dspy.Predict("question -> queries: list[str]")
        self.search = Search(k=1)

    def forward(self, question):
        found = Found()
        for _ in range(2):
            plan = self.plan(question=question, context=found.passages).plan
            found = self.search(f"{plan} {self.write(question=question, plan=plan).query}", found)
        return self.answer(question=question, context=found.passages)


class Looped(Prefixed):
    def forward(self, question):
        found = Found()
        for query in self.write_all(question=question).queries:
            found = self.search(query, found)


@pytest.mark.parametrize(
    ("kind", "raw", "oracle"),
    [
        (Prefixed, [(f"{ASKED} {ASKED}",)] * 2, [("beta beta",), ("gamma gamma",)]),
        (Looped, [(ASKED,)], [("beta",), ("gamma",)]),
    ],
)
def test_the_oracle_gives_each_search_a_title_whatever_steps_no_search_follows(kind, raw, oracle):
    parts = parts_of(kind())
    assert [hop.queries for hop in roll(*parts, raw_question).hops] == raw
    rollout = roll(*parts, oracle_titles(CORPUS, {"q": query_places(roll(*parts, marked_question))}))
    assert [hop.queries for hop in rollout.hops] == oracle
    assert [p.doc_id for p in rollout.ranking] == ["beta", "gamma"]


def test_a_list_of_queries_gets_a_list_and_other_outputs_are_refused():
    signature = dspy.Signature("question -> queries: list[str], note: str")
    assert answer_fields("write", signature, ["a", "b"]) == {"queries": ["a", "b"], "note": "a b"}
    with pytest.raises(ConfigError, match=r"\(direct\) has no output fields; remove these systems from `systems`"):
        answer_fields("(direct)", None, ["a"])
    agent = Replay(Agent())
    with pytest.raises(ConfigError, match=r"list\[str\] fields, but agent.react.next_tool_name is .*Literal"):
        roll(agent, Formatter(agent), raw_question)


def test_rm3_and_hyde_are_rows_of_the_summary_which_says_what_hydes_queries_were(run, tmp_path):
    sampled = run.sampling()  # RM3 reads the index behind the cache
    sampled["retriever"]["cache"] = {"use": "on", "path": str(tmp_path / "rankings")}
    run.update(sampling=sampled)
    recipe = asks("raw-question", "base", "rm3", "hyde", limit=2)
    summary = evaluate(recipe, run, report=write_report).summary
    rows = {row["system"]: (row["policy"], row["lm_calls"], row["failed"]) for row in summary["rows"]}
    assert (list(rows), rows["rm3"]) == (["raw-question", "rm3", "base", "hyde"], (None, 0, 0))
    assert rows["hyde"] == ("base", 4, 0)
    (note,) = summary["notes"]
    assert "query was the text" in note
    assert note in run.report.read_text()
    assert ("hyde", "raw-question") in {(pair["a"], pair["b"]) for pair in summary["comparisons"]}
    assert evaluate(recipe, run).already
    with pytest.raises(ConfigError, match=r"rm3 cannot be evaluated.*remove rm3"):
        rm3_retriever(FakeRetriever())


TEXTS = ["the sea", "milk and more", "where is milk", "?"]
ONES = tuple(Candidate(str(i), text, position=i) for i, text in enumerate(TEXTS))
TASK = Task.question("q", "where is the milk")


def test_picks_follow_bm25_and_then_the_order_of_the_candidates():
    candidates, left, picked = CandidateRanking(), list(ONES), []
    for _ in ONES:
        id = candidates.first(TASK, Choice("pick", {"question": TASK.text}, (*left, STOP), tuple(picked)))
        picked.append(next(one for one in left if one.id == id))
        left.remove(picked[-1])
    assert [one.id for one in picked][2:] == ["0", "3"]
    assert {one.id for one in picked[:2]} == {"1", "2"}
    found = tuple(one._replace(position=None) for one in ONES)  # as the passages of a search
    assert candidates.first(TASK, Choice("pick", {"question": TASK.text}, (STOP, *found[1:], found[0]))) == "1"
    assert rank("milk", [Document("a", "", "?"), Document("b", "", "!")]) == ["a", "b"]  # no word in any
