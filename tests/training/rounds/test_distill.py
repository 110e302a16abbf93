"""Distillation: losses against oracles and TRL, the mask by hand, a training in a run."""

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer

from leret.config.policy import OpenAIPolicySettings
from leret.core.errors import PolicyError, TrainingError
from leret.rollouts.rounds import Sampled
from leret.training.rounds.distill import DistillRecipe, ServedTeacher, advantages, loss
from leret.training.rounds.update import Forward, RolloutBatch
from leret.training.rounds.writing import WriterLearner
from leret.training.stage import train
from tests.http.servers import Served, serving
from tests.tiny import tiny_policy
from tests.training.rounds.test_update import batch, make, same_gradients, trl_inputs, trl_trainer
from tests.training.training_runs import ONLINE, log, nudge

TRL_BETAS = {"forward": 0.0, "reverse": 1.0, "jsd": 0.3}


def given(**keys):
    made = batch()
    return replace(made, advantages=torch.zeros_like(made.mask), imitation=made.mask, **keys)


def taught(base, recipe, size=64):
    """Return the update of a policy, and its teacher."""
    update = make(base, recipe, size=size)
    teacher = AutoModelForCausalLM.from_pretrained(base).eval()
    nudge(teacher, 0.05, seed=2)
    update.add_teacher(teacher)
    return update, AutoModelForCausalLM.from_pretrained(base), teacher


def rows_of(model, sequences):
    """Return the float64 log-probabilities (n_tokens, n_vocabulary) at the tokens of each sequence."""
    for prompt, completion in sequences:
        ids = torch.tensor([[*prompt, *completion]])
        logits = model(ids).logits[0, len(prompt) - 1 : -1].double()
        yield logits.log_softmax(-1), torch.tensor(completion)


def outputs(logits):
    """Return the outputs of a teacher at tokens 0."""
    return Forward(logits, logits.log_softmax(-1)[..., 0], None)


def test_a_reverse_kl_with_the_teachers_own_prompts_is_the_papers_in_float64(base):
    update, model, teacher = taught(base, DistillRecipe(divergence="reverse"), size=4)
    completions = given(teacher_prompts=[[3, 20 + i, 4] for i in range(6)])
    shown = [(prompt, ids) for prompt, (_, ids) in zip(completions.teacher_prompts, completions.sequences, strict=True)]
    pairs = zip(rows_of(model, completions.sequences), rows_of(teacher, shown), strict=True)
    losses = [(p.exp() * (p - q.detach())).sum(-1) for (p, _), (q, _) in pairs]  # equation 1 of arXiv 2306.13649
    expected = torch.cat(losses).mean()
    expected.backward()
    figures = update.step(completions)
    assert figures["loss"] == pytest.approx(float(expected.detach()), abs=1e-6)
    assert (figures["divergence"], figures["imitation"]) == pytest.approx((figures["loss"], 1))
    same_gradients(update, model)
    assert all(weight.grad is None for weight in teacher.parameters())


@pytest.mark.parametrize("divergence", TRL_BETAS)
def test_one_update_is_that_of_trls_distillation_trainer(base, tmp_path, divergence):
    update, model, teacher = taught(base, DistillRecipe(divergence=divergence, jsd_beta=0.3))
    more = {"teacher_model": teacher}
    trainer = trl_trainer(base, tmp_path, "Distillation", model, more, beta=TRL_BETAS[divergence])
    completions = given()
    expected, *_ = trainer._compute_loss(trainer.model, trl_inputs(completions), completions.mask.sum())
    expected.backward()
    assert update.step(completions)["loss"] == pytest.approx(float(expected.detach()), abs=1e-5)
    same_gradients(update, trainer.model)


def test_the_sampled_estimate_has_the_policy_gradient_of_the_teachers_log_ratio(base):
    update, model, teacher = taught(base, DistillRecipe(estimator="sampled"))
    completions = given()
    surrogate, values = [], []
    pairs = zip(rows_of(model, completions.sequences), rows_of(teacher, completions.sequences), strict=True)
    for (p, ids), (q, _) in pairs:
        p, q = p.gather(-1, ids[:, None])[:, 0], q.gather(-1, ids[:, None])[:, 0].detach()
        surrogate.append(p * (p.detach() - q))
        values.append(p.detach() - q)
    torch.cat(surrogate).mean().backward()
    figures = update.step(completions)
    assert figures["divergence"] == pytest.approx(float(torch.cat(values).mean()), abs=1e-6)
    same_gradients(update, model)


def test_the_mask_imitates_below_the_best_reward_and_reinforces_the_best():
    sequences = [([3], [5, 6]), ([3], [7]), ([3], [8]), ([4], [5]), ([4], [6])]
    rewards = torch.tensor([1.0, 0.5, 0.0, 0.2, 0.2])
    sampled = Sampled(sequences, torch.tensor([0, 0, 0, 1, 1]), rewards, torch.zeros(5, 1), {})
    made = advantages(
        DistillRecipe(mask="reward", scale_rewards="none"), sampled, RolloutBatch.of(sequences, sampled.groups), 0.0
    )
    assert made.imitation.tolist() == [[0, 0], [1, 0], [1, 0], [0, 0], [0, 0]]
    assert made.advantages.tolist() == [[0.5, 0.5], [0, 0], [0, 0], [0, 0], [0, 0]]

    # Three tokens of equal probability, and a teacher for which they have 1/2, 1/4 and 1/4.
    counted = replace(made, old_logps=torch.full((5, 2), -math.log(3))).counted(None, False)
    assert len(counted.sequences) == 3, "a group without spread has no effect"
    logits = torch.zeros(3, 2, 3, requires_grad=True)
    logps = torch.full((3, 2), -math.log(3)) + 0 * logits.sum(-1)
    teacher = torch.tensor([0.5, 0.25, 0.25]).log().expand(3, 2, 3)
    terms = loss(DistillRecipe(mask="reward"), counted, Forward(logits, logps, None, teacher=outputs(teacher)), 0.0)
    kl = (math.log(2 / 3) + 2 * math.log(4 / 3)) / 3
    # 6 tokens in the round: two of the best completion at ratio 1, two below it.
    assert terms["loss"].item() == pytest.approx((-2 * 0.5 + 2 * kl) / 6)
    assert float(terms["divergence"]) == pytest.approx(2 * kl / 4)
    assert float(terms["imitation"]) == pytest.approx(0.5)


BIG = {"model": "big", "urls": ["http://127.0.0.1:9/v1"]}
SMALL = {**ONLINE, "questions_per_round": 2, "per_device_train_batch_size": 16}


@pytest.fixture
def teacher(base, tmp_path):
    """Another policy with the student's tokenizer, and its directory."""
    model, path = AutoModelForCausalLM.from_pretrained(base).eval(), tiny_policy(tmp_path / "teacher")
    nudge(model, 0.1)
    model.save_pretrained(path)
    return model, str(path)


def test_a_teacher_that_cannot_teach_the_student_is_refused(run, monkeypatch):
    from leret.training.rounds import distill

    with pytest.raises(TrainingError, match=r"teacher: .grpo. is not .base., a trained policy"):
        train(DistillRecipe(**SMALL), run)
    with pytest.raises(TrainingError, match="has the student's weights"):
        train(DistillRecipe(**SMALL, teacher="base"), run)
    with pytest.raises(TrainingError, match=r"temperature 0\.7: a teacher on a server .* set temperature: 1\.0"):
        train(DistillRecipe(**SMALL, temperature=0.7, teacher=BIG, estimator="sampled"), run)
    load = distill.load_for_training
    other = SimpleNamespace(get_vocab=lambda: {"a": 0})
    monkeypatch.setattr(distill, "load_for_training", lambda *given: (load(*given)[0], other))
    with pytest.raises(TrainingError, match="has another tokenizer than the student"):
        train(DistillRecipe(**SMALL, teacher="base", hint="gold"), run)


def test_only_the_teachers_prompt_has_a_hint_which_leaves_room_for_the_completion(run, tmp_path, monkeypatch):
    path = tiny_policy(tmp_path / "small")
    AutoModelForCausalLM.from_pretrained(path, max_position_embeddings=80).save_pretrained(path)
    lengths, learn = [], WriterLearner.learn

    def learn_from(self, sampled, number):
        for (prompt, completion), hinted in zip(sampled.sequences, sampled.teacher_prompts, strict=True):
            lengths.append((len(prompt), len(hinted), len(hinted) + len(completion)))
        return learn(self, sampled, number)

    monkeypatch.setattr(WriterLearner, "learn", learn_from)
    entries = log(train(DistillRecipe(**SMALL, init_from=str(path), teacher="self", hint="gold"), run))
    assert all(entry["hint/shown"] > 0 for entry in entries)
    assert any(entry["distill/divergence"] > 0 for entry in entries)
    assert max(total for *_, total in lengths) <= 80
    assert {hinted - prompt > 0 for prompt, hinted, _ in lengths} == {True, False}
    assert all(hinted >= prompt for prompt, hinted, _ in lengths)


class Vllm(Served):
    """Scores prompts of token ids as vLLM does; ``change`` edits the table of an answer."""

    def __init__(self, model, tokenizer, change=lambda table: table):
        super().__init__()
        self.model, self.tokenizer, self.change = model, tokenizer, change

    async def route(self, request, body):
        assert (request.path, body["echo"], body["max_tokens"]) == ("/v1/completions", True, 0)
        ids = body["prompt"]
        with torch.no_grad():
            logps = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        table = [None]
        for place, token in enumerate(ids[1:]):
            text = self.tokenizer.decode([token])
            table.append({str(token): {"logprob": float(logps[place, token]), "rank": 1, "decoded_token": text}})
        return web.json_response({"choices": [{"text": "", "prompt_logprobs": self.change(table)}]})


def with_server(server, work):
    """Return the result of ``work`` on the recipe section of a server."""

    async def main():
        async with serving(server, under="/v1") as urls:
            section = {"kind": "openai", "model": "big", "urls": urls, "retry_for_s": 0}
            return await asyncio.to_thread(work, section)

    return asyncio.run(main())


def test_a_run_learns_from_a_server_what_it_learns_from_the_same_teacher_in_process(run, base, teacher):
    model, path = teacher
    keys = {**SMALL, "max_steps": 2, "estimator": "sampled", "hint": "gold"}
    server = Vllm(model, AutoTokenizer.from_pretrained(base))
    reports = [
        with_server(server, lambda section: train(DistillRecipe(**keys, name="served", teacher=section), run)),
        train(DistillRecipe(**keys, teacher=path), run),
    ]
    assert "from big" in (reports[0].path / "README.md").read_text()
    for served, local in zip(*map(log, reports), strict=True):
        assert served.keys() == local.keys() >= {"reward", "distill/divergence", "distill/share", "loss"}
        for name in ("loss", "distill/divergence", "grad_norm", "reward"):
            assert served[name] == pytest.approx(local[name], abs=1e-5)
    checked = server.bodies[0]["prompt"]
    size = len(server.tokenizer)
    assert (checked[0], checked[-1], len(checked) > 50) == (0, size - 1, True), "tokens of the whole vocabulary"
    train(DistillRecipe(**keys, name="served", teacher=BIG), run)


def edited(row, **keys):
    return {token: scored | keys for token, scored in row.items()}


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("sent 5 prompt_logprobs for 6 tokens", lambda table: table[:-1]),
        ("sends no prompt_logprobs; serve the teacher with vLLM", lambda table: None),
        ("has None as token 7", lambda table: [None, *({"9": row["7"]} if "7" in row else row for row in table[1:])]),
        ("a log-probability is not a finite number", lambda table: [*table[:-1], edited(table[-1], logprob=math.nan)]),
        (
            "has 'Paris' as token 8, and the student has .*another tokenizer",
            lambda table: [*table[:-1], edited(table[-1], decoded_token="Paris")],
        ),
    ],
    ids=["short", "missing", "no value", "not finite", "another token"],
)
def test_wrong_answers_of_a_teacher_are_refused(base, message, change):
    tokenizer = AutoTokenizer.from_pretrained(base)

    def score(section):
        return ServedTeacher(OpenAIPolicySettings(**section), tokenizer).score([([3, 4], [5, 6, 7, 8])])

    server = Vllm(AutoModelForCausalLM.from_pretrained(base), tokenizer, change)
    with pytest.raises((TrainingError, PolicyError), match=rf"http://127\.0\.0\.1:\d+/v1.*{message}"):
        with_server(server, score)
