"""The lexicon, and the people and works that are made of it."""

from __future__ import annotations

import random

from leret.datasets.world import cast as lexicon
from leret.datasets.world.cast import Names, make_cast


def test_name_parts_belong_to_one_list_each() -> None:
    names = ["ADJECTIVES", "AWARDS", "CITIES", "FIRMS", "FIRST_NAMES", "INSTRUMENTS", "LAST_NAMES", "NOUNS", "TRADES"]
    parts = [word for name in names for word in getattr(lexicon, name)]
    assert len({part.lower() for part in parts}) == len(parts)


def test_names_and_ids_are_handed_out_once() -> None:
    names = Names(random.Random(1), 1000)
    made = [name for _ in range(300) for name in (names.person(), names.work(), names.company(), names.doc_id())]
    assert len(set(made)) == len(made)


def test_works_that_share_a_name_differ_in_kind() -> None:
    cast = make_cast(random.Random(2), Names(random.Random(2), 1000), 30, 10, 60)
    assert (len(cast.people), len(cast.companies), len(cast.works)) == (30, 10, 60)
    assert len({work.title for work in cast.works}) == 60
    assert len({work.name for work in cast.works}) < 60
    assert all(person in cast.people for work in cast.works for person in work.people)
