from leret.viewer.tree import Tree


def test_equal_samples_share_a_card_and_cards_are_ordered_by_reward(index):
    [group] = Tree(index, "q1").groups("P1", "s0")
    assert [[one.id for one in card.samples] for card in group.cards] == [["a"], ["b", "b2"], ["cc"]]
    assert [card.is_chosen for card in group.cards] == [False, True, False]
    assert [card.beats for card in group.cards] == [{2}, set(), set()]


def test_gold_ranks_are_known_before_and_after_a_step(index):
    first, second = Tree(index, "q1").groups("P1")
    assert (first.ranks, first.cards[0].ranks) == ({"d1": None, "d2": None}, {"d1": 1, "d2": 2})
    assert second.before == ["d3", "d1"]
    assert second.ranks == {"d1": 2, "d2": None}
    assert [card.ranks for card in second.cards] == [{"d1": 1, "d2": 3}, {"d1": None, "d2": None}]


def test_paths_are_sampled_ones_and_those_of_systems(index):
    paths = Tree(index, "q1").paths()
    assert [step["ranks"]["d1"] for step in paths["sampled: base"]] == [2, 1]
    systems = Tree(index, "q3").paths()
    assert {name: [step["ranks"]["d1"] for step in path] for name, path in systems.items()} == {"base": [2], "ipo": [1]}
