"""Programs are loaded by file and class."""

from pathlib import Path

import pytest

from leret.core.errors import ProgramError
from leret.programs.load import differing_k, load_program

MULTIHOP = Path(__file__).parents[2] / "pipelines/multihop.py"
FIXED = """import dspy
from leret.programs import Search
class MultiHop(dspy.Module):
    def __init__(self):
        super().__init__()
        self.search = Search(k=4)
"""


@pytest.mark.parametrize(
    ("source", "arguments", "k", "says"),
    [
        (None, {}, 3, []),
        (None, {}, 10, ["MultiHop has k 3, retriever.k is 10: a search brings 10 passages"]),
        (None, {"k": 2}, 10, ["MultiHop has k 2, retriever.k is 10: a search brings 2 passages"]),
        (FIXED, {}, 10, ["MultiHop has k 4, retriever.k is 10: a search brings 4 passages"]),
    ],
)
def test_a_program_that_says_another_k_than_the_recipe_is_told(tmp_path, source, arguments, k, says):
    path = tmp_path / "fixed.py" if source else MULTIHOP
    if source:
        path.write_text(source)
    assert differing_k(load_program(path, "MultiHop", arguments, k=k), arguments, k) == says


@pytest.mark.parametrize(
    ("path", "name", "arguments", "message"),
    [
        (MULTIHOP.with_name("none.py"), "MultiHop", {}, "does not exist"),
        (MULTIHOP, "Multihop", {}, "no dspy.Module 'Multihop'; it has MultiHop"),
        (MULTIHOP, "WriteQuery", {}, "no dspy.Module"),
        (MULTIHOP, "MultiHop", {"hoops": 3}, r"takes hops, k, reason; the recipe also gives program\.hoops"),
    ],
    ids=["missing file", "misspelt class", "not a module", "unknown argument"],
)
def test_bad_programs_are_refused(path, name, arguments, message):
    with pytest.raises(ProgramError, match=message):
        load_program(path, name, arguments)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def (", "does not run: SyntaxError"),
        ("import nothing_of_this_name", "does not run: ModuleNotFoundError"),
        ("import dspy\nclass P(dspy.Module):\n    def forward(self, question): pass", "no leret.Search"),
        ("import dspy\nclass P(dspy.Module):\n    def __init__(self): 1 / 0", "ZeroDivisionError"),
    ],
    ids=["syntax", "import", "no search", "constructor"],
)
def test_broken_files_are_refused(tmp_path, source, message):
    (tmp_path / "p.py").write_text(source)
    with pytest.raises(ProgramError, match=message):
        load_program(tmp_path / "p.py", "P", {})
