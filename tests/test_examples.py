import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import dspy
import pytest
import torch

import leret
from leret.config.retriever import BM25Settings
from leret.datasets.corpus import Corpus
from leret.retrieval.load import build_index
from tests.first_steps import read_lines, succeeds, write_world

EXAMPLES = Path(__file__).parents[1] / "examples"
KEYS = {"num_train_epochs": 1, "learning_rate": 1e-3, "max_length": 512}
SMALL = {"samples": 2, "algorithms": ["sft"], "train_kwargs": KEYS}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    build_index(BM25Settings(), Corpus(write_world(folder, 24, 0, 0, comparison=0)), folder / "index")
    return folder


@pytest.fixture(scope="module", autouse=True)
def _as_a_script(place):
    before = {name: dspy.settings.get(name) for name in ("lm", "adapter", "rm")}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        patch.chdir(place)
        yield
    dspy.configure(**before)


@pytest.fixture(scope="module")
def saved(_as_a_script):
    names = "questions.jsonl", "index", "saved/multihop", "demo"
    return import_module("multihop").main(*names, run_dir="runs/multihop", **SMALL)


def test_multihop_is_optimized_saved_and_loaded(saved):
    question = read_lines("questions.jsonl")[0]["question"]
    assert type(saved).__name__ == "MultiHop"
    programs = saved, leret.load("saved/multihop")
    [before, after] = [program(question=question).doc_ids for program in programs]
    assert before == after


def test_the_researcher_is_an_agent_that_is_optimized_and_saved(place):
    settings = SMALL | {"train_kwargs": KEYS | {"max_length": 1024}, "run_dir": "runs/researcher"}
    Path("few.jsonl").write_text("".join(Path("questions.jsonl").read_text().splitlines(keepends=True)[:3]))
    optimized = import_module("researcher").main("few.jsonl", "corpus.jsonl", "saved/researcher", "agent", **settings)
    assert {candidate["stage"] for candidate in optimized.candidate_programs} == {"student", "sft"}
    again = leret.load("saved/researcher").program
    assert (type(again).__name__, again.max_iters) == ("Researcher", 4)
    question = read_lines("questions.jsonl")[0]["question"]
    assert again(question=question).trajectory["tool_name_0"] in ("look_up", "finish")


def test_a_picker_learns_on_own_data_by_a_feature_of_its_own():
    rows = read_lines("questions.jsonl")
    given = ["data.kind=jsonl", "data.questions=questions.jsonl", "data.corpus=corpus.jsonl", "data.limit=4"]
    given.append(f"policy.features={EXAMPLES / 'picker.py'}:numbers")
    stages = [f"{stage}/expand-pick.yaml" for stage in ("sampling", "training", "eval")]
    words = ["run", *stages, "--run", "runs/picker", *(word for one in given for word in ("--set", one))]
    succeeds(*words)
    found = import_module("picker").main("runs/picker", rows[0]["question"])
    assert len(found.context) == 6
    assert "capitals" in Path("runs/picker/policies/expand-pick/picker.json").read_text()


@pytest.mark.usefixtures("saved")
def test_the_app_answers_over_http(monkeypatch):
    testing = pytest.importorskip("fastapi.testclient")
    monkeypatch.setenv("PROGRAM", "saved/multihop")
    with testing.TestClient(import_module("app").app) as client:
        answer = client.post("/search", json={"question": "Where was the director of the film born?"})
        assert (answer.status_code, client.post("/search", json={}).status_code) == (200, 422)
    assert len(answer.json()["doc_ids"]) == len(answer.json()["context"]) > 0


def test_the_notebook_runs_from_top_to_bottom():
    cells = json.loads((EXAMPLES / "loop.ipynb").read_text(encoding="utf-8"))["cells"]
    namespace = {"__name__": "__main__"}
    for number, source in enumerate("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        small = source.replace("example_data()", "example_data(n_train=12, n_val=4, n_test=4)")
        exec(compile(small, f"cell {number}", "exec"), namespace)
    assert namespace["after"] >= 0
    shown = ["".join(output["text"]) for cell in cells for output in cell.get("outputs", ())]
    before, after = map(float, shown[-1].split(" -> "))  # of the whole notebook, as it was run last
    assert after >= before + 8


def test_grpo_on_one_page_compares_a_group_and_takes_a_step(place, capsys):
    page = import_module("grpo_on_one_page")
    assert page.average_precision(["a", "x", "b"], ["a", "b"]) == pytest.approx((1 + 2 / 3) / 2)
    before, after = page.main(rounds=1, questions_per_round=2, group_size=4, n_test=2)
    assert 0 <= before <= 1
    assert 0 <= after <= 1
    assert "round 1: 16 completions, mean reward" in capsys.readouterr().out


def test_grpo_on_one_page_has_the_gradient_of_the_policy_loss():
    page = import_module("grpo_on_one_page")
    logits = torch.zeros(2, 3, requires_grad=True)

    class Model:
        network = None

        def logps(self, network, prompt, completion):
            return logits[prompt[0]].log_softmax(-1)[list(completion)]

    policy = SimpleNamespace(model=Model())
    samples = [page.Sample([0], [0, 1], 1.0, None, 0.5), page.Sample([1], [2], 0.0, None, -0.5)]
    page.loss(policy, samples).backward()
    third = 1 / 3  # each token's probability; also, 1 / number of tokens
    expected = torch.zeros(2, 3)
    expected[0] = -0.5 * torch.tensor([1 - 2 * third, 1 - 2 * third, -2 * third])
    expected[1] = 0.5 * torch.tensor([-third, -third, 1 - third])
    torch.testing.assert_close(logits.grad, expected * third)


@pytest.mark.slow
def test_grpo_on_one_page_learns(place):
    before, after = import_module("grpo_on_one_page").main(rounds=60, n_test=100)
    assert after >= before + 0.1
