"""``leret eval-retriever``: by hand, against our reward functions, and from the command line."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

import ir_measures
import pytest
from typer.testing import CliRunner

from leret.cli.app import app
from leret.core.errors import ConfigError, DataError
from leret.core.types import Document, Outcome, Passage, Ranking, Task
from leret.datasets.corpus import Corpus
from leret.evaluation import retriever as ir
from leret.evaluation.retriever import evaluate_retriever, read_rewrites
from leret.retrieval.engines.bm25 import BM25
from leret.rewards import reward
from tests.retrieval.serving import Echo, running

NAMES = ["R@1", "R@10", "R@100", "AP", "AP@10", "RR", "RR@10", "nDCG", "nDCG@10", "Success@1", "Success@5"]


class Table:
    """Finds what a table says."""

    digest = "table"

    def __init__(self, found: dict[str, Sequence[str]], score: float | None = None) -> None:
        self.found, self.score, self.asked = found, score, []  # type: ignore[var-annotated]

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        self.asked.append((len(queries), k))
        return [
            tuple(
                Passage(doc_id, "", "", 1.0 / rank if self.score is None else self.score)
                for rank, doc_id in enumerate(self.found.get(query, ())[:k], 1)
            )
            for query in queries
        ]


def q(question_id: str, *gold: str) -> Task:
    return Task.question(question_id, f"text {question_id}", gold=gold)


def test_by_hand() -> None:
    table = Table({"text 1": ["x", "a", "b"], "text 2": ["c"]})
    report = evaluate_retriever(
        table, [q("1", "a", "b"), q("2", "c", "d"), q("3", "e")], ["R@2", "AP", "RR", "Success@1"]
    )
    # question 1: R@2 1/2, AP (1/2 + 2/3)/2 = 7/12, RR 1/2; 2: R@2 1/2, AP 1/2, RR 1; 3 found nothing: 0
    assert report.measures == pytest.approx({"R@2": 1 / 3, "AP": (7 / 12 + 1 / 2) / 3, "RR": 1 / 2, "Success@1": 1 / 3})
    assert report.brief() == {"n_questions": 3, "measures": report.measures}
    assert report.n_empty == 1
    assert report.depth == 100
    for name, (low, high) in report.intervals.items():
        assert low <= report.measures[name] <= high


def difference(questions: Sequence[Task], rankings: Sequence[Ranking]) -> float:
    """The largest difference between ir_measures and our reward functions, over questions and measures."""
    values = ir.values(ir.parse_measures(NAMES), questions, rankings)
    worst = 0.0
    for i, (question, ranking) in enumerate(zip(questions, rankings, strict=True)):
        for j, name in enumerate(NAMES):
            base, at, cut = name.partition("@")
            ours = reward(f"{ir._OURS[base]}{at}{cut}")(Outcome(question, ranking=ranking)) or 0.0
            worst = max(worst, abs(ours - values[i, j]))
    return worst


@pytest.mark.parametrize("score", [None, 1.0, -3.0, 1e30])
def test_random_rankings_give_what_our_rewards_give_ties_and_odd_ids_included(score: float | None) -> None:
    rng = random.Random(0)
    ids = [f"d{i}" for i in range(150)] + ["a b", "é%20", "100%", "\u3000x", "-1"]
    questions = [q(f"q {i}", *rng.sample(ids, rng.randint(1, 12))) for i in range(60)]
    table = Table({question.text: rng.sample(ids, rng.randint(0, 120)) for question in questions}, score)
    rankings = table.search([question.text for question in questions], 200)
    assert difference(questions, rankings) < 1e-12


@pytest.mark.parametrize("name", ["scifact", "nfcorpus", "hotpotqa"])
def test_bm25s_run_file_on_real_data_gives_what_our_rewards_give(shared_data: Path, tmp_path: Path, name: str) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    from bm25_figures import SETS, read

    data = read(shared_data, name)
    questions = [question for question in data.tasks if question.gold]
    report = evaluate_retriever(
        BM25.build(data.corpus, fold_accents=False), questions, [*NAMES, "AP@100"], resamples=10
    )
    assert difference(questions, report.rankings) < 1e-12
    report.save(tmp_path)
    run, qrels = tmp_path / "run.trec", tmp_path / "qrels.trec"
    again = ir_measures.calc_aggregate(
        [ir_measures.parse_measure(n) for n in NAMES],
        ir_measures.read_trec_qrels(str(qrels)),
        ir_measures.read_trec_run(str(run)),
    )
    assert {str(m): v for m, v in again.items()} == pytest.approx({n: report.measures[n] for n in NAMES}, abs=1e-12)
    if name == "nfcorpus":
        assert max(grade for q in questions for grade in q.grades.values()) == 2
    else:  # its figure counts documents of score 0 (benchmarks/bm25_figures.py)
        assert (report.measures["R@10"], report.measures["AP@100"]) == pytest.approx(SETS[name][3:], abs=0.0011)


def test_trec_files_hold_whatever_ids_the_corpus_may(tmp_path: Path) -> None:
    ids = ["half\ud800", "nul\x00a", "nul\x00b", "a b\tc", "%20", "line\u2028", "\u0085"]
    table = Table({f"text {doc_id}": ids for doc_id in ids})
    report = evaluate_retriever(table, [q(doc_id, doc_id) for doc_id in ids], ["RR", "R@3"])
    report.save(tmp_path)
    again = ir_measures.iter_calc(
        [ir_measures.RR],
        ir_measures.read_trec_qrels(str(tmp_path / "qrels.trec")),
        ir_measures.read_trec_run(str(tmp_path / "run.trec")),
    )
    assert {unquote(m.query_id, errors="surrogatepass"): m.value for m in again} == {
        doc_id: 1 / i for i, doc_id in enumerate(ids, 1)
    }
    rows = [json.loads(line) for line in (tmp_path / "per_question.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ids


def test_a_question_without_gold_is_an_error_of_the_data() -> None:
    with pytest.raises(DataError, match="1 of 2 questions name no relevant document, 'b' first"):
        evaluate_retriever(Table({}), [q("a", "x"), q("b")], ["AP"])
    with pytest.raises(DataError, match="no question"):
        evaluate_retriever(Table({}), [], ["AP"])


def test_the_depth_is_what_the_measures_need() -> None:
    for names, depth, want in (
        (["R@10"], None, 10),
        (["R@10", "AP"], None, 100),
        (["R@200", "AP"], None, 200),
        (["RR"], None, 100),
        (["RR"], 7, 7),
        (["R@7", "AP"], 7, 7),
    ):
        table = Table({})
        evaluate_retriever(table, [q("a", "x")], names, depth=depth)
        assert table.asked == [(1, want)]
    table = Table({})
    with pytest.raises(ConfigError, match="5 documents are too few for R@10, P@6;"):
        evaluate_retriever(table, [q("a", "x")], ["R@10", "AP", "R@5", "P@6"], depth=5)
    assert table.asked == []


def test_names_of_ir_measures_and_of_our_rewards_are_understood_and_others_are_listed() -> None:
    assert list(ir.parse_measures(["recall@10", "ap", "nDCG@10", "RR"])) == ["R@10", "AP", "nDCG@10", "RR"]
    assert list(ir.parse_measures(["R@010", "P@\u0661", "AP@2147483647"])) == ["R@10", "P@1", "AP@2147483647"]
    wrong = ["nope", "AP@0", "AP@x", "", "R@2147483648", f"R@{'9' * 5000}", "R@\u00b2", "R@-1", "R@1.5", "R@"]
    with pytest.raises(ConfigError, match="cut-offs from 1 to 2147483647") as caught:
        ir.parse_measures(wrong)
    assert len(caught.value.problems) == len(wrong)
    assert evaluate_retriever(Table({"text a": ["x"]}), [q("a", "x")], ["R@2147483647"]).measures == {"R@2147483647": 1}


def test_rewrites_are_searched_for_and_fused() -> None:
    table = Table({"text 1": ["a", "x"], "new 1": ["b", "a"]})
    questions = [q("1", "b")]
    alone = evaluate_retriever(table, questions, ["RR"], rewrites={"1": "new 1"})
    assert (alone.system, alone.measures) == ("rewritten", {"RR": 1.0})
    both = evaluate_retriever(table, questions, ["RR"], rewrites={"1": "new 1"}, fuse=True)
    assert [p.doc_id for p in both.rankings[0]] == ["a", "b", "x"]  # 1/61 + 1/62, 1/61, 1/62
    assert (both.system, both.measures) == ("fused", {"RR": 0.5})
    with pytest.raises(DataError, match="no rewritten query, '1' first"):
        evaluate_retriever(table, questions, ["RR"], rewrites={})


def test_a_fused_measure_is_the_same_whatever_others_are_named() -> None:
    table = Table({"text 1": ["a", "x", "b"], "new 1": ["y", "z", "b"]})
    for names in (["Success@1"], ["Success@1", "AP"], ["Success@1", "R@200"]):
        report = evaluate_retriever(table, [q("1", "b")], names, rewrites={"1": "new 1"}, fuse=True)
        assert report.measures["Success@1"] == 1.0  # b has 2/63, a and y 1/61; neither list has b first
        assert len(report.rankings[0]) == min(report.depth, 5)
    assert {k for _, k in table.asked} == {100, 200}


@pytest.mark.parametrize("text", ["{", '{"id": "a"}', '{"id": 1, "query": "x"}', "[]", '{"id":"a","query":"x"}\n' * 2])
def test_bad_rewrites_are_told_with_their_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rewrites.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=r"rewrites.jsonl:[12]"):
        read_rewrites(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_rewrites(tmp_path / "none")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus = Corpus(
        Document(f"d {i}", f"Title {i}", f"word{i} common {'even' if i % 2 == 0 else 'odd'}") for i in range(20)
    )
    path = tmp_path_factory.mktemp("eval-retriever") / "bm25"
    BM25.build(corpus, path)
    return path


def write_questions(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def leret(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.stdout, result.output


def test_the_command_prints_one_json_object_and_writes_trec_files(index: Path, tmp_path: Path) -> None:
    questions = write_questions(
        tmp_path / "q.jsonl",
        {"id": "a", "question": "word3", "relevant_doc_ids": ["d 3"]},
        {"id": "b c", "question": "word5 word7", "relevant_doc_ids": ["d 5", "d 8"]},
    )
    code, out, _ = leret("eval-retriever", index, "--questions", questions, "--measures", "R@10,AP", "--json",
                         "--out", tmp_path / "out")  # fmt: skip
    assert code == 0
    assert json.loads(out) == {"n_questions": 2, "measures": {"R@10": 0.75, "AP": pytest.approx(0.75, abs=0.26)}}
    lines = (tmp_path / "out" / "run.trec").read_text().splitlines()
    assert {unquote(line.split()[0]) for line in lines} == {"a", "b c"}
    assert (tmp_path / "out" / "qrels.trec").read_text().splitlines()[0] == "a 0 d%203 1"
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["n_questions"] == 2
    assert set(summary["intervals"]) == {"R@10", "AP"}
    assert len((tmp_path / "out" / "per_question.jsonl").read_text().splitlines()) == 2
    code, out, _ = leret("eval-retriever", index, "--questions", questions, "--rm3", "--original-weight", "1")
    assert (code, "R@10" in out) == (0, True)


def test_questions_of_another_corpus_are_warned_of_behind_a_server(tmp_path: Path) -> None:
    here, elsewhere = (
        write_questions(tmp_path / f"{gold}.jsonl", {"id": "a", "question": "word", "relevant_doc_ids": [gold]})
        for gold in ("word#1", "gone")
    )
    with running(Echo()) as server:
        for questions, warned in ((here, False), (elsewhere, True)):
            code, out, everything = leret("eval-retriever", server.url, "--questions", questions, "--json")
            assert (code, json.loads(out)["n_questions"]) == (0, 1)
            assert ("warning: no relevant document was found" in everything) is warned


def test_what_the_command_refuses(index: Path, tmp_path: Path) -> None:
    good = write_questions(tmp_path / "q.jsonl", {"id": "a", "question": "word3", "relevant_doc_ids": ["d 3"]})
    bare = write_questions(tmp_path / "bare.jsonl", {"id": "a", "question": "word3", "relevant_doc_ids": []})
    other = write_questions(tmp_path / "other.jsonl", {"id": "a", "question": "word3", "relevant_doc_ids": ["gone"]})
    for args, says in (
        ((index, "--questions", bare), "bare.jsonl: 1 bad record"),
        ((index, "--questions", other), "'gone'"),
        ((index, "--questions", good, "--measures", "nope"), "'nope' is none"),
        ((index, "--questions", good, "--fuse"), "--rewrites"),
        ((tmp_path / "none", "--questions", good, "--depth", 5), "too few for R@10"),
        ((tmp_path / "none", "--questions", good), "is no index"),
    ):
        code, _, output = leret("eval-retriever", *args)
        assert code == 2, output
        assert says in output
        assert "Traceback" not in output
