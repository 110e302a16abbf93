"""Distillation at a program's states: the student samples, and a teacher scores the student's tokens.

The loss is a divergence of the student's from the teacher's distribution over the next token, at
each token that the student sampled. In this process both distributions are known, so the divergence
is computed over the whole vocabulary (``estimator: full``), as in GKD (arXiv 2306.13649) and TRL's
DistillationTrainer. ``estimator: sampled`` is the policy gradient whose reward per token is
log p teacher - log p student of the sampled token, as in "On-Policy Distillation" (Thinking Machines,
2025) and MiniLLM (arXiv 2306.08543, eq. 2, without its long-term return). Its gradient has the same
expectation as that of the full reverse KL, and more variance. A teacher on a server gives only the
log-probabilities of the sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from leret.config.policy import OpenAIPolicySettings
from leret.config.training import WritingRecipe
from leret.core.aio import gathered, submit
from leret.core.errors import TrainingError
from leret.core.types import digest
from leret.http.client import Answer, Call, HttpError
from leret.policies.local.chat_template import letters
from leret.policies.remote.openai import client_of, policy_error
from leret.training.model import InitialPolicy, find_initial, find_writer, load_for_training
from leret.training.rounds.algorithm import RoundAlgorithm, writer
from leret.training.rounds.learner import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from leret.core.runs import Run
    from leret.rollouts.rounds import Sampled
    from leret.training.job import TrainingJob
    from leret.training.rounds.update import Forward, Ids, RolloutBatch
    from leret.training.rounds.writing import WriterLearner

SELF = "self"
_NAMES = {"reverse": "reverse KL", "forward": "forward KL", "jsd": "Jensen-Shannon divergence"}
_BETAS = {"forward": 0.0, "reverse": 1.0}
_N_CHECKED = 64  # tokens of the vocabulary that a server is asked for before the first round
_OTHER_TOKENIZER = (
    "the teacher has another tokenizer than the student, so their tokens cannot be compared; choose "
    "a teacher with the student's tokenizer, or sample a run from the teacher and train on its "
    "samples with algorithm: sft"
)

TeacherKey = Annotated[
    Annotated[str, Tag("name")] | Annotated[OpenAIPolicySettings, Tag("section")],
    Discriminator(lambda value: "name" if isinstance(value, str) else "section"),
]
"""A policy in this process, or a section with the model and the URLs of vLLM servers."""


class DistillRecipe(WritingRecipe):
    """On-policy distillation."""

    algorithm: Literal["distill"] = "distill"
    teacher: TeacherKey = Field(
        "grpo",
        description="a policy of the run, base, a directory, self, or model and urls of vLLM servers",
    )
    hint: Literal["gold"] | None = Field(
        None,
        description="gold: the teacher's prompt names the missing gold documents, or the reference answer",
    )
    divergence: Literal["reverse", "forward", "jsd"] = Field(
        "reverse",
        description="KL(student || teacher), KL(teacher || student), or the generalized Jensen-Shannon divergence",
    )
    jsd_beta: float = Field(0.5, gt=0, lt=1, description="teacher's share of the mixture (jsd)")
    estimator: Literal["full", "sampled"] = Field(
        "full", description="over the whole vocabulary, or from the sampled token (reverse)"
    )
    mask: Literal["reward"] | None = Field(
        None,
        description="reward: imitate below the best reward of the group, and reinforce the best",
    )
    loss_type: Literal["sequence", "token", "dapo"] = "dapo"
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group", description="divide the advantages (mask: reward) as in grpo"
    )

    @property
    def trl_beta(self) -> float:
        """TRL's ``beta`` of the divergence."""
        return _BETAS.get(self.divergence, self.jsd_beta)

    @model_validator(mode="after")
    def _has_a_teacher_that_differs(self) -> DistillRecipe:
        if self.teacher == SELF and self.hint is None:
            raise ValueError("teacher: self teaches nothing without a hint; set hint: gold too")
        if self.hint is not None and self.groups == "question":
            raise ValueError("hint: needs groups of states; remove groups: question")
        return self

    @model_validator(mode="after")
    def _estimates_the_reverse_kl(self) -> DistillRecipe:
        if self.estimator == "sampled" and self.divergence != "reverse":
            raise ValueError(
                f"estimator: sampled estimates the reverse KL, not divergence {self.divergence}; "
                "set estimator: full"
            )
        if self.estimator == "full" and not isinstance(self.teacher, str):
            raise ValueError(
                "estimator: full needs probabilities of the whole vocabulary, but servers send those "
                "of the sampled tokens; set estimator: sampled"
            )
        return self


def find_policies(run: Run, recipe: DistillRecipe) -> InitialPolicy:
    """Return the student's initial policy, with the teacher in ``actors`` and a digest of both."""
    initial = find_writer(run, recipe)
    if recipe.teacher == SELF:
        return initial
    if not isinstance(recipe.teacher, str):
        return replace(initial, digest=digest(initial.digest, recipe.teacher.model))
    teacher = find_initial(run, recipe.teacher, recipe.predictors, key="teacher")
    if recipe.hint is None and teacher.digest == initial.digest:
        raise TrainingError(
            f"teacher: {recipe.teacher} has the student's weights and teaches nothing; choose "
            "another teacher, or set hint: gold"
        )
    whole = digest(initial.digest, teacher.digest)
    return replace(initial, digest=whole, actors={"teacher": teacher})


def distiller(objective: Objective, job: TrainingJob, device: str) -> WriterLearner:
    """Return the learner of a student, with its teacher loaded."""
    learner = writer(objective, job, device)
    settings = learner.recipe.teacher
    if settings == SELF:
        learner.update.add_teacher(learner.model)
        return learner
    if not isinstance(settings, str):
        teacher = ServedTeacher(settings, learner.tokenizer)
        teacher.check(learner.temperature)
        learner.score = teacher.score
        return learner
    initial = job.initial.actors["teacher"]
    model, tokenizer = load_for_training(initial, None, learner.recipe.dtype)
    if tokenizer.get_vocab() != learner.tokenizer.get_vocab():
        raise TrainingError(f"teacher: {initial.directory}: {_OTHER_TOKENIZER}")
    if learner.recipe.dtype == "bfloat16":
        model = model.bfloat16()
    model = model.to(device).requires_grad_(False).eval()
    learner.update.add_teacher(model)
    return learner


class ServedTeacher:
    """A teacher on vLLM servers, which score token ids.

    Args:
        settings: model, URLs and key of the servers.
        tokenizer: the student's, which must be the teacher's too.
    """

    def __init__(self, settings: OpenAIPolicySettings, tokenizer: Any) -> None:
        self._settings = settings
        self._tokenizer = tokenizer

    def check(self, temperature: float) -> None:
        """Check the sampling temperature, the servers, and tokens from the whole vocabulary.

        Raise `TrainingError` or `PolicyError` if the teacher cannot score the student's tokens.
        """
        if temperature != 1:
            raise TrainingError(
                f"temperature {temperature:g}: a teacher on a server has log-probabilities for "
                "temperature 1; set temperature: 1.0"
            )
        ids = sorted(self._tokenizer.get_vocab().values())
        some = [*ids[:: math.ceil(len(ids) / _N_CHECKED)], ids[-1]]
        self.score([(some[:1], some[1:])])

    def score(self, sequences: Sequence[tuple[Ids, Ids]]) -> list[list[float]]:
        """Return the log-probabilities of the tokens of each completion after its prompt.

        Raise `PolicyError` if a server fails, and `TrainingError` if it scores other tokens.
        """
        return submit(self._score(sequences)).result()

    async def _score(self, sequences: Sequence[tuple[Ids, Ids]]) -> list[list[float]]:
        settings = self._settings
        client = client_of(settings, "teacher")
        calls = []
        for prompt, completion in sequences:
            body = {
                **settings.extra_body,
                "model": settings.model,
                "prompt": [*prompt, *completion],
                "prompt_logprobs": 0,
                # No new token, for which a full context has no position.
                "echo": True,
                "max_tokens": 0,
            }
            read = partial(self._logps, prompt, completion)
            calls.append(client.request(Call("POST", "/completions", json=body), read))
        async with aclosing(client):
            try:
                return await gathered(calls)
            except HttpError as error:
                raise policy_error(error) from error

    def _logps(self, prompt: Ids, completion: Ids, answer: Answer) -> list[float]:
        """Return the log-probabilities of a completion's tokens in an answer."""
        table = answer.json["choices"][0].get("prompt_logprobs")
        if table is None:
            raise TrainingError(
                f"teacher: {answer.url} sends no prompt_logprobs; serve the teacher with vLLM"
            )
        n_tokens = len(prompt) + len(completion)
        if len(table) != n_tokens:
            raise TrainingError(
                f"teacher: {answer.url} sent {len(table)} prompt_logprobs for {n_tokens} tokens; "
                "serve the teacher with another version of vLLM"
            )
        logps = []
        for token, row in zip(completion, table[len(prompt) :], strict=True):
            scored = row.get(str(token), {})
            text = self._tokenizer.decode([token])
            teachers = scored.get("decoded_token")
            is_same = teachers is not None and letters(teachers) == letters(text)
            # Servers show a part of a character as they like.
            is_part = "\ufffd" in text
            if not is_same and not is_part:
                raise TrainingError(
                    f"teacher: {answer.url} has {teachers!r} as token {token}, and the student has "
                    f"{text!r}: {_OTHER_TOKENIZER}"
                )
            logps.append(float(scored["logprob"]))
        if not all(map(math.isfinite, logps)):
            raise ValueError("a log-probability is not a finite number")
        return logps


def advantages(
    recipe: DistillRecipe, sampled: Sampled, batch: RolloutBatch, beta: float
) -> RolloutBatch:
    """Set the weights of the divergence: 1 at each token, or only below the group's best reward.

    With ``mask: reward``, the group's best completions get their group-relative advantages. Where
    all rewards of a group are equal, these are 0, and the group has no effect.
    """
    from leret.training.rounds.advantages import Comparison, below_best, group_relative

    if recipe.mask is None:
        return replace(batch, imitation=batch.mask)
    comparison = Comparison.of(sampled)
    rewards = sampled.rewards.double()
    below = comparison.apply(below_best, rewards)
    values = comparison.apply(group_relative, rewards, recipe.scale_rewards).masked_fill(below, 0)
    return replace(
        batch,
        advantages=values.to(batch.mask)[:, None] * batch.mask,
        imitation=below.to(batch.mask)[:, None] * batch.mask,
    )


def loss(
    recipe: DistillRecipe, batch: RolloutBatch, now: Forward, beta: float
) -> dict[str, Tensor]:
    """Return the mean of the tokens' divergences and policy losses (`advantages` weights both)."""
    from leret.training.rounds.losses import clipped_loss
    from leret.training.rounds.update import penalized

    assert batch.imitation is not None
    log_ratio = batch.log_ratio(now.logps)
    losses, clipped = clipped_loss(log_ratio, batch.advantages, recipe.epsilon, recipe.epsilon_high)
    estimate = _sampled if recipe.estimator == "sampled" else _full
    divergences = estimate(recipe, batch, now) * batch.imitation
    policy = batch.mean(losses + divergences, recipe.loss_type)
    return penalized(policy, recipe, batch, now, beta, recipe.loss_type) | {
        "clipped": batch.token_mean(clipped),
        "divergence": batch.token_mean(divergences.detach()),
        "imitation": batch.token_mean(batch.imitation),
    }


def _full(recipe: DistillRecipe, batch: RolloutBatch, now: Forward) -> Tensor:
    from leret.training.rounds.losses import divergence

    assert now.teacher is not None
    # Models of one family pad the same vocabulary to different sizes.
    n_tokens = min(now.logits.shape[-1], now.teacher.logits.shape[-1])
    student = now.logits[..., :n_tokens]
    return divergence(student, now.teacher.logits[..., :n_tokens], recipe.trl_beta)


def _sampled(recipe: DistillRecipe, batch: RolloutBatch, now: Forward) -> Tensor:
    """Return the estimate log p student - log p teacher, with the gradient of the clipped ratio."""
    from leret.training.rounds.losses import clipped_loss

    assert batch.old_logps is not None
    teacher = batch.teacher_logps if now.teacher is None else now.teacher.logps
    assert teacher is not None
    # Tables of log-probabilities are NaN or 0 at padding.
    rewards = (teacher - batch.old_logps).where(batch.mask.bool(), 0)
    losses, _ = clipped_loss(
        batch.log_ratio(now.logps), rewards, recipe.epsilon, recipe.epsilon_high
    )
    return losses


def _describe(recipe: DistillRecipe) -> str:
    teacher = recipe.teacher if isinstance(recipe.teacher, str) else recipe.teacher.model
    method = (
        f"on-policy distillation (arXiv 2306.13649) from {teacher}, {_NAMES[recipe.divergence]}"
    )
    if recipe.hint is not None:
        method += ", with the missing gold documents in the teacher's prompt"
    if recipe.mask is None:
        return method
    return f"{method} for completions below their group's best, policy gradient for the best"


OBJECTIVE = Objective(advantages, loss)
DISTILL = RoundAlgorithm(DistillRecipe, OBJECTIVE, distiller, _describe, find_policies)
