"""The recipe of `leret eval`."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, SerializeAsAny

from leret.config.base import Free, RecipePath, Settings
from leret.config.policy import PolicySettings


class EvalDataSettings(Settings):
    """Changes to the run's data of kind babilong; the evaluation's seed is its ``noise_seed``."""

    sentences: PositiveInt | None = None
    facts: PositiveInt | None = None
    noise: tuple[Annotated[str, RecipePath("text file")], ...] | None = None


class EvalRecipe(Settings):
    """`leret eval`: systems on held-out questions of the run's data."""

    evaluation: str | None = Field(None, pattern=r"^\w[\w.-]*$", description="name; None: from split and file")
    split: Literal["dev", "test", "all"] = "test"
    limit: Annotated[PositiveInt | None, Free()] = None
    questions: Annotated[str | None, RecipePath("question file")] = Field(None, description="over the run's corpus")
    data: EvalDataSettings = EvalDataSettings()
    systems: Annotated[tuple[str, ...], Free()] = Field(
        ("raw-question", "oracle-titles", "base", "bank", "policies"),
        description="bank: all few-shot prompts with the base policy; policies: all trained ones; or single names",
    )
    demos: Annotated[
        dict[str, Annotated[str, RecipePath("prompt file", "name a JSON file as in R/prompts")]], Free()
    ] = Field(default_factory=dict, description="extra systems of the base policy: prompt file by name")
    actors: Annotated[dict[str, SerializeAsAny[PolicySettings]], Free()] = Field(
        default_factory=dict, description="extra systems: policy or picker by name"
    )
    policies: dict[str, SerializeAsAny[PolicySettings]] = Field(
        default_factory=dict, description="by predictor, replace the run's in all systems that are not trained for it"
    )
    measures: Annotated[tuple[str, ...], Free()] = ("recall", "ap")
    choose_on: Literal["dev"] | None = Field(None, description="choose the delivered policy by recall; None: the last")
    baseline: Annotated[str, Free()] = Field("base", description="system for comparisons")
    temperature: float = Field(0.0, ge=0)
    samples: Annotated[PositiveInt, Free()] = Field(1, description="runs per question, averaged, at temperature > 0")
    resamples: Annotated[PositiveInt, Free()] = Field(10_000, description="of the bootstrap")
    confidence: Annotated[float, Free()] = Field(0.95, gt=0, lt=1)
    examples: Annotated[NonNegativeInt, Free()] = Field(10, description="most improved and most worsened questions")
    seed: int = 0

    @property
    def evaluation_name(self) -> str | None:
        """Directory in R/eval; None for the run's test questions, which use R/eval itself."""
        split = "" if self.split == "test" else self.split
        stem = re.sub(r"(\.(jsonl|json|tsv|txt|gz|bz2|zst))+$", "", PurePath(self.questions or "").name.lstrip("."))
        seed = f"seed{self.seed}" if self.changes and self.seed else ""
        length = f"ns{self.data.sentences}" if self.data.sentences else ""
        what = (self.evaluation,) if self.evaluation else (split, stem)
        return "-".join(part for part in (*what, length, seed) if part) or None

    @property
    def changes(self) -> dict[str, Any]:
        """The changed keys of the run's data."""
        changes = {name: value for name, value in self.data if value is not None}
        return {**changes, "noise_seed": self.seed} if changes else {}
