import json
import random
from itertools import chain

import pytest

from leret.config.data import DataSettings
from leret.datasets.load import load_tasks


def sides(number, n, personas):
    """Return both views of a conversation: a persona, and (utterance, reply) for each turn."""
    said = [f"word {number} {place} of talk" for place in range(n)]
    first, second = personas
    yield second, [(said[i], said[i + 1]) for i in range(0, n - 1, 2)]
    yield first, [("__SILENCE__", said[0])] + [(said[i], said[i + 1]) for i in range(1, n - 1, 2)]


def conversations(n_conversations, n_utterances, n_personas):
    rng = random.Random(0)
    everybody = [[f"i like thing {i} .", f"i am {i} ."] for i in range(n_personas)]
    for number in range(n_conversations):
        personas = rng.sample(everybody, 2) if n_personas < 2 * n_conversations else everybody[2 * number :][:2]
        yield list(sides(number, n_utterances, personas))


def convai2(talks, with_personas):
    """Return the text of a file with the first views of all conversations, then the second views."""
    lines = []
    for persona, turns in chain(*zip(*talks, strict=True)):
        facts = [f"your persona: {line}" for line in persona if with_personas]
        said = [f"{utterance}\t{reply}\t\tno|yes" for utterance, reply in turns]
        lines += [f"{number} {line}" for number, line in enumerate([*facts, *said], start=1)]
    return "\n".join(lines)


def lapdog(talks):
    """Return LAPDOG's lines: the partner's last three utterances, with labels that alternate up to the last."""
    rows = []
    for persona, turns in chain(*zip(*talks, strict=True)):
        said = []
        for utterance, reply in turns:
            said += [utterance] if utterance != "__SILENCE__" else []
            first = len(said) - len(said[-3:])
            labels = ["QR"[(first + place + len(said)) % 2] for place in range(3)]
            context = " ".join(f"{label}: {text}" for label, text in zip(labels, said[-3:], strict=False))
            rows.append({"question": f"persona: {' '.join(persona)} context:  {context}", "answers": [reply]})
    return "\n".join(map(json.dumps, rows))


FORMS = {
    "self.txt": lambda talks: convai2(talks, with_personas=True),
    "none.txt": lambda talks: convai2(talks, with_personas=False),
    "lapdog.jsonl": lapdog,
}


@pytest.mark.parametrize(("n_utterances", "n_personas"), [(4, 120), (9, 24)])  # of 24, nearly all have talked
@pytest.mark.parametrize("form", FORMS)
def test_both_sides_of_a_conversation_are_in_one_split(tmp_path, form, n_utterances, n_personas):
    path = tmp_path / form
    path.write_text(FORMS[form](list(conversations(60, n_utterances, n_personas))))
    data = DataSettings.model_validate({"kind": "dialogue", "questions": str(path), "split": "all"})
    by_talk, splits = {}, set()
    for task in load_tasks(data).items:
        splits.add(task.split)
        by_talk.setdefault(task.answers[0].split()[1], set()).add(task.split)
    assert len(by_talk) == 60
    assert all(len(splits) == 1 for splits in by_talk.values())
    assert splits == {"train", "dev", "test"}
