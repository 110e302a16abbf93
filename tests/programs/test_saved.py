import asyncio
import copy
import json
import logging
from pathlib import Path

import cloudpickle
import dspy
import pytest

import leret
from leret.config.data import FileSettings
from leret.config.policy import LocalPolicySettings, PolicySettings
from leret.config.retriever import BM25Settings
from leret.core.errors import ConfigError, ProgramError
from leret.core.types import Document
from leret.datasets.corpus import Corpus
from leret.policies.dspy_lm import policy_lm
from leret.programs.load import load_program
from leret.programs.saved import ProgramSource, save, with_save
from leret.retrieval.engines.bm25 import BM25
from tests.keyed import at, keyed
from tests.optimize.fakes import Writer
from tests.programs.zoo import Agent, Async, TwoPredictors
from tests.sampling.fakes import FakeRetriever, write_data
from tests.tiny import tiny_policy

MULTIHOP = Path(__file__).parents[2] / "pipelines/multihop.py"


@pytest.fixture
def saved(tmp_path):
    write_data(tmp_path)
    source = ProgramSource(MULTIHOP, "MultiHop", {"hops": 2})
    data = FileSettings(corpus=str(tmp_path / "corpus.jsonl"), questions=str(tmp_path / "questions.jsonl"))
    program, place = load_program(source.path, source.name, source.arguments), tmp_path / "run/program"
    policy = LocalPolicySettings(model=str(tiny_policy(tmp_path / "run/policies/sft")), max_tokens=4)
    retriever = BM25Settings(k=2, index=str(tmp_path / "run/cache/bm25"))
    parts = {"policies": {"": policy}, "retriever": retriever, "data": data}
    save(program, place, source=source, adapter=leret.CompactAdapter(), **parts)
    return place


@pytest.fixture(scope="module")
def lms(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies")
    policies = [LocalPolicySettings(model=str(tiny_policy(folder / name, seed=i))) for i, name in enumerate("ab")]
    return [policy_lm(policy, temperature=0.0, max_tokens=5) for policy in policies]


def optimized(kind, lms):
    program = kind()
    program.write.lm, program.answer.lm = lms
    program.write.signature = program.write.signature.with_instructions("Write what finds the book.")
    program.answer.demos = [{"question": "who ?", "context": ["the book"], "answer": "smith"}]
    return program


def ask(program, question="who wrote the book ?"):
    with dspy.context(adapter=leret.CompactAdapter(instructions=True), rm=FakeRetriever()):
        return program(question=question).answer


class Counted(TwoPredictors):
    def __init__(self, hops=2):
        super().__init__()
        self.n_hops = hops


def test_a_moved_run_loads_and_the_program_takes_its_file_along(saved, tmp_path):
    leret.load(saved).save(tmp_path / "again")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert (tmp_path / "again/multihop.py").read_text() == MULTIHOP.read_text()
    others = {"lm": dspy.LM("openai/m"), "retriever": FakeRetriever()}
    again = leret.load(tmp_path / "again", **others)
    assert again.hops == again.program.hops == 2
    with pytest.raises(ProgramError, match=r"cache/bm25 is not an index.*retriever=\.\.\."):
        leret.load(tmp_path / "again", lm=others["lm"])
    assert leret.load(tmp_path / "elsewhere/program")(question="alpha") is not None


def test_a_copy_saves_itself_and_files_are_saved_by_dspy(lms, tmp_path):
    program = with_save(optimized(TwoPredictors, lms), leret.CompactAdapter())
    other = copy.deepcopy(program)
    other.answer.demos = []
    other.save(tmp_path / "saved")
    assert leret.load(tmp_path / "saved").program.answer.demos == []
    for name in ("answer", "write"):
        getattr(program, name).lm = None
    program.save(tmp_path / "state.json")
    fresh = TwoPredictors()
    fresh.load(tmp_path / "state.json")
    assert fresh.answer.demos == program.answer.demos


@pytest.mark.parametrize("kind", [Async, TwoPredictors])
def test_a_loaded_program_is_awaited_without_a_warning_or_called(kind, lms, tmp_path, caplog):
    save(optimized(kind, lms), tmp_path, adapter=leret.CompactAdapter(instructions=True))
    again = leret.load(tmp_path, retriever=FakeRetriever())
    dspy.enable_logging()
    log = logging.getLogger("dspy.primitives.module")
    log.addHandler(caplog.handler)
    awaited = asyncio.run(again.acall(question="who ?")).answer
    log.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if "discouraged" in record.getMessage()]
    assert awaited == again(question="who ?").answer


def test_predictors_without_an_lm_take_dspys_and_one_lm_replaces_all(lms, tmp_path):
    program = optimized(TwoPredictors, lms)
    program.answer.lm = None
    save(program, tmp_path, adapter=leret.CompactAdapter())
    assert [p.lm is None for p in leret.load(tmp_path).program.predictors()] == [False, True]
    assert {p.lm for p in leret.load(tmp_path, lm=lms[0]).predictors()} == {lms[0]}
    program.write.lm = None
    save(program, tmp_path, adapter=leret.CompactAdapter())
    with pytest.raises(ConfigError, match="no predictor of this program has a leret policy"):
        leret.load(tmp_path, serve="http://127.0.0.1:9/v1")


def test_weights_that_leret_trained_go_along(lms, tmp_path):
    trained = tiny_policy(tmp_path / "run/policies/ipo", seed=3)
    (trained / "training.json").write_text("{}")
    program = optimized(TwoPredictors, [policy_lm(LocalPolicySettings(model=str(trained)), temperature=0.0), lms[1]])
    save(program, tmp_path / "mine", adapter=leret.CompactAdapter())
    with dspy.context(adapter=leret.CompactAdapter(), rm=FakeRetriever()):
        answer = program(question="who ?").answer
    (tmp_path / "run").rename(tmp_path / "gone")
    (tmp_path / "mine").rename(tmp_path / "elsewhere")
    again = leret.load(tmp_path / "elsewhere", retriever=FakeRetriever())
    assert again(question="who ?").answer == answer
    again.save(tmp_path / "elsewhere")  # over itself
    assert [path.name.rpartition("-")[0] for path in (tmp_path / "elsewhere/policies").iterdir()] == ["ipo"]


def test_what_only_python_can_construct_is_given(lms, tmp_path, caplog):
    class Local(TwoPredictors):
        pass

    save(optimized(Local, lms), tmp_path, adapter=leret.CompactAdapter())
    assert "leret.load(..., program=Local(...))" in caplog.text
    with pytest.raises(ProgramError, match=r"program=Local\(\.\.\.\)"):
        leret.load(tmp_path)
    assert leret.load(tmp_path, program=Local()).program.answer.demos
    with pytest.raises(ProgramError, match=r"other predictors.*self\.agent"):
        leret.load(tmp_path, program=Agent())
    save(optimized(lambda: Counted(hops=3), lms), tmp_path, adapter=leret.CompactAdapter())
    with pytest.raises(ProgramError, match=r"self\.n_hops is 2 but was saved as 3"):
        leret.load(tmp_path)
    assert leret.load(tmp_path, program=Counted(hops=3)).program.n_hops == 3


def test_a_damaged_program_is_refused_and_another_dspy_noted(lms, tmp_path, caplog):
    with pytest.raises(ProgramError, match="not a saved program"):
        leret.load(tmp_path)
    (tmp_path / "program.json").write_text('{"version": 99}')
    with pytest.raises(ProgramError, match="does not have version 3"):
        leret.load(tmp_path)
    with pytest.raises(ConfigError, match="serve='vlm'"):
        leret.load(tmp_path, serve="vlm")
    save(optimized(TwoPredictors, lms), tmp_path, adapter=leret.CompactAdapter())
    edited(tmp_path, lambda saved: saved.update(dspy="3.3.0"))
    leret.load(tmp_path)
    assert "saved with DSPy 3.3.0" in caplog.text
    for damage in (lambda saved: saved.pop("adapter"), lambda saved: saved["predictors"]["self.write"].update(lm=99)):
        save(optimized(TwoPredictors, lms), tmp_path)
        edited(tmp_path, damage)
        with pytest.raises(ProgramError, match=r"program\.json cannot be loaded .*save the program again"):
            leret.load(tmp_path)


class Searching(Writer):
    def forward(self, question):
        return dspy.Prediction(doc_ids=self.search(question).doc_ids)


CORPUS = Corpus([Document("d1", "Alpha", "the first letter"), Document("d2", "Beta", "the second letter")])


@pytest.mark.parametrize(("by_rm", "on_disk"), [(False, True), (True, False)])
def test_a_retriever_is_saved_with_its_program(lms, tmp_path, by_rm, on_disk):
    retriever = BM25.build(CORPUS, tmp_path / "index" if on_disk else None)
    program = Searching()
    program.write.lm = lms[0]
    program.search.retriever = None if by_rm else retriever
    with dspy.context(rm=retriever if by_rm else None):
        save(program, tmp_path / "saved")
    with dspy.context(rm=None):
        again = leret.load(tmp_path / "saved")
        assert again(question="beta").doc_ids == ["d2"]
        again.save(tmp_path / "twice")
        assert leret.load(tmp_path / "twice")(question="beta").doc_ids == ["d2"]


def test_a_retriever_that_only_python_makes_is_told_and_asked_for(lms, tmp_path, caplog):
    program = Searching()
    program.search.retriever = FakeRetriever()
    save(program, tmp_path)
    assert "retriever of self.search is a FakeRetriever" in caplog.text
    with pytest.raises(ProgramError, match=r"leret\.load\(\.\.\., retriever=\.\.\.\)"):
        leret.load(tmp_path)
    assert leret.load(tmp_path, retriever=FakeRetriever())(question="alpha") is not None


def test_a_program_comes_back_with_its_lms_instructions_demos_and_retriever(lms, tmp_path):
    program = with_save(optimized(TwoPredictors, lms), leret.CompactAdapter(instructions=True))
    program.search.retriever = BM25.build(CORPUS)
    answer = ask(program)
    program.save(tmp_path / "saved")
    loaded = leret.load(tmp_path / "saved")
    loaded.save(tmp_path / "pickled", save_program=True)
    program.save(tmp_path / "pickled-by-dspy", save_program=True)
    pickled = [dspy.load(tmp_path / name, allow_pickle=True) for name in ("pickled", "pickled-by-dspy")]
    sent = cloudpickle.loads(cloudpickle.dumps((program, loaded)))
    for copied in (loaded, *pickled, *sent):
        assert ask(copied) == answer
        assert copied.search("beta").doc_ids[0] == "d2"
    with dspy.context(adapter=dspy.ChatAdapter()):
        assert loaded(question="who wrote the book ?").answer == answer
    assert [p.lm.kwargs["max_tokens"] for p in loaded.predictors()] == [5, 5]


def edited(directory, change):
    saved = json.loads((directory / "program.json").read_text())
    change(saved)
    (directory / "program.json").write_text(json.dumps(saved))


def _lm(**keys):
    entry = {"lm": {"model": "openai/x", "api_base": "http://127.0.0.1:9/v1"}, "has_key": True}
    return lambda saved: saved.update(lms=[{**entry, **keys}] * 2)


def test_a_key_is_sent_where_the_caller_named_its_variable(lms, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "sesame")
    save(optimized(TwoPredictors, lms), tmp_path)
    remote = {"kind": "remote", "urls": ["http://127.0.0.1:9"], "token_env": "MY_SECRET", "retry_for_s": 0.0}
    edited(tmp_path, lambda saved: saved.update(searches={"": {"settings": remote}}))
    for keys in (None, "OTHER", ["OTHER"]):
        with pytest.raises(ConfigError, match=r"MY_SECRET to .*127\.0\.0\.1:9.*api_key_env='MY_SECRET'"):
            leret.load(tmp_path, api_key_env=keys)
    with pytest.raises(ProgramError, match=r"127\.0\.0\.1:9.* or pass another retriever"):
        leret.load(tmp_path, api_key_env="MY_SECRET")
    leret.load(tmp_path, lm=lms[0], retriever=FakeRetriever())
    save(optimized(TwoPredictors, lms), tmp_path)
    edited(tmp_path, _lm())
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9.*api_key_env="):
        leret.load(tmp_path)
    assert leret.load(tmp_path, api_key_env="MY_SECRET").predictors()[0].lm.kwargs["api_key"] == "sesame"
    edited(tmp_path, _lm(lm={"model": "openai/x", "base_url": "http://127.0.0.1:9/v1"}, has_key=False))
    with pytest.raises(ProgramError, match="sets base_url"):  # hides from the check
        leret.load(tmp_path)


PLACES = [
    (place, model, name)
    for model, name in keyed()
    for place in (["lms"] if issubclass(model, PolicySettings) else ["searches", "retriever"])
]


@pytest.mark.parametrize(("place", "model", "name"), PLACES, ids=lambda value: getattr(value, "__name__", value))
def test_a_saved_program_sends_no_key_without_leave(lms, tmp_path, monkeypatch, place, model, name):
    monkeypatch.setenv("MY_KEY", "sesame")
    save(optimized(TwoPredictors, lms), tmp_path)
    settings = at(model, "http://127.0.0.1:9", **{name: "MY_KEY"})
    records = {
        "lms": [{"policy": settings, "config": {}, "name": "x-1"}] * 2,
        "searches": {"": {"settings": settings}},
        "retriever": settings,
    }
    edited(tmp_path, lambda saved: saved.update({place: records[place]}))
    with pytest.raises(ConfigError, match=r"MY_KEY to http://127\.0\.0\.1:9.*api_key_env='MY_KEY'"):
        leret.load(tmp_path)


@pytest.mark.parametrize("file", ["../evil.py", "/tmp/evil.py", "link.py"])
def test_a_program_file_outside_of_the_directory_is_not_run(saved, file):
    evil = saved.parent / "evil.py"
    evil.write_text("raise SystemExit(3)")
    (saved / "link.py").symlink_to(evil)
    edited(saved, lambda value: value["program"].update(file=file))
    with pytest.raises(ProgramError, match="is not in this directory"):
        leret.load(saved)


@pytest.mark.parametrize("place", ["retriever", "policy"])
def test_a_kind_in_a_file_is_not_run(saved, place):
    (saved / "evil.py").write_text("raise SystemExit(3)")
    kind = {"kind": f"{saved}/evil.py:KIND", "model": "x"}
    edited(saved, lambda value: (value if place == "retriever" else value["lms"][0]).update({place: kind}))
    with pytest.raises(ProgramError, match="runs only if a recipe names it"):
        leret.load(saved)
