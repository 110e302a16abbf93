"""The picker that a training starts from: the run's, a trained one of the run, or a directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from leret.config.policy import PickerSettings
from leret.config.sampling import SamplingRecipe
from leret.core.errors import TrainingError
from leret.core.runs import Run
from leret.policies.pickers.picker import RECORD, open_picker
from leret.training.algorithms.picking import PickingRecipe
from leret.training.model import InitialPolicy, training_record


def find_picker(run: Run, recipe: PickingRecipe) -> InitialPolicy:
    """Resolve the recipe's ``init_from``.

    Raises:
        TrainingError: the run has no picker there.
    """
    sampling = SamplingRecipe.model_validate(run.section("sampling", "leret sample RECIPE"))
    base = picker_settings(sampling, recipe.predictors)
    found = next(
        (path for path in (run.policies / recipe.init_from, Path(recipe.init_from)) if (path / RECORD).is_file()), None
    )
    if found is None and recipe.init_from != "base":
        raise TrainingError(
            f"init_from: {recipe.init_from!r} is neither base nor a picker of {run.path}, nor the directory of one; "
            "train it first"
        )
    directory = found or Path(base.model)
    settings = base.model_copy(update={"model": str(directory)})
    total = int(training_record(directory).get("total_steps", 0))
    return InitialPolicy(recipe.init_from, directory, open_picker(settings).digest, total)


def picker_settings(recipe: SamplingRecipe, predictors: Sequence[str] | None) -> PickerSettings:
    """Of the picker that a run was sampled with, for the named picks.

    Raises:
        TrainingError: there is none.
    """
    policies = {"": recipe.policy}
    named = [one for name, one in policies.items() if predictors is None or name in predictors]
    found = [one for one in (named or [recipe.policy]) if isinstance(one, PickerSettings)]
    if not found:
        raise TrainingError(
            "the run has no picker to train: set policy.kind (or policies.NAME.kind of a pick) to features or encoder "
            "in the recipe of `leret sample`"
        )
    return found[0]
