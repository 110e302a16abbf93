"""The `data` section: tasks and corpus, one settings class for each set of keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, PositiveInt, field_validator, model_validator

from leret.config.base import Free, KindSettings, RecipePath

Split = Literal["train", "dev", "test", "all"]

QUESTIONS_ALONE = frozenset({"jsonl", "hover", "chunks", "babilong", "episodes"})
"""Kinds with files that hold no documents, so that most engines need `data.corpus` too."""


class DataSettings(KindSettings):
    """Keys of every kind of `leret.datasets.formats.READERS`. A kind without further keys is a `FileSettings`."""

    default_kind = "jsonl"

    kind: str
    split: Split = Field("train", description="the questions that are sampled; evaluation has its own")
    limit: Annotated[PositiveInt | None, Free()] = Field(None, description="maximum number of questions of the split")
    part: Annotated[str | None, Free()] = Field(
        None, pattern=r"^\d+/\d+$", description="I/N: every N-th question under `limit`, from the I-th (0 is the first)"
    )
    seed: int = Field(0, description="of the split, of the order under `limit`, of the generated world")
    skip_invalid: Annotated[bool, Free()] = Field(False, description="count bad lines instead of refusing the file")

    @property
    def corpus_file(self) -> str | None:
        return None

    @field_validator("part")
    @classmethod
    def _is_a_part(cls, value: str | None) -> str | None:
        index, count = map(int, (value or "0/1").split("/"))
        if index >= count:
            raise ValueError(f"{value}: part {index} of {count} does not exist; count from 0, as in 0/{count or 2}")
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_kind(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if cls is not DataSettings or not isinstance(values, Mapping):
            return handler(values)
        kinds: dict[Any, type[Self]] = {kind.model_fields["kind"].default: kind for kind in cls.kinds()}
        name = str(values.get("kind", cls.default_kind))
        return kinds.get(name, kinds["jsonl"]).model_validate(values)


class _Files(DataSettings):
    corpus: Annotated[str | None, Free(), RecipePath("corpus file")] = Field(None, description="path, or hf:NAME")
    questions: Annotated[str, Free(), RecipePath("question file")] = Field(
        description="path, or hf:NAME; --set data.questions=FILE names it, `leret init` writes a recipe for your files"
    )

    @property
    def corpus_file(self) -> str | None:
        return self.corpus


class FileSettings(_Files):
    """Tasks in files of a format."""

    kind: str = Field("jsonl", description="format of the files, or world, which is generated")


class BabilongSettings(_Files):
    """bAbI's stories among sentences of books."""

    kind: Literal["babilong"] = "babilong"
    noise: tuple[Annotated[str, RecipePath("text file")], ...] = Field((), description="books")
    sentences: PositiveInt | tuple[PositiveInt, ...] | None = Field(
        None, description="sentences per task, facts and noise; of several, each task draws one; none: no noise"
    )
    facts: PositiveInt | None = Field(None, description="longest story in sentences; none: the least of `sentences`")
    noise_seed: int = Field(0, description="of the places of facts, and of the noise")

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.sentences,) if isinstance(self.sentences, int) else self.sentences or ()

    @model_validator(mode="after")
    def _has_noise(self) -> Self:
        if self.sentences and not self.noise:
            raise ValueError("data.noise is missing: it fills up data.sentences; name a book, a text file")
        return self


class WorldSettings(DataSettings):
    """A generated world, which reads no file."""

    kind: Literal["world"] = "world"
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of the generator")
