"""The `data` section: tasks and corpus. Kinds with the same keys share a settings class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator
from pydantic_core import PydanticKnownError

from leret.config.base import Free, KindName, KindSettings, RecipePath, Settings
from leret.core.classes import is_path

Split = Literal["train", "dev", "test", "all"]

QUESTIONS_ALONE = frozenset({"jsonl", "hover", "chunks", "episodes"})
"""Kinds with no documents in their question files, so most retrievers also need `data.corpus`."""


GENERATED = frozenset({"world", "personas"})
"""Kinds without files, written in the vocabulary of policies `demo` and `agent`."""


class DataSettings(KindSettings):
    """Keys shared by all kinds in `leret.datasets.formats.READERS`. Kinds without special keys use `FileSettings`."""

    default_kind = "jsonl"
    shelf: ClassVar[Mapping[str, str]] = {
        "babilong": "leret.extras.babilong:BABILONG",
        "dialogue": "leret.extras.dialogue:DIALOGUE",
        "medquad": "leret.extras.medquad:MEDQUAD",
        "personas": "leret.extras.personas:PERSONAS",
    }

    kind: KindName
    split: Split = Field("train", description="split to sample; `leret eval` has its own key")
    limit: Annotated[PositiveInt | None, Free()] = Field(
        None, description="maximum number of questions from the split"
    )
    part: Annotated[str | None, Free()] = Field(
        None,
        pattern=r"^\d+/\d+$",
        description="I/N: every N-th question within `limit`, starting at index I (from 0)",
    )
    gold: Literal["document", "parent"] = Field(
        "document",
        description="ids in relevant_doc_ids: documents of the corpus, or parents of its chunks",
    )
    seed: int = Field(
        0, description="seed for the split, the choice under `limit`, and the generated world"
    )
    skip_invalid: Annotated[bool, Free()] = Field(
        False, description="skip and count invalid records"
    )
    merge_questions: bool = Field(
        False, description="merge equal questions, with all their answers and gold documents"
    )

    @property
    def corpus_file(self) -> str | None:
        return None

    @field_validator("part")
    @classmethod
    def _is_a_part(cls, value: str | None) -> str | None:
        index, count = map(int, (value or "0/1").split("/"))
        if index >= count:
            raise ValueError(
                f"{value}: part {index} of {count} does not exist; parts start at 0, as in 0/{count or 2}"
            )
        return value

    @property
    def brings_documents(self) -> bool:
        """True if the question files have documents too, so that ``corpus`` is optional."""
        if is_path(self.kind) or self.kind in self.shelf:
            return bool(DataSettings.find(self.kind).brings_documents)
        return self.kind not in QUESTIONS_ALONE

    @classmethod
    def _settings(cls, name: str) -> type[Any]:
        try:
            return super()._settings(name)
        except PydanticKnownError:  # a file format, or an unknown name, which `reader_of` reports
            return FileSettings


class QuestionFiles(DataSettings):
    """Keys shared by all kinds with question files."""

    corpus: Annotated[str | None, Free(), RecipePath("corpus file")] = Field(
        None, description="path or hf:NAME"
    )
    questions: Annotated[str, Free(), RecipePath("question file")] = Field(
        description="path or hf:NAME; use --set data.questions=FILE, or write a recipe for your files with `leret init`"
    )

    @property
    def corpus_file(self) -> str | None:
        return self.corpus


class FieldSettings(Settings):
    """Columns of the user's files by leret's field name (kind jsonl). The default column is the field name."""

    id: str | None = None
    question: str | None = None
    inputs: dict[str, str] = Field(
        default_factory=dict, description="columns by input name of the program"
    )
    answer: str | None = None
    answers: str | None = None
    relevant_doc_ids: str | None = None
    relevance: str | None = None
    type: str | None = None
    hops: str | None = None
    split: str | None = None
    doc_id: str | None = None
    title: str | None = None
    text: str | None = None


class FileSettings(QuestionFiles):
    """Tasks in files, or any other kind without special keys."""

    kind: KindName = Field("jsonl", description="file format")
    fields: FieldSettings | None = None

    @model_validator(mode="after")
    def _maps_fields(self) -> Self:
        if self.kind != "jsonl" and self.fields:
            raise ValueError(
                f"data.fields applies to kind jsonl, not to {self.kind}; remove it, or change data.kind"
            )
        return self


class GeneratedSettings(DataSettings):
    """Generated data, which need no files: questions about a world, or dialogues with personas and stories."""

    kind: Literal["world", "personas"] = "world"
    options: dict[str, Any] = Field(default_factory=dict, description="arguments for the generator")
