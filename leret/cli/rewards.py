"""``leret rescore``: rewards and pairs of stored samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from leret.cli import console
from leret.cli.console import RunOption
from leret.core.errors import ConfigError
from leret.core.progress import shown

if TYPE_CHECKING:
    from leret.config.sampling import RewardSettings
    from leret.core.runs import Run

_RECIPE = (".yaml", ".yml")


def rescore(
    run: RunOption,
    reward: Annotated[
        str | None,
        typer.Option(
            help="A name, FILE.py:function, {parts: ...} as YAML, or a recipe.",
            show_default="the run's, if its code has changed",
        ),
    ] = None,
    strategy: Annotated[
        Literal["adjacent", "best-worst", "all", "margin"] | None,
        typer.Option(help="How to pair samples by reward.", show_default="as before"),
    ] = None,
    margin: Annotated[
        float | None, typer.Option(min=0.0, help="Minimum reward difference (--strategy margin).")
    ] = None,
    max_pairs: Annotated[
        int | None, typer.Option(min=1, help="Maximum pairs per state, largest margins first.")
    ] = None,
) -> None:
    """Recompute the rewards of a run's samples, if they change, and rebuild the pairs. Calls no LM."""
    from leret.core.runs import Run
    from leret.rollouts.environment import has_new_reward
    from leret.sampling.rescore import rescore as stage

    if margin and strategy != "margin":
        raise ConfigError(f"--margin {margin} needs --strategy margin; add it or remove --margin")
    options = {"strategy": strategy, "margin": margin, "max_pairs": max_pairs}
    pairing = {name: value for name, value in options.items() if value is not None}
    directory = Run.open(run)
    directory.section("sampling", "leret sample RECIPE")
    if reward is None and not has_new_reward(directory):
        return _rebuild_pairs(directory, pairing)
    spec = None if reward is None else _spec(reward)
    with shown() as progress:
        report = stage(directory, spec, pairing=pairing, progress=progress)
    console.done(f"{report.changed:,} of {report.samples:,} rewards changed")
    console.facts(report)


def _rebuild_pairs(run: Run, pairing: Mapping[str, Any]) -> None:
    from leret.rollouts.environment import refuse_changes_since_sampling
    from leret.sampling.preferences.dataset import build_preferences
    from leret.sampling.rescore import pair_settings

    refuse_changes_since_sampling(run, "pairs")
    report = build_preferences(run, **pair_settings(run, pairing))
    console.done(f"{report.pairs:,} pairs saved to {report.path}")
    console.facts(report)


def _spec(text: str) -> str | RewardSettings:
    from leret.config.load import flag_recipe
    from leret.core.yaml import parse

    if text.endswith(_RECIPE):
        reward, *final = console.sampling_recipe(text).sampling.rewards
        if final:
            console.complain(
                "sampling.final is ignored; only step rewards are computed again", label="note: "
            )
        return reward
    value = parse(text, "--reward").value if text.lstrip().startswith("{") else text
    recipe = {"data": {"kind": "world"}, "sampling": {"reward": value}}
    return flag_recipe(recipe, {"sampling.reward": "--reward"}).sampling.reward
