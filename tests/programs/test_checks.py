import dspy
import pytest

from leret.core.errors import ReplayError
from tests.programs.zoo import Agent, TwoPredictors


@pytest.mark.parametrize("kind", [dspy.XMLAdapter, dspy.ChatAdapter, dspy.JSONAdapter])
def test_an_agent_with_tool_parts_runs_under_native_function_calling(walk, kind):
    class AgentV2(Agent):
        kind = dspy.ReActV2

    needs, end = walk(AgentV2(), kind(use_native_function_calling=True), check=True, pure=AgentV2())
    assert len(needs) == 2
    assert end.searches
    assert end.prediction.termination_reason == "submit"


def test_an_agent_whose_tool_fails_sends_the_traceback_that_stock_dspy_sends(walk):
    class Failing(Agent):
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
    other, broken = Changing(), Changing()
    other.word, broken.times = "again", None
    with pytest.raises(ReplayError, match=r"(?s)Changing, task q, prompt 0: .*leret: .*who is it\?.*program: .*again"):
        walk(Changing(), pure=other)
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
