import json
import sqlite3
import struct
from contextlib import closing

import pytest

from leret.core.runs import Run
from leret.sampling.replay import replay
from leret.sampling.stage import sample
from leret.sampling.store.store import Store
from tests.first_steps import leret, refused, succeeds
from tests.sampling.conftest import sampled_by
from tests.sampling.fakes import (
    FakePolicy,
    FakeRetriever,
    change,
    content,
    policy_is,
    served,
)

CHOSEN = "id IN (SELECT chosen FROM visits WHERE chosen IS NOT NULL)"
"""Samples that the next states follow from."""


@pytest.fixture
def run(sampled_copy):
    with policy_is(FakePolicy(junk=0.1)):
        yield sampled_copy


@pytest.fixture
def new(tmp_path, in_data):
    return Run.create(tmp_path / "run")


def scored(run, where="true"):
    """Return the samples with a reward that no later state depends on, the last one first."""
    sql = f"SELECT * FROM samples WHERE reward IS NOT NULL AND NOT {CHOSEN} AND {where} ORDER BY id DESC"
    with closing(sqlite3.connect(run.store)) as database:
        database.row_factory = sqlite3.Row
        return database.execute(sql).fetchall()


def differences(report):
    return {found.sample: (found.part, found.detail) for found in report.differences}


def as_json(*words):
    out = leret("replay", *words, "--json")[1]
    [line] = [line for line in out.splitlines() if line.startswith("{")]
    return json.loads(line)


def counts(report):
    return report.samples, report.equal, report.rounded, len(report.differences)


def test_a_run_equals_its_store_and_stays_as_it_is(run):
    def files():
        return {path: path.read_bytes() for path in run.path.iterdir() if path.is_file()}

    before = files()
    report = replay(run)
    n = sum(len(group.samples) for group in content(run))
    assert counts(report) == (n, n, 0, 0)
    assert (report.completions, report.notes, report.largest) == (n, [], None)
    assert files() == before
    with Store(run.store):  # in use
        assert replay(run, n_random=3).equal == 3


def test_each_difference_is_found_with_its_id_and_first_part(run):
    rows = scored(run, "json_array_length(doc_ids) > 1")
    reward = rows[0]["reward"]
    cases = [
        ("reward = 1 - reward", "reward", f"reward: {1 - reward:.6g} in the store, {reward:.6g} now"),
        ("components = json_replace(components, '$.recall', 7)", "reward", "recall: 7 in the store"),
        ("completion = completion || ' new'", "completion", ": ' new' in the store, '' now"),
        ("doc_ids = json_replace(doc_ids, '$[1]', 'none')", "search", "rank 2: ('none',) in the store"),
        ("scores = json_replace(scores, '$[0]', 9.5)", "search", "9.5 in the store"),
        ('outputs = \'{"query": "x"}\'', "search", "character of the outputs 11: 'x"),
    ]
    for row, (sql, _, _) in zip(rows, cases, strict=False):
        change(run, f"UPDATE samples SET {sql} WHERE id = ?", row["id"])
    code, out = leret("replay", run.path)
    assert code == 1
    found = differences(replay(run))
    assert len(found) == len(cases)
    for row, (_, part, detail) in zip(rows, cases, strict=False):
        assert (found[row["id"]][0], detail in found[row["id"]][1]) == (part, True)
        assert f"{row['id']} (question {row['question_id']}, step {row['step']}): {found[row['id']][1]}" in out
    answer = as_json(run.path)
    assert answer["different"] == {"reward": 2, "completion": 1, "search": 3}
    assert answer["equal"] == answer["samples"] - 6


def test_a_state_that_does_not_follow_from_its_stored_sample_is_found(run):
    with Store(run.store, read_only=True) as store:
        second = next(group for group in store.groups() if group.state.step == 1)
    parent = second.state.parent
    change(run, "UPDATE samples SET completion = 'omega' WHERE id = ?", parent)
    found = differences(replay(run))
    assert found[parent][0] == "completion"
    assert set(found) == {parent, *(row.id for row in second.samples)}
    assert f"the prompt differs (it follows from sample {parent}) at character" in found[second.samples[0].id][1]


def test_samples_are_chosen_by_id_and_at_random(run):
    ids = [row.id for group in content(run) for row in group.samples]
    policy = FakePolicy(junk=0.1)
    with policy_is(policy):
        assert counts(replay(run, ids[5])) == (1, 1, 0, 0)
    assert sum(len(request.seeds) for request in policy.requests) == 1
    assert as_json(run.path, "--random", 7)["samples"] == 7
    assert replay(run, n_random=10**6).samples == len(ids)
    assert "--sample nothing: no sample has this id" in refused("replay", run.path, "--sample", "nothing")


def test_hints_and_mixed_and_final_rewards_are_made_again(new):
    policy = FakePolicy()
    reward = {"parts": {"recall@1": 1.0, "rr": 0.5, "steps": 0.1}, "mixer": "normalize_then_sum"}
    credit = {"credit": "both", "final": "recall", "n_continuations": 2}
    sampled_by(policy, new.path, 5, prompts=2, samples=3, hint="gold", reward=reward, **credit)
    assert any("still missing" in json.dumps(request.messages) for request in policy.requests)
    with policy_is(FakePolicy()):
        report = replay(new)
        assert (report.equal, report.notes) == (report.samples, [])
        row = scored(new)[0]
        change(new, "UPDATE samples SET reward = reward + 0.25 WHERE id = ?", row["id"])
        assert differences(replay(new, row["id"]))[row["id"]][0] == "reward"


def test_completions_of_a_server_are_not_requested_but_searched_and_scored_again(new, server):
    sample(served(server, data={"limit": 6}), new)
    n_asked, row = server.n_asked, scored(new, "json_array_length(doc_ids) > 1")[0]
    report = replay(new)
    assert (report.equal, report.completions) == (report.samples, 0)
    assert report.notes == [
        "completions were not computed again and not compared: seeded is on a server (policy.kind: openai)"
    ]
    change(new, "UPDATE samples SET reward = reward + 0.5 WHERE id = ?", row["id"])
    assert differences(replay(new))[row["id"]][0] == "reward"
    assert server.n_asked == n_asked


def test_a_changed_model_or_question_is_named_and_only_compared_where_it_can_be(run):
    other = FakePolicy()
    other.digest = "another"
    with policy_is(other):
        report = replay(run)
    assert (report.equal, other.requests) == (report.samples, [])
    assert "fake has changed since sampling" in report.notes[0]

    file = run.path.parent / "questions.jsonl"
    file.write_text(file.read_text().replace("what follows alpha number 0", "who follows alpha number 0"))
    report = replay(run)
    assert report.notes == ["questions: its content has changed since sampling"]
    assert {found.question for found in report.differences} == {"q00"}
    assert "'o follows alpha number 0" in report.differences[0].detail
    file.write_text("".join(line for line in file.read_text().splitlines(True) if '"q00"' not in line))
    assert replay(run).different == {"question": len(report.differences)}


def test_a_broken_retriever_is_an_outage_and_not_a_wrong_search(run, monkeypatch):
    monkeypatch.setattr("leret.rollouts.environment.load_retriever", lambda *_: FakeRetriever(broken=["alpha"]))
    report = replay(run)
    assert report.different["outage"] > 0
    assert any("retrieval: the index is away" in found.detail for found in report.differences)


def test_tokens_and_log_probabilities_of_a_real_model_are_compared(tmp_path):
    small = ["data.limit=3", "sampling.prompts=1", "sampling.samples=4", "sampling.token_ids=true"]
    run = Run(tmp_path / "run")
    succeeds("sample", "demo", "--run", run.path, *(word for setting in small for word in ("--set", setting)))
    report = as_json(run.path)
    assert report["equal"] + report["rounded"] == report["samples"] == report["completions"]
    assert report["largest"] < 1e-4
    row = scored(run)[0]
    logprobs = list(struct.unpack(f"<{len(row['logprobs']) // 4}f", row["logprobs"]))
    logprobs[1] -= 0.5
    stored = struct.pack(f"<{len(logprobs)}f", *logprobs)
    change(run, "UPDATE samples SET logprobs = ? WHERE id = ?", stored, row["id"])
    assert "log-probability of token 2: " in differences(replay(run, row["id"]))[row["id"]][1]
    ids = struct.pack("<i", 7) + row["token_ids"][4:]
    change(run, "UPDATE samples SET token_ids = ? WHERE id = ?", ids, row["id"])
    assert "token 1: (7,) in the store" in differences(replay(run, row["id"]))[row["id"]][1]


def test_samples_of_an_abandoned_path_are_left_out(run):
    with closing(sqlite3.connect(run.store)) as database:
        database.row_factory = sqlite3.Row
        sample = dict(database.execute("SELECT * FROM samples WHERE step = 1").fetchone())
        state = dict(database.execute("SELECT * FROM states WHERE id = ?", [sample["state_id"]]).fetchone())
        for table, row in (("states", state | {"id": "zz"}), ("samples", sample | {"id": "zz", "state_id": "zz"})):
            database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", list(row.values()))
        database.commit()
    report = replay(run)
    assert (report.differences, report.equal) == ([], sum(len(group.samples) for group in content(run)) - 1)
    assert any("abandoned" in note for note in report.notes)
    assert replay(run, "zz").samples == 0
