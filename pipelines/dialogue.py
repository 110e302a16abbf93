"""Retrieval-augmented dialogue: search stories by the persona, pick one, and reply with it, as in LAPDOG.

A policy writes the reply and a picker chooses the story; `algorithm: joint` trains both on the quality of the reply
(https://arxiv.org/abs/2406.18847). Copy this file and edit it; a recipe refers to it as
``program: {path: "dialogue.py:Dialogue"}``.
"""

import dspy

from leret import Pick, Search


class Reply(dspy.Signature):
    """Reply to the last utterance as the person of the persona. Use the story if it helps."""

    persona: list[str] = dspy.InputField()
    history: list[str] = dspy.InputField(desc="utterances of the dialogue, the partner's last")
    story: str = dspy.InputField()
    reply: str = dspy.OutputField()


class Dialogue(dspy.Module):
    """Replies in a dialogue.

    Args:
        k: number of stories found for the persona; the picker chooses one of them.
        turns: number of last utterances that the writer sees. The picker sees only the last one, because the search
            already uses the persona.
        closed_book: reply from the persona and the history alone, without search and pick.
    """

    def __init__(self, k: int = 8, turns: int = 3, closed_book: bool = False) -> None:
        super().__init__()
        self.turns, self.closed_book = turns, closed_book
        if not closed_book:
            self.search, self.pick = Search(k=k, candidates=True), Pick(retrieves=True)
        self.reply = dspy.Predict(Reply.delete("story") if closed_book else Reply)

    def forward(self, persona: list[str], history: list[str]) -> dspy.Prediction:
        said = history[-self.turns :]
        if self.closed_book:
            return dspy.Prediction(reply=self.reply(persona=persona, history=said).reply)
        story = self.pick(self.search(" ".join(persona)).ranking, utterance=" ".join(history[-1:]))
        text = story.text if story else ""  # None: the search found nothing
        reply = self.reply(persona=persona, history=said, story=text).reply
        return dspy.Prediction(reply=reply, doc_ids=[story.id] if story else [])
