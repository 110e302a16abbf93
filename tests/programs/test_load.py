from pathlib import Path

import pytest

from leret.core.errors import ProgramError
from leret.programs.load import differing_k, load_program

MULTIHOP = Path(__file__).parents[2] / "pipelines/multihop.py"
PLAIN = "import dspy, leret\nclass P(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"


def test_a_program_that_says_another_k_than_the_recipe_is_told():
    def told(arguments, k):
        return differing_k(load_program(MULTIHOP, "MultiHop", arguments, k=k), arguments, k)

    assert told({}, 3) == []
    assert told({}, 10) == ["MultiHop has k 3, but retriever.k is 10: each search returns 10 passages"]
    assert told({"k": 2}, 10) == ["MultiHop has k 2, but retriever.k is 10: each search returns 2 passages"]


@pytest.mark.parametrize("search", ["leret.Search(k=4)", "dspy.Retrieve(k=4)", "len"])
def test_a_program_may_search_without_leret_search(tmp_path, search):
    notes = [] if search == "len" else ["P has k 4, but retriever.k is 10: each search returns 4 passages"]
    (tmp_path / "p.py").write_text(f"{PLAIN}        self.search = {search}")
    assert differing_k(load_program(tmp_path / "p.py", "P", {}), {}, 10) == notes
    if "leret" not in search:
        with pytest.raises(ProgramError, match=r"retriever\.exclude_seen needs a leret.Search"):
            load_program(tmp_path / "p.py", "P", {}, exclude_seen=True)


@pytest.mark.parametrize(
    ("source", "name", "arguments", "message"),
    [
        (None, "P", {}, "no such file"),
        (MULTIHOP.read_text(), "Multihop", {}, "no dspy.Module 'Multihop'; available: MultiHop"),
        (MULTIHOP.read_text(), "MultiHop", {"hoops": 3}, r"takes hops, k, reason; remove program\.hoops .*mean hops"),
        ("def (", "P", {}, "cannot be loaded: SyntaxError"),
        ("import dspy\nclass P(dspy.Module):\n    def __init__(self): 1 / 0", "P", {}, "ZeroDivisionError"),
    ],
)
def test_bad_programs_are_refused(tmp_path, source, name, arguments, message):
    if source:
        (tmp_path / "p.py").write_text(source)
    with pytest.raises(ProgramError, match=message):
        load_program(tmp_path / "p.py", name, arguments)
