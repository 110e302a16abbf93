import json

import numpy as np
import pytest
import torch

from leret.config.policy import FeaturesSettings
from leret.core.errors import PolicyError
from leret.core.types import Candidate, Choice
from leret.policies.checkpoints import PICKER_RECORD, PICKER_VERSION, read_picker
from leret.policies.pickers.features import mentions
from tests.policies.pickers.stories import shaken, story


def test_a_new_network_gives_0_and_standardises_features(picker):
    assert picker("features").q([story(), story([2])])[0].tolist() == [0.0] * 6
    network = picker("features").model  # of story() and story([2])
    lengths = [25, 25, 19, 24, 25, 22, 25, 25, 24, 25, 22]
    np.testing.assert_allclose(network.mean[0], np.mean(lengths), rtol=1e-6)
    np.testing.assert_allclose(network.scale[0], np.std(lengths), rtol=1e-6)


def test_values_are_a_linear_layer_plus_a_small_network(picker):
    one = shaken(picker("features", hidden_size=4))
    weights = {name: value.double().numpy() for name, value in one.model.state_dict().items()}
    rows = [[len(c.text), c.position, 1] for c in story([3]).candidates]
    x = (np.array(rows, float) - weights["mean"]) / weights["scale"]
    hidden = torch.nn.functional.gelu(torch.from_numpy(x @ weights["hidden.weight"].T + weights["hidden.bias"])).numpy()
    halves = hidden * weights["out.weight"][0]
    linear = (x @ weights["linear.weight"].T + weights["linear.bias"])[:, 0]
    np.testing.assert_allclose(one.score([story([3])])[0], linear + halves.sum(1), atol=1e-5)
    expected = np.stack([linear + 2 * halves[:, :2].sum(1), linear + 2 * halves[:, 2:].sum(1)])
    np.testing.assert_allclose(one.q([story([3])], twin=True)[0].detach(), expected, atol=1e-5)


def test_mentions_reads_the_numbers_of_candidates():
    whole = Candidate("a", "a", data={"idf": 1.0, "own": 0})
    others = [Candidate("b", "b", data=data) for data in ({"idf": 2.0, "own": 1}, {"own": True}, {})]
    names, rows = mentions(Choice("pick", {}, [whole, *others], (whole,)))
    assert names == ("idf", "own", "step", "again", "partly_again")
    assert rows[0].tolist() == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert rows[1:].tolist() == [[*row, 1.0, 0.0, 0.0] for row in ([2.0, 1.0], [0.0, 1.0], [0.0, 0.0])]


def test_mentions_counts_words_shared_with_picks():
    picked = Candidate("1", "Anna Bolt"), Candidate("2", "Rome")
    texts = ["anna bolt", "Anna Kern Bolt Rome", "Mia", ""]
    _, rows = mentions(Choice("pick", {}, [Candidate(text, text) for text in texts], picked))
    assert rows.tolist() == [[2.0, 1.0, 0.0], [2.0, 0.75, 1.0], [2.0, 0.0, 0.0], [2.0, 0.0, 0.0]]


def test_a_directory_cannot_name_code_to_run(tmp_path):
    function = str(tmp_path / "code.py:numbers")
    record = {"version": PICKER_VERSION, "kind": "features", "settings": {"features": function}}
    (tmp_path / PICKER_RECORD).write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(PolicyError, match="runs only if the recipe names it"):
        read_picker(FeaturesSettings(model=str(tmp_path)))
    assert read_picker(FeaturesSettings(model=str(tmp_path), features=function))[1] == record
