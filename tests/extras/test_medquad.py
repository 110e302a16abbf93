import pytest

from leret.core.errors import DataError
from leret.core.types import Document, Task
from tests.datasets.writing import load

PAIR = '<QAPair pid="{0}"><Question qid="{0}" qtype="symptoms">Who {0} ?</Question>{1}</QAPair>'
ANSWER, OTHER = "<Answer>A cancer of the\n   blood &amp; <b>bone</b> marrow.</Answer>", "<Answer>Cancer</Answer>"
LAUGHS = (
    '<?xml version="1.0"?><!DOCTYPE d [<!ENTITY a0 "ha">'
    + "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 10))
    + "]><Document><Focus>&a9;</Focus></Document>"
)
OUTSIDE = (
    '<!DOCTYPE d [<!ENTITY x SYSTEM "secret.txt">]><Document><Focus>F</Focus><QAPair><Question qid="1">Q</Question>'
    "<Answer>&x;</Answer></QAPair></Document>"
)


def document(*pairs):
    return f"<Document><Focus>Adult Leukemia</Focus><QAPairs>{''.join(pairs)}</QAPairs></Document>"


@pytest.fixture
def folder(tmp_path):
    for site, answer in (("1_CancerGov_QA", ANSWER), ("2_GARD_QA", OTHER)):
        (tmp_path / site).mkdir()
        (tmp_path / site / "1.xml").write_text(document(PAIR.format(1, answer), PAIR.format(2, "<Answer> </Answer>")))
    return tmp_path


def test_an_answer_is_the_gold_document_of_its_question_which_websites_share_on_request(folder):
    data = load("medquad", str(folder))
    answer = "A cancer of the blood & bone marrow."
    assert (list(data.corpus), data.tasks.skipped) == (["1-1", "2-1"], {"no answer": 2})
    assert data.corpus["1-1"] == Document("1-1", "Adult Leukemia", answer)
    assert data.tasks.items[0] == Task.question("1-1", "Who 1 ?", answer, ("1-1",), "symptoms")
    (task,) = load("medquad", str(folder), merge_questions=True).tasks
    assert (task.id, task.gold) == ("1-1", ("1-1", "2-1"))


BAD = {
    "entities that grow": (LAUGHS, "broken XML .*amplification"),
    "an external entity": (OUTSIDE, "broken XML .*undefined entity"),
    "a file that is cut short": (document()[:30], "broken XML"),
    "a question without an id": (document(PAIR.format(3, OTHER).replace('qid="3"', "")), "pair 3: field 'id' is empty"),
    "two answers": (document(PAIR.format(3, ANSWER + OTHER)), "pair 3: .*two questions or answers"),
    "an id of another file": (document(PAIR.format(1, OTHER)), "pair 1: duplicate id '1-1'"),
}


@pytest.mark.parametrize(("text", "says"), BAD.values(), ids=BAD)
def test_bad_files_are_refused_with_their_name_or_skipped(text, says, folder):
    (folder / "secret.txt").write_text("secret")
    (folder / "1_CancerGov_QA/2.xml").write_text(text)
    with pytest.raises(DataError, match=rf"2\.xml: {says}"):
        load("medquad", str(folder))
    assert len(load("medquad", str(folder), skip_invalid=True).corpus) == 2
