"""Whether a stage is done, and whether it may go on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from leret.config.base import Settings
from leret.core.errors import RunError
from leret.core.stages import check_resumable, completed, input_stamps, mark_completed, stage_key


class Recipe(Settings):
    k: int = 3
    path: str = "corpus"


@pytest.fixture
def done(tmp_path: Path) -> Path:
    (tmp_path / "store.db").write_bytes(b"1234")
    mark_completed(tmp_path, "sample", "key", {"pairs": 3}, [tmp_path / "store.db"])
    return tmp_path


def test_completed_stage_gives_its_report(done):
    assert completed(done, "sample", "key") == {"pairs": 3}
    assert completed(done, "train", "key") is None
    assert completed(done, "sample", "other") is None


def test_directory_may_move(done, tmp_path):
    assert completed(done.rename(tmp_path.parent / "moved"), "sample", "key") == {"pairs": 3}


@pytest.mark.parametrize("content", [b"123", None])
def test_changed_or_missing_result_is_not_completed(done, content):
    (done / "store.db").unlink()
    if content is not None:
        (done / "store.db").write_bytes(content)
    assert completed(done, "sample", "key") is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"key": "key"}', '{"key": "key", "files": [], "report": {}}'])
def test_unreadable_mark_is_not_completed(done, text):
    (done / "sample.done").write_text(text)
    assert completed(done, "sample", "key") is None


def test_key_follows_recipe_and_input_files(tmp_path):
    file = tmp_path / "corpus" / "part"
    file.parent.mkdir()
    file.write_text("one")

    def key(recipe: Recipe) -> str:
        return stage_key(recipe, input_stamps(tmp_path / "corpus", None))

    before = key(Recipe())
    assert key(Recipe()) == before
    assert key(Recipe(k=4)) != before
    os.utime(file, ns=(1, 1))
    assert key(Recipe()) != before


def test_every_changed_key_is_listed(tmp_path):
    old = {"k": 3, "engines": [{"kind": "bm25", "k1": 0.9}], "digest": {"corpus": "a"}}
    new = {"k": 4, "engines": [{"kind": "bm25", "k1": 1.2}], "digest": {"corpus": "b"}}
    with pytest.raises(RunError) as error:
        check_resumable(tmp_path, old, new)
    lines = str(error.value).split("\n")
    assert [line.split(":")[0].strip() for line in lines[1:4]] == ["k", "engines.0.k1", "corpus"]
    assert "3 in the run, 4" in lines[1]


def test_free_keys_may_change(tmp_path):
    old = {"policy": {"model": "a", "lora": {"r": 1}}, "engines": [{"url": "x"}]}
    new = {"policy": {"model": "a", "lora": None}, "engines": [{"url": "y"}]}
    check_resumable(tmp_path, old, new, ["policy.lora", "engines.url"])
    with pytest.raises(RunError, match=r"policy\.lora\.r: 1 in the run, None"):
        check_resumable(tmp_path, old, new, ["engines.url"])
