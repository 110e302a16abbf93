from __future__ import annotations

import numpy as np

from leret.config.policy import EncoderSettings
from leret.policies.pickers.scratch import scratch_encoder

TEXTS = ["Mary went to the kitchen.", "Mary took the milk.", "To the garden!"]


def test_words_that_stand_once_are_unknown() -> None:
    encoder = scratch_encoder(TEXTS, EncoderSettings(), 0)
    ids = encoder.tokenizer("mary WENT to the Milk [SEP] the", padding=False)["input_ids"]
    assert encoder.tokenizer.convert_ids_to_tokens(ids) == [
        "mary",
        "[UNK]",
        "to",
        "the",
        "[UNK]",
        "[SEP]",
        "the",
        "[SEP]",
    ]
    assert len(scratch_encoder(TEXTS, EncoderSettings(vocab_size=4), 0).tokenizer) == 4


def test_weights_follow_from_the_seed() -> None:
    one, same, other = (scratch_encoder(TEXTS, EncoderSettings(), seed).encode(TEXTS) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert abs(one - other).max() > 0.01
    assert one.shape == (3, 64)
