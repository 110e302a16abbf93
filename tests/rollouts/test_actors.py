from leret.rollouts.actors import Role
from leret.sampling.store.store import Store
from tests.rollouts.test_credit import Recorded, Retelling, groups_of, is_alpha, only, sample, samples_of


def test_each_policy_answers_its_own_predictors_once(tmp_path):
    writer, reader = Recorded("writer"), Recorded("reader")
    frozen = Role(reader, sampled=False, temperature=0.0, max_tokens=30)
    roles = {"plan": frozen, "write": Role(writer), "answer": frozen}
    stats = sample(tmp_path / "db", roles)
    assert (set(writer.asked), set(reader.asked)) == ({"write"}, {"plan", "answer"})
    assert {(request.temperature, request.max_tokens) for request in reader.requests} == {(0.0, 30)}
    for group in groups_of(tmp_path / "db"):
        assert group.policy_digest == stats.policy_digest not in {writer.digest, reader.digest}
        sizes = {"plan": ["0"], "write": ["0", "0", "1", "1"], "answer": ["0"]}
        assert [sample.prompt for sample in group.samples] == sizes[group.state.predictor]
    again = [Recorded("writer"), Recorded("reader")]
    sample(tmp_path / "db", {name: Role(again[role.policy is reader], role.sampled, "auto", role.temperature,
                                        role.max_tokens) for name, role in roles.items()})  # fmt: skip
    assert not again[0].requests
    assert not again[1].requests


def test_nothing_is_learnt_from_a_predictor_that_is_not_sampled(tmp_path):
    policy = Recorded()
    sample(tmp_path / "db", only(policy, "write"))
    assert {(s.reward, *s.components) for s in samples_of(tmp_path / "db", "answer")} == {(0.0, "sampled")}
    with Store(tmp_path / "db", read_only=True) as store:
        groups = list(store.finished(next(store.groups()).policy_digest))
        assert {group.state.predictor for group in groups} == {"write"}


def test_what_forward_makes_itself_is_completed_and_not_sampled(tmp_path):
    policy = Recorded()
    sample(tmp_path / "db", Role(policy, credit="final"), Retelling(), final=is_alpha)
    sizes = {group.state.predictor: len(group.samples) for group in groups_of(tmp_path / "db")}
    assert sizes == {"write": 4, "(StringSignature)": 1, "answer": 4}
