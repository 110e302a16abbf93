import random

from leret.datasets.world import cast as lexicon
from leret.datasets.world.cast import Names, make_cast


def test_name_parts_belong_to_one_list_each_and_names_are_unique_except_of_works_of_different_kinds():
    parts = [word.lower() for words in lexicon.LISTS.values() for word in words]
    assert len(set(parts)) == len(parts)
    names = Names(random.Random(1), 1000)
    made = [name for _ in range(300) for name in (names.person(), names.work(), names.company(), names.doc_id())]
    assert len(set(made)) == len(made)
    cast = make_cast(random.Random(2), Names(random.Random(2), 1000), 30, 10, 60)
    assert (len(cast.people), len(cast.companies), len({work.title for work in cast.works})) == (30, 10, 60)
    assert len({work.name for work in cast.works}) < 60
