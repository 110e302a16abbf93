"""Hints: what they name, what they withhold, where they stand, and what is trained."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from leret.core.types import Document, Passage, Task
from leret.programs.prompts import Prompt
from leret.rollouts.hints import Hints
from leret.sampling.bank.bank import load_bank
from leret.sampling.stage import sample
from leret.training.data import RunSamples
from leret.training.stored.sft import SFTRecipe, examples
from tests.sampling.fakes import FakePolicy, content, policy_is, recipe_of

DOCUMENTS = {
    "a": Document("a", "The Iron Raven (film)", "A film."),
    "b": Document("b", "Tobias Jarvis", "A writer."),
    "c": Document("c", "", "the raven flies over iron hills and never lands on a tree again"),
}
RAVEN = "The Iron Raven | still missing: The Iron Raven"
JARVIS = "Tobias Jarvis | still missing: Tobias Jarvis"
TASK = Task.question("q", "Who wrote The Iron Raven?", gold=("a", "b"))


def after(*doc_ids):
    passages = tuple(Passage(id, DOCUMENTS[id].title, DOCUMENTS[id].text, 1.0) for id in doc_ids)
    return SimpleNamespace(searches=(SimpleNamespace(added=(passages,)),) if passages else ())


def shown(hints, *texts, task=TASK, need=None):
    messages = tuple({"role": "user", "content": text} for text in texts)
    return [message["content"] for message in hints.show(messages, task, need or after())]


def test_a_hint_names_missing_documents_and_withholds_what_the_prompt_does_not_contain():
    hints = Hints(DOCUMENTS)
    question = "question: Who wrote The Iron Raven?"
    assert shown(hints, question) == [f"{RAVEN}\n{question}"]
    assert (hints.shown, hints.withheld) == (1, 1)
    found = f"{question}\ncontext:\nThe Iron Raven (film) | A film scripted by Tobias Jarvis."
    assert shown(hints, "demo", found, need=after("a")) == ["demo", f"{JARVIS}\n{found}"]
    assert (hints.shown, hints.withheld) == (2, 1)
    assert shown(hints, found, need=after("a", "b")) == [found], "nothing is missing"
    assert "named 2 missing" in hints.note()
    assert "withheld 1 that" in hints.note()


def test_instructions_and_demonstrations_make_nothing_readable():
    hints = Hints(DOCUMENTS)
    system = ({"role": "system", "content": "Tobias Jarvis"}, {"role": "user", "content": "who?"})
    assert hints.show(system, TASK, after("a")) == system
    demo = ({"role": "user", "content": "Tobias Jarvis"}, {"role": "user", "content": "who?"})
    assert hints.show(demo, TASK, after("a"), demo[1:]) == demo
    nameless = Hints({"x": replace(DOCUMENTS["a"], title="!!!")})
    assert nameless.show(demo, replace(TASK, gold=("x",)), after()) == demo


def test_without_a_title_a_hint_has_first_words_or_a_chunk_or_the_answer():
    untitled, text = replace(TASK, gold=("c",)), DOCUMENTS["c"].text
    name = text.removesuffix(" again")
    assert shown(Hints(DOCUMENTS), text, task=untitled) == [f"{name} | still missing: {name}\n{text}"]

    chunked = replace(TASK, gold=("whole",), parents={"b": "whole"})
    hints = Hints(DOCUMENTS, {"whole": "b"})
    assert shown(hints, "Tobias Jarvis?", task=chunked) == [f"{JARVIS}\nTobias Jarvis?"]
    assert shown(hints, "Tobias Jarvis?", task=chunked, need=after("b")) == ["Tobias Jarvis?"]

    answered = Task.question("q", "Is it Rome?", "Rome")
    assert shown(Hints({}), "Is it Rome?", task=answered) == ["Rome | the answer: Rome\nIs it Rome?"]
    assert shown(Hints({}), "Which city?", task=answered) == ["Which city?"]


class Obedient(FakePolicy):
    """Searches for what a hint names, and else for what no document has."""

    def _one(self, request, seed):
        made = super()._one(request, seed)
        line = request.messages[-1]["content"].splitlines()[0].lower()
        missing = line.partition(" | still missing: ")[2]
        return replace(made, text=missing or f"nothing {seed % 7}")


def test_hinted_samples_compete_and_are_trained_under_the_zero_shot_prompt(run):
    demo = {"question": "who", "context": [], "query": "find who"}
    Path("own").mkdir()
    Prompt("mine", {"write_query": [demo]}).save(Path("own/m.json"))
    with policy_is(Obedient()):
        report = sample(recipe_of(hint="gold", prompts=3, samples=1, bank={"path": "own"}), run)
    assert [prompt.hint for prompt in load_bank(run)] == [None, "gold", "gold"]
    best = [max(group.samples, key=lambda sample: sample.reward).prompt for group in content(run)]
    assert sum(prompt != "0" for prompt in best) > len(best) / 2
    targets = examples(SFTRecipe(), RunSamples(run))
    words = [target.completions[0] for target in targets]
    assert any("alpha" in text for text in words)
    assert not any("still missing" in str(target.prompt) or "find who" in str(target.prompt) for target in targets)
    assert any("hints named" in note and "withheld" in note for note in report.notes)
