"""Embedding pickers: Q(s, a) is the similarity of the state's and the candidate's embeddings.

Source: Q-RAG, arXiv 2511.07328.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from leret.config.policy import EncoderSettings
from leret.core.errors import PolicyError, import_optional, reason
from leret.core.types import STOP, Candidate, Choice, SharedInstance
from leret.policies.checkpoints import find_model, pick_device

Array = NDArray[np.float64]

_SEPARATOR = ". "  # between a candidate's title and text, like `DenseSettings.separator`
_CHUNK_TEXTS = 128
_CHUNK_NUMBERS = 2**19
"""Floats per batch of inner products without gradients, to fit a core's cache."""

_CACHE_BYTES = 2**28
_CACHE_TEXTS = 2**16
"""Maximum number of texts with cached token ids; the cache is emptied when full."""

_BASE = 1000.0
"""Base of the rotation speeds: the slowest plane turns once per about 6,000 positions."""

_SCRATCH_TOKENS = 256
_SPECIALS = ("[PAD]", "[UNK]", "[SEP]")
_HEAD = 32


class EncoderQ:
    """Q-function of kind ``encoder``, with one encoder for states and one for candidates."""

    module: nn.ModuleDict

    def __init__(self, settings: EncoderSettings) -> None:
        self.settings = settings
        if settings.model != "scratch":
            directory = find_model(settings.model)
            self._take([_load(directory), _load(directory)])
        else:
            import_optional("sentence_transformers", "sentence-transformers", "dense")

    def fit(self, choices: Sequence[Choice]) -> None:
        """Create untrained encoders, with a vocabulary of the words in these choices."""
        texts = []
        for choice in choices:
            texts.append(self._state(choice, " "))
            texts += self._actions([choice])
        seed = self.settings.seed
        self._take([scratch_encoder(texts, self.settings, seed + i) for i in range(2)])

    def q(
        self, choices: Sequence[Choice], only: Sequence[int] | None = None, cached: bool = False
    ) -> Tensor:
        texts = self._actions(choices)
        positions = positions_of(choices, self.settings.positions)
        state_texts = [self._state(choice, self._separator) for choice in choices]
        states, state_rows = self._embed_states(state_texts)
        sizes = torch.tensor([len(choice.candidates) for choice in choices])
        state_rows = state_rows.repeat_interleave(sizes)
        if only is not None:
            texts = [texts[i] for i in only]
            state_rows = state_rows[only]
            positions = positions[only]
        embeddings, rows = self._embed_actions(texts, cached)
        n = len(rows) if torch.is_grad_enabled() else max(1, _CHUNK_NUMBERS // states.shape[1])
        values: list[Tensor] = []
        for start in range(0, len(rows), n):
            part = slice(start, start + n)
            part_states = states if len(states) == 1 else states[state_rows[part]]
            actions = _take_rows(embeddings, rows[part])
            at = None if self.settings.positions == "none" else positions[part]
            values.append(rotated_products(part_states, actions, at))
        similarity = torch.cat(values, dim=1)
        if self.settings.similarity == "cosine":  # the embeddings have length 1
            similarity = similarity * math.sqrt(states.shape[1])
        if not self.settings.score_weight:
            return similarity
        scores = standard_scores(choices)
        if only is not None:
            scores = scores[only]
        return similarity + self.settings.score_weight * scores.to(similarity.device)

    def renew(self) -> None:
        self._embed_actions.renew()

    def save(self, directory: Path) -> dict[str, Any]:
        for name, encoder in self.module.items():
            encoder.save_pretrained(str(directory / name), create_model_card=False)  # type: ignore[operator]
        return {}

    def load(self, directory: Path, record: dict[str, Any]) -> None:
        self._take([_load(directory / name) for name in ("state", "action")])

    def _take(self, encoders: Sequence[Any]) -> None:
        settings = self.settings
        normalize = settings.similarity == "cosine"
        state = _normalized(encoders[0], normalize)
        action = _normalized(encoders[1], normalize)
        device = pick_device(settings.device)
        self.module = nn.ModuleDict({"state": state, "action": action}).to(device).eval()
        self._embed_states = Embedder(state, settings.max_length)
        self._embed_actions = Embedder(action, settings.max_length)
        self._separator = f" {state.tokenizer.sep_token or ''} "

    def _state(self, choice: Choice, separator: str) -> str:
        context = " ".join(value for value in choice.context.values() if isinstance(value, str))
        picked = list(choice.picked)
        have_positions = all(candidate.position is not None for candidate in picked)
        if self.settings.order == "document" and have_positions:
            picked.sort(key=lambda candidate: candidate.position or 0)
        texts = [context, *map(_text, picked)]
        return self.settings.query_prefix + separator.join(texts)

    def _actions(self, choices: Sequence[Choice]) -> list[str]:
        prefix = self.settings.document_prefix
        texts = []
        for choice in choices:
            for candidate in choice.candidates:
                has_only_text = candidate.text and not candidate.title
                text = candidate.text if has_only_text else _text(candidate)
                texts.append(prefix + text)
        return texts


def _take_rows(embeddings: Tensor, rows: Tensor) -> Tensor:
    """Return rows of the embeddings; successive rows (a document) as a slice, uncopied."""
    if bool((rows.diff() == 1).all()):
        return embeddings[rows[0] : rows[-1] + 1]
    return embeddings[rows]


class Embedder:
    """Computes embeddings with a sentence-transformers model, with gradients if enabled."""

    def __init__(self, model: Any, max_length: int | None) -> None:
        self._model = model
        self._ids = TokenIds(model, max_length)
        self.renew()

    def renew(self) -> None:
        self._rows: dict[str, int] = {}
        self._cache: Tensor | None = None

    def __call__(self, texts: Sequence[str], cached: bool = False) -> tuple[Tensor, Tensor]:
        """Return the embeddings of the distinct texts, (n, d), and each text's row, (n_texts,).

        With ``cached``, new texts are added to the cache, and all embeddings in the cache are
        returned.
        """
        row_of: dict[str, int] = {}
        embeddings: Tensor | None = None
        if cached and (self._cache is None or self._cache.nbytes <= _CACHE_BYTES):
            row_of = self._rows
            embeddings = self._cache
        new = list(dict.fromkeys(text for text in texts if text not in row_of))
        if embeddings is None or new:
            added = self._embed(self._ids(new))
            embeddings = added if embeddings is None else torch.cat([embeddings, added])
            for text in new:
                row_of[text] = len(row_of)
        if cached:
            self._rows = row_of
            self._cache = embeddings
        rows = np.array([row_of[text] for text in texts])
        return embeddings, torch.from_numpy(rows)

    def _embed(self, ids: Sequence[Sequence[int]]) -> Tensor:
        order = np.argsort([len(text) for text in ids], kind="stable")
        parts = []
        for start in range(0, len(ids), _CHUNK_TEXTS):
            chunk = order[start : start + _CHUNK_TEXTS]
            parts.append(self._embed_chunk([ids[i] for i in chunk]))
        return torch.cat(parts)[torch.from_numpy(order).argsort()]

    def _embed_chunk(self, ids: Sequence[Sequence[int]]) -> Tensor:
        lengths = [len(text) for text in ids]
        width = max(lengths)
        pad = self._model.tokenizer.pad_token_id
        padded = torch.tensor([[*text, *[pad] * (width - len(text))] for text in ids])
        mask = torch.arange(width) < torch.tensor(lengths)[:, None]
        device = self._model.device
        inputs = {"input_ids": padded.to(device), "attention_mask": mask.long().to(device)}
        output = self._model(inputs)
        embeddings: Tensor = output["sentence_embedding"].float()
        return embeddings


class TokenIds(SharedInstance):
    """Cache of token ids by text.

    In training, the network and its target network read each text many times.
    """

    def __init__(self, model: Any, max_length: int | None) -> None:
        limits = (max_length or 2**20, model.max_seq_length or 2**20)
        self._tokenizer = deepcopy(model.tokenizer.backend_tokenizer)
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(min(limits))
        self._ids: dict[str, list[int]] = {}

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        ids = self._ids if len(self._ids) < _CACHE_TEXTS else {}
        new = [text for text in texts if text not in ids]
        encodings = self._tokenizer.encode_batch_fast(new)
        for text, encoding in zip(new, encodings, strict=True):
            ids[text] = encoding.ids
        self._ids = ids
        return [ids[text] for text in texts]


def positions_of(choices: Sequence[Choice], kind: str) -> Tensor:
    """Return the positions of all choices' candidates, (n,) float32.

    0 for candidates without a position.

    Absolute positions are positions in the document. Relative positions depend on the sorted
    positions b_1, b_2, ... of the picked chunks: position i between b_j and b_{j+1} becomes 10 j +
    9 (i - b_j) / (b_{j+1} - b_j). Here b_0 is -1, and the last b is the largest position + 1.

    Source: relative positional encoding of Q-RAG, arXiv 2511.07328, section 3.
    """
    parts = []
    for choice in choices:
        # None becomes NaN.
        positions = np.array([chunk.position for chunk in choice.candidates], np.float64)
        if kind == "relative":
            positions = _relative(positions, choice.picked)
        parts.append(positions)
    numbers = np.nan_to_num(np.concatenate(parts))
    return torch.from_numpy(numbers.astype(np.float32))


def _relative(positions: Array, picked: Sequence[Candidate]) -> Array:
    bounds = sorted(chunk.position for chunk in picked if chunk.position is not None)
    last = np.fmax.reduce(positions, initial=max(bounds, default=-1.0))
    ends = np.array([-1.0, *bounds, last + 1])
    j = np.searchsorted(np.array(bounds), positions, side="right")
    lengths = ends[j + 1] - ends[j]
    relative: Array = 10 * j + 9 * (positions - ends[j]) / lengths
    return relative


def rotated_products(states: Tensor, actions: Tensor, positions: Tensor | None) -> Tensor:
    """Return inner products of states and rotated actions, divided by sqrt(d), for two heads.

    A vector has shape (2, 2, d / 4): coordinates of a plane, heads, planes. Each plane rotates at a
    different speed, and speeds alternate between the heads. Each head's product is doubled, so that
    their mean is the full product.

    Args:
        states: (n, d), d a multiple of 4; (1, d) is one state for all actions.
        actions: (n, d).
        positions: (n,); None means no rotation.

    Returns:
        (2, n).

    Source: rotary position embedding, arXiv 2104.09864, equation 34.
    """
    d = actions.shape[1]
    x, y = states.reshape(-1, 2, 2, d // 4).unbind(1)
    u, v = actions.reshape(-1, 2, 2, d // 4).unbind(1)
    if positions is not None:  # rotating the state backwards equals rotating the action
        planes = torch.arange(d // 2, device=actions.device).reshape(d // 4, 2).T
        speeds = torch.exp(planes * (-math.log(_BASE) / (d // 2)))
        angles = positions[:, None, None].to(actions.device) * speeds
        cos = angles.cos()
        sin = angles.sin()
        rotated_x = torch.addcmul(x * cos, y, sin)
        y = torch.addcmul(y * cos, x, sin, value=-1)
        x = rotated_x
    products: Tensor = torch.linalg.vecdot(x, u) + torch.linalg.vecdot(y, v)
    return products.T * (2 / math.sqrt(d))


def standard_scores(choices: Sequence[Choice]) -> Tensor:
    """Return all candidates' retriever scores, standardised within each choice, (n,) float32.

    0 for `STOP`.
    """
    parts: list[Any] = []
    for choice in choices:
        candidates = [candidate for candidate in choice.candidates if candidate != STOP]
        scores = [candidate.data.get("score", math.nan) for candidate in candidates]
        if not all(isinstance(score, int | float) and math.isfinite(score) for score in scores):
            raise PolicyError(
                f"policy.score_weight: a candidate of {choice.predictor} has no number "
                "data['score']; pass passages of a search, or set score_weight: 0"
            )
        values = np.array(scores, np.float64)
        parts.append((values - values.mean()) / (values.std() or 1))
        n_stops = len(choice.candidates) - len(candidates)  # `STOP` is last
        parts.append(np.zeros(n_stops))
    return torch.from_numpy(np.concatenate(parts).astype(np.float32))


def _text(candidate: Candidate) -> str:
    if candidate == STOP:
        return candidate.id
    if candidate.title:
        return f"{candidate.title}{_SEPARATOR}{candidate.text}"
    return candidate.text


def _load(directory: Path) -> Any:
    """Load a sentence-transformers model."""
    from transformers.utils import logging

    library = import_optional("sentence_transformers", "sentence-transformers", "dense")
    logging.disable_progress_bar()
    try:
        model = library.SentenceTransformer(str(directory), device="cpu", local_files_only=True)
    except (
        OSError,
        ValueError,
        RuntimeError,
        LookupError,
        TypeError,
        AttributeError,
        ImportError,
    ) as error:
        fault = f"sentence-transformers cannot load {directory} ({reason(error)})"
        raise PolicyError(f"policy.model: {fault}") from error
    return model.float()


def _normalized(model: Any, normalize: bool) -> Any:
    """Add or remove a model's normalization layer.

    Inner products of unit vectors are at most 1 / sqrt(d).
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize

    modules = [module for module in model if not isinstance(module, Normalize)]
    if normalize:
        modules.append(Normalize())
    return SentenceTransformer(modules=modules, device="cpu")


def scratch_encoder(texts: Iterable[str], settings: EncoderSettings, seed: int) -> Any:
    """Return a sentence-transformers model with random weights and a vocabulary of the texts.

    Words are in lower case. The vocabulary has at most ``vocab_size`` entries: the most frequent
    words that occur at least twice.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
    from transformers import DistilBertConfig, DistilBertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = _tokenizer(texts, settings.vocab_size)
    size = settings.hidden_size
    config = DistilBertConfig(
        vocab_size=len(tokenizer),
        dim=size,
        n_layers=settings.num_hidden_layers,
        n_heads=max(1, size // _HEAD),
        hidden_dim=2 * size,
        dropout=0.0,
        attention_dropout=0.0,
        max_position_embeddings=_SCRATCH_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        # sentence-transformers loads modules from directories.
        DistilBertModel(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        transformer = Transformer(folder)
        pooling = Pooling(size, "mean")
        dense = Dense(size, size, activation_function=nn.Identity())
        return SentenceTransformer(modules=[transformer, pooling, dense], device="cpu")


def _tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    from tokenizers import (
        Regex,
        Tokenizer,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+"), behavior="removed", invert=True)
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=list(_SPECIALS), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    # End each text with [SEP], so that a text without words has a token.
    backend.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", special_tokens=[("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=_SCRATCH_TOKENS,
    )
