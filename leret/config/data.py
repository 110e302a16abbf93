"""The `data` section: questions and corpus."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PositiveInt,
    model_validator,
)

from leret.config.base import Free, RecipePath, Settings

DataKind = Literal["jsonl", "beir", "hotpotqa", "hover", "musique", "2wiki", "world"]


Split = Literal["train", "dev", "test", "all"]


class DataSettings(Settings):
    """Questions and corpus."""

    kind: DataKind = "jsonl"
    corpus: Annotated[str | None, Free(), RecipePath("corpus file")] = Field(
        None, description="path, or hf:NAME; not for kind world"
    )
    questions: Annotated[str | None, Free(), RecipePath("question file")] = Field(
        None, description="path, or hf:NAME; not for kind world"
    )
    split: Split = Field("train", description="the questions that are sampled; evaluation has its own")
    limit: Annotated[PositiveInt | None, Free()] = Field(None, description="at most so many questions of the split")
    seed: int = Field(0, description="of the split, of the order under `limit`, of the generated world")
    skip_bad: Annotated[bool, Free()] = Field(False, description="count unreadable lines instead of refusing the file")
    options: dict[str, Any] = Field(default_factory=dict, description="of the generator, for kind world")

    @model_validator(mode="after")
    def _paths(self) -> DataSettings:
        if self.kind != "world" and not self.questions:
            raise ValueError(
                f"data.questions is missing: kind {self.kind} reads a file; name it with --set data.questions=FILE, or "
                "let `leret init` write a recipe for your files"
            )
        return self
