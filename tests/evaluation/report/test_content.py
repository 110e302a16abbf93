import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from leret.core.errors import RunError
from leret.core.runs import Run
from leret.core.types import Document, Failure, Sample, State, Task
from leret.datasets.corpus import Corpus
from leret.evaluation.report.content import SampledRound, TrainingData, curves_of, examples, training_data
from leret.evaluation.results import ScoredHop
from leret.sampling.store.store import SamplingParams, Store

CORPUS = {"a": Document("a", "Ann", ""), "b": Document("b", "", "")}
QUESTIONS = [Task.question(f"q{i}", f"text {i}", gold=("a", "b")) for i in range(4)]


def shown(ours, theirs, n=10, docs=("a",), failed=()):
    rows = {"ipo": [], "base": []}
    for name, values, found in (("ipo", ours, docs), ("base", theirs, ())):
        for i, value in enumerate(values):
            hops = [("first", (), {"ap": 0.0}), ("second", found, {"ap": value})]
            rows[name] += [ScoredHop(f"q{i}", None, 0, n, q, q, ids, (), ap) for n, (q, ids, ap) in enumerate(hops, 1)]
    rows["ipo"] += [ScoredHop(f"q{i}", None, 0, 3, None, None, (), (), {}, failure="down") for i in failed]
    return examples(*rows.items(), QUESTIONS[::-1], CORPUS, n)


@pytest.mark.parametrize(
    ("ours", "theirs", "more", "improved", "worsened"),
    [
        ([1.0, 0.5, 0.0, 0.2], [0.0, 0.0, 0.5, 0.2], {}, [("q0", 1.0), ("q1", 0.5)], [("q2", -0.5)]),  # not equal ones
        ([1.0] * 4, [0.0] * 4, {"n": 2}, [("q0", 1.0), ("q1", 1.0)], []),  # then by id
        ([1.0, 1.0], [0.0, 0.0], {"failed": (0,)}, [("q1", 1.0)], []),  # what failed is not compared
    ],
)
def test_the_widest_differences_come_first(ours, theirs, more, improved, worsened):
    found = shown(ours, theirs, **more)
    assert [(e["question_id"], e["difference"]) for e in found["improved"]] == improved
    assert [(e["question_id"], e["difference"]) for e in found["worsened"]] == worsened


def test_a_hop_shows_what_it_added_and_marks_the_gold():
    (example,) = shown([1.0], [0.0], docs=("x", "b"))["improved"]
    added = [{"title": "x", "gold": False}, {"title": "b", "gold": True}]
    assert [(hop["query"], hop["found"]) for hop in example["policy"]] == [("first", []), ("second", added)]
    assert (example["gold"], example["rival"][1]["found"]) == (["Ann", "b"], [])


def test_an_online_training_has_curves_of_reward_kl_and_entropy():
    log = [{"step": i, "reward": i / 9, "kl": i / 100, "entropy": 2.0 - i, "loss": 0.1} for i in (1, 2, 3)]
    ppo = [{"step": i, "objective/scores": 0.1, "objective/kl": 0.2, "policy/entropy": 0.3} for i in (1, 2)]
    (_, grpo), (_, of_ppo) = curves_of({"grpo": {"log_history": log}, "ppo": {"log_history": ppo}})
    titles = ["mean reward", "KL to the initial policy, nats", "entropy, nats per token"]
    assert [title for title, _ in grpo] == [*titles, "loss"]
    assert [title for title, _ in of_ppo] == titles
    assert grpo[1][1] == {"KL": [(1, 0.01), (2, 0.02), (3, 0.03)]}


def test_an_online_training_has_curves_of_parts_spread_unparsed_share_and_length():
    parts = {"rewards/rr/mean": 0.5, "rewards/final.f1/mean": 0.1, "rewards/reward/mean": 0.6}  # TRL logs the last
    more = {"frac_reward_zero_std": 0.3, "completions/unparsed": 0.01, "completions/mean_length": 20.0}
    [(_, panels)] = curves_of({"grpo": {"log_history": [{"step": i, **parts, **more} for i in (1, 2)]}})
    shown = {title: list(lines) for title, lines in panels}
    assert shown == {
        "mean of each reward part": ["rr", "final.f1"],
        "share of groups without spread": ["share"],
        "share of unparsed completions": ["share"],
        "mean length of a completion, tokens": ["tokens"],
    }
    assert dict(panels)["mean of each reward part"]["final.f1"] == [(1, 0.1), (2, 0.1)]


def test_rewards_are_shown_at_five_points_of_the_training():
    def log(n):
        return [{"step": 5 * i, "reward_percentiles/0": 0.0, "reward_percentiles/100": i / n} for i in range(1, n + 1)]

    [(_, [(title, lines)])] = curves_of({"grpo": {"log_history": [{"step": 0, "eval_recall": 0.5}, *log(9)]}})
    assert title.startswith("reward by percentile")
    assert list(lines) == [f"step {step}" for step in (5, 15, 25, 35, 45)]
    assert lines["step 45"] == [(0.0, 0.0), (100.0, 1.0)]
    [(_, [(_, lines)])] = curves_of({"grpo": {"log_history": log(2)}})
    assert list(lines) == ["step 5", "step 10"]


def test_rewards_by_step_spread_failures_and_margins(tmp_path):
    run = Run.create(tmp_path / "run")
    assert training_data(run) == TrainingData()
    origin = SamplingParams("p", "digest", "prompt", 1.0, 1.0, 8)
    with Store(run.store) as store:
        for step, rewards in enumerate(([0.5, 1.0], [0.5, 0.5])):
            state = f"s{step}"
            store.put_state(State(state, "q", step, "write", {}, ()))
            samples = [Sample(f"{state}-{i}", state, "q", step, "0", i, i, "", reward=r) for i, r in enumerate(rewards)]
            store.put_samples(samples, origin)
        store.put_samples([Sample("bad", "s1", "q", 1, "0", 2, 2, "", failure=Failure("parse", "x"))], origin)
    run.preferences.mkdir()
    path = run.preferences / "train.parquet"
    pq.write_table(pa.table({"step": [0, 1], "score_chosen": [1.0, 0.5], "score_rejected": [0.5, 0.25]}), path)
    rewards, margins = {0: [0.5, 1.0], 1: [0.5, 0.5]}, {0: [0.5], 1: [0.25]}
    counts = {"n_states": 2, "n_spread": 1, "failures": {"parse": 1}, "n_samples": 5}
    assert training_data(run) == TrainingData(rewards, margins, **counts)
    run.update(rounds=[{"policy": "demo", "digest": "digest"}, {"policy": "ipo", "digest": "d2", "part": "1/2"}])
    of_round = SampledRound("demo", "all", n_states=2, n_samples=4, mean_reward=0.625, spread=0.5)
    assert training_data(run).rounds == (of_round, SampledRound("ipo", "1/2", 0, 0, 0.0, 0.0))
    path.write_bytes(b"no")
    with pytest.raises(RunError, match="leret rescore --run"):
        training_data(run)


def test_a_chunk_of_a_gold_parent_is_marked():
    corpus = Corpus([Document("a#0", "Ann", "", "a"), Document("a#1", "Ann", "", "a")])
    rows = [ScoredHop("q", None, 0, 1, "x", "x", ("a#1",), (1.0,), {"ap": value}) for value in (1.0, 0.0)]
    question = Task.question("q", "?", gold=("a",), parents=corpus.parents)
    [example] = examples(("ipo", rows[:1]), ("base", rows[1:]), [question], corpus, 1)["improved"]
    assert (example["gold"], example["policy"][0]["found"]) == (["Ann"], [{"title": "Ann", "gold": True}])


def test_an_example_shows_both_answers_and_unscored_questions_are_left_out():
    def answered(value, prediction, measures=None):
        return [ScoredHop("q", None, 0, 1, "x", "x", (), (), measures or {"f1": value}, prediction=prediction)]

    question = Task("q", {"question": "?"}, answers=("Rome",))
    ours, theirs = answered(1.0, '{"answer": "Rome"}'), answered(0.0, '{"reply": "r", "why": "w"}')
    [example] = examples(("ipo", ours), ("base", theirs), [question], {}, 1, "f1")["improved"]
    assert example["answers"] == {"policy": "Rome", "rival": "reply: r; why: w"}
    unscored = answered(0.0, None, {"em": 1.0})
    assert examples(("ipo", ours), ("base", unscored), [question], {}, 1, "f1")["improved"] == []
