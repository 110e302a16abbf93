"""Exercises in copying."""

from __future__ import annotations

import random
from itertools import islice, repeat

from leret.demo.pretrain.batch import Row
from leret.demo.pretrain.exercises import copying, interleaved


def test_targets_are_runs_of_the_prompt() -> None:
    rng = random.Random(0)
    for _ in range(50):
        row = copying(rng, range(100, 200), ((1, 2), (3, 4)), 5)
        assert row.prompt[:2] == (1, 2)
        assert row.prompt[-2:] == (3, 4)
        said = row.prompt[2:-2]
        for target in row.targets:
            assert target[-1] == 5
            n = len(target) - 1
            assert n >= 2
            assert any(said[i : i + n] == target[:-1] for i in range(len(said)))


def test_the_share_falls_to_its_last_value_and_the_rows_stay() -> None:
    rows = [Row((i,), ((i,),)) for i in range(4000)]
    exercise = Row((-1,), ((-1,),))
    mixed = list(interleaved(iter(rows), repeat(exercise), (0.8, 0.2), 2000, random.Random(0)))
    assert [row for row in mixed if row is not exercise] == rows
    early = sum(row is exercise for row in mixed[:200]) / 200
    late = sum(row is exercise for row in mixed[2500:]) / len(mixed[2500:])
    assert 0.65 < early < 0.9
    assert 0.16 < late < 0.24


def test_the_same_seed_gives_the_same_stream() -> None:
    def stream() -> list[Row]:
        rng = random.Random(3)
        exercises = (copying(rng, range(9), ((), ()), 9) for _ in repeat(None))
        return list(islice(interleaved(repeat(Row((0,), ((0,),))), exercises, (0.5, 0.5), 10, rng), 100))

    assert stream() == stream()
