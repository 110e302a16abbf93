import dspy
import pytest

from leret.core.classes import class_at, constructor_arguments, path_of, plain_value
from leret.core.errors import ProgramError


def test_a_class_of_a_module_has_a_path_that_finds_it_again():
    path = path_of(ProgramError)
    assert path == "leret.core.errors:ProgramError"
    assert class_at(path, Exception) is ProgramError


def test_a_class_inside_a_function_has_no_path():
    class Local:
        pass

    with pytest.raises(ProgramError, match="cannot be imported by another process"):
        path_of(Local)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:A", "cannot be imported here"),
        ("leret.core.errors:Nothing", "cannot be imported here"),
        ("leret.core.errors:ProgramError", "is not a subclass of Module"),
    ],
)
def test_a_path_that_is_no_program_is_refused(path, message):
    with pytest.raises(ProgramError, match=message):
        class_at(path, dspy.Module)


def test_plain_values_survive_json():
    assert plain_value({"a": [1, 2.5, None, True, "x"]})
    assert not plain_value({1: "a"})
    assert not plain_value((1, 2))


def test_constructor_arguments_are_read_without_running_the_file(tmp_path):
    file = tmp_path / "x.py"
    file.write_text(
        "raise SystemExit\n"
        "class A:\n    def __init__(self, k, *, hops=2): ...\n"
        "class B(A): ...\n"
        "class C:\n    def __init__(self, **more): ...\n"
    )
    assert constructor_arguments(file, "A") == ["k", "hops"]
    assert constructor_arguments(file, "B") is None
    assert constructor_arguments(file, "C") is None
