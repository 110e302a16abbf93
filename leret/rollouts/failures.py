"""Failures in rollouts: their records, a session's counts, and the limits that stop a session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from leret.core.errors import LeretError, PolicyError, ProgramError, RetrievalError
from leret.core.types import Failure, Sample
from leret.policies.base import PromptTooLongError
from leret.programs.prompts import Formatter

BOUNDARIES: Mapping[str, type[LeretError]] = {
    "policy": PolicyError, "retrieval": RetrievalError, "program": ProgramError,
}  # fmt: skip

FAILURES = (PolicyError, RetrievalError, ProgramError)

_MIN_SAMPLES = 50  # number of samples from which a failure rate can stop a session
MIN_UNPARSED = 5  # the lower number that suffices if none parses


def failure_of(error: PolicyError | RetrievalError | ProgramError) -> Failure:
    """Return the failure record for an outage, a crash, or a prompt that is too long."""
    if isinstance(error, PromptTooLongError):
        return Failure("prompt", str(error))
    kind = next(kind for kind, boundary in BOUNDARIES.items() if isinstance(error, boundary))
    return Failure(kind, str(error))


def unparsed(formatter: Formatter, predictor: str, completion: str) -> Failure:
    """Return the failure record for a completion that does not parse.

    The record has an example of the adapter's format.
    """
    text = repr(completion[:200])
    if predictor in formatter.picks:
        return Failure("parse", f"{text} is not the id of a candidate of {predictor}")
    message = f"{text} is not in the adapter's format"
    if not predictor.startswith("("):
        fields = {name: f"<{name}>" for name in formatter.signature(predictor).output_fields}
        example = formatter.completion(predictor, fields)
        message += f"; {type(formatter.adapter).__name__} reads {example!r}"
    return Failure("parse", message)


def cut_notes(n_cut: int, n_samples: int) -> Iterator[str]:
    """Yield a warning if ``max_tokens`` cut more than 10 % of the completions."""
    if n_cut > n_samples / 10:
        yield (
            f"{n_cut:,} of {n_samples:,} completions ({n_cut / n_samples:.0%}) were cut at "
            "policy.max_tokens, so they are trained without an end token; raise policy.max_tokens"
        )


@dataclass
class SamplingStats:
    """Counts of one session.

    ``waiting`` counts questions that an outage stopped; a resume continues them. ``notes`` are for
    the user.
    """

    questions: int = 0
    samples: int = 0
    reward_sum: float = 0.0
    n_rewarded: int = 0
    waiting: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    last_failure: Failure | None = None
    last_unparsed: Failure | None = None
    policy_digest: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def mean_reward(self) -> float:
        if not self.n_rewarded:
            return 0.0
        return self.reward_sum / self.n_rewarded

    @property
    def n_failed(self) -> int:
        return self.failures.total() - self.failures["parse"]

    def count(self, samples: Sequence[Sample]) -> None:
        self.samples += len(samples)
        for sample in samples:
            if sample.failure is not None:
                self.fail(sample.failure)
            elif sample.reward is not None and sample.is_sampled:
                self.reward_sum += sample.reward
                self.n_rewarded += 1

    def add(self, session: SamplingStats) -> None:
        self.questions += session.questions
        self.samples += session.samples
        self.reward_sum += session.reward_sum
        self.n_rewarded += session.n_rewarded
        self.waiting += session.waiting
        self.failures.update(session.failures)
        self.last_failure = session.last_failure or self.last_failure
        self.last_unparsed = session.last_unparsed or self.last_unparsed
        self.policy_digest = session.policy_digest or self.policy_digest
        self.notes = list(dict.fromkeys([*self.notes, *session.notes]))

    def fail(self, failure: Failure) -> None:
        self.failures[failure.kind] += 1
        if failure.kind == "parse":
            self.last_unparsed = failure
        else:
            self.last_failure = failure


def refuse_failures(
    stats: SamplingStats, max_error_rate: float, max_unparsed_rate: float, last: bool = False
) -> None:
    """Raise an error if too many samples failed or do not parse.

    At the ``last`` check, also raise it if no sample has a reward.
    """
    n_failed = stats.n_failed
    n_samples = stats.samples
    if stats.last_unparsed is not None and n_samples >= _MIN_SAMPLES:
        refuse_unparsed(
            [stats.last_unparsed], stats.failures["parse"], n_samples, max_unparsed_rate
        )
    too_many = n_samples >= _MIN_SAMPLES and n_failed > max_error_rate * n_samples
    nothing = last and n_failed > 0 and stats.n_rewarded == 0
    if stats.last_failure is None or not (too_many or nothing):
        return
    limit = "and no rewards"
    if too_many:
        limit = f"more than sampling.max_error_rate = {max_error_rate:g} allows"
    again = "run the same command again"
    if stats.last_failure.kind == "prompt":
        again = "name a new run directory"
    boundary = BOUNDARIES.get(stats.last_failure.kind, PolicyError)
    error = boundary(
        f"{n_failed} failures in {n_samples} samples, {limit}; "
        f"last failure: {stats.last_failure.message}. "
        f"Finished samples are kept; fix the cause and {again}"
    )
    if isinstance(error, ProgramError):
        raise error
    raise error.failed()


def refuse_unparsed(
    failures: Iterable[Failure], n_unparsed: int, n_samples: int, max_unparsed_rate: float
) -> None:
    """Raise an error if too many completions do not parse; from 5 to 49, only if none parses.

    Below 5, never.
    """
    enough = n_samples >= _MIN_SAMPLES or n_samples == n_unparsed >= MIN_UNPARSED
    if enough and n_unparsed > max_unparsed_rate * n_samples:
        raise PolicyError(
            f"{n_unparsed} of {n_samples} completions do not parse, for example: "
            f"{next(iter(failures)).message}; find a format that parses with `leret sample RECIPE --trial`, "
            "set program.adapter, policy.model or policy.max_tokens and name a new run directory, "
            "or raise sampling.max_unparsed_rate"
        )
