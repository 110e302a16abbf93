"""What a run learned from, as the report shows it: rewards of the samples, margins of the pairs, training curves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from leret.core.errors import RunError
from leret.core.runs import Run
from leret.sampling.store.store import Store

Curve = tuple[str, Mapping[str, Sequence[tuple[float, float]]]]
"""A panel: its title, and (step, value) points by the line's name."""

_PANELS = (
    ("loss", {"loss": "loss"}),
    ("chosen preferred to rejected, share", {"rewards/accuracies": "share"}),
    ("implicit rewards", {"rewards/chosen": "chosen", "rewards/rejected": "rejected"}),
    ("gradient norm", {"grad_norm": "norm"}),
)
"""Panels of a training, by the names of the trainer's log."""


@dataclass(frozen=True)
class Learned:
    """Values by hop, from 1.

    Attributes:
        rewards: of every sample that has one.
        margins: reward of the chosen less that of the rejected, of every pair.
        n_states: states visited.
        n_spread: those whose samples differ in reward, so that something can be learned there.
        failures: samples that failed, by kind.
    """

    rewards: Mapping[int, Sequence[float]] = field(default_factory=dict)
    margins: Mapping[int, Sequence[float]] = field(default_factory=dict)
    n_states: int = 0
    n_spread: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)


def learned(run: Run) -> Learned:
    """Read the store and the preferences, as far as they are there.

    Raises:
        RunError: one of them is damaged.
    """
    rewards: dict[int, list[float]] = defaultdict(list)
    failures: dict[str, int] = defaultdict(int)
    n_states = n_spread = 0
    if run.store.is_file():
        with Store(run.store, read_only=True) as store:
            for group in store.groups():
                own = [sample.reward for sample in group.samples if sample.reward is not None]
                rewards[group.state.step + 1] += own
                n_states += 1
                n_spread += len(set(own)) > 1
                for sample in group.samples:
                    if sample.failure is not None:
                        failures[sample.failure.kind] += 1
    return Learned(dict(rewards), _margins(run), n_states, n_spread, dict(failures))


def curves_of(training: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[Curve]]]:
    """Panels of every trained policy whose log has at least two points, by name.

    Args:
        training: content of training.json by policy.
    """
    found = []
    for name, facts in training.items():
        log = [entry for entry in facts.get("log_history") or () if "step" in entry]
        panels: list[Curve] = []
        for title, keys in _PANELS:
            lines = {label: [(e["step"], e[key]) for e in log if e.get(key) is not None] for key, label in keys.items()}
            lines = {label: points for label, points in lines.items() if len(points) > 1}
            if lines:
                panels.append((title, lines))
        if panels:
            found.append((name, panels))
    return found


def _margins(run: Run) -> dict[int, list[float]]:
    margins: dict[int, list[float]] = defaultdict(list)
    path = run.preferences / "train.parquet"
    if path.is_file():
        try:
            table = pq.read_table(path, columns=["step", "score_chosen", "score_rejected"]).to_pydict()
        except (OSError, pa.ArrowException) as error:
            raise RunError(
                f"{path} cannot be read ({error}); make it again with `leret pairs --run {run.path}`"
            ) from error
        for step, chosen, rejected in zip(*table.values(), strict=True):
            margins[step + 1].append(chosen - rejected)
    return dict(margins)
