"""The `data` section: tasks and corpus."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from leret.config.base import Free, RecipePath, Settings

Split = Literal["train", "dev", "test", "all"]

QUESTIONS_ALONE = frozenset({"jsonl", "hover", "chunks", "babilong", "episodes"})
"""Kinds whose files hold no documents, so that most engines need `data.corpus` too."""

_OF_BABILONG = ("noise", "sentences", "facts", "noise_seed")


class DataSettings(Settings):
    """Tasks and corpus. The kinds are those of `leret.datasets.formats.READERS`."""

    kind: str = Field("jsonl", description="the format of the files, or world, which is generated")
    corpus: Annotated[str | None, Free(), RecipePath("corpus file")] = Field(None, description="path, or hf:NAME")
    questions: Annotated[str | None, Free(), RecipePath("question file")] = Field(None, description="path, or hf:NAME")
    split: Split = Field("train", description="the questions that are sampled; evaluation has its own")
    limit: Annotated[PositiveInt | None, Free()] = Field(None, description="at most so many questions of the split")
    part: Annotated[str | None, Free()] = Field(
        None, pattern=r"^\d+/\d+$", description="I/N: of what `limit` leaves, every N-th question from the I-th, from 0"
    )
    seed: int = Field(0, description="of the split, of the order under `limit`, of the generated world")
    skip_invalid: Annotated[bool, Free()] = Field(False, description="count bad lines instead of refusing the file")
    noise: tuple[Annotated[str, RecipePath("text file")], ...] = Field((), description="babilong: books")
    sentences: PositiveInt | tuple[PositiveInt, ...] | None = Field(
        None, description="babilong: of a task in all, facts and noise; one of several is drawn a task; none: no noise"
    )
    facts: PositiveInt | None = Field(
        None, description="babilong: stories of more sentences are left out; none: those longer than `sentences`"
    )
    noise_seed: int = Field(0, description="babilong: of the places of facts, and of the noise")
    options: dict[str, Any] = Field(default_factory=dict, description="of the generator, for kind world")

    @property
    def lengths(self) -> tuple[int, ...]:
        """The values of ``sentences``."""
        return (self.sentences,) if isinstance(self.sentences, int) else self.sentences or ()

    @field_validator("part")
    @classmethod
    def _is_a_part(cls, value: str | None) -> str | None:
        index, count = map(int, (value or "0/1").split("/"))
        if index >= count:
            raise ValueError(f"{value}: of {count} parts there is no {index}; they count from 0, as in 0/{count or 2}")
        return value

    @model_validator(mode="after")
    def _files(self) -> DataSettings:
        given = self.corpus or self.questions
        if self.kind == "world" and given:
            name = "corpus" if self.corpus else "questions"
            raise ValueError(f"data.{name}: kind world is generated and reads no file; remove it")
        other = [name for name in _OF_BABILONG if self.kind != "babilong" and name in self.model_fields_set]
        if any(getattr(self, name) != type(self).model_fields[name].default for name in other):
            raise ValueError(f"data.{other[0]}: kind {self.kind} has none, only kind babilong; remove it")
        if self.kind != "world" and self.options:
            raise ValueError(f"data.options: kind {self.kind} has none, only kind world; remove them")
        if self.kind != "world" and not self.questions:
            mend = "name it with --set data.questions=FILE, or let `leret init` write a recipe for your files"
            raise ValueError(f"data.questions is missing: kind {self.kind} reads a file; {mend}")
        if self.sentences and not self.noise:
            raise ValueError("data.noise is missing: data.sentences are filled up with it; name a book, a text file")
        return self
