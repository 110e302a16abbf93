from contextlib import suppress

import dspy
import pytest

from leret.core.dspy_internals import EngineLM, messages_of, run_program, text_response
from leret.core.errors import LeretError
from leret.optimize.job import open_job
from leret.optimize.sampler import sample_student
from leret.policies.base import Completion
from leret.sampling.store.store import Store
from tests.optimize.fakes import TRAIN, Words, fake_lm, fake_training, leret_of
from tests.programs.shapes import SHAPES, WORKS, written
from tests.sampling.fakes import FakeRetriever

CHAT = dspy.ChatAdapter(use_json_adapter_fallback=False)


class Typed(Words):
    def _one(self, request, seed):
        return Completion(written(request.messages, seed), "stop", 1, 2)


class Retriever(FakeRetriever):
    def __call__(self, query, k=3):
        return [dspy.Prediction(long_text=f"{p.title} | {p.text}") for p in self.search([query], k)[0]]


class End(BaseException):
    pass


def sampled(program, examples, run_dir, **settings):
    program.set_lm(fake_lm(policy=Typed("words"), max_tokens=64))
    job = open_job(leret_of(run_dir, samples=2, **settings), program, examples, None, None)
    sample_student(job)
    with Store(job.run.store, read_only=True) as store:
        return list(store.groups())


def path_of(groups):
    """Return the messages of a rollout with their completions."""
    path, group = [], next(group for group in groups if group.state.parent is None)
    while group is not None:
        ids = {sample.id: sample for sample in group.samples}
        after = next((other for other in groups if other.state.parent in ids), None)
        chosen = ids[after.state.parent] if after else group.samples[0]
        path.append((text_of(group.state.messages), chosen.completion))
        group = after
    return path


def text_of(messages):
    return str([dict(message) for message in messages])


@pytest.mark.parametrize("name", SHAPES)
def test_a_program_is_sampled_as_stock_dspy_runs_it_or_refused(name, tmp_path, monkeypatch):
    """Sample a program; then let stock DSPy, answered from a path, ask for exactly the states of that path."""
    fake_training(monkeypatch)
    kind, outcome = SHAPES[name]
    with dspy.context(adapter=CHAT, rm=Retriever(), lm=fake_lm(policy=Typed("words"))):
        if outcome != WORKS:
            with pytest.raises(LeretError, match=f"(?s){outcome}"):
                sampled(kind(), TRAIN[:2], tmp_path, metric=None)
            return
        groups = sampled(kind(), TRAIN[1:2], tmp_path, metric=lambda *given: 1.0)
    assert any(group.samples[0].is_sampled for group in groups)
    left = path_of(groups)

    def answer(request):
        asked = text_of(messages_of(request))
        place = next((i for i, (messages, _) in enumerate(left) if messages == asked), None)
        if place is None:
            raise End
        return text_response(request, left.pop(place)[1])

    lm, program = EngineLM("stock", answer), kind()
    program.set_lm(lm)
    with dspy.context(adapter=CHAT, rm=Retriever(), lm=lm), suppress(End):
        run_program(program, question=TRAIN[1].question)
    assert not left
