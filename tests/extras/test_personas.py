import re

import pytest

from leret.core.errors import DataError
from leret.datasets.world.cast import INSTRUMENTS
from leret.extras.personas import generate_personas

STORIES, TASKS = generate_personas(3, 30, 5, 10)
BY_ID = {story.doc_id: story for story in STORIES}


def test_a_dialogue_grows_by_a_turn_per_task_and_splits_share_no_persona_and_no_story():
    assert generate_personas(3, 30, 5, 10) == (STORIES, TASKS)
    assert len(TASKS) == 3 * 45 == len({task.id for task in TASKS})
    for first, second, third in zip(*(TASKS[i::3] for i in range(3)), strict=True):
        assert first.inputs["persona"] == second.inputs["persona"] == third.inputs["persona"]
        assert third.inputs["history"][:4] == [*second.inputs["history"], second.answers[0]][:4]
        assert len({first.split, second.split, third.split}) == 1
        assert len({*first.gold, *second.gold, *third.gold}) == 3
    by_split = [[task for task in TASKS if task.split == split] for split in ("train", "dev", "test")]
    for part_of in (lambda task: str(task.inputs["persona"]), lambda task: task.gold):
        seen = [{part_of(task) for task in tasks} for tasks in by_split]
        assert len(set.union(*seen)) == sum(map(len, seen))


def test_only_the_right_story_has_the_words_that_a_reply_adds():
    for task in TASKS:
        persona, right = " ".join(task.inputs["persona"]), BY_ID[task.gold[0]]
        stories = [right, *(story for story in STORIES if story.title in persona and story is not right)]
        words = re.findall(r"\w+", task.answers[0])[2:]
        added = {word for word in words if word in INSTRUMENTS or word[0].isupper() or word.isdigit()}
        assert len(stories) == 5
        assert [added <= {*re.findall(r"\w+", story.text)} for story in stories] == [True, *[False] * 4]


@pytest.mark.parametrize(("sizes", "says"), [({"n_train": 601}, "601"), ({"turns": 6}, "turns is 6")])
def test_a_size_that_the_lexicon_cannot_fill_is_refused(sizes, says):
    with pytest.raises(DataError, match=says):
        generate_personas(0, **sizes)
