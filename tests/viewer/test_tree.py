from leret.viewer.tree import Tree


def test_paths_are_sampled_ones_and_those_of_systems(index):
    paths = Tree(index, "q1").paths()
    assert [step["ranks"]["d1"] for step in paths["sampled: base"]] == [2, 1]
    systems = Tree(index, "q3").paths()
    assert {name: [step["ranks"]["d1"] for step in path] for name, path in systems.items()} == {"base": [2], "ipo": [1]}
