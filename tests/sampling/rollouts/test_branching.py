"""The samples of a state: which there are, and which are asked for again."""

from leret.sampling.store.store import Store
from tests.sampling.fakes import FakePolicy, FakeRetriever
from tests.sampling.rollouts.test_scheduler import content, sample


def test_every_state_gets_every_prompt_and_sample(tmp_path, replay, formatter):
    tally = sample(tmp_path / "db", replay, formatter)
    groups, _ = content(tmp_path / "db")
    assert tally.questions == 12
    assert sum(len(g.samples) for g in groups) == tally.samples
    for group in groups:
        assert [(s.prompt, s.index) for s in group.samples] == [("0", 0), ("0", 1), ("1", 0), ("1", 1)]
        assert len({s.seed for s in group.samples}) == 4
        assert all(s.reward == s.components["ap"] for s in group.samples)
        assert group.state.messages[-1]["content"].startswith("question: what follows")
        assert len(group.state.messages) == 1, "the zero-shot prompt"


def test_a_later_state_names_the_sample_that_led_to_it(tmp_path, replay, formatter):
    sample(tmp_path / "db", replay, formatter)
    groups, visits = content(tmp_path / "db")
    by_id = {s.id: s for g in groups for s in g.samples}
    second = [g for g in groups if g.state.step == 1]
    assert second
    for group in second:
        parent = by_id[group.state.parent]
        assert parent.question_id == group.state.question_id
        assert parent.step == 0
    for path in visits:
        assert [v.outcome for v in path[:-1]] == ["next"] * (len(path) - 1)
        assert path[-1].outcome in {"finished", "solved"}


def test_a_retriever_that_was_away_costs_no_completion_again(tmp_path, replay, formatter):
    sample(tmp_path / "whole", replay, formatter)
    broken = FakeRetriever(broken=["alpha"])  # one query takes its whole batch with it
    tally = sample(tmp_path / "db", replay, formatter, retriever=broken, concurrency=1)
    assert tally.failures["retrieval"] > 0
    policy = FakePolicy()
    with Store(tmp_path / "db") as store:
        had = {s.id for g in store.groups() for s in g.samples if s.completion is not None}
    sample(tmp_path / "db", replay, formatter, policy)
    assert content(tmp_path / "db") == content(tmp_path / "whole")
    asked_again = {seed for request in policy.requests for seed in request.seeds}
    groups, _ = content(tmp_path / "db")
    assert not asked_again & {s.seed for g in groups for s in g.samples if s.id in had}


def test_a_completion_that_does_not_parse_is_final(tmp_path, replay, formatter):
    sample(tmp_path / "db", replay, formatter, FakePolicy(junk=0.3))
    groups, _ = content(tmp_path / "db")
    broken = [s for g in groups for s in g.samples if s.failure]
    assert broken
    assert {s.failure.kind for s in broken} == {"parse"}
    again = FakePolicy()
    sample(tmp_path / "db", replay, formatter, again)
    assert not again.requests
