# ruff: noqa: E501  the shapes are as NCBI sends them
"""Replies in the shapes that NCBI's E-utilities send."""

from __future__ import annotations

from typing import Any

from tests.retrieval.serving import Asked, Reply

ARTICLES = {
    "1": """<PubmedArticle><MedlineCitation><PMID Version="1">1</PMID><Article>
<ArticleTitle>Formate assay in body fluids.</ArticleTitle>
</Article></MedlineCitation></PubmedArticle>""",
    "31": """<PubmedArticle><MedlineCitation Status="MEDLINE" Owner="NLM">
<PMID Version="1">31</PMID><Article PubModel="Print">
<Journal><Title>J</Title></Journal><ArticleTitle>Aspirin &amp; <i>p</i>53: CO<sub>2</sub>
 in <b>rats</b>.</ArticleTitle><Abstract>
<AbstractText Label="BACKGROUND" NlmCategory="BACKGROUND">We asked &lt;5.</AbstractText>
<AbstractText Label="RESULTS">It <sup>14</sup>C did.</AbstractText><CopyrightInformation>(c)</CopyrightInformation></Abstract>
</Article><CommentsCorrectionsList><CommentsCorrections RefType="Cites"><PMID Version="1">999</PMID></CommentsCorrections>
</CommentsCorrectionsList></MedlineCitation><PubmedData><ArticleIdList><ArticleId IdType="pubmed">31</ArticleId></ArticleIdList>
</PubmedData></PubmedArticle>""",
    "7": """<PubmedArticle><MedlineCitation><PMID Version="1">7</PMID><Article><ArticleTitle>No abstract here</ArticleTitle>
</Article></MedlineCitation></PubmedArticle>""",
    "52": """<PubmedBookArticle><BookDocument><PMID Version="1">52</PMID><Book><BookTitle book="b">GeneReviews</BookTitle></Book>
<ArticleTitle book="b" part="p">Odd Syndrome</ArticleTitle><Abstract><AbstractText>A review.</AbstractText></Abstract>
</BookDocument></PubmedBookArticle>""",
    "8": """<PubmedArticle><MedlineCitation><PMID Version="2">8</PMID><Article><ArticleTitle></ArticleTitle>
<VernacularTitle>Titre français</VernacularTitle></Article></MedlineCitation></PubmedArticle>""",
}
"""Records as efetch sends them; 999 in the first is an article that it cites."""


def esearch(ids: list[str], count: int | None = None, **more: Any) -> Reply:
    result = {
        "count": str(len(ids) if count is None else count),
        "retmax": str(len(ids)),
        "retstart": "0",
        "idlist": ids,
        "translationset": [],
        "querytranslation": "x",
        **more,
    }
    return Reply({"header": {"type": "esearch", "version": "0.3"}, "esearchresult": result})


def efetch(ids: list[str]) -> Reply:
    records = "".join(ARTICLES[i] for i in ids if i in ARTICLES)
    head = (
        '<?xml version="1.0" ?>\n<!DOCTYPE PubmedArticleSet PUBLIC "-//NLM//DTD PubMedArticle, 1st January 2025//EN" '
        '"https://dtd.nlm.nih.gov/ncbi/pubmed/out/pubmed_250101.dtd">\n'
    )
    return Reply(f"{head}<PubmedArticleSet>{records}</PubmedArticleSet>", headers={"Content-Type": "text/xml"})


def ncbi(found: dict[str, list[str]], reverse: bool = False) -> Any:
    """A server that finds ids by term; with ``reverse``, efetch sends its records in another order."""

    def answer(asked: Asked) -> Reply:
        if asked.path.endswith("/esearch.fcgi"):
            ids = found.get(asked.params["term"], [])[: int(asked.params["retmax"])]
            return esearch(ids, len(found.get(asked.params["term"], [])))
        ids = asked.params["id"].split(",")
        return efetch(ids[::-1] if reverse else ids)

    return answer
