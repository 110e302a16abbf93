"""Rewards that compare a program's answer with the task's reference answers. All are at most 1.

Higher is better.

The answer is the prediction's field ``answer`` (or ``field`` in the recipe), or else the
prediction's only string. With several references, the best match counts. The value is None if the
task has no reference answers or the program has not ended, and 0 if the program ended without an
answer.

`em` and `f1` normalise like the official scripts of SQuAD, HotpotQA, MuSiQue and 2WikiMultihopQA:
lower case, no punctuation, no articles, single spaces. `parlai_f1` normalises like ParlAI
(ConvAI2): punctuation becomes a space.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from leret.core.bundled import MINILM, minilm_directory
from leret.core.errors import ConfigError, import_optional
from leret.core.types import Outcome
from leret.rewards.corpus import ngrams, word_counts

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_TO_SPACES = str.maketrans(dict.fromkeys(string.punctuation, " "))
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_YES_NO = {"yes", "no", "noanswer"}
# group 1: not supported
_VERDICT = re.compile(
    r"\b(?:((?:can)?not (?:\w+ )?(?:support(?:ed)?|true)|unsupported|refute[sd]?|contradict(?:s|ed)?|false|no|nei"
    r"|(?:not enough|insufficient) (?:info|information|evidence))|support(?:s|ed)?|true|yes)\b"
)


def normalised(text: str) -> str:
    """Normalise an answer like the official scripts.

    >>> normalised("The  Beatles!")
    'beatles'

    Source: SQuAD 1.1's evaluation script; HotpotQA, MuSiQue and 2WikiMultihopQA do the same.
    """
    return " ".join(_words(text, _PUNCTUATION))


def _words(text: str, table: Mapping[int, Any]) -> list[str]:
    without_punctuation = text.lower().translate(table)
    return _ARTICLES.sub(" ", without_punctuation).split()


def token_f1(answer: str, reference: str, yes_no: bool = True) -> float:
    """Return the harmonic mean of precision and recall of words, counting repeated words.

    >>> round(token_f1("the film Ed Wood", "Ed Wood"), 2)
    0.8

    With ``yes_no``, the answers yes, no and noanswer must match exactly, as in the scripts of
    HotpotQA and 2WikiMultihopQA; SQuAD and MuSiQue have no such rule. An empty text only matches an
    empty text (SQuAD 2.0, MuSiQue).
    """
    answer = normalised(answer)
    reference = normalised(reference)
    if answer == reference:
        return 1.0
    if yes_no and (answer in _YES_NO or reference in _YES_NO):
        return 0.0
    return _overlap(answer.split(), reference.split())


def _overlap(words: list[str], reference_words: list[str]) -> float:
    n_common = (Counter(words) & Counter(reference_words)).total()
    if n_common == 0:
        return 0.0
    return 2 * n_common / (len(words) + len(reference_words))


def parlai_token_f1(answer: str, reference: str) -> float:
    """Return the F1 of ParlAI and of the ConvAI2 challenge; 0 if the texts share no word.

    >>> round(parlai_token_f1("it's a well-known film", "a film, well known"), 2)
    0.75
    """
    return _overlap(_words(answer, _TO_SPACES), _words(reference, _TO_SPACES))


def answer_of(outcome: Outcome, field: str | None = None) -> str | None:
    """Return the program's answer: None before the end, empty if it ended without an answer."""
    prediction: Any = outcome.prediction
    if prediction is None or isinstance(prediction, str):
        return prediction
    values = _fields(prediction)
    default: Any = ""
    if field is None:
        texts = [value for value in values.values() if isinstance(value, str)]
        if len(texts) == 1:
            default = texts[0]
    answer = values.get(field or "answer", default)
    return "" if answer is None else str(answer)


def answer_texts(prediction: Any) -> str | dict[str, str] | None:
    """Return the texts in a program's return value, by field, or its text if it is one.

    Answers are read from these.

    None if there are none, because the program has not ended or only returned documents.
    """
    if prediction is None or isinstance(prediction, str):
        return prediction
    values = _fields(prediction)
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    answer = values.get("answer")
    if isinstance(answer, int | float):
        texts["answer"] = str(answer)
    return texts or None


def _fields(prediction: Any) -> dict[str, Any]:
    if hasattr(prediction, "items"):
        return dict(prediction.items())
    return dict(vars(prediction))


def em(outcome: Outcome, field: str | None = None) -> float | None:
    """Return 1 if the answer equals a reference after normalisation, else 0."""

    def compare(answer: str, reference: str) -> float:
        return float(normalised(answer) == normalised(reference))

    return _best(outcome, field, compare)


def f1(outcome: Outcome, field: str | None = None) -> float | None:
    """Return `token_f1` with the best reference, as in HotpotQA and 2WikiMultihopQA."""
    return _best(outcome, field, token_f1)


def squad_f1(outcome: Outcome, field: str | None = None) -> float | None:
    """Return `f1` without the rule for yes and no, as in SQuAD and MuSiQue."""
    return _best(outcome, field, partial(token_f1, yes_no=False))


def parlai_f1(outcome: Outcome, field: str | None = None) -> float | None:
    """Return `parlai_token_f1` with the best reference."""
    return _best(outcome, field, parlai_token_f1)


def babi_em(outcome: Outcome, field: str | None = None) -> float | None:
    """Return 1 if the answer has a reference's words in order, ignoring case and commas, else 0."""
    words = re.compile(r"\w+").findall

    def compare(answer: str, reference: str) -> float:
        return float(words(answer.lower()) == words(reference.lower()))

    return _best(outcome, field, compare)


def verdict(outcome: Outcome, field: str | None = None) -> float | None:
    """Return 1 if the first verdict in the answer is the reference's, else 0.

    None if no reference is a verdict.

    The verdicts are HoVer's two. The labels of FEVER and SciFact, and true, false, yes and no,
    count as one of them.
    """
    answer = answer_of(outcome, field)
    if answer is None:
        return None
    matches = [_VERDICT.fullmatch(_plain(reference)) for reference in outcome.task.answers]
    gold = {match[1] is None for match in matches if match is not None}
    if not gold:
        return None
    stated = _VERDICT.search(_plain(answer))
    if stated is None:
        return 0.0
    supported = stated[1] is None
    return float(supported in gold)


def _plain(text: str) -> str:
    text = re.sub("n['’]t", " not", text.lower())
    return re.sub(r"[\W_]+", " ", text).strip()


def rouge(kind: str) -> Callable[..., float | None]:
    """Return the reward function for F of ``rouge1``, ``rouge2`` or ``rougeL``.

    Its setting ``stem`` compares stems.
    """

    def value(outcome: Outcome, field: str | None = None, stem: bool = False) -> float | None:
        def compare(answer: str, reference: str) -> float:
            scores = _rouge_scorer(kind, stem).score(reference, answer)
            return float(scores[kind].fmeasure)

        return _best(outcome, field, compare)

    return value


def bleu(outcome: Outcome, field: str | None = None) -> float | None:
    """Return sacrebleu's smoothed sentence BLEU against all references, scaled to [0, 1]."""

    def score(answer: str, references: Sequence[str]) -> float:
        library = import_optional("sacrebleu", "sacrebleu", "answers")
        percent = float(library.sentence_bleu(answer, list(references)).score)
        return min(1.0, percent / 100)  # sacrebleu may return 100.00000000000004

    return _scored(outcome, field, score)


def similarity(outcome: Outcome, model: str, field: str | None = None) -> float | None:
    """Return the cosine similarity of the answer's embedding to the nearest reference's.

    ``model`` is a sentence-transformers directory, a name on the Hugging Face Hub, or
    `leret.core.bundled.MINILM`. It runs on the CPU.
    """

    def score(answer: str, references: Sequence[str]) -> float:
        if not answer.strip():
            return 0.0
        vector, *reference_vectors = _embeddings(model, (answer, *references))
        return float(max(np.array(reference_vectors) @ vector))

    return _scored(outcome, field, score)


def length(outcome: Outcome, s: float = 1.0, field: str | None = None) -> float | None:
    """Return exp(-s |1 - ratio|), where ratio is answer / reference length, in words.

    If ratio < 1, 2s replaces s. With several references, the maximum counts. Source: LAPDOG's
    length penalty.
    """

    def compare(answer: str, reference: str) -> float:
        ratio = len(answer.split()) / max(1, len(reference.split()))
        slope = 2 * s if ratio < 1 else s
        return math.exp(-slope * abs(1 - ratio))

    def score(answer: str, references: Sequence[str]) -> float:
        return max(compare(answer, reference) for reference in references)

    return _scored(outcome, field, score)


def length_ratio(outcome: Outcome, field: str | None = None) -> float | None:
    """Return the answer's number of words divided by the closest number of a reference."""

    def score(answer: str, references: Sequence[str]) -> float:
        n, n_reference = word_counts(answer, references)
        return n / max(1, n_reference)

    return _scored(outcome, field, score)


def distinct(n: int) -> Callable[..., float | None]:
    """Return a reward function: the share of different n-grams among all n-grams of an answer.

    0 if it has none.
    """

    def value(outcome: Outcome, field: str | None = None) -> float | None:
        answer = answer_of(outcome, field)
        if answer is None:
            return None
        grams = ngrams(answer, n)
        return len(set(grams)) / max(1, len(grams))

    return value


def _best(
    outcome: Outcome, field: str | None, compare: Callable[[str, str], float]
) -> float | None:
    def score(answer: str, references: Sequence[str]) -> float:
        if not answer.strip():
            return 0.0
        return max(compare(answer, reference) for reference in references)

    return _scored(outcome, field, score)


def _scored(
    outcome: Outcome, field: str | None, score: Callable[[str, Sequence[str]], float]
) -> float | None:
    answer = answer_of(outcome, field)
    references = outcome.task.answers
    if answer is None or not references:
        return None
    return score(answer, references)


@lru_cache
def _rouge_scorer(kind: str, stem: bool) -> Any:
    library = import_optional("rouge_score.rouge_scorer", "rouge-score", "answers")
    return library.RougeScorer([kind], use_stemmer=stem)


@lru_cache(maxsize=4096)
def _embeddings(model: str, texts: Sequence[str]) -> list[list[float]]:
    vectors = _encoder(model).encode(list(texts), normalize_embeddings=True)
    rows: list[list[float]] = vectors.tolist()
    return rows


@lru_cache(maxsize=2)
def _encoder(model: str) -> Any:
    library = import_optional("sentence_transformers", "sentence-transformers", "dense")
    path = str(minilm_directory()) if model == MINILM else model
    try:
        return library.SentenceTransformer(path, device="cpu")
    except (OSError, ValueError) as error:
        fault = f"model {model!r} cannot be loaded ({error})"
        raise ConfigError(f"similarity: {fault}; choose another model") from error


ANSWERS: Mapping[str, Callable[..., float | None]] = {
    "em": em,
    "f1": f1,
    "squad_f1": squad_f1,
    "parlai_f1": parlai_f1,
    "babi_em": babi_em,
    "verdict": verdict,
    "rouge1": rouge("rouge1"),
    "rouge2": rouge("rouge2"),
    "rougeL": rouge("rougeL"),
    "bleu": bleu,
    "sentence_bleu": bleu,
    "similarity": similarity,
    "length": length,
    "length_ratio": length_ratio,
    "corpus_length_ratio": length_ratio,
    "distinct1": distinct(1),
    "distinct2": distinct(2),
}
