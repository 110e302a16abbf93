import pytest

from leret.core.errors import MissingDependency, import_optional, reason


def test_missing_package_is_named_with_its_command_and_all_packages():
    with pytest.raises(MissingDependency, match=r"is not installed; run `pip install 'leret\[dense\]'`") as error:
        import_optional("no_such", "sentence-transformers", "dense")
    _, _, command = str(error.value).rpartition("`pip install ")
    packages = {word.strip("'").partition("<")[0] for word in command.strip("`").split()}
    assert packages == {"faiss-cpu", "sentence-transformers"}


def test_reason_is_one_line():
    assert [reason(ValueError(text)) for text in ("\na\nb", "")] == ["ValueError: a", "ValueError: "]
