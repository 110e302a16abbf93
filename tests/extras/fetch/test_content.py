import pytest

from leret.extras.fetch.content import PageError, main_text

pytest.importorskip("trafilatura")


def test_text_is_decoded_by_the_header_or_the_page():
    page = "<html><head><meta charset='iso-8859-1'><title>Caf\u00e9</title></head><body><p>" + "Ein Caf\u00e9. " * 30
    assert main_text(page.encode("latin-1"), "text/html", None)[0] == "Caf\u00e9"
    assert main_text(page.encode("utf-8"), "text/html", "utf-8")[0] == "Caf\u00e9"
    for charset in ("no-such-charset", "base64", "undefined", "Punycode"):
        assert main_text("Caf\u00e9".encode(), "text/plain", charset) == ("", "Caf\u00e9")
    with pytest.raises(PageError, match="no main text"):
        main_text(b" ", "text/plain", None)
