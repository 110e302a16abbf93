"""Programs are loaded by file and class."""

from pathlib import Path

import pytest

from leret.errors import ProgramError
from leret.pipelines.loading import load_program

ROOT = Path(__file__).parents[2]
MULTIHOP = ROOT / "pipelines/multihop.py"


def test_k_reaches_a_constructor_that_takes_it():
    assert load_program(MULTIHOP, "MultiHop", {}, k=7).search.k == 7
    assert load_program(MULTIHOP, "MultiHop", {"k": 2}, k=7).search.k == 2


@pytest.mark.parametrize(
    ("path", "name", "arguments", "message"),
    [
        (ROOT / "pipelines/none.py", "MultiHop", {}, "does not exist"),
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
