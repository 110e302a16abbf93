"""The questions of an evaluation: of the run's data, never sampled, never trained on."""

from __future__ import annotations

from leret.config.evaluation import EvalRecipe
from leret.core.errors import ConfigError, DataError
from leret.core.runs import Run
from leret.core.types import Task
from leret.datasets.load import limited
from leret.datasets.splits import refuse_doubles, refuse_leak
from leret.sampling.rollouts.environment import Environment, questions_digest
from leret.sampling.store.store import Store


def held_out(recipe: EvalRecipe, run: Run, bench: Environment) -> tuple[list[Task], str]:
    """The recipe's questions, as many of them as have gold documents, in a fixed order; and their digest.

    Args:
        recipe: its split, limit and question file.
        run: whose store knows what was sampled.
        bench: of the run.

    Returns:
        The questions; and what names all of the split with their gold, whatever the limit is.

    Raises:
        ConfigError: the question file is asked of a generated world.
        DataError: there is no question, or one of them, or its text, was sampled in this run.
    """
    split = _bench(recipe, bench).questions(recipe.split)
    questions = limited(split, recipe.limit, bench.recipe.data.seed)
    scored = [question for question in questions if question.gold]
    if not scored:
        what = recipe.questions or f"split {recipe.split} of the run's data"
        why = f"its {len(questions)} questions have no gold documents" if questions else "it has none"
        raise DataError(f"{what} has no question to evaluate on: {why}; name another split or another question file")
    if run.store.is_file():
        with Store(run.store, read_only=True) as store:
            ids = store.question_ids()
        refuse_leak(ids, (question.id for question in scored))
        refuse_doubles((q for q in bench.questions("all", check=False) if q.id in ids), scored)
    return scored, questions_digest(split)


def _bench(recipe: EvalRecipe, bench: Environment) -> Environment:
    if recipe.questions is None:
        return bench
    if bench.recipe.data.kind == "world":
        raise ConfigError(
            f"questions: {recipe.questions!r} cannot be asked of a generated world, which brings its own; leave it out"
        )
    data = bench.recipe.data.model_copy(update={"questions": recipe.questions})
    return Environment(bench.recipe.model_copy(update={"data": data}), bench.cache)
