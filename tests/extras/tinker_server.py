"""A server on loopback that speaks the Tinker API with the real client, and samples and trains a tiny model.

It trains all weights instead of an adapter. Its checkpoints are copies of weights and optimizer in memory.
"""

import copy
import json
from itertools import count

import numpy as np
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

KEY, BASE = "tml-secret-of-the-test", "test/tiny"


class Model:
    def __init__(self, network):
        self.network = copy.deepcopy(network)
        self.optimizer = torch.optim.AdamW(self.network.parameters())

    def logps(self, ids):
        logits = self.network(input_ids=torch.tensor([ids])).logits[0, :-1]
        return logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]]


class TinkerStub:
    """``samples`` holds prompts, ids and log-probabilities; ``trained`` holds ids and the inputs of the loss."""

    def __init__(self, base):
        self.base = Model(AutoModelForCausalLM.from_pretrained(base).eval())
        self.runs, self.saved, self.samplers, self.results = {}, {}, {}, {}
        self.requests, self.samples, self.trained, self.losses = [], [], [], []
        self.numbers, self.url = count(), ""

    async def handle(self, request):
        name = request.path.rpartition("/")[2]
        if name != "healthz" and request.headers.get("X-API-Key") != KEY:
            return web.json_response({"detail": "invalid key"}, status=401)
        if request.method == "GET":
            answer = self.get(name)
        elif "protobuf" in request.content_type:
            answer = self.post(name, {"proto": await request.read()})
        else:
            answer = self.post(name, json.loads(await request.text() or "{}"))
        if isinstance(answer, bytes):
            return web.Response(body=answer, content_type="application/x-protobuf")
        return web.json_response(answer)

    def get(self, name):
        if name == "get_server_capabilities":
            return {"supported_models": [{"model_name": BASE, "max_context_length": 512}]}
        return {"status": "ok"} if name == "healthz" else {"sampler_id": name, "base_model": BASE}

    def post(self, name, body):
        """Return an answer, or a promise of a result, which the client fetches with another request."""
        self.requests.append((name, body))
        match name:
            case "create_session":
                return {"session_id": f"session-{next(self.numbers)}"}
            case "create_sampling_session":
                return {"sampling_session_id": self.sampler(body.get("model_path"))}
            case "get_info":
                return {"model_id": body["model_id"], "model_data": {"model_name": BASE}}
            case "retrieve_future":
                return self.results[body["request_id"]]
            case "config" | "dynamic_config" | "session_heartbeat" | "telemetry":
                return {"status": "accepted"}
        promise = {"request_id": f"request-{next(self.numbers)}"}
        try:
            self.results[promise["request_id"]] = getattr(self, name)(body)
        except KeyError as error:
            self.results[promise["request_id"]] = {"error": f"not found: {error.args[0]}", "category": "user"}
        return promise | {"sample_sequence_ids": [str(i) for i in range(body.get("num_samples", 0))]}

    def weights(self, report, kind="weights"):
        saved = self.saved[json.loads((report.path / "tinker.json").read_text())[kind]]
        return dict(saved.network.named_parameters())

    def sampler(self, path):
        name = f"sampler-{next(self.numbers)}"
        self.samplers[name] = Model(self.saved[path].network) if path else self.base
        return name

    def create_model(self, body, model=None):
        name = f"{body['session_id']}:train:{body['model_seq_id']}"
        self.runs[name] = model or Model(self.base.network)
        return {"model_id": name}

    def load_weights(self, body):
        saved = self.saved[body["path"]]
        return self.create_model(body, copy.deepcopy(saved) if body["optimizer"] else Model(saved.network))

    def save_weights(self, body, kind="weights"):
        path = f"tinker://{body['model_id']}/{kind}/{body.get('path', body['seq_id'])}"
        self.saved[path] = copy.deepcopy(self.runs[body["model_id"]])
        return {"path": path}

    def save_weights_for_sampler(self, body):
        saved = self.save_weights(body, "sampler_weights")
        return saved if "path" in body else {"sampling_session_id": self.sampler(saved["path"])}

    @torch.no_grad()
    def asample(self, body):
        from tinker.proto import tinker_public_pb2 as proto

        model, how = self.samplers[body["sampling_session_id"]], body["sampling_params"]
        prompt = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
        answer, noise = proto.SampleResponse(), torch.Generator().manual_seed(how.get("seed", 0))
        for _ in range(body["num_samples"]):
            ids, stop = [], how.get("stop")
            while len(ids) < how["max_tokens"] and ids[-1:] != stop:
                logits = model.network(input_ids=torch.tensor([prompt + ids])).logits[0]
                chosen = logits[-1].argmax() if how["temperature"] == 0 else _drawn(logits[-1], noise)
                ids.append(int(chosen))
            logps = logits.log_softmax(-1)[range(len(logits)), (prompt + ids)[1:]]
            written = logps[-len(ids) :].numpy()
            made = answer.sequences.add(tokens=np.array(ids, np.int32).tobytes(), logprobs=written.tobytes())
            made.stop_reason = proto.STOP_REASON_STOP if ids[-1:] == stop else proto.STOP_REASON_LENGTH
            self.samples.append((prompt, ids, written.tolist()))
        if body.get("prompt_logprobs"):
            answer.prompt_logprobs = np.append(np.float32(np.nan), logps[: len(prompt) - 1].numpy()).tobytes()
        return answer.SerializeToString()

    def forward_backward(self, body):
        from tinker.proto import tinker_public_pb2 as proto

        request = proto.ForwardBackwardRequest.FromString(body["proto"])
        self.losses.append("forward" if request.forward_only else request.loss_fn)
        rows, losses = zip(*(self._backward(request, datum) for datum in request.data), strict=True)
        output = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": sum(losses)})
        field = output.loss_fn_outputs.add(num_datums=len(rows)).fields["logprobs"]
        field.data, field.dtype = b"".join(row.tobytes() for row in rows), proto.DTYPE_FLOAT32
        field.offsets = np.cumsum([0, *(row.nbytes for row in rows)], dtype=np.int64).tobytes()
        return output.SerializeToString()

    def _backward(self, request, datum):
        inputs, bounds = dict(datum.loss_fn_inputs), request.loss_fn_config
        targets = np.frombuffer(inputs.pop("target_tokens").dense, np.int64).tolist()
        ids = [*np.frombuffer(datum.model_input[0].encoded_text.tokens, np.int32).tolist(), targets[-1]]
        inputs = {name: torch.tensor(np.frombuffer(one.dense, np.float32)) for name, one in inputs.items()}
        assert ids[1:] == targets
        logps = self.runs[request.model_id].logps(ids)
        if request.loss_fn == "cross_entropy":
            gain = logps * inputs["weights"]
        else:
            ratio, advantages = (logps - inputs["logprobs"]).exp(), inputs["advantages"]
            gain = ratio * advantages
            if request.loss_fn == "ppo":
                low, high = bounds["clip_low_threshold"], bounds["clip_high_threshold"]
                gain = torch.min(gain, ratio.clamp(low, high) * advantages)
        if not request.forward_only:
            self.trained.append((ids, {name: one.tolist() for name, one in inputs.items()}))
            (-gain.sum()).backward()
        return logps.detach().numpy(), -float(gain.detach().sum())

    def optim_step(self, body):
        model, adam = self.runs[body["model_id"]], body["adam_params"]
        torch.nn.utils.clip_grad_norm_(model.network.parameters(), adam["grad_clip_norm"])
        for group in model.optimizer.param_groups:
            group |= {"lr": adam["learning_rate"], "betas": (adam["beta1"], adam["beta2"]), "eps": adam["eps"]}
            group["weight_decay"] = adam["weight_decay"]
        model.optimizer.step()
        model.optimizer.zero_grad()
        return {"metrics": {}}


def _drawn(logits, noise):
    return logits.softmax(-1).multinomial(1, generator=noise)
