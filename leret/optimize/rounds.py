"""`leret run`: sampling, training and evaluation in order, in one or more rounds.

With several rounds, each round samples a different part of the questions. A later round samples
with the policies from the previous round and trains them further, under the names ``sft-2``,
``ipo-2`` and so on. If the recipe has ``policies``, each predictor or pick gets the last policy
that was trained for it. In every evaluation, `base` is the policy of the first round. Policy
servers must be able to load new weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from leret.config.evaluation import EvalRecipe
from leret.config.policy import (
    LocalPolicySettings,
    OpenAIPolicySettings,
    PickerSettings,
    PolicySettings,
    ServedPolicySettings,
)
from leret.config.sampling import SamplingRecipe
from leret.config.training import PickingRecipe
from leret.core.errors import ConfigError
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.training.algorithms import TrainingRecipe

if TYPE_CHECKING:
    from leret.evaluation.stage import EvalReport
    from leret.sampling.stage import SampleReport
    from leret.training.job import TrainReport

Recipe = SamplingRecipe | TrainingRecipe | EvalRecipe


@dataclass(frozen=True)
class RoundStage:
    """One stage of a round. Rounds count from 1; ``done`` is True if a later round has started."""

    round: int
    stage: Literal["sample", "train", "eval"]
    recipe: Recipe
    done: bool

    @property
    def title(self) -> str:
        """Return a title such as ``round 2: train ipo-2 (ipo) from sft-2``."""
        detail = ""
        if isinstance(self.recipe, TrainingRecipe):
            initial = getattr(self.recipe, "writer", self.recipe).init_from
            detail = f" {self.recipe.policy_name} ({self.recipe.algorithm_name}) from {initial}"
        elif isinstance(self.recipe, SamplingRecipe):
            detail = f" with {self.recipe.policy.model}"
        title = f"round {self.round}: {self.stage}{detail}"
        if self.done:
            title += ": already done"
        return title


def schedule(recipes: Sequence[Recipe], run: Run, rounds: int = 1) -> list[RoundStage]:
    """Return the stages of all rounds in order.

    Args:
        recipes: at most one sampling recipe, training recipes in order, and at most one evaluation
            recipe.
        run: a new run, or a run started with the same recipes.
        rounds: number of rounds, at least 1.

    Raises:
        ConfigError: recipes are missing, there are too many, or two have the same name.
    """
    sampling = [recipe for recipe in recipes if isinstance(recipe, SamplingRecipe)]
    trainings = [recipe for recipe in recipes if isinstance(recipe, TrainingRecipe)]
    evaluation = [recipe for recipe in recipes if isinstance(recipe, EvalRecipe)]
    if len(sampling) > 1 or len(evaluation) > 1:
        raise ConfigError(
            "there is more than one sampling or evaluation recipe; keep one of each kind"
        )
    problems = list(_problems(sampling, trainings, run, rounds))
    if problems:
        raise ConfigError(problems)
    stages: list[RoundStage] = []
    begun = run.manifest.rounds if run.manifest_path.is_file() else []
    for number in range(1, rounds + 1):
        trained = [_training(recipe, number, trainings, sampling) for recipe in trainings]
        records = [run.path / t.folder / t.policy_name / "training.json" for t in trained]
        done = len(begun) > number and all(record.is_file() for record in records)
        for recipe in sampling:
            part = recipe.data.part
            if number <= len(begun):
                part = begun[number - 1].get("part")
            elif rounds > 1:
                part = f"{number - 1}/{rounds}"
            data = recipe.data.model_copy(update={"part": part})
            sampled = recipe.model_copy(update={"data": data})
            if number > 1:  # `_served` replaces a server's model with the name on the server
                sampled = _with_successors(sampled, trainings, number - 1, run)
            stages.append(RoundStage(number, "sample", sampled, done))
        stages += [RoundStage(number, "train", recipe, done) for recipe in trained]
        stages += [RoundStage(number, "eval", recipe, done) for recipe in evaluation]
    return stages


def _problems(
    sampling: Sequence[SamplingRecipe], trainings: Sequence[TrainingRecipe], run: Run, rounds: int
) -> Iterator[str]:
    if not sampling and not run.manifest_path.is_file():
        yield f"{run.path} is not a run yet; add a sampling recipe"
    if rounds > 1 and not (sampling and any(recipe.folder == "policies" for recipe in trainings)):
        yield f"--rounds {rounds} needs a sampling recipe and a training recipe for a policy"
    names = [recipe.policy_name for recipe in trainings]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        yield f"two training recipes have the name {', '.join(twice)}; set `name` in one of them"
    if rounds == 1:
        return
    for recipe in sampling:
        if recipe.data.part is not None:
            yield (
                f"data.part: {recipe.data.part} conflicts with --rounds {rounds}, which sets the "
                "parts; remove either"
            )
        for key, settings in recipe.by_predictor.items():
            if _actor_of(recipe, trainings, key) is None:
                continue
            if not isinstance(settings, ServedPolicySettings):
                continue
            if not key and settings.kind == "openai":
                continue
            name = f"policies.{key}" if key else "policy"
            yield (
                f"{name}.kind: {settings.kind} cannot load new weights; use kind local, use kind "
                "openai with a vLLM server as `policy`, or remove --rounds"
            )


def run_stage(
    stage: RoundStage, run: Run, *, serve: str | None = None, progress: Progress | None = None
) -> SampleReport | TrainReport | EvalReport | None:
    """Run a stage and return its report, or None if it is already done.

    ``serve`` is the policy's serving engine.
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
    from leret.viewer.report import write_report

    return evaluate(stage.recipe, run, progress=progress, report=write_report)


def _name(name: str, number: int) -> str:
    if number == 1:
        return name
    return f"{name}-{number}"


def _actor_of(
    recipe: SamplingRecipe, trainings: Sequence[TrainingRecipe], key: str
) -> tuple[str, str] | None:
    """Return the last policy, not a control, that is trained for ``key``, and its part.

    The part is "" unless the policy is trained jointly.
    """
    is_picker = isinstance(recipe.by_predictor[key], PickerSettings)
    part = "picker" if is_picker else "writer"
    policies = [training for training in trainings if training.folder == "policies"]
    candidates = [training for training in policies if not training.is_control] or policies
    for training in reversed(candidates):
        joint = getattr(training, part, None)
        if joint is not None:
            if _trains(recipe, joint, key):
                return training.policy_name, part
        elif isinstance(training, PickingRecipe) is is_picker and _trains(recipe, training, key):
            return training.policy_name, ""
    return None


def _trains(recipe: SamplingRecipe, training: TrainingRecipe, key: str) -> bool:
    """Return True if a training of the right kind changes the policy of ``key``."""
    if training.predictors is not None:
        if key:
            return key in training.predictors
        return any(name not in recipe.policies for name in training.predictors)
    is_picker = isinstance(recipe.by_predictor[key], PickerSettings)
    return not key or isinstance(recipe.policy, PickerSettings) is not is_picker


def _with_successors(
    recipe: SamplingRecipe, trainings: Sequence[TrainingRecipe], number: int, run: Run
) -> SamplingRecipe:
    """Return the recipe with the policies that round ``number`` has trained."""
    settings = dict(recipe.by_predictor)
    for key, before in settings.items():
        actor = _actor_of(recipe, trainings, key)
        if actor is not None:
            name, part = actor
            directory = run.policies / _name(name, number) / part
            settings[key] = before.model_copy(update={"model": str(directory.resolve())})
    return recipe.model_copy(update={"policy": settings.pop(""), "policies": settings})


def _training(
    recipe: TrainingRecipe,
    number: int,
    trainings: Sequence[TrainingRecipe],
    sampling: Sequence[SamplingRecipe],
) -> TrainingRecipe:
    if number == 1:
        return recipe
    names = {training.policy_name: _name(training.policy_name, number) for training in trainings}

    def actor_before(section: TrainingRecipe, is_picker: bool) -> str | None:
        """Return the policy of the first predictor that a section trains."""
        for sampled in sampling:
            for key, settings in sampled.by_predictor.items():
                if isinstance(settings, PickerSettings) is not is_picker:
                    continue
                if _trains(sampled, section, key):
                    actor = _actor_of(sampling[0], trainings, key)
                    return None if actor is None else actor[0]
        return None

    def renamed(section: TrainingRecipe, is_picker: bool) -> TrainingRecipe:
        before = {**names, "base": "base"}
        if recipe.folder == "policies":  # a retriever's base is the run's retriever in every round
            actor = actor_before(section, is_picker)
            if actor is not None:
                before["base"] = _name(actor, number - 1)
        update: dict[str, Any] = {}
        for key in ("init_from", "match_steps_of"):
            name = getattr(section, key, None)
            if name:
                update[key] = before.get(name, name)
        return section.model_copy(update=update)

    actors = {part: getattr(recipe, part) for part in ("picker", "writer") if hasattr(recipe, part)}
    update = {part: renamed(section, part == "picker") for part, section in actors.items()}
    whole = recipe
    if not actors:
        whole = renamed(recipe, isinstance(recipe, PickingRecipe))
    return whole.model_copy(update={"name": names[recipe.policy_name], **update})


@contextmanager
def _server(settings: PolicySettings, engine: str | None) -> Iterator[None]:
    if engine is None:
        yield
        return
    if not isinstance(settings, LocalPolicySettings):
        raise ConfigError(
            f"--serve {engine}: a policy of kind {settings.kind} already has a server; remove "
            "--serve"
        )
    from leret.optimize.provider import LM

    lm = LM(
        settings.model, enable_thinking=settings.enable_thinking, launch_kwargs={"engine": engine}
    )
    lm.launch()
    try:
        yield
    finally:
        lm.kill()


def _served(stage: RoundStage, recipe: SamplingRecipe) -> SamplingRecipe:
    """Load a later round's policy into its servers, if any.

    Return the recipe with the policy's name on the servers.
    """
    is_new = Path(recipe.policy.model).is_dir()  # false if no recipe trains this policy
    if stage.round == 1 or not is_new or not isinstance(recipe.policy, OpenAIPolicySettings):
        return recipe
    from leret.policies.serving.model import refresh, resolve_policy

    directory = recipe.policy.model
    policy = refresh(recipe.policy, resolve_policy(directory), directory)
    return recipe.model_copy(update={"policy": policy})
