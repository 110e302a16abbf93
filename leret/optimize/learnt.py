"""What the algorithms learn from samples: targets and pairs, under the student's own prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import dspy

from leret.core.errors import LeretError, PolicyError, TrainingError
from leret.core.types import Sample
from leret.sampling.preferences.dataset import state_targets
from leret.sampling.preferences.pairs import distinct, make_pairs
from leret.sampling.store.schema import StateSamples
from leret.training.data import TrainingExample


def training_examples(
    groups: Sequence[StateSamples], lms: Mapping[str, dspy.LM], algorithms: Sequence[str], seed: int
) -> dict[str, dict[dspy.LM, list[TrainingExample]]]:
    """Targets or pairs by algorithm and LM, in the order of the states; ``lms`` are those of predictors.

    Raises:
        PolicyError: no completion parses.
        TrainingError: at no state do two completions differ in reward.
    """
    found = {name: {lm: list[TrainingExample]() for lm in lms.values()} for name in algorithms}
    for group in groups:
        messages = tuple(dict(message) for message in group.state.messages)
        for algorithm, by_lm in found.items():
            rows: Sequence[tuple[Sample, ...]] = make_pairs(distinct(group.samples), "adjacent")
            if algorithm == "sft":
                rows = [(target,) for target in state_targets(group, seed=seed)]
            texts = (tuple(sample.completion or "" for sample in row) for row in rows)
            by_lm[lms[group.state.predictor]] += [
                TrainingExample(group.state.question_id, messages, own) for own in texts
            ]
    if not any(examples for by_lm in found.values() for examples in by_lm.values()):
        raise _nothing_learnt(groups)
    return found


def _nothing_learnt(groups: Sequence[StateSamples]) -> LeretError:
    """Why there is no pair and no target."""
    samples = [sample for group in groups for sample in group.samples]
    unparsed = [one.failure for one in samples if one.failure is not None and one.failure.kind == "parse"]
    if unparsed and len(unparsed) == len(samples):
        return PolicyError(f"none of {len(samples)} completions parses; one of them: {unparsed[0].message}")
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    mean = sum(rewards) / max(1, len(rewards))
    return TrainingError(
        f"no pair and no target: at none of {len(groups)} sampled states did two completions differ in reward "
        f"({len(samples)} completions, {len(unparsed)} unparsed, mean reward {mean:.3f}); "
        "raise samples or the LM's temperature, or take a reward that tells them apart"
    )
