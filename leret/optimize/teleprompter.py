"""LeReT as a DSPy optimizer.

`sample_student` samples the student, `train` trains its LMs, and `dspy.Evaluate` chooses the best
program by the user's metric.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dspy
import numpy as np
from dspy.teleprompt import Teleprompter
from dspy.teleprompt.bootstrap_finetune import FinetuneTeleprompter

from leret.core.bundled import SCOPES
from leret.core.dspy_internals import one_truncation_warning
from leret.core.errors import ConfigError
from leret.core.progress import shown
from leret.evaluation.statistics import bootstrap_intervals
from leret.optimize.inputs import RewardFunction, server_of
from leret.optimize.job import ALGORITHM_NAMES, CompileJob, Credit, open_job
from leret.optimize.sampler import StudentSamples, sample_student
from leret.optimize.student import score
from leret.optimize.trainer import Examples, stored_examples, train
from leret.policies.local.chat_template import dated
from leret.programs.saved import with_save

Candidate = dict[str, Any]
"""A program, the stage that made it, and its score and subscores on the valset."""


# tracers patch only direct subclasses of Teleprompter
class LeReT(FinetuneTeleprompter, Teleprompter):
    """Trains the LMs of a program on rewards for their completions.

    At every LM call of the program on the trainset, LeReT samples and scores several completions.
    Training favors the completions with higher scores.

    Args:
        reward: step reward. A name from `leret.rewards` (``ap``, ``recall@5``) scores all documents
            retrieved by the end of the step; each example must then list its relevant documents in
            a field ``gold``, ``gold_ids`` or ``relevant_doc_ids``, or by title in ``gold_titles``.
            A function ``(example, outcome) -> float`` gets a `leret.core.types.Outcome` with
            ``doc_ids``, ``outputs`` and ``text``.
        metric: function ``(example, prediction, trace=None) -> float | bool`` that scores final
            predictions.
        prompts: number of prompts per LM call. The first is the student's prompt. The others are
            few-shot prompts from the teacher, or from BootstrapFewShotWithRandomSearch. Only the
            student's prompt is trained.
        samples: completions per prompt and LM call.
        algorithms: training algorithms in order, each starting from the previous weights. sft, dpo,
            ipo and kto train on stored samples; grpo, rloo and ppo sample with the policy in
            training.
        credit: score of a completion: the reward (``step``), the metric at the program's end
            (``final``), or their mean (``both``). None uses ``step`` for predictors that are
            followed by a search (``both`` if they also decide when to stop, as in `dspy.ReAct`),
            and ``final`` for other predictors, which are not trained if there is no metric.
        train_kwargs: keys of `leret train` recipes (such as ``learning_rate``), for all algorithms
            or nested by algorithm name; or one such dict per LM. The default ``learning_rate``
            depends on the model size.
        run_dir: directory for samples and trained policies; compile continues from its contents. A
            student with different code, demos, instructions or weights uses a subdirectory. None
            uses a temporary directory in leret's cache, which a later compile deletes after a week,
            so save the program.
        seed: seed for sampling and training.
        max_lm_calls: maximum number of LM calls by the program in one compile, including calls on
            the valset.
        n_continuations: number of runs from each completion to the program's end, to compute the
            metric.
        num_threads: threads for the valset.
    """

    def __init__(
        self,
        *,
        reward: str | RewardFunction | None = None,
        metric: Callable[..., Any] | None = None,
        prompts: int = 1,
        samples: int = 8,
        algorithms: Sequence[str] = ("sft", "ipo"),
        credit: Credit | None = None,
        train_kwargs: dict[str, Any] | dict[dspy.LM, dict[str, Any]] | None = None,
        run_dir: str | Path | None = None,
        seed: int = 0,
        max_lm_calls: int | None = None,
        n_continuations: int = 1,
        num_threads: int | None = None,
    ) -> None:
        super().__init__(train_kwargs=train_kwargs)
        self.num_threads = num_threads
        self.reward = reward
        self.metric = metric
        self.credit = credit
        self.prompts = prompts
        self.samples = samples
        self.n_continuations = n_continuations
        self.algorithms = tuple(algorithms)
        self.run_dir = run_dir
        self.seed = seed
        self.max_lm_calls = max_lm_calls
        if not self.algorithms or not set(self.algorithms) <= set(ALGORITHM_NAMES):
            raise ConfigError(
                f"algorithms={self.algorithms!r}: choose from {', '.join(ALGORITHM_NAMES)}; `leret "
                "train` trains pickers"
            )
        if credit not in (None, "step", "final", "both"):
            raise ConfigError(f"credit={credit!r}: choose step, final or both, or remove credit")
        if reward is None and (metric is None or credit in ("step", "both")):
            raise ConfigError(
                "reward is missing; pass a name (reward='ap') or a function, or use credit='final' "
                "with a metric"
            )
        if metric is None and credit in ("final", "both"):
            raise ConfigError(f"credit={credit!r} needs a metric to score the program's end")

    def compile(
        self,
        student: dspy.Module,
        *,
        trainset: list[dspy.Example],
        teacher: dspy.Module | list[dspy.Module] | None = None,
        valset: list[dspy.Example] | None = None,
    ) -> dspy.Module:
        """Optimize a copy of the student.

        The program is rerun many times with recorded completions and recorded searches (by
        `leret.Search`, `leret.search_tool` or ``dspy.settings.rm``). Any other tool is called again
        in every run, with side effects.

        Args:
            student: program with an LM on every predictor. Each `leret.LM` is trained once, for all
                its predictors; other LMs answer their predictors and are not trained. Samples are
                drawn at the LM's temperature, or at 1 if that is 0.
            trainset: examples with inputs to sample from.
            teacher: one or more programs with the same predictors as the student.
            valset: examples for choosing the best program, by ``metric`` at temperature 0, among
                the student and the trained programs. Without a valset, the last trained program is
                returned.

        Returns:
            The best program, with attributes ``candidate_programs`` (best first), ``trial_logs``
                and ``run_dir``. It is a copy of the student if no training improves the score.
                Each trained LM is named after its directory.

        Raises:
            LeretError: the program cannot be optimized, or the samples provide nothing to train on.
        """
        job = open_job(self, student, trainset, teacher, valset)
        job.log("run", f"samples and policies are in {job.run.path}")
        with dated(job.run.manifest.date), shown() as job.progress, one_truncation_warning():
            candidates, samples = _candidates(job)
        _restore_lms(job, candidates)
        ranked = candidates[::-1]
        if valset:  # a stable sort
            ranked = sorted(candidates, key=lambda candidate: -candidate["score"])
        best = ranked[0]
        text = _conclusion(candidates[0], best)
        if best is candidates[0]:
            text += f". {_advice(job, samples)}"
        job.log("result", text, returned=best["stage"])
        _note_servers(job, best["stage"])
        program: dspy.Module = best["program"]
        program._compiled = True
        program.candidate_programs = ranked
        program.trial_logs = job.logs
        program.run_dir = str(job.run.path)
        return with_save(program, job.adapter)


def _candidates(job: CompileJob) -> tuple[list[Candidate], StudentSamples]:
    """Sample and train; return the student and the program of each algorithm, and the samples."""
    candidates = [_candidate(job, "student", job.program)]
    samples = StudentSamples()
    examples: Mapping[str, Examples] = {}
    if job.stored:
        samples = sample_student(job)
        examples = stored_examples(job, samples)
    models: dict[dspy.LM, str] = {}
    for algorithm in job.settings.algorithms:
        program = train(job, algorithm, examples.get(algorithm, {}), models)
        candidates.append(_candidate(job, algorithm, program))
    return candidates, samples


def _restore_lms(job: CompileJob, candidates: Sequence[Candidate]) -> None:
    """Give each predictor without a trained LM the LM of the student."""
    for candidate in candidates:
        for predictor in candidate["program"].predictors():
            predictor.lm = job.originals.get(predictor.lm, predictor.lm)


def _candidate(job: CompileJob, stage: str, program: dspy.Module) -> Candidate:
    """Score a program at temperature 0 on the valset, in percent.

    The score is None without a valset.
    """
    mean: float | None = None
    subscores: list[float] = []
    metric = job.settings.metric
    if job.valset and metric is not None:
        before = job.budget.spent
        mean, subscores = score(
            stage,
            program,
            job.valset,
            metric,
            job.budget,
            job.progress,
            job.settings.num_threads,
            must_parse=stage == "student",
        )
        text = f"{mean:g} on valset ({len(job.valset)} examples)"
        job.log(stage, text, score=mean, lm_calls=job.budget.spent - before)
    return {"score": mean, "program": program, "stage": stage, "subscores": subscores}


def _conclusion(student: Candidate, best: Candidate) -> str:
    """Describe the result, with the paired difference on the valset and its 95% interval."""
    if best is student:
        return f"returning the student ({best['score']:g} on valset): no training improved it"
    if best["score"] is None:
        return (
            f"returning the result of {best['stage']}, the last training, without a score: "
            "there is no valset"
        )
    differences = 100 * (np.array(best["subscores"]) - np.array(student["subscores"]))
    low, high = bootstrap_intervals(differences[:, None])[0]
    return (
        f"returning the result of {best['stage']}: {best['score']:g} on valset (student: "
        f"{student['score']:g}), difference {differences.mean():+.1f} [{low:+.1f}, {high:+.1f}]"
    )


def _advice(job: CompileJob, samples: StudentSamples) -> str:
    for lm in job.trained.values():
        name = lm.model.removeprefix("leret/")
        if name in SCOPES and name != lm.model:
            return (
                f"{lm.model} {SCOPES[name]}; use a model from the Hugging Face Hub or a "
                "directory, or try algorithms=['grpo']"
            )
    n = sum(n_states for n_states, _ in samples.spread.values())
    n_spread = sum(n_unequal for _, n_unequal in samples.spread.values())
    if n and n_spread < n / 5:
        return (
            f"Samples differ in reward at only {n_spread} of {n} states: raise samples or the "
            "LM's temperature, or use a finer reward"
        )
    return (
        "Raise learning_rate in train_kwargs, use more examples or samples, or try "
        "algorithms=['grpo']"
    )


def _note_servers(job: CompileJob, stage: str) -> None:
    """Log where a trained LM runs if the student's LM ran on a server.

    The server keeps the first weights.
    """
    urls = filter(None, map(server_of, job.trained.values()))
    servers = ", ".join(sorted(set(urls)))
    if servers and stage != "student":
        job.log(
            "serve",
            f"the trained LM runs in this process, because {servers} has the first weights; "
            "to serve it: optimized.save(DIR), `leret serve policy DIR/policies/NAME`, "
            "leret.load(DIR, serve=URL)",
        )
