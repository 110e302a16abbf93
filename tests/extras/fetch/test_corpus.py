import pytest

from leret.core.errors import DataError
from leret.extras.fetch.__main__ import main
from leret.extras.fetch.corpus import read_list
from tests.datasets.writing import json_lines


def test_a_list_is_plain_lines_json_lines_or_csv(tmp_path, capsys):
    (tmp_path / "plain").write_text("http://a.org/1\n\nhttps://b.org/2#part\n")
    assert read_list(tmp_path / "plain", None, None)[0] == {u: u for u in ("http://a.org/1", "https://b.org/2#part")}
    for name, comma in (("l.csv", ","), ("l.tsv", "\t")):
        rows = "id,url\nd1,http://a.org/1\nd2,http://a.org/1\nd1,http://a.org/1\n".replace(",", comma)
        (tmp_path / name).write_text(rows)
        assert read_list(tmp_path / name, "url", "id") == ({"d1": "http://a.org/1", "d2": "http://a.org/1"}, [])
    records = [{"id": "d1", "u": "http://a.org/1"}, {"id": "d1", "u": "http://a.org/2"}, {"id": "d2", "u": None},
               {"id": "d3", "u": "ftp://a.org"}, {"id": "d4", "u": "http://me:secret@a.org"},
               {"id": "d5", "u": "a.org"}]  # fmt: skip
    urls, failures = read_list(tmp_path / json_lines(tmp_path / "l.jsonl", records), "u", "id")
    assert urls == {"d1": "http://a.org/1"}
    assert [(place.rpartition(":")[2], kind) for place, kind, _ in failures] == [(str(n), "list") for n in range(2, 7)]
    with pytest.raises(DataError, match="field 'page' is missing"):
        read_list(tmp_path / "l.jsonl", "page", None)
    assert main([str(tmp_path / "l.jsonl"), "--url-field", "page", "--out", str(tmp_path / "x")]) == 2
    assert "field 'page' is missing" in capsys.readouterr().err
