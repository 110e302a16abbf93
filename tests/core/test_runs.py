from concurrent.futures import ThreadPoolExecutor

import pytest

from leret.core.errors import RunError
from leret.core.runs import Run


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "a" / "run")


def test_a_run_is_found_again_with_what_was_written(run):
    with pytest.raises(RunError, match="no sampling yet; run `leret sample"):
        run.sampling()
    value = {"names": ("a", "b"), "rate": 1e-05, "none": None, "on": True, "text": "2026-11-28\nno"}
    run.update(sampling=value)
    assert run.record() == Run.open(run.path).record() == Run.create(run.path).record()
    assert "python" in Run.open(run.path).manifest.versions
    value["rate"] = 1
    assert run.sampling()["rate"] == 1e-05


@pytest.mark.parametrize("text", ["schema: 1\n", "{", "", "[]"])
def test_a_manifest_of_another_version_or_damaged_is_refused(run, text):
    run.manifest_path.write_text(text)
    with pytest.raises(RunError, match=r"layout version|cannot be read"):
        Run.open(run.path)


def test_a_run_moves_with_the_files_that_it_names(run, tmp_path):
    corpus = tmp_path / "a" / "corpus.jsonl"
    corpus.touch()
    run.update(sampling={"data": [str(corpus)]})
    assert run.record()["sampling"] == {"data": ["$RUN/../corpus.jsonl"]}
    moved = Run(corpus.parent.rename(tmp_path / "b") / "run")
    assert moved.manifest.sampling == {"data": [str(tmp_path / "b" / "corpus.jsonl")]}


def test_updates_at_the_same_time_lose_nothing(run):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: Run(run.path).update(**{f"part{i}": {"n": i}}), range(8)))
        list(pool.map(lambda i: Run(run.path).update(keep=True, training={f"p{i}": {"n": i}}), range(8)))
    assert {f"part{i}" for i in range(8)} <= set(run.record())
    assert run.manifest.training == {f"p{i}": {"n": i} for i in range(8)}
