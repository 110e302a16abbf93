"""How fast pickers choose and learn, on one thread, over sentences of random words.

    OMP_NUM_THREADS=1 python benchmarks/picking.py long [--sentences 40000] [--model DIRECTORY]
    OMP_NUM_THREADS=1 python benchmarks/picking.py features
    OMP_NUM_THREADS=1 python benchmarks/picking.py update [--sentences 50] [--model DIRECTORY]

``long``: an encoder embeds the sentences of one long text, and then makes picks in it. ``features``: 1,000 states of 20
candidates with 25 numbers each. ``update``: values with gradients for 48 episodes of two picks, both heads, and back.
Without ``--model`` encoders start from nothing, with relative positions, as the recipe `babilong` has them.

    embed_s     CPU seconds until the first pick, everything encoded
    step_ms     CPU milliseconds of each pick after that, the greatest of them
    *_ms        CPU milliseconds, the least of several
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable

import torch

from leret.config.policy import EncoderSettings, FeaturesSettings
from leret.core.types import Candidate, Choice
from leret.policies.base import Request
from leret.policies.pickers.picker import Picker, open_picker

WORDS = 2000
PICKS = 6


def milliseconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return 1000 * (time.process_time() - began)


def sentence(rng: random.Random) -> str:
    return " ".join(f"word{int(WORDS * rng.random() ** 2)}" for _ in range(rng.randint(5, 15)))


def story(n: int, seed: int) -> Choice:
    rng = random.Random(seed)
    return Choice("pick", {"question": sentence(rng)}, [Candidate(str(i), sentence(rng), "", i) for i in range(n)])


def after(choice: Choice, place: int) -> Choice:
    left = [*choice.candidates[:place], *choice.candidates[place + 1 :]]
    return Choice(choice.predictor, choice.context, left, (*choice.picked, choice.candidates[place]))


def encoder(arguments: argparse.Namespace, choices: list[Choice]) -> Picker:
    picker = open_picker(EncoderSettings(model=arguments.model, positions="relative"))
    picker.fit(choices)
    return picker


def long(arguments: argparse.Namespace) -> dict[str, object]:
    choice = story(arguments.sentences, 0)
    picker = encoder(arguments, [choice])
    times = []
    for _ in range(1 + PICKS):
        asked, chosen = Request((), (0,), 0.0, 1, choice=choice), []
        times.append(milliseconds(lambda asked=asked, chosen=chosen: chosen.extend(picker.complete_many([asked])[0])))
        choice = after(choice, [one.id for one in choice.candidates].index(chosen[0].text))
    dimensions = picker.model["state"].get_embedding_dimension()
    steps = [round(ms, 1) for ms in times[1:]]
    return {"dimensions": dimensions, "embed_s": round(times[0] / 1000, 2), "step_ms": steps, "max_step_ms": max(steps)}


def features(arguments: argparse.Namespace) -> dict[str, object]:
    rng = random.Random(0)
    data = [{f"n{i}": rng.random() for i in range(24)} for _ in range(100)]
    choices = [
        Choice("pick", {}, [Candidate(str(i), "", "", None, rng.choice(data)) for i in range(20)]) for _ in range(1000)
    ]
    picker = open_picker(FeaturesSettings())
    picker.fit(choices)
    function = picker._function._function
    both = [milliseconds(lambda: picker.score(choices)) for _ in range(9)]
    alone = [milliseconds(lambda: [function(choice) for choice in choices]) for _ in range(9)]
    requests = [Request((), tuple(range(8)), 1.0, 1, choice=choice) for choice in choices]
    draws = [milliseconds(lambda: picker.complete_many(requests)) for _ in range(5)]
    return {
        "function_ms": round(min(alone), 1),
        "score_ms_beside_it": round(min(both) - min(alone), 1),
        "complete_ms_8_seeds": round(min(draws), 1),
    }


def update(arguments: argparse.Namespace) -> dict[str, object]:
    episodes = [story(arguments.sentences, seed) for seed in range(48)]
    choices = [*episodes, *[after(choice, 3) for choice in episodes]]
    picker = encoder(arguments, choices)

    def backward() -> None:
        torch.cat([values.flatten() for values in picker.q(choices, twin=True)]).square().mean().backward()

    def score() -> None:
        picker.renew("new weights")
        picker.score(choices)

    scores, updates = ([milliseconds(work) for _ in range(7)] for work in (score, backward))
    n = sum(weights.numel() for weights in picker.model.parameters())
    return {"parameters": n, "score_ms": round(min(scores), 1), "update_ms": round(min(updates), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["long", "features", "update"])
    parser.add_argument("--sentences", type=int)
    parser.add_argument("--model", default="scratch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.sentences = arguments.sentences or {"long": 40_000}.get(arguments.what, 50)
    print(json.dumps({"what": arguments.what, **globals()[arguments.what](arguments)}, indent=1))


if __name__ == "__main__":
    main()
