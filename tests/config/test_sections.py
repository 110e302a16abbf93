import re

import pytest
from pydantic import ValidationError

from leret.config.base import free_keys
from leret.config.data import BabilongSettings, DataSettings, FileSettings, WorldSettings
from leret.config.policy import PolicySettings
from leret.config.retriever import BM25Settings, DenseSettings, RetrieverSettings
from leret.config.sampling import ProgramSettings, SamplingRecipe

FILE, OPENAI = {"questions": "q.jsonl"}, {"kind": "openai", "model": "m"}


@pytest.mark.parametrize(
    ("family", "section", "settings"),
    [
        (DataSettings, FILE, FileSettings(questions="q.jsonl")),
        (DataSettings, {"kind": "beir", **FILE}, FileSettings(kind="beir", questions="q.jsonl")),
        (DataSettings, {"kind": "babilong", **FILE}, BabilongSettings(questions="q.jsonl")),
        (DataSettings, {"kind": "world", "part": "1/2"}, WorldSettings(part="1/2")),
        (RetrieverSettings, {"k": 5}, BM25Settings(k=5)),
    ],
)
def test_kind_decides_the_class(family, section, settings):
    read = family.model_validate(section)
    assert (type(read), read) == (type(settings), settings)


def test_engines_of_a_hybrid_have_their_kinds():
    engines = [{"kind": "bm25", "b": 0.4}, {"kind": "dense", "model": "minilm"}]
    hybrid = RetrieverSettings.model_validate({"kind": "hybrid", "engines": engines})
    assert hybrid.engines == (BM25Settings(b=0.4), DenseSettings(model="minilm"))


@pytest.mark.parametrize(
    ("family", "section", "says"),
    [
        (DataSettings, {**FILE, "sentences": 50}, "sentences: Extra inputs"),
        (DataSettings, {"kind": "babilong", **FILE, "sentences": 50}, r"data\.noise is missing"),
        (DataSettings, {"kind": "world", **FILE}, "questions: Extra inputs"),
        (DataSettings, {"kind": "beir", "options": {}, **FILE}, "options: Extra inputs"),
        (DataSettings, {"kind": "hotpotqa"}, "questions: Field required"),
        (DataSettings, {"kind": "world", "part": "2/2"}, "part 2 of 2 does not exist"),
        (PolicySettings, {"kind": "magic", "model": "m"}, "magic"),
        (PolicySettings, OPENAI, "urls"),
        (PolicySettings, {"kind": "together"}, "model"),
        (PolicySettings, {"kind": "local", "urls": ["http://a"]}, "urls"),
        (PolicySettings, {**OPENAI, "urls": ["http://a"], "api_key_env": "sk-live-0123"}, "api_key_env"),
        (PolicySettings, {**OPENAI, "urls": ["http://user:secret@a/v1"]}, "urls"),
        (PolicySettings, {**OPENAI, "urls": ["http://a/v1?key=secret"]}, "urls"),
        (RetrieverSettings, {"fb_docs": 3}, "fb_docs: .*not permitted"),
        (RetrieverSettings, {"kind": "hybrid", "engines": [{}, {}], "weights": [0, 0]}, "weights.*: .*0"),
        (RetrieverSettings, {"kind": "hybrid", "engines": [{"k": 5}, {}]}, "engines.*: .*k belongs to"),
        (RetrieverSettings, {"kind": "remote", "urls": ["http://me:secret@host"]}, "urls.*: .*remove user"),
        (RetrieverSettings, {"kind": "pubmed", "max_date": "soon"}, "max_date.*: .*should match pattern"),
        (RetrieverSettings, {"kind": "clinicaltrials", "max_date": "2001/05/01"}, "max_date.*: .*should match pattern"),
        (RetrieverSettings, {"kind": "colbert", "checkpoint": "m", "candidates": 0}, "candidates: .*greater than 0"),
        (ProgramSettings, {"path": "p.py"}, r"p\.py:ClassName"),
    ],
)
def test_wrong_section_is_refused_at_its_key(family, section, says):
    with pytest.raises(ValidationError) as caught:
        family.model_validate(section)
    errors = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in caught.value.errors(include_input=False)]
    assert any(re.search(says, error) for error in errors), errors
    assert "secret" not in str(errors)


def test_other_keys_of_the_program_go_to_its_constructor():
    assert ProgramSettings(path="p.py:P", hops=3).arguments == {"hops": 3}


def test_ranking_keys_are_neither_free_nor_paths():
    assert set(BM25Settings().ranking_keys()) == {"k1", "b", "stopwords", "stemmer", "fold_accents"}


def test_keys_that_affect_samples_are_not_free():
    free = {"data.corpus", "policy.model", "retriever.index", "program.path", "pretrain"}
    free |= {"sampling.strategy", "sampling.concurrency", "sampling.max_error_rate"}
    deciding = {"data.kind", "data.seed", "data.split", "policy.temperature", "retriever.k"}
    deciding |= {"sampling.seed", "sampling.reward", "sampling.samples"}
    assert free_keys(SamplingRecipe) & (free | deciding) == free
