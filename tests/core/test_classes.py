import hashlib
from types import SimpleNamespace

import dspy
import pytest

from leret.core.classes import class_at, identity, load_function, path_of, source_digest, sources_digest, with_identity
from leret.core.errors import ConfigError, ProgramError
from leret.core.stages import source_files
from leret.rewards import scoring

FILES = {
    "reward.py": (
        "import json, os.path, near\nfrom pack import part as p, absent\nfrom pack.deep.leaf import x\n"
        "import leret.rewards\n\ndef own(o):\n    import late\n"
    ),
    "near.py": "import circle\n",
    "circle.py": "import near\n",
    "late.py": "def broken(\n",
    "unrelated.py": "",
    "pack/part.py": "from . import sibling\nfrom .deep import leaf\n",
    "pack/sibling.py": "",
    "pack/deep/__init__.py": "",
    "pack/deep/leaf.py": "from ..sibling import y\nimport near\n",
}
IMPORTED = [*FILES.keys() - {"reward.py", "unrelated.py"}]


def test_a_class_has_a_path_that_finds_it_again_or_is_refused():
    class Local:
        pass

    path = path_of(ProgramError)
    assert path == "leret.core.errors:ProgramError"
    assert class_at(path, Exception) is ProgramError
    with pytest.raises(ProgramError, match="cannot be imported by another process"):
        path_of(Local)
    for absent in ("no_such_module:A", "leret.core.errors:Nothing"):
        with pytest.raises(ProgramError, match="cannot be imported here"):
            class_at(absent, dspy.Module)
    with pytest.raises(ProgramError, match="is not a subclass of Module"):
        class_at(path, dspy.Module)


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_imports_are_listed_without_running_the_file(folder):
    found = source_files(folder / "reward.py")
    assert found[0] == folder / "reward.py"
    assert [path.relative_to(folder).as_posix() for path in found[1:]] == sorted(IMPORTED)


@pytest.mark.parametrize("name", ["reward.py", "near.py", "pack/deep/leaf.py"])
def test_changed_import_changes_the_digest(folder, name):
    function = f"{folder}/reward.py:own"
    before = source_digest(function), sources_digest(["recall", function])
    (folder / "unrelated.py").write_text("changed = 1\n")
    assert (source_digest(function), sources_digest([function])) == before
    with (folder / name).open("a") as file:
        file.write("# changed\n")
    assert source_digest(function) != before[0]
    assert sources_digest([function]) != before[1]


def test_digest_of_a_single_file_is_that_of_its_bytes(tmp_path):
    path = tmp_path / "alone.py"
    path.write_text("import json\nfrom leret.core import types\nimport numpy\n\ndef own(o):\n    return 1\n")
    assert source_digest(f"{path}:own") == hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    assert source_digest(f"{tmp_path}/absent.py:own") is None
    assert sources_digest(["recall", "ap@3"]) is None


def test_changed_module_is_imported_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    near, path = tmp_path / "near_name.py", tmp_path / "own_name.py"
    path.write_text("import near_name as near\n\n\ndef own(outcome):\n    return near.VALUE\n")
    outcome = SimpleNamespace(task=SimpleNamespace(id="first"))
    for value in (1.0, 25.0):
        near.write_text(f"VALUE = {value}\n")
        for name in (f"{path}:own", "own_name:own"):
            assert scoring(name)(outcome) == value
            assert load_function(name) is load_function(name)


def test_the_digest_of_a_kind_covers_its_code_and_must_be_an_attribute(tmp_path):
    path = tmp_path / "kind.py"
    path.write_text("KIND = 1\n")
    kind = f"{path}:KIND"
    assert identity("bm25") == "bm25"
    assert with_identity(SimpleNamespace(digest="d"), "bm25").digest == "d"
    before = with_identity(SimpleNamespace(digest="d"), kind).digest
    path.write_text("KIND = 2\n")
    assert with_identity(SimpleNamespace(digest="d"), kind).digest != before != "d"

    class Fixed:
        digest = property(lambda self: "d")

    with pytest.raises(ConfigError, match=r"Fixed\.digest cannot be set; make it an attribute"):
        with_identity(Fixed(), kind)
