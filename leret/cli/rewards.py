"""``leret rewards`` and ``leret rescore``: list and change rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from leret.cli import console
from leret.cli.console import AsJson, RunOption
from leret.core.progress import shown

if TYPE_CHECKING:
    from leret.config.sampling import RewardSettings

_RECIPE = (".yaml", ".yml")

app = typer.Typer(help="List rewards.", no_args_is_help=True)


@app.command("list", epilog="Example: leret rewards list")
def listing(as_json: AsJson = False) -> None:
    """List the rewards and mixers available to recipes."""
    from leret.config.sampling import MIXER_SHELF, REWARD_SHELF, WEIGHTS
    from leret.rewards import REWARDS, Part, settings_of

    rows = []
    names = [*REWARDS, *REWARD_SHELF]
    for name in names:
        settings = settings_of(Part(name, name).loaded)
        label = f"{name}, {name}@k" if "k" in settings else name
        rows.append((label, ", ".join(setting for setting in settings if setting != "k")))
    mixers = [WEIGHTS, *MIXER_SHELF]
    console.table(("reward", "settings"), rows, values={"rewards": names, "mixers": mixers})
    console.say(
        f"mixers: {', '.join(mixers)}; name your own as FILE.py:function or module:function"
    )


def rescore(
    run: RunOption,
    reward: Annotated[
        str | None,
        typer.Option(
            help="A name, FILE.py:function, {parts: ...} as YAML, or a recipe; default: the run's reward."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute the rewards of a run's samples without LM calls, and rebuild its preference pairs."""
    from leret.core.runs import Run
    from leret.sampling.rescore import rescore as stage

    with shown() as progress:
        report = stage(Run.open(run), None if reward is None else _spec(reward), progress=progress)
    console.done(f"{report.changed:,} of {report.samples:,} rewards changed")
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
