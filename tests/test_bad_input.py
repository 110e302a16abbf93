import hashlib
import shlex
import shutil
from pathlib import Path

import pytest

from leret.core import yaml
from leret.core.runs import Run
from leret.sampling.store.store import Store
from tests.first_steps import edit, refused, succeeds
from tests.sampling.fakes import ROOT, write_data
from tests.tiny import tiny_policy

RECIPE = """\
data: {kind: jsonl, corpus: corpus.jsonl, questions: questions.jsonl}
retriever: {k: 1}
policy: {model: model, max_tokens: 4}
program: {path: "program.py:MultiHop", hops: 2, k: 1, adapter: {kind: compact}}
sampling: {prompts: 1, samples: 2}
"""


def stops(command, *says, code=2):
    message = refused(*shlex.split(command), code=code).partition("error: ")[2]
    assert [words for words in says if words not in message] == [], message


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampled")
    write_data(folder)
    shutil.copy(ROOT / "pipelines/multihop.py", folder / "program.py")
    (folder / "r.yaml").write_text(RECIPE)
    tiny_policy(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        succeeds("sample", "r.yaml", "--run", "R")
    return folder


@pytest.fixture(autouse=True)
def _folder(tmp_path, sampled, monkeypatch):
    shutil.copytree(sampled, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def snapshot():
    passing = {"events.jsonl", "rollouts.db-wal", "rollouts.db-shm", "rollouts.db.lock"}
    files = [path for path in sorted(Path("R").rglob("*")) if path.is_file() and path.name not in passing]
    return {str(path): hashlib.blake2b(path.read_bytes()).hexdigest() for path in files}


def change(path, old, new):
    return lambda: edit(path, old, new)


def without_samples():
    value = yaml.load(Path("R/run.yaml").read_text())
    del value["sampling"]
    Path("R/run.yaml").write_text(yaml.dump(value))


NEW, AGAIN, EVAL = "sample r.yaml --run new", "sample r.yaml --run R", "eval eval/demo.yaml --run R"
CASES = {
    "recipe: two faults": (change("r.yaml", "corpus.jsonl", "nix"), f"{NEW} --set retriever.k=0", ("2 problems:", "retriever.k", "nix")),
    "recipe: none": (None, "sample nix.yaml --run new", ("nix.yaml: no such recipe", "leret recipes list")),
    "data that broke after sampling": (change("questions.jsonl", "\n", '\n{"id": "q"\n'), AGAIN, ("questions.jsonl:2",)),
    "program without the class": (change("program.py", "class MultiHop", "class Other"), NEW, ("no dspy.Module 'MultiHop'", "available: Other")),
    "program that raises": (change("program.py", "found = Found()", "found = Found(); 1 / 0"), NEW, ("ZeroDivisionError",)),
    "model with pickled weights": (lambda: Path("model/model.safetensors").rename("model/pytorch_model.bin"), NEW, ("no *.safetensors", "pytorch_model.bin", "save_pretrained")),
    "model with a broken config": (lambda: Path("model/config.json").write_text("{"), NEW, ("config.json",)),
    "run: not empty and none": (None, "sample r.yaml --run model", ("not empty and is not a run",)),
    "run: a spoilt store": (lambda: Path("R/rollouts.db").write_text("nix" * 99), "rescore --run R", ("rollouts.db",)),
    "run: no samples": (without_samples, "train training/sft.yaml --run R", ("leret sample",)),
    "run: no such policy": (None, "train training/ipo.yaml --run R", ("init_from: 'sft' is not 'base', a trained policy", "train sft first")),
    "run: no preferences": (lambda: shutil.rmtree("R/preferences"), "train training/dpo.yaml --run R --set init_from=base", ("preferences",)),
    "run: no samples to evaluate": (without_samples, EVAL, ("leret sample",)),
    "run: no such system": (None, f"{EVAL} --set systems=[bse]", ("'bse'", "did you mean base?")),
    "run: no such baseline": (None, f"{EVAL} --set baseline=bass", ("baseline: unknown system 'bass'",)),
    "run: an unknown measure": (None, f"{EVAL} --set measures=[recal]", ("measures: unknown measure 'recal'",)),
    "run: lengths of other data": (None, f"{EVAL} --set data.sentences=9", ("data: only babilong data",)),
    "run: sampled on what is asked": (None, f"{EVAL} --set split=all", ("q",)),
}  # fmt: skip
OUTPUTS = (
    "init --questions questions.jsonl --corpus corpus.jsonl --out", "view R --static", "merge model --out",
    "index build --kind bm25 --corpus corpus.jsonl --out", "recipes show sampling/demo --out", "demo --run",
    "search nix --questions questions.jsonl --out",
    "data chunk corpus.jsonl --out", "store export --run R --out", "serve policy model --log",
    "data episodes --questions questions.jsonl --corpus corpus.jsonl --out",
)  # fmt: skip
for _command in OUTPUTS:
    CASES[f"output below a file: {_command}"] = (
        None, f"{_command} corpus.jsonl/a/b", ("corpus.jsonl/a", "cannot be written", "choose"),
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_and_the_run_stays(case):
    spoil, command, says = CASES[case]
    if spoil:
        spoil()
    before = snapshot()
    stops(command, *says)
    assert snapshot() == before
    assert not (case.startswith("recipe") and Path("new").exists())


def test_a_server_that_is_not_there_fails_and_the_run_can_go_on():
    policy = "{kind: openai, model: m, urls: ['http://127.0.0.1:9/v1'], timeout_s: 2, retry_for_s: 0, max_tokens: 4}"
    stops(f'{NEW} --set data.limit=2 --set "policy={policy}"', "127.0.0.1:9", code=1)
    Run.open(Path("new"))
    succeeds(*NEW.split())


def test_a_run_that_another_process_samples_into_is_refused():
    with Store(Path("R/rollouts.db")):
        stops(f"{AGAIN} --set sampling.concurrency=9", "R", "another process")


def test_a_full_disk_leaves_the_run_to_go_on():
    before = snapshot()
    Path("R/events.jsonl").rename("kept.jsonl")
    Path("R/events.jsonl").symlink_to("/dev/full")
    command = "train training/sft.yaml --run R --set require_spread=false --set learning_rate=1e-3"
    stops(command, "R cannot be written: the disk is full; free some space and run the same command again")
    after = snapshot()
    assert {name for name in before if after.get(name) != before[name]} <= {"R/run.yaml"}
    Path("kept.jsonl").replace("R/events.jsonl")
    succeeds(*command.split())
