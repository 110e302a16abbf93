"""A server on loopback that speaks the Tinker API with the real client; it samples and trains a tiny model.

It trains all weights instead of an adapter. A checkpoint is a copy of weights and optimizer, which stays in memory.
"""

import copy
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import torch
from transformers import AutoModelForCausalLM

KEY = "tml-secret-of-the-test"
BASE = "test/tiny"


class Model:
    def __init__(self, network):
        self.network = copy.deepcopy(network).requires_grad_(True)
        self.optimizer = torch.optim.AdamW(self.network.parameters())

    def logps(self, ids):
        logits = self.network(input_ids=torch.tensor([ids])).logits[0, :-1].float()
        return logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]]


class TinkerStub:
    """``requests`` holds paths and bodies, ``samples`` prompts, ids and log-probabilities, ``trained`` the same."""

    def __init__(self, base):
        self.network = AutoModelForCausalLM.from_pretrained(base).eval()
        self.base = Model(self.network)
        self.runs, self.saved, self.samplers, self.results = {}, {}, {}, {}
        self.requests, self.samples, self.trained, self.losses = [], [], [], []
        self.numbers, self.lock = count(), threading.Lock()

    @contextmanager
    def serving(self):
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"stub": self}))
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            self.url = f"http://127.0.0.1:{server.server_port}"
            yield self.url
        finally:
            server.shutdown()
            server.server_close()

    def post(self, path, body):
        """Return an answer, or the result that the client fetches later."""
        name = f"{path.rpartition('/')[2]}"
        match path.removeprefix("/api/v1/"):
            case "create_session":
                return {"session_id": f"session-{next(self.numbers)}"}
            case "create_sampling_session":
                return {"sampling_session_id": self.sampler(body.get("model_path"))}
            case "get_info":
                return {"model_id": body["model_id"], "model_data": {"model_name": BASE}}
            case "telemetry":
                return {"status": "accepted"}
            case "retrieve_future":
                return self.results[body["request_id"]]
            case "client/config" | "client/dynamic_config" | "session_heartbeat":
                return {}
        request = f"request-{next(self.numbers)}"
        try:
            self.results[request] = getattr(self, name)(body)
        except KeyError as error:
            self.results[request] = {"error": f"not found: {error.args[0]}", "category": "user"}
        ids = {"sample_sequence_ids": [f"{request}-{i}" for i in range(body["num_samples"])]} if name == "asample" else {}
        return {"request_id": request, **ids}

    def sampler(self, path):
        name = f"sampler-{next(self.numbers)}"
        self.samplers[name] = Model(self.saved[path].network) if path else self.base
        return name

    def create_model(self, body):
        return {"model_id": self.run(body, Model(self.network))}

    def load_weights(self, body):
        saved = self.saved[body["path"]]
        model = Model(saved.network)
        if body["optimizer"]:
            model.optimizer.load_state_dict(copy.deepcopy(saved.optimizer.state_dict()))
        return {"path": body["path"], "model_id": self.run(body, model)}

    def run(self, body, model):
        name = f"{body['session_id']}:train:{body['model_seq_id']}"
        self.runs[name] = model
        return name

    def save_weights(self, body, kind="weights"):
        path = f"tinker://{body['model_id']}/{kind}/{body['path']}"
        self.saved[path] = copy.deepcopy(self.runs[body["model_id"]])
        return {"path": path}

    def save_weights_for_sampler(self, body):
        if body.get("path"):
            return self.save_weights(body, "sampler_weights")
        path = self.save_weights({**body, "path": f"live-{next(self.numbers)}"})["path"]
        return {"sampling_session_id": self.sampler(path)}

    @torch.no_grad()
    def asample(self, body):
        from tinker.proto import tinker_public_pb2 as proto

        model, how = self.samplers[body["sampling_session_id"]], body["sampling_params"]
        prompt = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
        answer, noise = proto.SampleResponse(), torch.Generator().manual_seed(how.get("seed") or 0)
        for _ in range(body["num_samples"]):
            ids: list[int] = []
            while len(ids) < how["max_tokens"] and ids[-1:] != how.get("stop"):
                logits = model.network(input_ids=torch.tensor([prompt + ids])).logits[0, -1]
                greedy = how["temperature"] == 0
                ids.append(int(logits.argmax() if greedy else logits.softmax(-1).multinomial(1, generator=noise)))
            logps = model.logps(prompt + ids)[-len(ids) :].numpy()
            reason = proto.STOP_REASON_STOP if ids[-1:] == how.get("stop") else proto.STOP_REASON_LENGTH
            answer.sequences.add(tokens=torch.tensor(ids, dtype=torch.int32).numpy().tobytes(), logprobs=logps.tobytes(), stop_reason=reason)
            self.samples.append((prompt, ids, logps.tolist()))
        if body.get("prompt_logprobs"):
            answer.prompt_logprobs = torch.cat([torch.tensor([torch.nan]), model.logps(prompt)]).numpy().tobytes()
        return answer.SerializeToString()

    def forward_backward(self, body):
        import numpy as np
        from tinker.proto import tinker_public_pb2 as proto

        request = proto.ForwardBackwardRequest.FromString(body["proto"])
        model, total, rows = self.runs[request.model_id], 0.0, []
        for datum in request.data:
            tensor = {
                name: torch.from_numpy(np.frombuffer(one.dense, np.int64 if name == "target_tokens" else np.float32).copy())
                for name, one in datum.loss_fn_inputs.items()
            }
            ids = [*np.frombuffer(datum.model_input[0].encoded_text.tokens, np.int32).tolist(), int(tensor["target_tokens"][-1])]
            logps = model.logps(ids)
            loss = self.loss(request.loss_fn, dict(request.loss_fn_config), tensor, logps)
            loss.backward()
            total += float(loss.detach())
            rows.append(logps.detach().numpy())
            self.trained.append((ids, {name: one.tolist() for name, one in tensor.items()}))
        self.losses.append(request.loss_fn)
        ends = np.cumsum([0, *(row.nbytes for row in rows)], dtype=np.int64)
        field = proto.BatchedTensor(data=b"".join(row.tobytes() for row in rows), offsets=ends.tobytes(), dtype=proto.DTYPE_FLOAT32)
        output = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": total})
        output.loss_fn_outputs.add(num_datums=len(rows)).fields["logprobs"].CopyFrom(field)
        return output.SerializeToString()

    def loss(self, name, config, inputs, logps):
        if name == "cross_entropy":
            return -(logps * inputs["weights"]).sum()
        ratio, advantages = (logps - inputs["logprobs"]).exp(), inputs["advantages"]
        if name == "importance_sampling":
            return -(ratio * advantages).sum()
        clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
        return -torch.min(ratio * advantages, clipped * advantages).sum()

    def optim_step(self, body):
        model, adam = self.runs[body["model_id"]], body["adam_params"]
        torch.nn.utils.clip_grad_norm_(model.network.parameters(), adam["grad_clip_norm"])
        for group in model.optimizer.param_groups:
            group |= {"lr": adam["learning_rate"], "betas": (adam["beta1"], adam["beta2"]), "eps": adam["eps"]}
            group["weight_decay"] = adam["weight_decay"]
        model.optimizer.step()
        model.optimizer.zero_grad()
        return {"metrics": {}}


class _Handler(BaseHTTPRequestHandler):
    stub: TinkerStub
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        name = self.path.rpartition("/")[2]
        if name != "healthz" and self.headers.get("X-API-Key") != KEY:
            return self.send({"detail": "invalid key"}, 401)
        if name == "healthz":
            return self.send({"status": "ok"})
        if name == "get_server_capabilities":
            return self.send({"supported_models": [{"model_name": BASE, "max_context_length": 512}]})
        return self.send({"sampler_id": name, "base_model": BASE})

    def do_POST(self):
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("X-API-Key") != KEY:
            return self.send({"detail": "invalid key"}, 401)
        is_proto = "protobuf" in self.headers.get("Content-Type", "")
        body = {"proto": content} if is_proto else json.loads(content or b"{}")
        with self.stub.lock:
            self.stub.requests.append((self.path, body))
            return self.send(self.stub.post(self.path, body))

    def send(self, answer, status=200):
        is_proto = isinstance(answer, bytes)
        content = answer if is_proto else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/x-protobuf" if is_proto else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        """Write no log."""
