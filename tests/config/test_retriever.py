import pytest
from pydantic import ValidationError

from leret.config.retriever import BM25Settings, RetrieverSettings

DENSE = {"kind": "dense", "model": "minilm"}


@pytest.mark.parametrize(
    ("values", "key", "says"),
    [
        ({"fb_docs": 3}, "fb_docs", "not permitted"),
        ({"kind": "hybrid", "engines": [{}, {}], "weights": [0, 0]}, "weights", "0"),
        ({"kind": "hybrid", "engines": [{"k": 5}, {}]}, "engines", "cannot set k"),
        ({"kind": "remote", "urls": ["http://me:secret@host"]}, "urls", "must not contain user"),
        ({"kind": "pubmed", "max_date": "soon"}, "max_date", "should match pattern"),
        ({"kind": "colbert", "checkpoint": "m", "candidates": "all", "engine": DENSE}, "engine", "candidates: all"),
        ({"kind": "colbert", "checkpoint": "m", "engine": {"kind": "bm25", "index": "x"}}, "engine", "engine.index"),
    ],
)
def test_wrong_section_is_refused_at_its_key(values, key, says):
    with pytest.raises(ValidationError) as caught:
        RetrieverSettings.model_validate(values)
    errors = [(".".join(map(str, error["loc"])), error["msg"]) for error in caught.value.errors(include_input=False)]
    assert any(key in place and says in message for place, message in errors), errors
    assert "secret" not in str(errors)


def test_ranking_keys_are_neither_free_nor_paths():
    assert set(BM25Settings().ranking_keys()) == {"k1", "b", "stopwords", "stemmer", "fold_accents"}
