import asyncio
import json
import shutil

import pytest

from leret.config.evaluation import EvalRecipe
from leret.config.sampling import SamplingRecipe
from leret.core.errors import ConfigError, PolicyError
from leret.core.runs import Run
from leret.extras.retriever_kl import RetrieverKLRecipe
from leret.optimize.rounds import _served, run_stage, schedule
from leret.policies.checkpoints import model_digest
from leret.policies.serving.model import resolve_policy
from leret.sampling.store.store import Store
from leret.training.picks.joint import JointRecipe
from leret.training.stored.preference import IPORecipe
from leret.training.stored.sft import SFTRecipe
from tests.http.servers import serving
from tests.policies.servers import ChatServer
from tests.policies.serving.conftest import gone
from tests.tiny import tiny_policy


def sampling(**policy):
    return SamplingRecipe.model_validate({"data": {"kind": "world"}, "policy": policy})


SAMPLING, EVAL = sampling(model="demo"), EvalRecipe()
SFT, IPO, MORE = SFTRecipe(), IPORecipe(init_from="sft"), SFTRecipe(name="sft-more", match_steps_of="ipo")


def dialogue(**policies):
    policies = policies or {"pick": {"kind": "encoder"}, "judge": {"kind": "together", "model": "m"}}
    recipe = {"data": {"kind": "personas"}, "policy": {"model": "demo"}, "policies": policies}
    return SamplingRecipe.model_validate(recipe)


SFT_REPLY = SFTRecipe(predictors=("pick",))


def trained(steps, number):
    recipes = [step.recipe for step in steps if (step.round, step.stage) == (number, "train")]
    return [(recipe.policy_name, recipe.init_from, recipe.match_steps_of) for recipe in recipes]


def test_a_second_round_goes_on_from_the_last_policy_that_is_no_control_or_retriever(tmp_path):
    recipes = [SAMPLING, SFT, IPO, MORE, EVAL]
    assert [step.recipe for step in schedule(recipes, Run(tmp_path))] == recipes
    steps = schedule(recipes, Run(tmp_path), rounds=3)
    assert [step.stage for step in steps] == ["sample", "train", "train", "train", "eval"] * 3
    assert trained(steps, 1) == [("sft", "base", None), ("ipo", "sft", None), ("sft-more", "base", "ipo")]
    assert trained(steps, 2) == [("sft-2", "ipo", None), ("ipo-2", "sft-2", None), ("sft-more-2", "ipo", "ipo-2")]
    assert trained(steps, 3) == [("sft-3", "ipo-2", None), ("ipo-3", "sft-3", None), ("sft-more-3", "ipo-2", "ipo-3")]
    policies = [step.recipe.policy for step in steps if step.stage == "sample"]
    assert [policy.model.rpartition("/")[2] for policy in policies] == ["demo", "ipo", "ipo-2"]
    steps = schedule([SAMPLING, SFT, RetrieverKLRecipe()], Run(tmp_path), rounds=2)
    named = [(step.recipe.policy_name, step.recipe.init_from) for step in steps if step.stage == "train"]
    assert named[2:] == [("sft-2", "sft"), ("retriever-kl-2", "base")]
    with pytest.raises(ConfigError, match="training recipe for a policy"):
        schedule([SAMPLING, RetrieverKLRecipe()], Run(tmp_path), rounds=2)


def test_a_later_round_has_every_policy_that_was_trained(tmp_path):
    run, joint = Run(tmp_path), JointRecipe(writer={"init_from": "sft"})
    steps = schedule([dialogue(), SFT, joint], run, rounds=3)
    samples = [step.recipe for step in steps if step.stage == "sample"]
    models = [(one.policy.model, one.policies["pick"].model, one.policies["judge"].model) for one in samples]
    place = str(run.policies.resolve())
    assert models[0] == ("demo", "scratch", "m")
    assert models[1] == (f"{place}/joint/writer", f"{place}/joint/picker", "m")
    assert models[2] == (f"{place}/joint-2/writer", f"{place}/joint-2/picker", "m")
    sft, second = (step.recipe for step in steps if (step.round, step.stage) == (2, "train"))
    assert (sft.policy_name, sft.init_from) == ("sft-2", "joint")
    assert (second.policy_name, second.picker.init_from, second.writer.init_from) == ("joint-2", "joint", "sft-2")


def parts(steps):
    return [step.recipe.data.part for step in steps if step.stage == "sample"]


def test_each_round_samples_its_own_part_and_is_done_where_a_later_one_has_followed(tmp_path):
    run, recipes = Run.create(tmp_path / "r"), [SAMPLING, SFT, EVAL]
    assert parts(schedule(recipes, run)) == [None]
    assert parts(schedule(recipes, run, rounds=3)) == ["0/3", "1/3", "2/3"]
    run.update(rounds=[{"digest": "a"}, {"digest": "b", "part": "1/2"}])  # begun with other numbers of rounds
    assert parts(schedule(recipes, run, rounds=3)) == [None, "1/2", "2/3"]
    assert not any(step.done for step in schedule(recipes, run, rounds=2))
    (run.policies / "sft").mkdir(parents=True)
    (run.policies / "sft" / "training.json").write_text("{}")
    assert [step.done for step in schedule(recipes, run, rounds=2)] == [True] * 3 + [False] * 3


def test_a_served_policy_stays_served_under_the_name_of_its_weights(tmp_path, weights):
    run = Run.create(tmp_path / "r")
    directory = shutil.copytree(weights, run.policies / "sft")

    def second_round(url):
        served = sampling(kind="openai", model="m", urls=[url])
        steps = schedule([served, SFT.model_copy(update={"init_from": "weights"})], run, rounds=2)
        assert trained(steps, 2) == [("sft-2", "weights", None)]
        return _served(steps[2], steps[2].recipe).policy

    async def asked_of(*models):
        async with serving(server := ChatServer(models=models), under="/v1") as [url]:
            try:
                return await asyncio.to_thread(second_round, url)
            finally:
                assert {*server.paths} == {"/v1/models"}, "no sample is asked of the old weights"

    name = resolve_policy(str(directory)).name
    policy = asyncio.run(asked_of("m", name))
    assert (policy.kind, policy.model) == ("openai", name)
    with pytest.raises(PolicyError, match=rf"does not serve {name}.*serves m.*with `leret serve policy .*sft`"):
        asyncio.run(asked_of("m"))


def test_a_server_of_each_rounds_weights_is_started_for_its_sampling(tmp_path, weights, engine, monkeypatch):
    monkeypatch.setenv("LERET_VLLM", str(engine))
    monkeypatch.setenv("FAKE_ENGINE", "well")
    run = Run.create(tmp_path / "r")
    recipe = SamplingRecipe.model_validate({
        "data": {"kind": "world", "limit": 4}, "policy": {"model": str(weights), "max_tokens": 4},
        "program": {"adapter": {"kind": "compact"}}, "sampling": {"prompts": 1, "samples": 2},
    })  # fmt: skip
    second = tiny_policy(run.policies / "sft", seed=1)
    for step, directory in zip(schedule([recipe, SFT], run, rounds=2)[::2], (weights, second), strict=True):
        run_stage(step, run, serve="vllm")
        started = json.loads((tmp_path / "record" / "start.json").read_text())["arguments"]
        assert str(directory) in started
        assert run.manifest.rounds[-1]["digest"] == model_digest(directory), "as in this process"
        assert gone(json.loads((tmp_path / "record" / "pids.json").read_text()))
    with Store(run.store, read_only=True) as store:
        assert {sample.completion for group in store.groups() for sample in group.samples} == {"Paris"}
    served = sampling(kind="openai", model="m", urls=["http://127.0.0.1:1/v1"])
    with pytest.raises(ConfigError, match="already has a server; remove --serve"):
        run_stage(schedule([served], Run(tmp_path))[0], run, serve="vllm")


@pytest.mark.parametrize(
    ("recipes", "rounds", "says"),
    [
        ([SAMPLING, SAMPLING], 1, "more than one sampling"),
        ([SFT], 1, "is not a run yet"),
        ([SAMPLING, EVAL], 2, "--rounds 2 needs"),
        ([SAMPLING, SFT, SFT], 1, "two training recipes have the name sft"),
        ([SamplingRecipe.model_validate({"data": {"kind": "world", "part": "0/2"}}), SFT], 2, "data.part: 0/2"),
        ([dialogue(pick={"kind": "together", "model": "m"}), SFT_REPLY], 2, "policies.pick.kind: together cannot load"),
        ([sampling(kind="together", model="m"), SFT], 2, "policy.kind: together cannot load new weights"),
    ],
)
def test_a_loop_that_cannot_be_is_refused(tmp_path, recipes, rounds, says):
    with pytest.raises(ConfigError, match=says):
        schedule(recipes, Run(tmp_path / "r"), rounds)
