"""Fetch the web pages of a list, and write their main texts as a corpus: ``python -m leret.extras.fetch``.

::

    DIR/pages/<digest of the URL>.json   main text of a page, or why there is none
    DIR/corpus.jsonl                     doc_id, title, text, url of each page
    DIR/failures.tsv                     URL, kind and reason of each failure

Only http and https URLs are requested, and only from the list's hosts and ``allow_hosts``;
redirects elsewhere are failures. robots.txt is obeyed. Status and content type decide whether a
page is accepted, not words in its text.
"""
