import pytest

from tests.first_steps import refused


@pytest.mark.parametrize(
    ("flags", "says"),
    [(["--address", "auto"], "needs --workers N"), (["--workers", "2", "--shard", "0/2"], "remove one of them"),
     (["--merge", "x", "--shard", "0/2"], "remove one of them"), (["--shard", "2/2", "--set", "data.limit=2"], "2/2")],
)  # fmt: skip
def test_flags_that_do_not_go_together_are_refused(tmp_path, flags, says):
    assert says in refused("sample", "demo", "--run", tmp_path / "r", *flags)
