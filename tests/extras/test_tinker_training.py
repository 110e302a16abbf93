import json
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from leret.config.policy import LocalPolicySettings
from leret.core.errors import TrainingError
from leret.extras.tinker import TinkerPolicySettings
from leret.extras.tinker_training import TinkerGRPO, TinkerLearner, TinkerRLOO
from leret.policies.base import Request
from leret.rollouts.rounds import Sampled
from leret.training.algorithms import ALGORITHMS, TrainingRecipe
from leret.training.job import TrainingJob
from leret.training.model import InitialPolicy
from leret.training.rounds.writing import WriterLearner
from leret.training.stage import train
from tests.extras.tinker_server import BASE, KEY
from tests.training.rounds.conftest import run  # noqa: F401
from tests.training.training_runs import ONLINE, Stopper, changed, fail, log, record

pytest.importorskip("tinker", reason="tinker is not installed")

KEYS = {**ONLINE, "engine": "tinker", "lora": {"r": 4}, "max_steps": 2, "questions_per_round": 2, "save_steps": 1}
GRPO = TinkerGRPO(**KEYS)
UPDATES = {
    "token": (changed(GRPO, loss_type="token"), "importance_sampling"),
    "sequence": (changed(GRPO, loss_type="sequence"), "importance_sampling"),
    "dapo with a penalty": (changed(GRPO, beta=0.2), "importance_sampling"),
    "rloo": (TinkerRLOO(**KEYS), "importance_sampling"),
    "several": (changed(GRPO, num_mini_batches=2, num_iterations=2, epsilon=0.05), "ppo"),
}


def learner(kind, recipe, base, settings):
    environment = SimpleNamespace(recipe=SimpleNamespace(policy_of=lambda names: settings))
    initial = InitialPolicy("base", base if kind is WriterLearner else settings.model, "")
    job = TrainingJob(recipe, initial, [None] * 12, None, {}, environment=environment)
    return kind(ALGORITHMS[recipe.algorithm].objective, job, "cpu")


@pytest.mark.parametrize("name", UPDATES)
def test_a_round_is_learnt_as_in_lerets_own_loop(stub, base, name):
    recipe, loss = changed(UPDATES[name][0], learning_rate=1e-4), UPDATES[name][1]  # Adam enlarges rounding errors
    server = {"url": stub.url, "api_key_env": "TINKER_API_KEY"}
    settings = TinkerPolicySettings(model=BASE, tokenizer=str(base), **server)
    remote = learner(TinkerLearner, recipe, base, settings)
    remote.policy.renew("0")
    asked = [Request(({"role": "user", "content": text},), (1, 2, 3, 4), 1.0, 6) for text in ("the city", "a river ?")]
    answers = [
        (one, remote.policy.prompt_ids(asked[i].messages))
        for i, group in enumerate(remote.policy.complete_many(asked))
        for one in group
    ]
    sampled = Sampled(
        [(prompt, one.token_ids) for one, prompt in answers],
        torch.tensor([0] * 4 + [1] * 4),
        torch.tensor([0.0, 1, 0, 0.5, 1, 0, 0, 0.2]),
        torch.zeros(8, 0),
        {},
        logps=[one.logprobs for one, _ in answers],
    )
    keys = {**recipe.model_dump(), "engine": "leret", "lora": None}
    ours = learner(WriterLearner, TrainingRecipe.model_validate(keys), base, LocalPolicySettings())
    entries = [one.learn(sampled, 0) for one in (ours, remote)]
    assert {*stub.losses} == {loss}
    for key in ("loss", "val/ratio", "clip_ratio/region_mean", "kl", "reward", "frac_reward_zero_std"):
        assert entries[0].get(key) == pytest.approx(entries[1].get(key), abs=1e-5), key
    assert entries[0].get("loss/policy_avg") == pytest.approx(entries[1].get("loss/policy_avg"), abs=1e-5)
    [trained] = stub.runs.values()
    for (key, one), two in zip(ours.model.named_parameters(), trained.network.parameters(), strict=True):
        assert (one - two).abs().max() < 1e-5, key


def test_a_stopped_training_resumes_and_trains_the_sampled_tokens(tinker_run, stub):
    with pytest.raises(ZeroDivisionError):
        train(GRPO, tinker_run, progress=Stopper(2, fail))
    saved, stub.saved = stub.saved, {}
    with pytest.raises(TrainingError, match=r"checkpoint tinker://.*weights/checkpoint-1 .* cannot be loaded"):
        train(GRPO, tinker_run)
    stub.saved = saved
    resumed = train(GRPO, tinker_run)
    assert (resumed.resumed_from, resumed.steps) == (1, 2)
    drawn = {(*prompt, *ids): logps for prompt, ids, logps in stub.samples}
    assert len(stub.trained) > 20
    for ids, inputs in stub.trained:
        logps = drawn[tuple(ids)]
        assert inputs["logprobs"][-len(logps) :] == pytest.approx(logps)
        assert not any(inputs["advantages"][: -len(logps)])
    straight = train(changed(GRPO, name="straight"), tinker_run)
    after = stub.weights(resumed, "sampler_weights")
    before = dict(stub.base.network.named_parameters())
    assert all((after[name] == one).all() for name, one in stub.weights(straight, "sampler_weights").items())
    assert any((after[name] != one).any() for name, one in before.items())
    assert [entry["reward"] for entry in log(straight)] == [entry["reward"] for entry in log(resumed)]
    assert KEY not in "".join(path.read_text() for path in tinker_run.path.rglob("*.json"))


def test_the_best_step_is_kept_and_trained_further(tinker_run, stub):
    recipe = changed(GRPO, max_steps=1, eval_steps=1, eval_tasks=2, eval_split="train", learning_rate=0.05)
    report = train(recipe, tinker_run)
    assert {entry["step"] for entry in log(report) if "eval_recall" in entry} == {0, 1}
    again = train(changed(GRPO, name="again", init_from="grpo", max_steps=1), tinker_run)
    assert record(again)["total_steps"] == 2
    loaded = [body["path"] for name, body in stub.requests if name == "load_weights"]
    assert loaded[-1] == json.loads((report.path / "tinker.json").read_text())["weights"]


def test_what_the_server_cannot_train_is_said(tinker_run, base):
    with pytest.raises(TrainingError, match=r"temperature 0\.5"):
        train(changed(GRPO, name="cold", temperature=0.5), tinker_run)
    with pytest.raises(TrainingError, match="init_from: 'demo' was not"):
        train(changed(GRPO, name="other", init_from="demo"), tinker_run)
    tinker_run.update(sampling={**tinker_run.sampling(), "policy": {"model": str(base)}})
    with pytest.raises(TrainingError, match=r"policy.kind tinker, not local"):
        train(GRPO, tinker_run)


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [({"lora": None}, "set lora"), ({"lora": {"alpha": 8}}, "set lora"), ({"entropy_coef": 0.1}, "no entropy_coef"),
     ({"num_iterations": 2, "beta": 0.1}, "one step per round"), ({"use_vllm": True}, "use_vllm")],
)  # fmt: skip
def test_a_key_without_effect_on_the_server_is_refused(keys, wrong):
    with pytest.raises(ValidationError, match=wrong):
        changed(GRPO, **keys)
