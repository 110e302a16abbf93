import os

import pytest

from leret.core.errors import RunError
from leret.core.stages import check_resumable, completed, input_stamps, inputs_unchanged, mark_completed, stage_key


@pytest.fixture
def done(tmp_path):
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "store.db").write_bytes(b"1234")
    mark_completed(tmp_path / "before", "sample", "key", {"pairs": 3}, [tmp_path / "before" / "store.db"])
    return (tmp_path / "before").rename(tmp_path / "moved")


def test_completed_stage_gives_its_report_until_a_result_changes(done):
    asked = [("sample", "key"), ("train", "key"), ("sample", "other")]
    assert [completed(done, *stage) for stage in asked] == [{"pairs": 3}, None, None]
    (done / "store.db").write_bytes(b"123")
    assert completed(done, "sample", "key") is None
    (done / "store.db").unlink()
    assert completed(done, "sample", "key") is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"key": "key"}', '{"key": "key", "files": [], "report": {}}'])
def test_unreadable_mark_is_not_completed(done, text):
    (done / "sample.done").write_text(text)
    assert completed(done, "sample", "key") is None


def test_input_files_are_compared_with_the_mark_and_may_move_with_it(tmp_path):
    run, file = tmp_path / "a" / "run", tmp_path / "a" / "corpus"
    run.mkdir(parents=True)
    file.write_text("one")
    before = stage_key({"k": 3}, input_stamps(file, None))
    assert [stage_key({"k": k}, input_stamps(file, None)) == before for k in (3, 4)] == [True, False]
    os.utime(file, ns=(1, 1))
    assert stage_key({"k": 3}, input_stamps(file, None)) != before

    mark_completed(run, "sample", "key", {}, inputs=dict(zip([file], input_stamps(file), strict=True)))
    moved = (tmp_path / "a").rename(tmp_path / "b")
    assert inputs_unchanged(moved / "run", "sample")
    (moved / "corpus").write_text("other")
    assert not inputs_unchanged(moved / "run", "sample")
    mark_completed(moved / "run", "sample", "key", {})
    assert not inputs_unchanged(moved / "run", "sample"), "its inputs are unknown"


def test_changed_keys_are_listed_unless_they_are_free(tmp_path):
    old = {"k": 3, "engines": [{"kind": "bm25", "k1": 0.9}], "digest": {"corpus": "a"}}
    new = {"k": 4, "engines": [{"kind": "bm25", "k1": 1.2}], "digest": {"corpus": "b"}}
    with pytest.raises(RunError, match=r" k: 3 in the run, 4.*\n +engines\.0\.k1: .*\n +corpus: its content"):
        check_resumable(tmp_path, old, new)

    old = {"policy": {"model": "a", "lora": {"r": 1}}, "engines": [{"url": "x"}]}
    new = {"policy": {"model": "a", "lora": None}, "engines": [{"url": "y"}]}
    check_resumable(tmp_path, old, new, ["policy.lora", "engines.url"])
    check_resumable(tmp_path, {"of": {"a.b": {"url": "x"}}}, {"of": {"a.b": {"url": "y"}}}, ["of.*.url"])
    with pytest.raises(RunError, match=r"policy\.lora\.r: 1 in the run, None"):
        check_resumable(tmp_path, old, new, ["engines.url"])
