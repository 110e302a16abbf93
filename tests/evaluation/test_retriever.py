import json
import random
import re
from dataclasses import replace
from urllib.parse import unquote

import ir_measures
import pytest

from leret.config.data import FileSettings
from leret.core.errors import ConfigError, DataError
from leret.core.types import Document, Outcome, Passage, Task
from leret.datasets.corpus import Corpus
from leret.datasets.load import load
from leret.evaluation.retriever import evaluate_retriever, parse_measures
from leret.retrieval.engines.bm25 import BM25
from leret.rewards import scoring
from tests.datasets.writing import json_lines
from tests.first_steps import leret, read_lines
from tests.retrieval.serving import Echo, running

NAMES = ["R@1", "R@10", "R@100", "AP", "AP@10", "RR", "RR@10", "nDCG", "nDCG@10", "Success@1", "Success@5"]
OURS = [re.sub("^r@", "recall@", name.lower()) for name in NAMES]
ODD = ["a b\tc", "é%20", "100%", "\u3000x", "-1", "line\u2028", "\u0085"]


class Table:
    digest = "table"

    def __init__(self, rankings, score=lambda rank: 1.0 / rank):
        self.rankings, self.score, self.depths = rankings, score, []

    def search(self, queries, k):
        self.depths.append(k)
        rankings = [enumerate(self.rankings.get(query, ())[:k], 1) for query in queries]
        return [tuple(Passage(i, "", "", self.score(rank)) for rank, i in ranking) for ranking in rankings]


def q(question_id, *gold):
    return Task.question(question_id, f"text {question_id}", gold=gold)


@pytest.mark.parametrize("score", [lambda rank: 1 / rank, lambda rank: 1.0], ids=["falling", "equal"])
def test_random_rankings_give_the_values_of_our_rewards_also_in_the_files(tmp_path, score):
    rng = random.Random(0)
    ids = [f"d{i}" for i in range(150)] + ODD
    questions = [q(f"{ODD[i % len(ODD)]}{i}", *rng.sample(ids, rng.randint(1, 12))) for i in range(60)]
    questions = [replace(one, relevance={gold: rng.randint(1, 2) for gold in one.gold}) for one in questions]
    table = Table({question.text: rng.sample(ids, rng.randint(0, 120)) for question in questions}, score)
    report = evaluate_retriever(table, questions, NAMES)
    rewards = [scoring(name) for name in OURS]
    for question, ranking, values in zip(questions, report.rankings, report.values, strict=True):
        found = [reward(Outcome(question, ranking=ranking)) or 0.0 for reward in rewards]
        assert found == pytest.approx(list(values), abs=1e-12)
    report.save(tmp_path)
    ours = {(row["id"], name): row[name] for row in read_lines(tmp_path / "per_question.jsonl") for name in NAMES}
    qrels = ir_measures.read_trec_qrels(str(tmp_path / "qrels.trec"))
    ranked = ir_measures.read_trec_run(str(tmp_path / "run.trec"))
    found = ir_measures.iter_calc([ir_measures.parse_measure(name) for name in NAMES], qrels, ranked)
    theirs = {(unquote(m.query_id, errors="surrogatepass"), str(m.measure)): m.value for m in found}
    assert theirs == pytest.approx(ours, abs=1e-12)


def test_bm25_on_real_data_has_its_known_figures(shared_data):
    folder = shared_data / "scifact"
    paths = {"questions": f"{folder}/queries_dev.jsonl.gz", "corpus": f"{folder}/corpus.jsonl.gz"}
    data = load(FileSettings(split="all", **paths))
    questions = [question for question in data.tasks if question.gold]
    report = evaluate_retriever(BM25.build(data.corpus, fold_accents=False), questions, ["R@10", "AP@100"])
    # the published figures count documents of score 0 (benchmarks/quality/bm25_figures.py)
    assert list(report.measures.values()) == pytest.approx([0.784, 0.639], abs=0.0011)


def test_the_depth_follows_from_the_measures():
    table = Table({})
    for names in (["R@10"], ["R@200", "AP"], ["RR"]):
        evaluate_retriever(table, [q("a", "x")], names)
    assert table.depths == [10, 200, 100]


def test_unknown_measures_are_listed_together_and_questions_need_gold_documents():
    assert parse_measures(["R@10", " AP", "nDCG@10", "Rprec", "R@10"]) == ("R@10", "AP", "nDCG@10", "Rprec")
    wrong = ["nope", "AP@0", "AP@x", "", f"R@{'9' * 5000}", "R@\u00b2", "R@-1", "R@1.5", "R@", "R", "Rprec@5"]
    with pytest.raises(ConfigError) as caught:
        parse_measures(wrong)
    assert [repr(name) in problem for name, problem in zip(wrong, caught.value.problems, strict=True)] == [True] * 11
    with pytest.raises(DataError, match=r"1 of 2 questions .* for example '2'"):
        evaluate_retriever(Table({}), [q("1", "b"), q("2")], ["RR"])


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    path = tmp_path_factory.mktemp("eval-retriever") / "bm25"
    BM25.build(Corpus(Document(f"d {i}", f"Title {i}", f"word{i} common") for i in range(20)), path)
    return path


@pytest.fixture
def ask(tmp_path):
    def run(place, questions, *args):
        rows = [{"id": f"q {i}", "question": text, "relevant_doc_ids": ids} for i, (text, *ids) in enumerate(questions)]
        path = tmp_path / "q.jsonl"
        return leret("search", place, "--questions", json_lines(path, rows), *args)

    return run


def printed(out):
    return next(json.loads(line) for line in out.splitlines() if line.startswith("{"))


def test_the_command_prints_one_json_object_and_writes_trec_files(index, ask, tmp_path):
    questions = [("word3", "d 3"), ("word5 word7", "d 5", "d 8")]
    code, out = ask(index, questions, "--measures", "R@10,AP", "--json", "--out", tmp_path / "out")
    measures = {"R@10": 0.75, "AP": pytest.approx(0.75, abs=0.26)}
    assert (code, printed(out)) == (0, {"n_questions": 2, "measures": measures})
    lines = {name: (tmp_path / "out" / name).read_text().splitlines() for name in ("run.trec", "qrels.trec")}
    assert {unquote(line.split()[0]) for line in lines["run.trec"]} == {"q 0", "q 1"}
    assert lines["qrels.trec"] == ["q%200 0 d%203 1", "q%201 0 d%205 1", "q%201 0 d%208 1"]
    assert set(json.loads((tmp_path / "out" / "summary.json").read_text())["intervals"]) == {"R@10", "AP"}
    code, out = ask(index, questions, "--set", "data.limit=1", "--json")
    assert (code, printed(out)["n_questions"]) == (0, 1)


def test_questions_of_another_corpus_are_warned_of_behind_a_server(ask):
    with running(Echo()) as server:
        for gold, warned in (("word#1", False), ("gone", True)):
            code, out = ask(server.url, [("word", gold)], "--json")
            assert (code, printed(out)["n_questions"]) == (0, 1)
            assert ("warning: no ranking has a relevant document" in out) is warned


def test_the_command_refuses_bad_input(index, ask):
    for place, questions, args, says in (
        ("", [("word3",)], (), "q.jsonl: 1 bad record"),
        ("none", [("word3", "d 3")], ("--measures", "nope"), "'nope'"),  # before anything is opened
        ("none", [("word3", "d 3")], (), "index"),
    ):
        code, output = ask(index / place, questions, *args)
        assert (code, says in output) == (2, True)


def test_measures_and_trec_files_count_parents_in_place_of_chunks(tmp_path):
    question = replace(q("1", "a", "b"), parents={"x#0": "x", "x#1": "x", "a#0": "a", "a#3": "a"})
    table = Table({"text 1": ["x#1", "x#0", "a#3", "a#0"]})
    report = evaluate_retriever(table, [question], ["R@2", "RR", "AP"])
    assert report.measures == pytest.approx({"R@2": 1 / 2, "RR": 1 / 2, "AP": (1 / 2) / 2})
    report.save(tmp_path)
    assert [line.split()[2] for line in (tmp_path / "run.trec").read_text().splitlines()] == ["x", "a"]
