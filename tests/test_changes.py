import shutil
import sys

import numpy as np
import pytest

import leret
from leret.cli.sample import rescore as rescore_command
from leret.core.errors import LeretError
from leret.core.runs import Run
from leret.evaluation.plan import estimate
from leret.evaluation.results import read_rows
from leret.evaluation.stage import evaluate
from leret.retrieval.index.manifest import check_files, read_manifest
from leret.sampling.rescore import rescore
from leret.sampling.stage import sample
from leret.training.rounds.grpo import GRPORecipe
from leret.training.stage import train
from leret.training.stored.sft import SFTRecipe
from tests.evaluation.eval_fakes import asks
from tests.first_steps import edit
from tests.sampling.fakes import ROOT, content, recipe_of, write_data
from tests.tiny import tiny_policy

SMALL = {"device": "cpu", "save_steps": 1000, "learning_rate": 1e-3}
HELPER = "import os\nimport sys\n\nsys.path.insert(0, os.path.dirname(__file__))\n"
FILES = {
    "words.py": "def clean(text):\n    return text.strip()\n",
    "deep/__init__.py": "",
    "deep/scale.py": "from . import unit\n\n\ndef scale(value):\n    return value * unit.ONE\n",
    "deep/unit.py": "ONE = 1\n",
    "reward.py": HELPER + "from deep.scale import scale\n\n\ndef own(o):\n    return scale(float(len(o.text)))\n",
    "measure.py": HELPER + "import level\n\n\ndef own(outcome):\n    return level.LEVEL\n",
    "level.py": "LEVEL = 0.25\n",
}


def recipe(**sampling):
    policy = {"model": "base", "max_tokens": 6}
    program = {"path": "program.py:MultiHop", "hops": 2}
    parts = {"parts": {"recall": {"function": "success"}, "reward.py:own": 0.01}}
    data = {"split": "train", "limit": 4}
    return recipe_of(data, policy, program, **{"prompts": 1, "samples": 4, "reward": parts, **sampling})


def sft(name, **keys):
    return SFTRecipe(**SMALL, **{"name": name, "max_steps": 1, "require_spread": False, **keys})


STAGES = {
    "sample": lambda run: sample(recipe(), run),
    "pairs": lambda run: rescore_command(run.path, strategy="all"),
    "sft": lambda run: train(sft("again"), run),
    "grpo": lambda run: train(GRPORecipe(**SMALL, questions_per_round=4, num_generations=2), run),
    "child": lambda run: train(sft("child", init_from="first"), run),
    "eval": lambda run: evaluate(EVAL, run),
    "estimate": lambda run: estimate(EVAL, run),
    "rescore": rescore,
    "load": lambda run: leret.load(run.program)(question="what follows alpha"),
}
EVAL = asks("raw-question", "base", "first", measures=("recall", "measure.py:own"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    home = tmp_path_factory.mktemp("finished")
    write_data(home, n=60)
    tiny_policy(home / "base")
    (home / "deep").mkdir()
    for name, text in FILES.items():
        (home / name).write_text(text)
    text = HELPER + "from words import clean\n" + (ROOT / "pipelines/multihop.py").read_text()
    (home / "program.py").write_text(text.replace("self.search(query", "self.search(clean(query)"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("LERET_CACHE_DIR", str(home / "cache"))
        run = Run.create(home / "run")
        sample(recipe(), run)
        train(sft("first"), run)
        evaluate(EVAL, run)
    return home


@pytest.fixture
def run(finished, tmp_path, monkeypatch):
    home = shutil.copytree(finished, tmp_path / "copy")
    for name in [name for name in sys.modules if name.partition(".")[0] in {"words", "deep", "level"}]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(home)
    return Run.open(home / "run")


def replace(name, old, new):
    return lambda home: edit(home / name, old, new)


def noise(name):
    def change(home):
        data = bytearray((home / name).read_bytes())
        data[-64:-60] = np.float32(0.125).tobytes()
        (home / name).write_bytes(data)

    return change


def break_index(home):
    path = next((home / "run/cache").rglob("data.csc.index.npy"))
    values = np.load(path)
    values[:] = np.nan
    np.save(path, values)


OF_REWARD = dict.fromkeys(["sample", "sft", "grpo", "child", "eval", "estimate"], "its content has changed")
OF_DATA = OF_REWARD | dict.fromkeys(["pairs", "rescore"], "its content has changed")
GOLD = '"relevant_doc_ids": ["alpha", "beta"]', '"relevant_doc_ids": ["beta"]'
OF_COPY = {"load": "a module it imports has changed since"}
OF_POLICY = "have changed since training"
CHANGES = {
    "gold": (replace("questions.jsonl", *GOLD), OF_DATA),
    "corpus": (replace("corpus.jsonl", "leads to beta", "leads to zeta"), OF_DATA | {"load": "of a different corpus"}),
    "program": (replace("program.py", "self.search(clean(query)", "self.search('x' + clean(query)"), OF_DATA),
    "module of the program": (replace("words.py", "strip()", "strip()[::-1]"), OF_DATA),
    "reward": (replace("reward.py", "float(len", "2.0 * float(len"), OF_REWARD),
    "module of a module": (replace("deep/unit.py", "ONE = 1", "ONE = 3"), OF_REWARD),
    "base": (
        noise("base/model.safetensors"),
        {"sft": "no longer the one that", "grpo": "no longer the one that", "eval": "has changed since"},
    ),
    "weights": (noise("run/policies/first/model.safetensors"), dict.fromkeys(["child", "eval", "load"], OF_POLICY)),
    "saved program": (replace("run/program/program.py", "hops: int = 2", "hops: int = 1"), OF_COPY),
    "saved module": (replace("run/program/words.py", "strip()", "lower()"), OF_COPY),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changed_inputs_are_refused(run, change):
    spoil, stages = CHANGES[change]
    spoil(run.path.parent)
    before = content(run)
    for stage, says in stages.items():
        with pytest.raises(LeretError, match=says):
            STAGES[stage](run)
        assert content(run) == before, stage


def test_equal_inputs_are_not_refused(run):
    for path in run.path.parent.rglob("*"):  # copied before
        path.touch()
    for stage in STAGES.values():
        stage(run)


def test_another_measure_is_computed_for_all_rows_of_a_table(run):
    assert measured(run) == {0.25}
    replace("level.py", "0.25", "0.5")(run.path.parent)
    report = evaluate(EVAL.model_copy(update={"systems": ("raw-question",)}), run)
    assert report.asked == ("raw-question",)
    assert set(evaluate(EVAL, run).asked) == {"base", "first"}
    assert measured(run) == {0.5}


def measured(run):
    files = [run.eval / name / "per_question.parquet" for name in EVAL.systems]
    return {row.measures["measure.py:own"] for file in files for row in read_rows(file)}


def test_rescoring_takes_another_reward(run):
    edit("deep/unit.py", "ONE = 1", "ONE = 3.0")
    old = scored(run)
    assert rescore(run).changed > 0
    for before, after in zip(old, scored(run), strict=True):
        assert after.components["reward.py:own"] == 3 * before.components["reward.py:own"]
    STAGES["sft"](run)


def scored(run):
    return [one for group in content(run) for one in group.samples if one.reward is not None]


def test_another_base_is_sampled_again(run):
    noise("base/model.safetensors")(run.path.parent)
    assert sample(recipe(), run).new_samples > 0


def test_a_changed_index_is_built_again_or_refused(run):
    break_index(run.path.parent)
    evaluate(asks("oracle-titles", "raw-question", measures=("ndcg",)), run)
    index = run.cache / "bm25"
    assert check_files(read_manifest(index), index, content=True) == []
    break_index(run.path.parent)
    with pytest.raises(LeretError, match="the index is broken"):
        leret.load(run.program)
