import dspy
import pytest

from leret.core.dspy_internals import EngineLM, text_response
from leret.core.types import Passage
from leret.programs.adapters import CompactAdapter
from leret.programs.load import load_program
from leret.programs.mentions import QUESTION, mentions
from leret.programs.prompts import Prompt
from leret.programs.search import Found
from tests.sampling.fakes import ROOT, FakeRetriever

ASKED = 'Who directed Silent Harbor before "Red Dune" won in Rome?'
HARBOR = Passage("h", "Silent Harbor", "Silent Harbor is a film directed by Anna Bolt. Otto Kern saw it in Rome.", 8.0)
DUNE = Passage("d", "Red Dune", 'Red Dune was made by Otto Kern for "The Lost Film" in 1999.', 4.0)
LATER = Passage("k", "Otto Kern", "Otto Kern met Mia Lund in 2001.", 20.0)


@pytest.mark.parametrize(
    ("searches", "expected"),
    [
        ((), ["Red Dune", "Silent Harbor", "Rome"]),
        (((HARBOR,),), ["Red Dune", "Rome", "Anna Bolt", "Otto Kern"]),
        (((HARBOR, DUNE),), ["Rome", "Anna Bolt", "Otto Kern", "The Lost Film"]),
        (((HARBOR, DUNE), (LATER,)), ["Rome", "Anna Bolt", "The Lost Film", "Mia Lund"]),
    ],
)
def test_the_questions_own_names_come_first_and_what_is_found_is_left_out(searches, expected):
    first, *rest = mentions(ASKED, Found(searches))
    assert first is QUESTION
    assert [(one.id, one.text) for one in rest] == [(name, name) for name in expected]


def test_numbers_say_where_a_name_stands_and_what_it_is():
    found = {one.id: one.data for one in mentions(ASKED, Found(((HARBOR, DUNE), (LATER,))))}
    assert found["[question]"] == {"question": 1.0}
    rome = found["Rome"]
    assert (rome["own"], rome["own_place"], rome["own_read"], rome["adjective"]) == (1.0, 2 / 3, 1.0, 0.0)
    bolt, film, lund = found["Anna Bolt"], found["The Lost Film"], found["Mia Lund"]
    assert (bolt["rank_0"], bolt["score"], bolt["first_sentence"], bolt["after_question_word"]) == (1.0, 0.4, 1.0, 1.0)
    assert bolt["sentence_overlap"] == 3 / 7  # directed, silent, harbor; of directed silent harbor red dune won rome
    assert (film["rank_1"], film["several_words"], film["overlap"]) == (1.0, 1.0, 0.0)
    assert (lund["later"], "score" in lund) == (1.0, False)
    twice = {one.id: one.data for one in mentions("who?", Found(((HARBOR, DUNE),)))}["Otto Kern"]
    assert (twice["count"], twice["rank_0"]) == (2.0, 1.0)
    page = Passage("p", "Jan Vos", "Jan Vos met a French painter, Anna Vos.", 1.0)
    found = {one.id: one.data for one in mentions("Which Dutch painter met Anna?", Found(((page,),)))}
    assert (found["Dutch"]["adjective"], found["Dutch"]["own_read"], found["Dutch"]["own_place"]) == (1.0, 0.0, 0.0)
    assert (found["Anna"]["adjective"], found["Anna"]["own_read"], found["Anna"]["own_place"]) == (0.0, 1.0, 1 / 3)
    assert (found["French"]["titled"], found["Anna Vos"]["titled"]) == (0.0, 0.5)


@pytest.mark.parametrize("name", ["Expand", "ExpandWrite"])
def test_the_shipped_programs_search_for_the_question_and_what_is_added(name, walk):
    program, pure = (load_program(ROOT / "pipelines/expand.py", name, {}, k=2) for _ in range(2))
    needs, end = walk(program, check=True, pure=pure)
    queries = [search.queries[0] for search in end.searches]
    assert [query.partition("?")[0] for query in queries] == ["who is it"] * len(queries)
    assert len(queries) == 1 + len(needs)
    assert len(end.ranking) == 2 + len(needs)


def test_an_lm_adds_suggestions_own_words_or_nothing_and_several_at_once():
    written = iter(["1 Beta; 1.; 2. own words; 0", "1984 news; nothing"])
    lm = EngineLM("scripted", lambda request: text_response(request, next(written)))
    program = load_program(ROOT / "pipelines/expand.py", "ExpandWrite", {"k": 1, "additions": 6, "context": True})
    program.first.retriever = program.more.retriever = retriever = FakeRetriever()
    with dspy.context(lm=lm, adapter=CompactAdapter()):
        made = program(question="what follows alpha, Beta or Gamma leads to zeta?")
    added = ["", " Beta", " Gamma", " own words", "", " 1984 news", ""]
    queries = [query for batch in retriever.batches for query in batch]
    assert [query.partition("?")[2] for query in queries] == added
    assert len(made.doc_ids) == len(set(made.doc_ids)) == 6
    assert "context" in program.write_words.signature.input_fields


def test_the_demos_for_a_real_lm_answer_with_a_suggestion():
    program = load_program(ROOT / "pipelines/expand.py", "ExpandWrite", {}, k=2)
    prompts = [Prompt.load(path) for path in (ROOT / "sampling/smollm2-hotpotqa").glob("*.json")]
    assert len({prompt.digest for prompt in prompts}) == 2
    for prompt in prompts:
        prompt.check_predictors([name for name, _ in program.named_predictors()], "sampling.bank.path")
        assert all(demo["words"] in demo["names"] for demo in prompt.demos["write_words"])
