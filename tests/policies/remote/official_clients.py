"""Send a chat request with the official client of Together or TGI, and print the parsed answer as JSON.

Runs in a virtual environment of its own (`make clients`), so it imports nothing of leret.

    python official_clients.py together http://127.0.0.1:8000 '{"messages": ...}'
"""

import json
import sys


def together(url, body):
    from together import Together

    client = Together(api_key="key", base_url=f"{url}/v1", max_retries=0, _strict_response_validation=True)
    return client.chat.completions.create(**body)


def tgi(url, body):
    from text_generation import Client
    from text_generation.types import Message

    known = {key: value for key, value in body.items() if key not in {"model", "messages"}}
    return Client(url).chat([Message(**message) for message in body["messages"]], **known)


if __name__ == "__main__":
    name, url, body = sys.argv[1:]
    answer = {"together": together, "tgi": tgi}[name](url, json.loads(body))
    print(json.dumps(answer.model_dump(mode="json")))
