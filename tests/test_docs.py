import doctest
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from urllib.parse import urlsplit

import dspy
import pytest

import leret
from leret.config.base import models_in
from leret.config.data import FileSettings
from leret.config.evaluation import EvalRecipe
from leret.config.load import load_recipe
from leret.config.retriever import BM25Settings
from leret.config.sampling import SamplingRecipe
from leret.core import yaml
from leret.datasets.load import load_corpus
from leret.demo import ExampleData
from leret.programs.adapters import CompactAdapter
from leret.programs.load import load_program
from leret.retrieval.load import load_retriever
from leret.training.algorithms import ALGORITHMS, TrainingRecipe
from tests.cli.test_demo import MINE
from tests.first_steps import copy_recipes, read_lines, write_world
from tests.first_steps import leret as leret_command
from tests.tiny import tiny_policy

ROOT = Path(__file__).resolve().parents[1]
TUTORIAL = ROOT / "docs" / "tutorial.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCS = {str(path.relative_to(ROOT)): path for path in PAGES if path != TUTORIAL}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

SMALL = {
    "sample": ["data.limit=6", "sampling.samples=2", "sampling.prompts=1", "policy.max_tokens=6"],
    "train": ["learning_rate=1e-3", "num_train_epochs=1", "max_length=512", "warmup_ratio=0", "require_spread=false"],
    "pick": ["max_steps=2", "eval_steps=null"],
    "eval": ["limit=4", "resamples=100", "systems=[raw-question, base, policies]"],
}

NOT_RUN = {
    "vllm": "a server",
    "pip": "set-up",
    "python": "runs the tests, or builds a policy, which takes minutes to an hour",
    "leret demo": "minutes; tests/cli/test_run.py runs it, small",
    "leret serve": "runs until it is stopped; tests/policies/serving and tests/retrieval/server start them",
    "scripts/vllm_cpu.sh": "set-up, gigabytes of it",
    "leret view": "runs until it is stopped; tests/viewer and tests/cli/test_view.py",
    "leret search indexes/trained": "its files are the reader's; tests/evaluation/test_retriever.py runs it",
    "leret search INDEX": "its files are the reader's; tests/evaluation/test_retriever.py runs it",
    "leret train training/retriever-kl.yaml": "needs a dense model; test_retriever_kl.py trains a tiny one",
    "sqlite3": "another program; the query is run below",
}


def blocks(language):
    pairs = [(name, block) for name, path in DOCS.items() for block in BLOCK.findall(path.read_text(encoding="utf-8"))]
    return [(name, body) for name, (kind, body) in pairs if kind == language]


def shell_lines(block):
    return [words for words in (shlex.split(line, comments=True) for line in block.splitlines()) if words]


def commands(document):
    return [words for name, body in blocks("sh") if name == document for words in shell_lines(body)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    copy_recipes(folder)
    write_world(folder)
    (folder / "pages").mkdir()  # as `python -m leret.extras.fetch` leaves it
    shutil.copy(folder / "corpus.jsonl", folder / "pages")
    for name in ("minilm", "smollm2"):
        tiny_policy(folder / "policies" / name)
    (folder / "my_program.py").write_text(MINE.replace("Mine", "TwoQueries"), encoding="utf-8")
    return folder


@pytest.fixture
def runs(place, monkeypatch):
    monkeypatch.chdir(place)
    if not Path("runs/demo").exists():
        for line in ("sample sampling/demo.yaml", "train training/demo-sft.yaml", "eval eval/demo.yaml"):
            run([*line.split(), "--run", "runs/demo"])
    if not Path("runs/world").exists():
        shutil.copytree("runs/demo", "runs/world")
    return place / "runs"


def run(args):
    name = Path(args[1]).stem if len(args) > 1 else ""
    if args[0] in SMALL and "demo" not in args[1] and name != "distill":
        small = SMALL["pick" if args[:2] == ["train", "expand-pick"] else args[0]]
        args = [*args[:2], *(part for value in small for part in ("--set", value)), *args[2:]]
    if args[0] == "train" and name in {"demo-grpo", "distill"}:
        args = [*args, "--set", "max_steps=1"]
    code, out = leret_command(*args)
    nothing = ("no usable", "no pair", "spread", "nothing to train")  # a random policy may not give a single pair
    if args[0] == "train" and code == 2 and any(words in out for words in nothing):
        return
    assert code == 0, f"{' '.join(args)}:\n{out}"


@pytest.mark.parametrize("document", DOCS)
def test_the_commands_of_a_document_run_in_order(document, place, monkeypatch):
    monkeypatch.chdir(place)
    for words in commands(document):
        if words[0] == "make":
            made = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
            assert made.returncode == 0, made.stderr
        elif "--print" in words or not {" ".join(words[:n]) for n in (1, 2, 3)} & NOT_RUN.keys():
            assert words[0] == "leret", f"{document}: {' '.join(words)}: not run, and not listed in NOT_RUN"
            run(words[1:])


@pytest.mark.parametrize(("name", "body"), blocks("yaml"))
def test_a_yaml_block_is_part_of_a_valid_recipe(name, body):
    value = {"data": {"kind": "world"}, **yaml.load(body)}
    for training in value.pop("train", []):
        TrainingRecipe.model_validate(training)
    EvalRecipe.model_validate(value.pop("eval", {}))
    SamplingRecipe.model_validate(value)


@pytest.fixture
def own():
    rows = read_lines("questions.jsonl")
    examples = [dspy.Example(question=row["question"], gold=row["relevant_doc_ids"]) for row in rows]
    found = [example.with_inputs("question") for example in examples]
    corpus = load_corpus(FileSettings(corpus="corpus.jsonl", questions="questions.jsonl"))
    retriever = load_retriever(BM25Settings(), corpus, Path("cache"))
    multihop = load_program(Path("pipelines/multihop.py"), "MultiHop", {})
    names = {"trainset": found[:10], "valset": found[10:14], "MultiHop": type(multihop), "program": multihop}
    names["own_data"] = ExampleData(found[:10], found[10:14], found[14:18], retriever)
    with dspy.context(adapter=CompactAdapter(), rm=retriever):
        yield {**names, "recall": lambda example, found, trace=None: len({*example.gold} & {*found.doc_ids}) / 2}


@pytest.mark.usefixtures("runs")
def test_the_python_blocks_run(own):
    names = {name: dict(own) for name in DOCS}
    for name, body in blocks("python"):
        if name == "CONTRIBUTING.md":  # a file of kinds, which tests/test_kinds.py runs
            continue
        if "example_data()" in body:  # the next test runs it as it is; here it makes the names that later blocks use
            mine = re.sub(r"^class MultiHop.*?(?=^def recall)", "", body, flags=re.MULTILINE | re.DOTALL)
            exec(compile(mine.replace("example_data()", "own_data"), name, "exec"), names[name])
            dspy.configure(lm=None, adapter=None, rm=None)
        elif "class " in body:  # a program: a file, which a recipe names
            Path("my_program.py").write_text(body, encoding="utf-8")
            run(["sample", "sampling/demo.yaml", "--run", "runs/own", "--set", "program.path=my_program.py:MultiHop"])
        else:
            exec(compile(body, name, "exec"), names[name])


def test_the_tutorial_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for kind, body in BLOCK.findall(TUTORIAL.read_text(encoding="utf-8")):
        if kind == "python":
            exec(compile(body, "tutorial", "exec"), names)
        for words in shell_lines(body) if kind == "sh" else ():
            run(words[1:])
    assert len(names["documents"]) == 1640  # the number in the output that the tutorial shows
    assert names["found"].doc_ids


@pytest.mark.slow  # the blocks test runs it on fewer questions
def test_the_first_block_improves_the_program_as_pasted(tmp_path):
    first = next(body for name, body in blocks("python") if name == "README.md")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", first]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    before, _, after = ran.stdout.splitlines()[-1].partition(" -> ")
    assert float(after) >= float(before) + 8, ran.stdout


def test_the_query_of_the_docs_reads_the_store(runs):
    (query,) = [words[2] for name in DOCS for words in commands(name) if words[0] == "sqlite3"]
    with closing(sqlite3.connect(runs / "world" / "rollouts.db")) as connection:
        assert connection.execute(query).fetchall()


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr


def test_the_reference_has_every_public_name_and_algorithm():
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: .*?\n.*heading: leret\.(\w+),", page, re.MULTILINE)
    assert sorted({*shown, "__version__"}) == sorted(leret.__all__)

    kinds = (ROOT / "docs" / "reference" / "kinds.md").read_text(encoding="utf-8")
    shown = re.findall(r"heading: (leret\.[\w.]+),", page + kinds)
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for module, names in re.findall(r"^from (leret\.[\w.]+) import (.+)$", text, re.MULTILINE):
        for name in names.split(", "):
            private = {"Task", "digest", "writer"}
            assert name in private or f"{module}.{name}" in shown, f"{module}.{name}"

    page = (ROOT / "docs" / "reference" / "algorithms.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \|.*$", page, re.MULTILINE)
    assert sorted(rows) == sorted([*ALGORITHMS, *TrainingRecipe.shelf])


def test_examples_in_docstrings_hold():
    modules = [path for path in (ROOT / "leret").rglob("*.py") if ">>> " in path.read_text(encoding="utf-8")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in modules]
    assert sum(doctest.testmod(import_module(name)).attempted for name in names) > len(names)
    assert [name for name in names if doctest.testmod(import_module(name)).failed] == []


def test_every_link_to_a_file_leads_somewhere():
    links = [(path, link) for path in PAGES for link in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8"))]
    assert [link for link in links if "://" not in link[1] and not (link[0].parent / link[1]).exists()] == []


@pytest.mark.parametrize("page", ["docs/index.md", "docs/reference/algorithms.md"])
def test_figures_of_a_row_are_in_the_section_of_the_results_that_it_links(page):
    rows = [
        line
        for line in (ROOT / page).read_text(encoding="utf-8").splitlines()
        if "RESULTS.md#" in line and line[0] == "|"
    ]
    assert rows
    for row in rows:
        [anchor] = re.findall(r"RESULTS\.md#([\w-]+)", row)
        figures = re.findall(r"\.\d{3,}", re.sub(r"arXiv [\d.]+", "", row))
        section = results_section(anchor)
        assert figures, row
        assert [figure for figure in figures if figure not in section] == [], row


def results_section(anchor):
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0].lstrip("# ").lower()
        if re.sub(r"[^\w -]", "", title).replace(" ", "-") == anchor:
            return section
    raise AssertionError(anchor)


TRAINING = list(TrainingRecipe.kinds())
for path in TrainingRecipe.engines.values():
    TRAINING += [algorithm.settings for algorithm in resolve_name(path).values()]
RECIPES = {"Sampling": [SamplingRecipe], "Training": TRAINING, "Evaluation": [EvalRecipe]}


@pytest.mark.parametrize("section", RECIPES)
def test_every_key_is_documented_and_every_documented_key_exists(section):
    page = (ROOT / "docs" / "reference" / "recipes.md").read_text(encoding="utf-8")
    text = page.split(f"## {section}")[1].split("\n## ")[0]
    told = set()
    for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE):
        names = re.findall(r"`([^`]+)`", row)
        first, dot, _ = names[0].rpartition(".")  # `retriever.urls`, `email`: the others are of the same section
        told |= {name if "." in name or not dot else f"{first}.{name}" for name in names}
    known = set()
    whole = {"lora", "teacher", "reward", "policies", "actors", "retrievers", "picker", "writer", "measures"}
    for recipe in RECIPES[section]:
        for name, field in recipe.model_fields.items():
            inner = [] if name in whole else list(models_in(field.annotation))
            known |= {f"{name}.{key}" for model in inner for key in model.model_fields} or {name}
    known = {"program.adapter.kind" if k == "program.adapter" else k for k in known}
    known = {"sampling.bank.*" if k == "sampling.bank" else k for k in known}
    undocumented = {"sampling.margin", "sampling.max_pairs"}
    assert told - known == set()
    of_engines = {key for key in known if key.startswith("retriever.")}  # the rest is in docs/reference/retrieval.md
    assert known - told - undocumented - of_engines == set()


def test_the_readme_is_short():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split()) <= 900
    first = next(body for name, body in blocks("python") if name == "README.md")
    assert len(first.splitlines()) <= 15


def test_the_recipes_of_deploy_fit_the_servers_of_its_compose_file(tmp_path):
    services = yaml.load((ROOT / "deploy/compose.yaml").read_text())["services"]
    files = [f"data.{name}={tmp_path}/{name}.jsonl" for name in ("questions", "corpus")]
    for file in files:
        Path(file.split("=")[1]).touch()
    sampling = load_recipe(str(ROOT / "deploy/served.yaml"), SamplingRecipe, files)
    training = load_recipe(str(ROOT / "deploy/served-grpo.yaml"), TrainingRecipe, ())
    hosts = {urlsplit(url).hostname for url in (*sampling.retriever.urls, *sampling.policy.urls)}
    assert hosts == set(services) - {"trainer"}
    assert training.served
    assert f"--max-lora-rank {training.lora.r}" in services["policy"]["command"]
    assert f"--name {sampling.policy.model} " in services["policy"]["command"]
    assert services["policy"]["command"].split()[3] == training.init_from
    assert all(name in services["trainer"]["command"][2] for name in ("deploy/served.yaml", "deploy/served-grpo.yaml"))
    # the containers share the folder with the adapters
    assert services["policy"]["volumes"] == services["trainer"]["volumes"]
    assert services["policy"]["environment"] == {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
