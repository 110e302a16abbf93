"""Settings classes with a key that names an environment variable, and a server that records requests."""

from aiohttp import web

from leret.config.base import KeyVariable, mark_of, models_in
from leret.config.evaluation import EvalRecipe
from leret.config.policy import PolicySettings
from leret.config.retriever import RetrieverSettings
from leret.config.sampling import SamplingRecipe
from leret.config.training import TrainingRecipe
from tests.http.servers import Served
from tests.policies.servers import completion

SECRET = "tml-secret-of-the-user"
DEFAULTS = ("TOGETHER_API_KEY", "TINKER_API_KEY", "NCBI_API_KEY")
FAMILIES = (PolicySettings, RetrieverSettings)


class Recorder(Served):
    """Answers chats, and refuses everything else."""

    async def route(self, request, body):
        if request.path.endswith("/chat/completions"):
            return web.json_response(completion(body))
        if request.path.endswith("/healthz"):  # the Tinker client sends its key after this request
            return web.json_response({"status": "ok"})
        return web.json_response({"error": "unknown"}, status=400)

    @property
    def seen(self):
        return [str(vars(request)) for request in self.requests]


def classes(recipe, seen=()):
    for model in models_in(recipe):
        if model not in seen:
            yield model
            for field in model.model_fields.values():
                yield from classes(field.annotation, (*seen, model))


def variables():
    """Settings classes with the keys that name variables, by the key's name or description."""
    roots = (SamplingRecipe, TrainingRecipe, EvalRecipe, *FAMILIES)
    for model in dict.fromkeys(model for root in roots for model in classes(root)):
        for name, field in model.model_fields.items():
            if name.endswith("_env") or "variable" in (field.description or ""):
                yield model, name, field


def keyed():
    return [(model, name) for model, name, field in variables() if mark_of(field, KeyVariable)]


def at(model, url, **keys):
    """Settings of a class with a server at ``url``, validated as a saved record is."""
    address = mark_of(next(field for kind, _, field in variables() if kind is model), KeyVariable).addresses
    model_name = {"model": "x"} if "model" in model.model_fields else {}
    kind = model.model_fields["kind"].default
    return {"kind": kind, address: [url] if address == "urls" else url, **model_name, **keys}
