import pytest

from leret.core.types import State
from leret.sampling.store.store import StateSamples, Store
from leret.training.data import Encoded, GroupSamples, RunSamples
from leret.training.stored.sft import IGNORED, SFTRecipe, collate_targets, examples, sft_rows
from tests.sampling.fakes import made

ENCODED = [Encoded([1, 2], ([3, 4, 5],)), Encoded([7], ([8],))]


def groups(run):
    with Store(run.store, read_only=True) as store:
        return list(store.groups())


@pytest.mark.parametrize(("keys", "only_best"), [({"max_targets": 2}, True), ({"targets": "random"}, False)])
def test_targets_are_of_the_highest_reward_unless_they_are_a_control(run, keys, only_best):
    targets = examples(SFTRecipe(**keys), RunSamples(run))
    best = {sample.completion for group in groups(run) for sample in group.samples if sample.reward == 1.0}
    assert len(targets) == 24
    assert ({text for example in targets for text in example.completions} <= best) is only_best


@pytest.mark.parametrize("packed", [True, False])
def test_prompts_padding_and_ends_that_are_not_learnt_have_no_loss(packed):
    rows = sft_rows([*ENCODED, Encoded([1, 2], ([3, 4, 5],), learns_end=False)])
    batch = collate_targets([{name: rows[name][i] for name in rows} for i in range(3)], 0, packed=packed)
    seen = [[label for label in labels if label != IGNORED] for labels in batch["labels"].tolist()]
    assert seen == [[3, 4, 5], [8], [3, 4]]
    assert (batch["labels"][:, 0] == IGNORED).all()


def test_an_end_is_not_learnt_where_many_samples_are_cut():
    state = State("s", "q", 0, "write", {}, ({"role": "user", "content": "q"},))
    samples = [made(name, 1.0, completion=name, finish_reason="stop") for name in "abcdefghi"]
    for n_cut, learnt in ((0, True), (1, True), (2, False)):
        cut = [made(f"cut{i}", 0.0, finish_reason="length") for i in range(n_cut)]
        group = StateSamples(state, "P", (*samples, *cut))
        [target] = examples(SFTRecipe(require_spread=False), GroupSamples([group]))
        assert (target.learns_end, target.is_cut) == (learnt, (False,))
