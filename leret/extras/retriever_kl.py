"""KL training of a retriever: the softmax of its scores moves towards that of documents' rewards.

The rows need no gold documents: a document's score is the mean reward of the samples that found it.
Models are dense or multi-vector models of sentence-transformers, trained by that library's trainer
and KL loss. REPLUG (arXiv 2301.12652) and LAPDOG (arXiv 2406.18847) train retrievers with such a
loss.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from leret.config.load import sampling_recipe_of
from leret.config.retriever import DenseSettings, HybridSettings, RetrieverSettings
from leret.config.training import TrainingRecipe
from leret.core.bundled import find_model, model_digest
from leret.core.errors import RunError, TrainingError, import_optional
from leret.core.runs import Run
from leret.core.types import Document, Sample
from leret.extras.colbert import ColbertSettings, is_multi_vector
from leret.retrieval.base import to_valid_utf8
from leret.retrieval.engines.dense import open_model
from leret.rollouts.credit import training_rewards
from leret.rollouts.environment import Environment
from leret.training.data import RunSamples, TrainingExample
from leret.training.model import InitialPolicy, SavedPolicy, training_record
from leret.training.stored.trainer import TrainerInputs, TRLEngine, trainer_arguments

if TYPE_CHECKING:
    from leret.training.driver import Engine
    from leret.training.job import TrainingJob

ROW_COLUMNS = {
    "question_id": "string",
    "predictor": "string",
    "query": "string",
    "doc_ids": "strings",
    "documents": "strings",
    "scores": "floats",
}
"""Columns of `retriever_rows`."""

_MIN_SPREAD = 1e-9
# key with the model
_KEYS: dict[type, str] = {DenseSettings: "model", ColbertSettings: "checkpoint"}


class RetrieverKLRecipe(TrainingRecipe):
    """KL training of a dense or multi-vector retriever."""

    folder = "retrievers"
    in_one_process = True
    trains = "a retriever"

    algorithm: Literal["retriever-kl"] = "retriever-kl"
    init_from: str = Field(
        "base",
        description="base (the run's retriever), a trained retriever, a directory, or a hub name",
    )
    num_documents: int = Field(
        8, ge=2, description="documents per row; a short row gets documents of other rows"
    )
    temperature: float | None = Field(
        None,
        gt=0,
        description="divides the model's scores; None: 0.05 for dense, 1 for multi-vector models",
    )
    reward_temperature: float = Field(0.1, gt=0, description="divides the rewards")
    max_length: PositiveInt | None = Field(
        None, description="tokens of a text in training; None: the model's limit"
    )
    learning_rate: float = Field(2e-5, gt=0)
    gradient_accumulation_steps: PositiveInt = Field(1, description="batches per step")

    def with_predictors(self, picks: Sequence[str], writers: Sequence[str]) -> Self:
        """Return the recipe itself: a retriever learns from the samples of all predictors."""
        return self

    @property
    def is_control(self) -> bool:
        return True  # no later round starts from a retriever

    def n_steps(self, n_inputs: int) -> int:
        per_step = self.per_device_train_batch_size * self.gradient_accumulation_steps
        batches = -(-n_inputs // per_step)
        return self.max_steps or max(1, round(batches * self.num_train_epochs))

    @model_validator(mode="after")
    def _has_no_validation(self) -> Self:
        if self.eval_steps is not None:
            raise ValueError(
                "retriever-kl has no validation; remove eval_steps, and compare with "
                "`leret search INDEX --questions FILE`"
            )
        return self


def document_scores(samples: Sequence[Sample], unparsed_reward: float | None) -> dict[str, float]:
    """Return the mean reward of the samples that found each document, if not all found it."""
    scored = training_rewards(samples, unparsed_reward)
    rewards = defaultdict(list)
    for sample in scored:
        for doc_id in dict.fromkeys(sample.doc_ids):
            rewards[doc_id].append(sample.reward or 0.0)
    return {
        doc_id: fmean(values) for doc_id, values in rewards.items() if len(values) < len(scored)
    }


def retriever_rows(
    run: Run,
    environment: Environment,
    predictors: Sequence[str] | None = None,
    settings: Any = None,
) -> Iterator[dict[str, Any]]:
    """Yield the question, documents and scores of each state with documents of different scores.

    ``settings`` (of kind dense or colbert) add the prefixes and the separator that an index adds to
    the texts.

    Raises:
        RunError: a question or document of the samples is not in the run's data.
    """
    tasks = {task.id: task for task in environment.tasks(check=False)}
    samples = RunSamples(run, predictors)
    corpus = environment.corpus
    unparsed_reward = samples.unparsed_reward
    for group in samples.groups():
        scores = document_scores(group.samples, unparsed_reward)
        if len(scores) < 2 or max(scores.values()) - min(scores.values()) < _MIN_SPREAD:
            continue
        task = tasks.get(group.state.task_id)
        unknown = [doc_id for doc_id in scores if doc_id not in corpus]
        if task is None or unknown:
            what = f"document {unknown[0]!r}" if unknown else f"question {group.state.task_id}"
            raise RunError(
                f"{what} was sampled but is not in the run's data; set data.corpus and "
                "data.questions"
            )
        best = sorted(scores, key=lambda doc_id: (-scores[doc_id], doc_id))
        yield {
            "question_id": task.id,
            "predictor": group.state.predictor,
            "query": getattr(settings, "query_prefix", "") + to_valid_utf8(task.text),
            "doc_ids": best,
            "documents": [_text(corpus[doc_id], settings) for doc_id in best],
            "scores": [scores[doc_id] for doc_id in best],
        }


def _text(document: Document, settings: Any) -> str:
    title = f"{document.title}{getattr(settings, 'separator', '. ')}" if document.title else ""
    return to_valid_utf8(f"{getattr(settings, 'document_prefix', '')}{title}{document.text}")


def examples(recipe: RetrieverKLRecipe, rows: Sequence[Mapping[str, Any]]) -> list[TrainingExample]:
    """Return rows of ``num_documents`` documents each.

    ``completions`` are the documents, ``scores`` their scores.

    A row that is too long keeps its best documents as one half, and a random choice of the others.
    A short row gets random documents of other questions, with its lowest score.
    """
    rng = random.Random(recipe.seed)
    n = recipe.num_documents
    texts_by_id: dict[str, str] = {}
    for row in rows:
        texts_by_id |= zip(row["doc_ids"], row["documents"], strict=True)
    pool = sorted(texts_by_id.items())
    result = []
    for row in rows:
        scored = list(zip(row["documents"], row["scores"], strict=True))
        if len(scored) > n:
            middle = n // 2
            scored = scored[:middle] + rng.sample(scored[middle:], n - middle)
        if len(scored) < n:
            candidates = rng.sample(pool, min(len(pool), 2 * n))
            texts = [text for doc_id, text in candidates if doc_id not in row["doc_ids"]]
            lowest = row["scores"][-1]
            scored += [(text, lowest) for text in texts[: n - len(scored)]]
        if len(scored) == n:
            documents, scores = zip(*scored, strict=True)
            prompt = ({"role": "user", "content": row["query"]},)
            result.append(TrainingExample(row["question_id"], prompt, documents, scores))
    return result


@dataclass(frozen=True, slots=True)
class RetrieverAlgorithm:
    """An algorithm that trains a retriever on rows of the run's samples."""

    settings: type[RetrieverKLRecipe] = RetrieverKLRecipe

    is_online: ClassVar[bool] = False
    row_columns: ClassVar[dict[str, str]] = ROW_COLUMNS
    rows = staticmethod(retriever_rows)

    def describe(self, recipe: Any) -> str:
        return "KL divergence between the softmax of its scores and the softmax of the documents' mean rewards"

    def find_initial(self, run: Run, recipe: Any) -> InitialPolicy:
        trained = run.path / recipe.folder / recipe.init_from
        if (trained / "training.json").is_file():
            directory = trained
        elif recipe.init_from == "base":
            settings = next(_models_of(sampling_recipe_of(run).retriever), None)
            if settings is None:
                raise TrainingError(
                    f"{run.path} was sampled without a dense or colbert retriever; set init_from "
                    "to a model directory"
                )
            if isinstance(settings, DenseSettings) and settings.query_model:
                raise TrainingError(
                    "retriever.query_model: retriever-kl trains one model; set init_from"
                )
            directory = find_model(getattr(settings, _KEYS[type(settings)]), "retriever")
        else:
            directory = find_model(recipe.init_from, "init_from")
        total = int(training_record(directory).get("total_steps", 0))
        return InitialPolicy(recipe.init_from, directory, model_digest(directory), total)

    def inputs(self, recipe: Any, run: Run) -> list[TrainingExample]:
        directory = self.find_initial(run, recipe).directory
        kind = ColbertSettings if is_multi_vector(directory) else DenseSettings
        models = _models_of(sampling_recipe_of(run).retriever)
        settings = next((model for model in models if isinstance(model, kind)), None)
        if settings is None:
            settings = kind.model_validate({_KEYS[kind]: str(directory)})
        with Environment.open(run) as data:
            rows = list(retriever_rows(run, data, recipe.predictors, settings))
        targets = examples(recipe, rows)
        if not targets:
            raise TrainingError(
                f"the run has no rows for retriever-kl: {len(rows)} states have documents with "
                f"different rewards, and num_documents is {recipe.num_documents}; sample more "
                "questions, or more samples per state"
            )
        return targets

    @contextmanager
    def engine(self, job: TrainingJob, device: str) -> Iterator[Engine]:
        yield RetrieverEngine(make_trainer(job, device), None, job, len(job.inputs))


class RetrieverEngine(TRLEngine):
    """Engine that wraps a trainer of sentence-transformers, whose model saves its own tokenizer."""

    def save(self, directory: Path) -> SavedPolicy:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        model.save_pretrained(str(directory), create_model_card=False)
        return SavedPolicy(
            self.base_model,
            "sentence-transformers",
            noun="retriever",
            use="`retriever: {kind: dense, model: DIRECTORY}` opens it, or `{kind: colbert, "
            "checkpoint: DIRECTORY}` for token vectors.",
            pipeline="sentence-similarity",
            tag="retriever",
        )


def make_trainer(job: TrainingJob, device: str) -> Any:
    """Return sentence-transformers' trainer for dense or for multi-vector models."""
    library = import_optional("sentence_transformers", "sentence-transformers", "dense")
    from datasets import Dataset
    from sentence_transformers.multi_vector_encoder.losses import MultiVectorDistillKLDivLoss
    from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss

    recipe: Any = job.recipe
    name = "MultiVectorEncoder" if is_multi_vector(job.initial.directory) else "SentenceTransformer"
    model = open_model(name, job.initial.directory, device, "dense")
    inputs = TrainerInputs(model, None, (), job.directory.path, device, recipe.max_steps)
    arguments = trainer_arguments(recipe, inputs)
    columns = _columns(job.inputs, recipe, model.tokenizer)
    temperatures = {
        "student_temperature": recipe.temperature,
        "teacher_temperature": recipe.reward_temperature,
    }
    if name == "SentenceTransformer":
        temperatures["student_temperature"] = recipe.temperature or 0.05
        loss = DistillKLDivLoss(model, library.util.pairwise_cos_sim, **temperatures)
    else:
        temperatures["student_temperature"] = recipe.temperature or 1.0
        loss = MultiVectorDistillKLDivLoss(model, **temperatures)
        prompts = {}
        for column in columns:
            prompt = model.prompts["query" if column == "query" else "document"]
            if prompt and column != "label":
                prompts[column] = prompt
        arguments["prompts"] = prompts
    kind = getattr(library, f"{name}Trainer")
    # The callback for sentence-transformers' model card computes embeddings; leret writes another card.
    kind = type(kind.__name__, (kind,), {"add_model_card_callback": lambda *_: None})
    arguments = getattr(library, f"{name}TrainingArguments")(**arguments)
    return kind(model=model, args=arguments, train_dataset=Dataset.from_dict(columns), loss=loss)


def _columns(rows: Any, recipe: RetrieverKLRecipe, tokenizer: Any) -> dict[str, list[Any]]:
    """Return the columns that the losses of sentence-transformers take."""
    columns = {"query": [row.prompt[0]["content"] for row in rows]}
    for i in range(recipe.num_documents):
        columns[f"document_{i}"] = [row.completions[i] for row in rows]
    if recipe.max_length is not None:
        for name, texts in columns.items():
            columns[name] = _shorten(tokenizer, texts, recipe.max_length)
    columns["label"] = [list(row.scores) for row in rows]
    return columns


def _shorten(tokenizer: Any, texts: list[str], max_length: int) -> list[str]:
    """Shorten the texts, because a lower limit of the model would be saved with the model."""
    encoded = tokenizer(texts, truncation=True, max_length=max_length, return_offsets_mapping=True)
    shortened = []
    for text, offsets in zip(texts, encoded["offset_mapping"], strict=True):
        end = max(end for _, end in offsets)
        shortened.append(text[:end])
    return shortened


def _models_of(settings: RetrieverSettings) -> Iterator[DenseSettings | ColbertSettings]:
    """Yield the settings of a retriever, or of a hybrid's engines, that name a trainable model."""
    engines = settings.engines if isinstance(settings, HybridSettings) else (settings,)
    for engine in engines:
        if isinstance(engine, DenseSettings | ColbertSettings):
            yield engine


RETRIEVER_KL = RetrieverAlgorithm()
