"""Serve an optimized program over HTTP.

    PROGRAM=saved/multihop uvicorn --app-dir examples app:app
    curl -d '{"question": "Where was the director of Ed Wood born?"}' -H 'Content-Type: application/json' :8000/search

The policy runs in this process. With SERVE=http://127.0.0.1:8001/v1 it runs on that server, and the app needs no torch;
with SERVE=vllm on a vLLM server that starts and ends with the app.
"""

import os
from contextlib import asynccontextmanager

from fastapi import FastAPI
from pydantic import BaseModel

import leret


class Query(BaseModel):
    question: str


class Passages(BaseModel):
    doc_ids: list[str]
    context: list[str]


@asynccontextmanager
async def lifespan(app):
    with leret.load(os.environ["PROGRAM"], serve=os.environ.get("SERVE") or None) as app.state.program:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/search")
async def search(query: Query) -> Passages:
    prediction = await app.state.program.acall(question=query.question)
    return Passages(doc_ids=prediction.doc_ids, context=prediction.context)
