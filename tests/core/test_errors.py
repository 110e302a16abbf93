"""Messages about packages that are missing and about somebody else's errors."""

import pytest

from leret.core.errors import MissingDependency, import_optional, reason


def test_a_missing_package_is_named_with_the_command_that_brings_it():
    with pytest.raises(MissingDependency, match=r"no-such is not installed; `pip install 'leret\[extra\]'`"):
        import_optional("no_such", "no-such", "extra")


def test_an_extra_is_told_by_its_packages_too():
    with pytest.raises(MissingDependency) as error:
        import_optional("no_such", "sentence-transformers", "dense")
    _, _, command = str(error.value).rpartition("`pip install ")
    packages = {word.strip("'").partition("<")[0] for word in command.strip("`").split()}
    assert packages == {"faiss-cpu", "sentence-transformers"}


def test_an_error_is_told_in_a_line():
    assert [reason(ValueError(text)) for text in ("\na\nb", "")] == ["ValueError: a", "ValueError: "]
