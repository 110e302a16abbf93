"""The samples of a state: which there are, and which are asked for again."""

from tests.sampling.fakes import FakePolicy, FakeRetriever
from tests.sampling.rollouts.test_scheduler import content, sample


def test_every_state_gets_every_prompt_and_sample(tmp_path, replay, formatter):
    stats = sample(tmp_path / "db", replay, formatter)
    groups, visits = content(tmp_path / "db")
    assert (stats.questions, stats.samples) == (12, sum(len(group.samples) for group in groups))
    for group in groups:
        assert [(s.prompt, s.index) for s in group.samples] == [("0", 0), ("0", 1), ("1", 0), ("1", 1)]
        assert len({s.seed for s in group.samples}) == 4
        assert all(s.reward == s.components["ap"] for s in group.samples)
        [zero_shot] = group.state.messages
        assert zero_shot["content"].startswith("question: what follows")
    chosen = {visit.chosen for path in visits for visit in path if visit.outcome == "next"}
    assert {group.state.parent for group in groups if group.state.step == 1} == chosen
    assert {path[-1].outcome for path in visits} <= {"finished", "solved"}


def test_a_retriever_that_was_away_costs_no_completion_again(tmp_path, replay, formatter):
    sample(tmp_path / "whole", replay, formatter)
    broken = FakeRetriever(broken=["alpha"])  # one query takes its whole batch with it
    assert sample(tmp_path / "db", replay, formatter, retriever=broken, concurrency=1).failures["retrieval"] > 0
    had = {s.seed for group in content(tmp_path / "db")[0] for s in group.samples if s.completion is not None}
    policy = FakePolicy()
    sample(tmp_path / "db", replay, formatter, policy)
    assert content(tmp_path / "db") == content(tmp_path / "whole")
    assert not had & {seed for request in policy.requests for seed in request.seeds}


def test_a_completion_that_does_not_parse_is_final(tmp_path, replay, formatter):
    again = FakePolicy()
    for policy in (FakePolicy(junk=0.3), again):
        sample(tmp_path / "db", replay, formatter, policy)
    assert {s.failure.kind for group in content(tmp_path / "db")[0] for s in group.samples if s.failure} == {"parse"}
    assert not again.requests
