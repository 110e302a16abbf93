"""What a finished policy says about itself: training.json for programs, README.md for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What the stage did.

    Attributes:
        path: the policy's directory.
        steps: optimizer steps of this training, the ones before an interruption included.
        total_steps: with those of the policies it started from.
        seconds: wall clock of this call.
        examples: that were trained on.
        dropped: examples longer than the policy or the recipe takes.
        loss_first: at the first step that was logged; None where nothing was.
        loss_last: at the last one.
        already: the policy was there, and nothing was done.
        resumed_from: the step of the checkpoint that this call went on from; 0 at a fresh start.
    """

    path: Path
    steps: int
    total_steps: int
    seconds: float
    examples: int
    dropped: int
    loss_first: float | None
    loss_last: float | None
    already: bool = False
    resumed_from: int = 0

    @property
    def notes(self) -> list[str]:
        """What to look at."""
        few = f"{self.examples} examples made {self.steps} steps, which teach little; sample more questions"
        return [few] if self.steps < 10 else []


@dataclass(frozen=True, slots=True)
class Record:
    """Content of training.json.

    Attributes:
        key: the resolved recipe, the digest of the data, the parent with its digest: what must be the same for a
            finished training to be the one that is asked for.
        parent: ``init`` of the recipe.
        log_history: one mapping a logged step: step, epoch, loss, grad_norm, learning_rate, and for pairs
            rewards/accuracies, rewards/margins, logps/chosen ...
    """

    name: str
    algorithm: str
    key: Mapping[str, Any]
    parent: str
    examples: int
    dropped: int
    steps: int
    total_steps: int
    seconds: float
    preflight: float
    versions: Mapping[str, str | None]
    log_history: Sequence[Mapping[str, Any]] = field(default_factory=tuple)

    def value(self) -> dict[str, Any]:
        """As JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    def report(self, path: Path, seconds: float, *, already: bool = False, resumed_from: int = 0) -> TrainReport:
        """What the stage returns for this policy."""
        losses = [float(entry["loss"]) for entry in self.log_history if "loss" in entry]
        return TrainReport(
            path=path,
            steps=self.steps,
            total_steps=self.total_steps,
            seconds=seconds,
            examples=self.examples,
            dropped=self.dropped,
            loss_first=losses[0] if losses else None,
            loss_last=losses[-1] if losses else None,
            already=already,
            resumed_from=resumed_from,
        )


_METHODS = {
    "sft": "supervised fine-tuning on the best completions a state (context distillation)",
    "dpo": "direct preference optimization (arXiv 2305.18290)",
    "ipo": "identity preference optimization (arXiv 2310.12036)",
}


def model_card(record: Record, base_model: str, peft: bool) -> str:
    """README.md of a policy, with the front matter of a Hugging Face model card."""
    recipe = record.key["recipe"]
    last: Mapping[str, Any] = next((entry for entry in reversed(record.log_history) if "loss" in entry), {})
    shown = {name: value for name, value in last.items() if isinstance(value, int | float)}
    return "\n".join(
        [
            "---",
            f"library_name: {'peft' if peft else 'transformers'}",
            f"base_model: {_quoted(base_model)}",
            "pipeline_tag: text-generation",
            f"tags: [leret, trl, {record.algorithm}]",
            "---",
            "",
            f"# {record.name}",
            "",
            f"A policy that writes search queries, trained by leret: {_METHODS[record.algorithm]}.",
            "",
            f"It started from `{record.parent}` and took {record.steps} steps ({record.total_steps} since the base) on "
            f"{record.examples} examples; {record.dropped} were too long and left out.",
            *_reduction(recipe),
            "",
            "## Recipe",
            "",
            *_table(("key", "value"), {name: f"`{value}`" for name, value in recipe.items()}),
            "",
            "## Last logged step",
            "",
            *_table(("measure", "value"), {name: f"{value:.6g}" for name, value in shown.items()}),
            "",
            "## Use",
            "",
            "It answers prompts as the program's DSPy adapter formats them. `leret.load` of the run's `program`",
            "directory gives the program with a policy; any server of the OpenAI protocol can serve this directory.",
            "Evaluation is in the run's `eval/summary.json`; the whole training log is in `training.json`.",
            "",
        ]
    )


def _reduction(recipe: Mapping[str, Any]) -> list[str]:
    if recipe["algorithm"] != "ipo":
        return []
    how = "summed over" if recipe["reduction"] == "sequence" else "averaged over"
    return ["", f"The loss is on log-probabilities {how} a completion's tokens, beta {recipe['beta']}."]


def _table(head: tuple[str, str], rows: Mapping[str, str]) -> list[str]:
    return [f"| {head[0]} | {head[1]} |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
