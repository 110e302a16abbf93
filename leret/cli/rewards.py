"""``leret rewards``, ``leret rescore`` and ``leret score``: list and change rewards, and score answers."""

from __future__ import annotations

from pathlib import Path
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
    from leret.rewards import REWARDS, settings_of
    from leret.rewards.combine import MIXERS

    rows = []
    for name, function in REWARDS.items():
        settings = settings_of(function)
        rows.append(
            (
                f"{name}, {name}@k" if "k" in settings else name,
                ", ".join(s for s in settings if s != "k"),
            )
        )
    console.table(
        ("reward", "settings"), rows, values={"rewards": list(REWARDS), "mixers": list(MIXERS)}
    )
    console.say(
        f"mixers: {', '.join(MIXERS)}; name a custom reward as FILE.py:function or module:function"
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


def score(
    answers: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Answers: JSON lines, CSV, Parquet, or text lines."),
    ],
    references: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="References, by id or in the same order.", show_default="FILE"
        ),
    ] = None,
    measures: Annotated[
        str,
        typer.Option(
            help="Names, comma-separated, or a YAML list: [f1, {similarity: {model: NAME}}]."
        ),
    ] = "f1",
    field: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column with the answers.")
    ] = None,
    resamples: Annotated[int, typer.Option(min=1, help="Bootstrap resamples.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Score the answers in a file against references, with 95 % intervals."""
    from leret.config.evaluation import EvalRecipe
    from leret.config.load import flag_settings
    from leret.core.yaml import parse
    from leret.evaluation.score import score as stage

    listed = measures.lstrip()[:1] in {"[", "{"}
    names = (
        parse(measures, "--measures").value
        if listed
        else [name.strip() for name in measures.split(",")]
    )
    recipe = {"measures": names, "resamples": resamples, "seed": seed}
    settings = flag_settings(EvalRecipe, recipe, {"measures": "--measures"})
    report = stage(answers, references or answers, settings, field)
    rows = []
    for name, value in report.measures.items():
        low, high = report.intervals[name]
        rows.append(
            (
                name,
                "-" if value is None else f"{value:.4f}",
                "-" if low is None else f"[{low:.4f}, {high:.4f}]",
            )
        )
    title = f"{report.n_answers:,} answers in {answers}"
    console.table(("measure", "value", "95 % interval"), rows, title, values=report)
    if report.n_failed:
        console.say(f"{report.n_failed:,} answers are null and not scored")
    if report.n_without_reference:
        console.say(f"{report.n_without_reference:,} answers have no reference and are not scored")


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
