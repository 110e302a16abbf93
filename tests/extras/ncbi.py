# ruff: noqa: E501  the shapes are as NCBI sends them
"""Replies in the shapes that NCBI's E-utilities send."""

from tests.retrieval.serving import Reply


def article(pmid, title):
    return f"""<PubmedArticle><MedlineCitation><PMID Version="1">{pmid}</PMID><Article>
<ArticleTitle>{title}</ArticleTitle></Article></MedlineCitation></PubmedArticle>"""


ARTICLES = {
    "1": article(1, "Formate assay in body fluids."),
    "31": """<PubmedArticle><MedlineCitation Status="MEDLINE" Owner="NLM">
<PMID Version="1">31</PMID><Article PubModel="Print">
<Journal><Title>J</Title></Journal><ArticleTitle>Aspirin &amp; <i>p</i>53: CO<sub>2</sub>
 in <b>rats</b>.</ArticleTitle><Abstract>
<AbstractText Label="BACKGROUND" NlmCategory="BACKGROUND">We asked &lt;5.</AbstractText>
<AbstractText Label="RESULTS">It <sup>14</sup>C did.</AbstractText><CopyrightInformation>(c)</CopyrightInformation></Abstract>
</Article><CommentsCorrectionsList><CommentsCorrections RefType="Cites"><PMID Version="1">999</PMID></CommentsCorrections>
</CommentsCorrectionsList></MedlineCitation><PubmedData><ArticleIdList><ArticleId IdType="pubmed">31</ArticleId></ArticleIdList>
</PubmedData></PubmedArticle>""",
    "7": article(7, "No abstract here"),
    "52": """<PubmedBookArticle><BookDocument><PMID Version="1">52</PMID><Book><BookTitle book="b">GeneReviews</BookTitle></Book>
<ArticleTitle book="b" part="p">Odd Syndrome</ArticleTitle><Abstract><AbstractText>A review.</AbstractText></Abstract>
</BookDocument></PubmedBookArticle>""",
    "8": """<PubmedArticle><MedlineCitation><PMID Version="2">8</PMID><Article><ArticleTitle></ArticleTitle>
<VernacularTitle>Titre français</VernacularTitle></Article></MedlineCitation></PubmedArticle>""",
}


def esearch(ids, count=None):
    result = {"count": str(len(ids) if count is None else count), "retmax": str(len(ids)), "idlist": ids}
    return Reply({"header": {"type": "esearch", "version": "0.3"}, "esearchresult": result})


def efetch(articles):
    head = '<?xml version="1.0" ?>\n<!DOCTYPE PubmedArticleSet PUBLIC "-//NLM//DTD PubMedArticle, 1st January 2025//EN" "https://dtd.nlm.nih.gov/ncbi/pubmed/out/pubmed_250101.dtd">\n'
    return Reply(
        f"{head}<PubmedArticleSet>{''.join(articles)}</PubmedArticleSet>", headers={"Content-Type": "text/xml"}
    )


def ncbi(ids_by_term, record=ARTICLES.get):

    def answer(asked):
        if asked.path.endswith("/esearch.fcgi"):
            ids = ids_by_term.get(asked.params["term"], [])
            return esearch(ids[: int(asked.params["retmax"])], len(ids))
        return efetch(filter(None, map(record, asked.params["id"].split(",")[::-1])))

    return answer
