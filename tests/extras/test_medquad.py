import pytest

from leret.core.errors import DataError
from leret.core.types import Document, Task
from tests.datasets.writing import load

DOCUMENT = """<?xml version="1.0" encoding="UTF-8"?>
<Document id="0000001_1" source="CancerGov" url="https://www.cancer.gov/leukemia">
<Focus>Adult Leukemia</Focus>
<QAPairs>
  <QAPair pid="1">
    <Question qid="0000001_1-1" qtype="information">What is (are) Adult Leukemia ?</Question>
    <Answer>A cancer of the
        blood &amp; <b>bone</b> marrow.</Answer>
  </QAPair>
  <QAPair pid="2">
    <Question qid="0000001_1-2" qtype="symptoms">What are the symptoms of Adult Leukemia ?</Question>
    <Answer> </Answer>
  </QAPair>
</QAPairs>
</Document>
"""
LAUGHS = (
    '<?xml version="1.0"?><!DOCTYPE d [<!ENTITY a0 "ha">'
    + "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 10))
    + "]><Document><Focus>&a9;</Focus></Document>"
)
OUTSIDE = (
    '<!DOCTYPE d [<!ENTITY x SYSTEM "secret.txt">]><Document><Focus>F</Focus><QAPair><Question qid="1">Q</Question>'
    "<Answer>&x;</Answer></QAPair></Document>"
)


@pytest.fixture
def folder(tmp_path):
    for number, name, text in ((1, "CancerGov", DOCUMENT), (2, "GARD", DOCUMENT.replace("A cancer", "Cancer"))):
        (tmp_path / "MedQuAD" / f"{number}_{name}_QA").mkdir(parents=True)
        (tmp_path / "MedQuAD" / f"{number}_{name}_QA/0000001_1.xml").write_text(text, encoding="utf-8")
    return tmp_path / "MedQuAD"


def test_an_answer_is_the_gold_document_of_its_question_which_websites_share_on_request(folder):
    data = load("medquad", str(folder))
    answer, question = "A cancer of the blood & bone marrow.", "What is (are) Adult Leukemia ?"
    assert data.corpus["1-0000001_1-1"] == Document("1-0000001_1-1", "Adult Leukemia", answer)
    assert list(data.corpus) == ["1-0000001_1-1", "2-0000001_1-1"]
    assert data.tasks.items[0] == Task.question("1-0000001_1-1", question, answer, ("1-0000001_1-1",), "information")
    (task,) = load("medquad", str(folder), merge_questions=True).tasks
    assert (task.id, task.gold) == ("1-0000001_1-1", ("1-0000001_1-1", "2-0000001_1-1"))


BAD = {
    "entities that grow": (LAUGHS, "broken XML .*amplification"),
    "an external entity": (OUTSIDE, "broken XML .*undefined entity"),
    "a file that is cut short": (DOCUMENT[:400], "broken XML"),
    "a question without an id": (DOCUMENT.replace('qid="0000001_1-1"', ""), "pair 1: field 'id' is empty"),
}


@pytest.mark.parametrize(("text", "says"), BAD.values(), ids=BAD)
def test_bad_files_are_refused_with_their_name_or_skipped(text, says, folder):
    (folder / "secret.txt").write_text("secret")
    (folder / "1_CancerGov_QA/0000002.xml").write_text(text)
    with pytest.raises(DataError, match=rf"0000002\.xml: {says}"):
        load("medquad", str(folder))
    assert len(load("medquad", str(folder), skip_invalid=True).corpus) == 2
