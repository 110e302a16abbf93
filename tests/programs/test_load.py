from pathlib import Path

import pytest

from leret.core.errors import ProgramError
from leret.programs.load import differing_k, load_program

MULTIHOP = Path(__file__).parents[2] / "pipelines/multihop.py"
PLAIN = "import dspy, leret\nclass P(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"


@pytest.mark.parametrize("search", ["leret.Search(k=4)", "dspy.Retrieve(k=4)", "len"])
def test_a_program_may_search_without_leret_search(tmp_path, search):
    notes = [] if search == "len" else ["P has k 4, but retriever.k is 10: each search returns 4 passages"]
    (tmp_path / "p.py").write_text(f"{PLAIN}        self.search = {search}")
    program = load_program(tmp_path / "p.py", "P", {})
    assert (differing_k(program, {}, 10), differing_k(program, {}, 4)) == (notes, [])
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
