import dspy
import pytest

import leret
from leret.core.dspy_internals import AdapterParseError
from leret.core.errors import ProgramError
from leret.core.types import STOP, Candidate, Passage, Task
from leret.policies.base import Completion
from leret.programs.pick import candidates_of, named_picks
from leret.programs.prompts import Formatter
from leret.programs.replay import Replay
from tests.training.stories import Mixed

CHUNKS = ["Mary went home.", "John slept.", "Mary took the milk."]


class Picks(dspy.Module):
    def __init__(self, stop=False, retrieves=False, chunks=CHUNKS):
        super().__init__()
        self.pick = leret.Pick(stop=stop, retrieves=retrieves)
        self.chunks = chunks

    def forward(self, question):
        picked = []
        while len(picked) < 2 and (one := self.pick(self.chunks, picked, question=question)):
            picked.append(one)
        return dspy.Prediction(picked=[one.text for one in picked])


def replayed(program, *answers):
    replay = Replay(program)
    formatter, steps, task = Formatter(replay), [], Task.question("q", "Where is the milk?")
    need = replay.run(task, steps, {})
    for answer in answers:
        steps.append(formatter.step(need, answer))
        need = replay.run(task, steps, {})
    return need


def test_a_choice_has_context_and_candidates_without_those_picked():
    need = replayed(Picks(stop=True), "2")
    assert need.choice is not None
    choice = need.choice
    assert (choice.predictor, choice.context) == ("pick", {"question": "Where is the milk?"})
    assert [(one.id, one.position) for one in choice.candidates[:-1]] == [("0", 0), ("1", 1)]
    assert choice.candidates[-1] is STOP
    assert choice.picked == (Candidate("2", CHUNKS[2], "", 2),)
    assert need.inputs == {"question": "Where is the milk?", "candidates": ["0", "1", "2"], "picked": ["2"]}


@pytest.mark.parametrize(
    ("answers", "picked"), [(("2", "0"), [2, 0]), (("1", "[stop]"), [1]), (("[stop]",), []), ((' "1"\n', "2"), [1, 2])]
)
def test_the_program_goes_on_with_what_the_ids_name(answers, picked):
    assert replayed(Picks(stop=True), *answers).prediction.picked == [CHUNKS[i] for i in picked]


@pytest.mark.parametrize(("stop", "answers"), [(True, ["7"]), (True, ["1", "1"]), (False, ["[stop]"])])
def test_an_id_that_may_not_be_picked_does_not_parse(stop, answers):
    end = replayed(Picks(stop=stop), *answers)
    assert end.unparsed
    assert "is not the id of a candidate left for pick" in str(end.prediction)


def test_what_is_picked_counts_as_retrieved_where_the_pick_says_so():
    end = replayed(Picks(retrieves=True), "2", "0")
    assert [(p.doc_id, p.score) for p in end.ranking] == [("2", 1.0), ("0", 0.5)]
    assert [search.n_steps for search in end.searches] == [1, 2]
    assert not replayed(Picks(), "2", "0").searches


def test_a_program_that_picks_and_writes_sends_what_dspy_sends(walk):
    needs, end = walk(Mixed(), check=True, pure=Mixed())
    assert any(need.choice is not None for need in needs)
    assert end.prediction is not None


def test_candidates_are_texts_dicts_passages_or_candidates():
    given = ["a", {"id": 7, "text": "b", "title": "B"}, Passage("d", "D", "c", 1.0), Candidate("x", "e", data={"n": 1})]
    made = candidates_of(given).items
    assert [(one.id, one.title, one.text, one.position) for one in made] == [
        ("0", "", "a", 0), ("7", "B", "b", 1), ("d", "D", "c", None), ("x", "", "e", None),
    ]  # fmt: skip
    assert made[2].data == {"score": 1.0}
    with pytest.raises(ProgramError, match="candidate 0 of a Pick is 3"):
        candidates_of([3])
    with pytest.raises(ProgramError, match="the id '0'"):
        candidates_of(["a", {"id": "0", "text": "b"}])


class Placed:
    name = digest = "placed"

    def __init__(self, place, answer=None):
        self.requests, self.answers, self.place, self.answer = [], [], place, answer

    async def complete(self, request):
        candidates = request.choice.candidates
        self.requests.append(request)
        self.answers.append(self.answer or candidates[min(self.place, len(candidates) - 1)].id)
        return [Completion(self.answers[-1], "stop", 0, 0)]


def test_outside_of_leret_the_actor_answers_also_for_a_copy():
    program, actor = Picks(), Placed(-1)
    with pytest.raises(ProgramError, match=r"pick\.actor = POLICY"):
        program(question="?")
    program.pick.actor = actor
    named_picks(program)
    assert program.deepcopy()(question="?").picked == [CHUNKS[2], CHUNKS[1]]
    assert actor.requests[0].choice.predictor == "pick"
    assert '"candidates": {"0": "Mary went home."' in actor.requests[0].messages[0]["content"]
    program.pick.actor = Placed(0, "nine")
    with pytest.raises(AdapterParseError, match="'nine' is not the id of a candidate"):
        program(question="?")
