import pytest

from leret.core.errors import MissingDependency, import_optional, reason


def test_missing_package_is_named_with_its_command():
    with pytest.raises(MissingDependency, match=r"is not installed; run `pip install 'leret\[dense\]'`"):
        import_optional("no_such", "sentence-transformers", "dense")


def test_reason_is_one_line():
    assert [reason(ValueError(text)) for text in ("\na\nb", "")] == ["ValueError: a", "ValueError: "]
