from leret.rollouts.actors import Role
from tests.rollouts.test_credit import Recorded, groups_of, sample


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
