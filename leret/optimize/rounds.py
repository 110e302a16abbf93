"""`leret run`: sampling, training and evaluation one after the other, in as many rounds as wanted.

Each of several rounds samples its own part of the questions. In a later round the policy that the last one trained
writes the queries, trainings go on from it, and what they leave is named ``sft-2``, ``ipo-2`` and so on. `base` stays,
in every evaluation, the policy of the first round. A policy behind servers stays behind them: they get the new weights,
or the round is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from leret.config.evaluation import EvalRecipe
from leret.config.policy import LocalPolicySettings, OpenAIPolicySettings, PolicySettings
from leret.config.sampling import SamplingRecipe
from leret.core.errors import ConfigError
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.training.algorithms import TrainingRecipe

if TYPE_CHECKING:
    from leret.evaluation.stage import EvalReport
    from leret.sampling.stage import SampleReport
    from leret.training.checkpoints import TrainReport

Recipe = SamplingRecipe | TrainingRecipe | EvalRecipe


@dataclass(frozen=True)
class RoundStage:
    """One stage of one round, from 1; one of a round that a later one has followed is done, and left out."""

    round: int
    stage: Literal["sample", "train", "eval"]
    recipe: Recipe
    done: bool

    @property
    def title(self) -> str:
        """``round 2: train ipo-2 from sft-2``."""
        what = ""
        if isinstance(self.recipe, TrainingRecipe):
            what = f" {self.recipe.policy_name} ({self.recipe.algorithm}) from {self.recipe.init_from}"
        elif isinstance(self.recipe, SamplingRecipe):
            what = f" with {self.recipe.policy.model}"
        return f"round {self.round}: {self.stage}{what}" + (": done before" if self.done else "")


def schedule(recipes: Sequence[Recipe], run: Run, rounds: int = 1) -> list[RoundStage]:
    """What the loop will do, in order.

    Args:
        recipes: at most one of sampling, trainings in the order in which they build on each other, at most one of
            evaluation.
        run: new, or begun by the same loop.
        rounds: at least 1.

    Raises:
        ConfigError: recipes are missing, too many, or of the same name.
    """
    sampling = [recipe for recipe in recipes if isinstance(recipe, SamplingRecipe)]
    trainings = [recipe for recipe in recipes if isinstance(recipe, TrainingRecipe)]
    evaluation = [recipe for recipe in recipes if isinstance(recipe, EvalRecipe)]
    problems = []
    if len(sampling) > 1 or len(evaluation) > 1:
        problems.append("a loop takes one recipe of sampling and one of evaluation; leave the others out")
    if not sampling and not run.manifest_path.is_file():
        problems.append(f"{run.path} is not a run yet, and none of the recipes is of sampling; name one")
    if rounds > 1 and not (sampling and trainings):
        problems.append(f"--rounds {rounds}: another round needs a recipe of sampling and one of training at least")
    names = [recipe.policy_name for recipe in trainings]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"two trainings are both named {', '.join(twice)}; set `name` in one of them")
    problems += [fault for recipe in sampling if rounds > 1 for fault in _no_rounds(recipe, rounds)]
    if problems:
        raise ConfigError(problems)
    stages: list[RoundStage] = []
    begun = run.manifest.rounds if run.manifest_path.is_file() else []
    for number in range(1, rounds + 1):
        trained = [_training(recipe, number, trainings) for recipe in trainings]
        done = len(begun) > number and all((run.policies / t.policy_name / "training.json").is_file() for t in trained)
        for recipe in sampling:
            part = f"{number - 1}/{rounds}" if rounds > 1 else recipe.data.part
            part = begun[number - 1].get("part") if number <= len(begun) else part  # as it was begun
            data = recipe.data.model_copy(update={"part": part})
            policy = _policy(recipe.policy, run, number, _successor(trainings, number - 1))
            own = recipe.model_copy(update={"data": data, "policy": policy})
            stages.append(RoundStage(number, "sample", own, done))
        stages += [RoundStage(number, "train", recipe, done) for recipe in trained]
        stages += [RoundStage(number, "eval", recipe, done) for recipe in evaluation]
    return stages


def run_stage(
    stage: RoundStage, run: Run, *, serve: str | None = None, progress: Progress | None = None
) -> SampleReport | TrainReport | EvalReport | None:
    """Run one stage, unless it is done; the report of the stage, None where it was left out.

    ``serve`` names an engine (vllm): a server of the policy's weights is started for a sampling, and stopped after it.
    """
    if stage.done:
        return None
    if isinstance(stage.recipe, SamplingRecipe):
        from leret.sampling.stage import sample

        with _server(stage.recipe.policy, serve):
            return sample(_served(stage, stage.recipe), run, base_dir=Path.cwd(), progress=progress)
    if isinstance(stage.recipe, TrainingRecipe):
        from leret.training.stage import train

        return train(stage.recipe, run, progress=progress)
    from leret.evaluation.stage import evaluate

    return evaluate(stage.recipe, run, progress=progress)


def _name(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


def _successor(trainings: Sequence[TrainingRecipe], number: int) -> str:
    """The policy that a round hands on: the last one trained that is no control."""
    heirs = [recipe for recipe in trainings if not recipe.is_control] or list(trainings)
    return _name(heirs[-1].policy_name, number) if heirs and number else "base"


def _training(recipe: TrainingRecipe, number: int, trainings: Sequence[TrainingRecipe]) -> TrainingRecipe:
    if number == 1:
        return recipe
    names = {other.policy_name: _name(other.policy_name, number) for other in trainings}
    names["base"] = _successor(trainings, number - 1)
    keys = {key: value for key in ("init_from", "match_steps_of") if (value := getattr(recipe, key, None))}
    renamed = {key: names.get(value, value) for key, value in keys.items()}
    return recipe.model_copy(update={"name": names[recipe.policy_name], **renamed})


def _no_rounds(recipe: SamplingRecipe, rounds: int) -> Iterator[str]:
    if recipe.data.part is not None:
        yield f"data.part: {recipe.data.part} is of one round, and --rounds {rounds} makes parts itself; leave one out"
    if recipe.policies:
        yield "policies: a round hands on one policy, which answers all predictors; leave them, or --rounds, out"
    if not isinstance(recipe.policy, LocalPolicySettings | OpenAIPolicySettings):
        told = "does not take new weights from here; use local, or openai with a vLLM that you start"
        yield f"policy.kind: {recipe.policy.kind} {told}, or leave --rounds out"


def _policy(settings: PolicySettings, run: Run, number: int, previous: str) -> PolicySettings:
    """The settings of a round's policy; of a served one, ``model`` is its directory until `_served` has a name."""
    directory = str((run.policies / previous).resolve())
    return settings if number == 1 else settings.model_copy(update={"model": directory})


@contextmanager
def _server(settings: PolicySettings, engine: str | None) -> Iterator[None]:
    if engine is None:
        yield
        return
    if not isinstance(settings, LocalPolicySettings):
        raise ConfigError(f"--serve {engine}: policy.kind {settings.kind} has its server; leave --serve out")
    from leret.optimize.provider import LM

    lm = LM(settings.model, enable_thinking=settings.enable_thinking, launch_kwargs={"engine": engine})
    lm.launch()
    try:
        yield
    finally:
        lm.kill()


def _served(stage: RoundStage, recipe: SamplingRecipe) -> SamplingRecipe:
    """The recipe with the name under which the servers of a later round have its policy, if they are servers."""
    if stage.round == 1 or not isinstance(recipe.policy, OpenAIPolicySettings):
        return recipe
    from leret.policies.serving.model import resolve_policy
    from leret.policies.serving.refresh import refresh

    directory = recipe.policy.model
    policy = refresh(recipe.policy, resolve_policy(directory), directory)
    return recipe.model_copy(update={"policy": policy})
