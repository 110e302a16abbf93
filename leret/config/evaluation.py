"""The recipe of `leret eval`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    PositiveInt,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from leret.config.base import Free, RecipePath, Settings
from leret.config.policy import PickerSettings, PolicySettings
from leret.config.retriever import OtherRetriever, RetrieverName
from leret.config.sampling import RewardSettings

_BANK = re.compile(r"\bbank:(?=\d)")
_FEW_SHOT = re.compile(r"\bfew-shot:(?=\d)")


def label(text: str) -> str:
    """Return a system's name, or a sentence with one, as people read it.

    Results store ``bank:1`` for what tables call ``few-shot:1``.

    >>> label("bank:1 finds more than runs/databank:1")
    'few-shot:1 finds more than runs/databank:1'
    """
    return _BANK.sub("few-shot:", text)


def main_measure(measures: Sequence[str]) -> str:
    """Return the measure that chooses policies and is shown in plots and differences.

    This is recall, or the first measure without gold documents.
    """
    return "recall" if "recall" in measures else measures[0]


def stored_name(name: str) -> str:
    """Return the name by which results store a system: the inverse of `label`."""
    return _FEW_SHOT.sub("bank:", name)


StoredName = Annotated[str, AfterValidator(stored_name)]


class EvalDataSettings(Settings):
    """Overrides for the run's data (kind babilong only). The evaluation's ``seed`` becomes ``data.noise_seed``."""

    sentences: PositiveInt | None = None
    facts: PositiveInt | None = None
    noise: tuple[Annotated[str, RecipePath("text file")], ...] | None = None


class ReaderSettings(Settings):
    """An LM that answers every task from the passages that a system found, at temperature 0."""

    policy: SerializeAsAny[PolicySettings] = Field(description="an LM of any kind")
    passages: PositiveInt = Field(6, description="passages to read, best first")
    words: PositiveInt = Field(100, description="words to read of each passage")
    instruction: str | None = Field(
        None, description="end of the prompt; None: Answer in a few words."
    )

    @field_validator("policy")
    @classmethod
    def _writes(cls, policy: PolicySettings) -> PolicySettings:
        if isinstance(policy, PickerSettings):
            raise ValueError(
                f"kind {policy.kind} is a picker, which cannot write answers; choose an LM"
            )
        return policy


class EvalRecipe(Settings):
    """The recipe of `leret eval`, which compares systems on held-out questions."""

    removed: ClassVar[Mapping[str, Any]] = {"examples": 10}

    evaluation: str | None = Field(
        None, pattern=r"^\w[\w.-]*$", description="name; None: built from split and file"
    )
    split: Literal["dev", "test", "all"] = "test"
    limit: Annotated[PositiveInt | None, Free()] = None
    questions: Annotated[str | None, RecipePath("question file")] = Field(
        None, description="replaces the run's file"
    )
    data: EvalDataSettings = EvalDataSettings()
    systems: Annotated[tuple[StoredName, ...], Free()] = Field(
        ("raw-question", "oracle-titles", "base", "bank", "policies"),
        description="names of systems; bank: base with the best few-shot prompt; policies: all trained policies",
    )
    demos: Annotated[
        dict[str, Annotated[str, RecipePath("prompt file", "name a file like R/prompts/*.json")]],
        Free(),
    ] = Field(
        default_factory=dict,
        description="extra systems: prompt file, DSPy state file or saved program by name",
    )
    actors: Annotated[dict[str, SerializeAsAny[PolicySettings]], Free()] = Field(
        default_factory=dict, description="extra systems: policy or picker by name"
    )
    retrievers: Annotated[dict[RetrieverName, OtherRetriever], Free()] = Field(
        default_factory=dict,
        description="other retrievers by name; each system is also evaluated as SYSTEM@NAME",
    )
    policies: dict[str, SerializeAsAny[PolicySettings]] = Field(
        default_factory=dict,
        description="policies in place of the run's, by predictor; trained policies are kept",
    )
    measures: Annotated[tuple[str | RewardSettings, ...], Free()] = Field(
        ("recall", "ap"), description="names, or settings by name as in the parts of a reward"
    )
    choose_on: Literal["dev"] | None = Field(
        None,
        description="choose the final policy by recall (or the first measure that applies); None: the last policy",
    )
    baseline: Annotated[StoredName, Free()] = Field(
        "base", description="system to compare all other systems with"
    )
    reader: ReaderSettings | None = Field(
        None, description="LM that writes the answers of all systems"
    )
    temperature: float = Field(0.0, ge=0)
    dtype: Annotated[Literal["float32"] | None, Free()] = Field(
        "float32",
        description="precision of local policies; in float32, batches do not change a completion; None: theirs",
    )
    samples: Annotated[PositiveInt, Free()] = Field(
        1, description="runs per question to average at temperature > 0"
    )
    resamples: Annotated[PositiveInt, Free()] = Field(10_000, description="bootstrap resamples")
    confidence: Annotated[float, Free()] = Field(0.95, gt=0, lt=1)
    seed: int = 0

    @field_validator("measures", mode="before")
    @classmethod
    def _with_settings(cls, measures: Any) -> Any:
        # [f1, {similarity: {model: NAME}}] or {f1: null, similarity: {...}}; a measure with settings is one reward part
        listed = [measures] if isinstance(measures, dict) else measures
        if not isinstance(listed, list | tuple):
            return measures
        sections: list[Any] = []
        for measure in listed:
            is_name_or_dumped = not isinstance(measure, dict) or "parts" in measure
            if is_name_or_dumped:
                sections.append(measure)
                continue
            for name, part in measure.items():
                sections.append(name if part is None else {"parts": {name: part}})
        return sections or measures

    @model_validator(mode="after")
    def _without_weights(self) -> Self:
        for section in self.measures:
            if isinstance(section, str):
                continue
            for name, part in section.parts.items():
                if part.weight != 1:
                    raise ValueError(
                        f"measures: {name} has a weight, which only rewards have; remove it"
                    )
        return self

    @property
    def specs(self) -> dict[str, str | RewardSettings]:
        """Measures by name."""
        specs: dict[str, str | RewardSettings] = {}
        for measure in self.measures:
            name = measure if isinstance(measure, str) else next(iter(measure.parts))
            specs[name] = measure
        return specs

    @property
    def evaluation_name(self) -> str | None:
        """Directory name in R/eval; None for the run's test questions, which use R/eval itself."""
        split = "" if self.split == "test" else self.split
        name = PurePath(self.questions or "").name.lstrip(".")
        stem = re.sub(r"(\.(jsonl|json|csv|tsv|parquet|txt|gz|bz2|zst))+$", "", name)
        seed = f"seed{self.seed}" if self.changes and self.seed else ""
        length = f"ns{self.data.sentences}" if self.data.sentences else ""
        what = (self.evaluation,) if self.evaluation else (split, stem)
        return "-".join(part for part in (*what, length, seed) if part) or None

    @property
    def changes(self) -> dict[str, Any]:
        """Keys of the run's data that the recipe overrides, with their new values."""
        changes = {name: value for name, value in self.data if value is not None}
        return {**changes, "noise_seed": self.seed} if changes else {}
