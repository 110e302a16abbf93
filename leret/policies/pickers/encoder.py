"""Pickers that compare embeddings: Q(s, a) is the inner product of a state's and a candidate's (arXiv 2511.07328)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from leret.config.policy import EncoderSettings
from leret.core import hub
from leret.core.errors import PolicyError, import_optional, reason
from leret.core.types import STOP, Candidate, Choice
from leret.policies.checkpoints import find_model
from leret.policies.pickers.positions import absolute_positions, relative_positions, rotated_products
from leret.policies.pickers.scratch import scratch_encoder

_TITLE = ". "
"""Between title and text of a candidate, as `DenseSettings.separator` has it."""

_CHUNK_TOKENS = 4096
"""Encoded at once, padding included."""

_ROWS = 2048
"""Candidates compared at once without gradients: what a core's cache holds."""

_CACHE_BYTES = 2**28
"""Of embeddings of candidates."""


class EncoderQ:
    """The kind ``encoder`` of a picker: one encoder reads states, the other candidates."""

    def __init__(self, settings: EncoderSettings) -> None:
        self.settings = settings
        self.module: nn.ModuleDict | None = None
        self.content: str | None = None
        library = import_optional("sentence_transformers", "sentence-transformers", "dense")
        if settings.model != "scratch":
            directory = find_model(settings.model)
            self.content = hub.model_digest(directory)
            encoder = _opened(library, directory)
            self._take(encoder, deepcopy(encoder))

    def fit(self, choices: Sequence[Choice]) -> None:
        """Make encoders from nothing, with the words of these choices."""
        if self.module is not None:
            return
        texts = [text for choice in choices for text in (self._state(choice, " "), *self._actions(choice.candidates))]
        state, action = (scratch_encoder(texts, self.settings, self.settings.seed + i) for i in range(2))
        self._take(state, action)

    def q(self, choices: Sequence[Choice], twin: bool = False, at: Sequence[int] | None = None) -> list[Tensor]:
        """Each text of a candidate is encoded once a call."""
        places: dict[str, int] = {}
        texts = [self._actions(choice.candidates) for choice in choices]
        if at is not None:
            texts = [[own[i]] for own, i in zip(texts, at, strict=True)]
        rows = [_rows(own, places) for own in texts]
        return self._values(choices, self._states(choices), rows, self._action(list(places)), twin, at)

    def score(self, choices: Sequence[Choice]) -> list[Tensor]:
        """Each text of a candidate is encoded once a `renew`."""
        rows = self._cache.rows([self._actions(choice.candidates) for choice in choices])
        return [one.cpu() for one in self._values(choices, self._states(choices), rows, self._cache.embeddings)]

    def renew(self) -> None:
        if self.module is not None:
            self._cache = EmbeddingCache(self._action)

    def save(self, directory: Path) -> dict[str, Any]:
        assert self.module is not None
        for name in ("state", "action"):
            encoder: Any = self.module[name]
            encoder.save_pretrained(str(directory / name), create_model_card=False)
        return {}

    def load(self, directory: Path, record: dict[str, Any]) -> None:
        library = import_optional("sentence_transformers", "sentence-transformers", "dense")
        self._take(*(_opened(library, directory / name) for name in ("state", "action")))

    def _take(self, state: Any, action: Any) -> None:
        self.module = nn.ModuleDict({"state": state, "action": action}).to(_device(self.settings.device)).eval()
        self._read_state, self._read_action = (TokenIds(one, self.settings.max_length) for one in (state, action))
        self._separator = f" {state.tokenizer.sep_token or ''} "
        self.renew()

    def _states(self, choices: Sequence[Choice]) -> Tensor:
        assert self.module is not None
        places: dict[str, int] = {}
        rows = _rows((self._state(choice, self._separator) for choice in choices), places)
        return embed(self.module["state"], self._read_state(list(places)))[rows]

    def _action(self, texts: Sequence[str]) -> Tensor:
        assert self.module is not None
        return embed(self.module["action"], self._read_action(texts))

    def _state(self, choice: Choice, separator: str) -> str:
        """The texts of the context, then of what was picked."""
        context = " ".join(value for value in choice.context.values() if isinstance(value, str))
        picked = list(choice.picked)
        if self.settings.order == "document" and all(one.position is not None for one in picked):
            picked.sort(key=lambda one: one.position or 0)
        return self.settings.query_prefix + separator.join([context, *[_text(one) for one in picked]])

    def _actions(self, candidates: Sequence[Candidate]) -> list[str]:
        prefix = self.settings.document_prefix
        texts = [one.text if not one.title else _text(one) for one in candidates]
        if candidates and candidates[-1] == STOP:
            texts[-1] = STOP.id
        return [prefix + text for text in texts] if prefix else texts

    def _values(
        self,
        choices: Sequence[Choice],
        states: Tensor,
        rows: Sequence[Tensor],
        embeddings: Tensor,
        twin: bool = False,
        at: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """(n_candidates,) a choice, or (2, n_candidates); ``rows`` are the candidates' in ``embeddings``."""
        sizes = [len(own) for own in rows]
        whose = torch.arange(len(choices)).repeat_interleave(torch.tensor(sizes))
        turned = [self._positions(choice) for choice in choices]
        if at is not None:
            turned = [own[[i]] for own, i in zip(turned, at, strict=True)]
        positions = torch.from_numpy(np.concatenate(turned))
        flat = torch.cat(list(rows))
        step = len(flat) if torch.is_grad_enabled() else _ROWS
        found = [
            rotated_products(states[whose[i : i + step]], embeddings[flat[i : i + step]], at)
            for i in range(0, len(flat), step)
            for at in [None if self.settings.positions == "none" else positions[i : i + step].to(states.device)]
        ]
        heads = torch.cat(found, dim=1)
        return list((heads if twin else heads.mean(0)).split(sizes, dim=-1))

    def _positions(self, choice: Choice) -> NDArray[np.float32]:
        places = np.array([one.position for one in choice.candidates], np.float64)
        if self.settings.positions == "relative":
            return relative_positions(places, np.array([one.position for one in choice.picked], np.float64))
        return absolute_positions(places)


class EmbeddingCache:
    """Embeddings of texts, computed once; the oldest go, all together, where they would exceed `_CACHE_BYTES`."""

    def __init__(self, encode: Any) -> None:
        self._encode = encode
        self._places: dict[str, int] = {}
        self._embeddings: Tensor | None = None

    @property
    def embeddings(self) -> Tensor:
        """(n_texts, n_dimensions)."""
        assert self._embeddings is not None
        return self._embeddings

    def rows(self, texts: Sequence[Sequence[str]]) -> list[Tensor]:
        """The rows of each text; what is not there is encoded in one batch."""
        if self._embeddings is not None and self._embeddings.nbytes > _CACHE_BYTES:
            self._places, self._embeddings = {}, None
        n = len(self._places)
        rows = [_rows(own, self._places) for own in texts]
        new = list(self._places)[n:]
        if new:
            try:
                encoded = self._encode(new)
            except BaseException:
                for text in new:
                    del self._places[text]
                raise
            self._embeddings = encoded if self._embeddings is None else torch.cat([self._embeddings, encoded])
        return rows


class TokenIds:
    """Token ids of texts as an encoder reads them, without the padding, several times as fast as its own method."""

    def __init__(self, encoder: Any, max_length: int | None) -> None:
        self._tokenizer = deepcopy(encoder.tokenizer.backend_tokenizer)
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(min(max_length or 2**20, encoder.max_seq_length or 2**20))

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in self._tokenizer.encode_batch_fast(list(texts))]


def embed(encoder: Any, ids: Sequence[Sequence[int]]) -> Tensor:
    """(n_texts, n_dimensions) of a sentence-transformers model, with gradients where they are enabled."""
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    found: list[Tensor] = []
    start = 0
    while start < len(order):
        end = start + 1
        while end < len(order) and (end + 1 - start) * len(ids[order[end]]) <= _CHUNK_TOKENS:
            end += 1
        part = [ids[i] for i in order[start:end]]
        width = max(1, len(part[-1]))
        padded = torch.tensor([[*own, *[encoder.tokenizer.pad_token_id] * (width - len(own))] for own in part])
        mask = torch.arange(width) < torch.tensor([len(own) for own in part])[:, None]
        inputs = {"input_ids": padded.to(encoder.device), "attention_mask": mask.long().to(encoder.device)}
        found.append(encoder(inputs)["sentence_embedding"].float())
        start = end
    back = torch.empty(len(order), dtype=torch.long)
    back[torch.tensor(order, dtype=torch.long)] = torch.arange(len(order))
    return torch.cat(found)[back.to(found[0].device)]


def _rows(texts: Iterable[str], places: dict[str, int]) -> Tensor:
    """The place of each text among distinct ones; new ones are added to ``places``."""
    return torch.tensor([places.setdefault(text, len(places)) for text in texts], dtype=torch.long)


def _text(candidate: Candidate) -> str:
    return f"{candidate.title}{_TITLE}{candidate.text}" if candidate.title else candidate.text


def _device(device: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def _opened(library: Any, directory: Path) -> Any:
    """A sentence-transformers model without a last layer that makes all vectors as long as each other."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = library.SentenceTransformer(str(directory), device="cpu", local_files_only=True)
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, ImportError) as error:
        raise PolicyError(f"{directory} cannot be opened as a sentence-transformers model ({reason(error)})") from error
    if type(model[-1]).__name__ == "Normalize":  # of unit vectors no inner product is more than 1 / sqrt(d)
        model = library.SentenceTransformer(modules=list(model)[:-1], device="cpu")
    return model.float()
