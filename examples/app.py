"""Serve an optimized program over HTTP.

    PROGRAM=saved/multihop uvicorn --app-dir examples app:app
    curl -d '{"question": "Where was the director of Ed Wood born?"}' -H 'Content-Type: application/json' :8000/search

The policy runs in this process; with SERVE=http://127.0.0.1:8001/v1 on that server, and the app needs no torch; with
SERVE=vllm on a vLLM server that starts and ends with the app.
"""

import os
from contextlib import asynccontextmanager

from fastapi import FastAPI
from pydantic import BaseModel

import leret


class Asked(BaseModel):
    question: str


class Answered(BaseModel):
    doc_ids: list[str]
    context: list[str]


@asynccontextmanager
async def lifespan(app):
    with leret.load(os.environ["PROGRAM"], serve=os.environ.get("SERVE") or None) as app.state.program:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/search")
async def search(asked: Asked) -> Answered:
    found = await app.state.program.acall(question=asked.question)
    return Answered(doc_ids=found.doc_ids, context=found.context)
