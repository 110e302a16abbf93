"""Data sets by name; a folder stands in for the hub, which `datasets` reads the same way."""

from __future__ import annotations

from pathlib import Path

import pytest

from leret.core.errors import DataError
from tests.datasets.writing import HOTPOT, json_lines, load, load_tasks

datasets = pytest.importorskip("datasets")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "hub"
    folder.mkdir()
    json_lines(folder / "train.jsonl", HOTPOT[:1])
    json_lines(folder / "validation.jsonl", HOTPOT[1:])
    return f"hf:{folder}"


def test_published_splits_are_kept(hub: str) -> None:
    data = load("hotpotqa", hub)
    assert {question.id: question.split for question in data.tasks} == {"5a": "train", "5b": "dev"}
    assert list(data.corpus) == ["Ada", "Byron", "Café"]


def test_one_split_can_be_named(hub: str) -> None:
    assert [question.id for question in load_tasks("hotpotqa", f"{hub}@validation")] == ["5b"]
    with pytest.raises(DataError, match="no split 'test'; there are train, validation"):
        load_tasks("hotpotqa", f"{hub}@test")


def test_an_unreachable_hub_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise ConnectionError("Couldn't reach 'a/b' on the Hub\nwith details")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(
        DataError, match=r"hf:a/b: cannot be had from the hub \(Couldn't reach 'a/b' on the Hub\).*download"
    ):
        load_tasks("hotpotqa", "hf:a/b")
