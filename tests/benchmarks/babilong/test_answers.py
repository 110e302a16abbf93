import asyncio
import json

import pytest

from benchmarks.babilong.__main__ import main
from benchmarks.babilong.answers import answer, read_log
from benchmarks.babilong.reader import ReaderLM
from leret.core.errors import PolicyError
from leret.core.progress import Progress
from leret.policies.base import Completion
from tests.tiny import tiny_policy

LINE = {"id": "a", "question": "Where is the milk?", "answer": "home", "support": ["0"], "texts": ["Mary went home."],
        "picked": ["0"], "q_values": [1.0], "return": 1.0, "f1": 1.0, "em": 1.0, "gold_within": 1.0}  # fmt: skip
LINES = [LINE, {**LINE, "id": "b", "question": "Where is John?", "answers": ["garden", "park"], "em": 0.0, "f1": 0.5}]


class Knows:
    name = digest = "knows"

    def __init__(self, fails_on="nothing"):
        self.n, self.fails_on = 0, fails_on

    async def complete(self, request):
        self.n += 1
        asked = request.messages[0]["content"]
        if self.fails_on in asked:
            raise PolicyError("down")
        return [Completion("the park" if "John" in asked else "Home.", "stop", 1, 1)]


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "ns50" / "base" / "eval_seed0_ns50.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def run(path, policy):
    return asyncio.run(answer(path, ReaderLM(policy), Progress()))


def test_answers_are_written_beside_the_log_and_scored_by_the_best_reference(log):
    found = run(log, Knows())
    assert (found["n"], found["answer_em"], found["answer_f1"], found["em"], found["f1"]) == (2, 1.0, 1.0, 0.5, 0.75)
    assert found["em_ci"][0] <= 0.5 <= found["em_ci"][1]
    written = read_log(log.with_name("eval_seed0_ns50.answers.jsonl"))
    assert [line["prediction"] for line in written] == ["Home.", "the park"]
    assert all(line.items() >= own.items() for line, own in zip(written, LINES, strict=True))


def test_answers_are_reused_after_an_outage(log):
    for _ in range(2):  # the second run keeps the answers of the first, too
        with pytest.raises(PolicyError):
            run(log, Knows(fails_on="John"))
    for n_asked in (1, 0):
        policy = Knows()
        assert (run(log, policy)["answer_em"], policy.n) == (1.0, n_asked)


def test_the_command_answers_with_a_model_of_this_process(log, tmp_path, capsys):
    main(["answer", str(tmp_path / "ns50"), "--policy", str(tiny_policy(tmp_path / "reader")), "--max-tokens", "4"])
    [result] = json.loads(capsys.readouterr().out.splitlines()[-1])["logs"]
    assert (result["n"], result["log"]) == (2, str(log))
