"""Around a training: what is put back afterwards, a full disk, and signals."""

import errno
import os
import random
import signal
from contextlib import suppress

import pytest
import torch
import transformers

from leret.training.job import Interrupt, training_process
from tests.training.training_runs import interrupt


def test_threads_logs_and_random_numbers_are_put_back():
    before = torch.get_num_threads(), transformers.logging.get_verbosity(), random.getstate()
    with training_process(1):
        random.seed(0)
        assert torch.get_num_threads() == 1
    after = torch.get_num_threads(), transformers.logging.get_verbosity(), random.getstate()
    assert before == after


@pytest.mark.parametrize(
    ("raised", "full"),
    [("PytorchStreamWriter failed writing file", True), ("unexpected pos 64 vs 0", True), ("a shape is wrong", False)],
)
def test_a_full_disk_is_an_os_error_whichever_library_says_it(raised, full):
    with pytest.raises(OSError if full else RuntimeError) as caught, training_process(None):
        raise RuntimeError(raised)
    assert getattr(caught.value, "errno", None) == (errno.ENOSPC if full else None)


def test_a_second_signal_ends_at_once_and_the_handlers_are_put_back():
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    asked = Interrupt()
    with suppress(KeyboardInterrupt), asked.handled():  # which ends so after any signal
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.requested
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
