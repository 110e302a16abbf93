import dspy
import pytest

from leret.config.sampling import AdapterSettings
from leret.core.errors import ReplayError
from leret.core.runs import Run
from leret.programs.adapters import make_adapter
from leret.programs.load import load_program
from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.sampling.stage import sample
from tests.programs.zoo import PROGRAMS, TwoPredictors
from tests.sampling.fakes import ROOT, open_fakes, recipe_of, write_data

DEMOS = [
    {"question": "what follows alpha", "context": [], "query": "alpha beta", "reasoning": "Let me see."},
    {"question": "what follows \"gamma\"?", "context": ["Gamma | gamma leads to {delta}", "Ünïcode | [[ ## x ## ]]"],
     "query": "gamma\ndelta", "reasoning": "Let me see."},
]  # fmt: skip


@pytest.mark.parametrize("kind", PROGRAMS, ids=lambda kind: kind.__name__)
def test_every_program_comes_back_to_its_places_and_sends_what_stock_dspy_sends(kind, walk):
    needs, end = walk(kind(), check=True, pure=kind())
    assert needs
    assert not end.unparsed
    assert end.searches


@pytest.mark.parametrize("reason", [False, True], ids=["predict", "reason"])
@pytest.mark.parametrize("kind", ["chat", "json", "xml", "compact"])
def test_every_adapter_and_prompt_sends_what_stock_dspy_sends(kind, reason, walk):
    def load():
        return load_program(ROOT / "pipelines/multihop.py", "MultiHop", {"hops": 3, "reason": reason}, k=2)

    ((name, _),) = load().named_predictors()
    prompts = [ZERO_SHOT, Prompt("1", {name: DEMOS[:1]}), Prompt("2", {name: DEMOS}, {name: "Be brief: two words."})]
    needs, _ = walk(load(), make_adapter(AdapterSettings(kind=kind)), check=True, pure=load(), prompts=prompts)
    assert len(needs) == 3


@pytest.mark.parametrize("kind", [dspy.XMLAdapter, dspy.ChatAdapter, dspy.JSONAdapter])
def test_an_agent_with_tool_parts_runs_under_native_function_calling(walk, kind):
    agent = next(kind for kind in PROGRAMS if kind.__name__ == "AgentV2")
    needs, end = walk(agent(), kind(use_native_function_calling=True), check=True, pure=agent())
    assert len(needs) == 2
    assert end.searches
    assert end.prediction.termination_reason == "submit"


def test_an_agent_whose_tool_fails_sends_the_traceback_that_stock_dspy_sends(walk):
    class Failing(next(kind for kind in PROGRAMS if kind.__name__ == "Agent")):
        def look_up(self, query: str) -> list[str]:
            raise ValueError("no such shelf")

    needs, _ = walk(Failing(), check=True, pure=Failing())
    assert "Traceback" in needs[1].inputs["trajectory"]


class Changing(TwoPredictors):
    times, word = 2, ""

    def forward(self, question):
        for i in range(self.times):
            found = self.search(self.write(question=f"{question} {self.word if i else ''}", context=[]).query)
        return dspy.Prediction(ids=found.doc_ids)


def test_a_program_that_sends_something_else_is_refused_with_the_difference(walk):
    other, less = Changing(), Changing()
    other.word, less.times = "again", 1
    with pytest.raises(ReplayError, match=r"(?s)Changing, task q, prompt 0: .*leret: .*who is it\?.*program: .*again"):
        walk(Changing(), pure=other)
    with pytest.raises(ReplayError, match="program sends nothing"):
        walk(Changing(), pure=less)
    broken = Changing()
    broken.times = None
    with pytest.raises(ReplayError, match=r"program sends nothing\n  program raises TypeError: .*test_checks.py"):
        walk(Changing(), pure=broken)


def test_a_call_out_of_reach_is_refused(walk):
    lm = dspy.LM("openai/away", api_base="http://127.0.0.1:9/v1", api_key="none", num_retries=0, cache=False)

    class Away(TwoPredictors):
        def forward(self, question):
            with dspy.context(adapter=dspy.ChatAdapter(use_json_adapter_fallback=False)):
                query = self.write(question=question, context=[], lm=lm if self.away else None).query
            return dspy.Prediction(ids=self.search(query).doc_ids)

    away, here = Away(), Away()
    here.away, away.away = False, True
    with pytest.raises(ReplayError, match=r"calls the LM openai/away, .*self\.judge = "):
        walk(here, pure=away)


OWN = """
import random, dspy
from leret.programs.search import Search
class Own(dspy.Module):
    def __init__(self):
        super().__init__()
        self.write, self.search = dspy.Predict("question, n -> query"), Search()
    def forward(self, question):
        return self.search(self.write(question=question, n=str(random.random())).query)
"""


def test_the_stage_refuses_a_program_that_is_not_deterministic_before_it_asks_the_policy(tmp_path, monkeypatch):
    policies = open_fakes(monkeypatch)
    write_data(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    recipe = recipe_of(prompts=1, program={"path": f"{tmp_path}/own.py:Own"})
    with pytest.raises(ReplayError, match=r"write.n was .* and .* in another"):
        sample(recipe, Run.create(tmp_path / "run"), base_dir=tmp_path)
    assert not policies[0].requests
