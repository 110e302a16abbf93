from leret.core.yaml import Placed, dotted, dump, load, parse


def test_keys_know_their_places():
    placed = parse("a: 1\nb:\n  c:\n    - {d: 2}\n    - e\n", "f.yaml")
    places = {("b", "c", 0, "d"): 4, ("b", "c", 1): 5, ("b", "x", "y"): 2}  # the last: of the nearest section around
    assert {key: placed.at(key) for key in places} == {key: f"f.yaml:{line}: " for key, line in places.items()}
    assert dotted(("b", "c", 0, "d")) == "b.c[0].d"


def test_values_are_plain_and_follow_yaml_1_2():
    value = load("[1, 2.5, 1e-5, true, on, no, ~, &x false, *x, 'a', 010]")
    assert value == [1, 2.5, 1e-5, True, "on", "no", None, False, False, "a", 10]
    assert [type(item) for item in value] == [int, float, float, bool, str, str, type(None), bool, bool, str, int]
    assert load("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n")["b"] == {"y": 3, "x": 1}  # merged keys yield


def test_a_key_that_is_not_text_is_a_problem_and_read_as_text():
    placed = parse("a: {3: b}\n2020-01-01: c\n", "f.yaml")
    assert placed.value == {"a": {"3": "b"}, "2020-01-01": "c"}
    assert [problem[:8] for problem in placed.problems] == ["f.yaml:1", "f.yaml:2"]


def test_written_values_are_read_unchanged():
    value = {"b": "on", "a": [1e-5, "1e-5", None, "2024-01-01", "x: y"], "c": {"d": [], "e": "é\n\u2028"}, "f": "~"}
    assert list(load(dump(value)).items()) == list(value.items())


def test_a_value_of_a_command_flag_is_named_by_the_flag():
    placed = Placed({}, {("data", "corpus"): "--corpus", ("k",): "--set", ("a",): "r.yaml:3"})
    keys = [("data", "corpus"), ("k",), ("a",), ("a", "b")]
    assert [placed.label(key) for key in keys] == ["--corpus", "--set k", "r.yaml:3: a", "r.yaml:3: a.b"]
