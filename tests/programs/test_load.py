from pathlib import Path

import dspy
import pytest

from leret.core.errors import ProgramError
from leret.programs.load import differing_k, load_program
from leret.programs.search import Search

MULTIHOP = Path(__file__).parents[2] / "pipelines/multihop.py"


class Fixed(dspy.Module):
    def __init__(self):
        super().__init__()
        self.search = Search(k=4)


def test_a_program_that_says_another_k_than_the_recipe_is_told():
    def told(arguments, k):
        return differing_k(load_program(MULTIHOP, "MultiHop", arguments, k=k), arguments, k)

    assert told({}, 3) == []
    assert told({}, 10) == ["MultiHop has k 3, retriever.k is 10: a search brings 10 passages"]
    assert told({"k": 2}, 10) == ["MultiHop has k 2, retriever.k is 10: a search brings 2 passages"]
    assert differing_k(Fixed(), {}, 10) == ["Fixed has k 4, retriever.k is 10: a search brings 4 passages"]


def test_a_program_may_search_without_leret_search(tmp_path):
    file, source = (
        tmp_path / "p.py",
        "import dspy\nclass P(dspy.Module):\n    def __init__(self):\n        super().__init__()\n",
    )
    for search, notes in (
        ("dspy.Retrieve(k=4)", ["P has k 4, retriever.k is 10: a search brings 4 passages"]),
        ("len", []),
    ):
        file.write_text(f"{source}        self.search = {search}")
        assert differing_k(load_program(file, "P", {}), {}, 10) == notes
        with pytest.raises(ProgramError, match=r"P has no leret.Search.* retriever\.exclude_seen"):
            load_program(file, "P", {}, exclude_seen=True)


@pytest.mark.parametrize(
    ("source", "name", "arguments", "message"),
    [
        (None, "P", {}, "does not exist"),
        (MULTIHOP.read_text(), "Multihop", {}, "no dspy.Module 'Multihop'; it has MultiHop"),
        (MULTIHOP.read_text(), "WriteQuery", {}, "no dspy.Module"),
        (MULTIHOP.read_text(), "MultiHop", {"hoops": 3}, r"takes hops, k, reason; .* also gives program\.hoops"),
        ("def (", "P", {}, "does not run: SyntaxError"),
        ("import nothing_of_this_name", "P", {}, "does not run: ModuleNotFoundError"),
        ("import dspy\nclass P(dspy.Module):\n    def __init__(self): 1 / 0", "P", {}, "ZeroDivisionError"),
    ],
)
def test_bad_programs_are_refused(tmp_path, source, name, arguments, message):
    if source:
        (tmp_path / "p.py").write_text(source)
    with pytest.raises(ProgramError, match=message):
        load_program(tmp_path / "p.py", name, arguments)
