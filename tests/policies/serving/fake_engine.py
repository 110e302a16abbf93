"""An LM server without an LM, which starts and fails as real ones do.

Run as ``fake_engine.py serve MODEL --port P --served-model-name NAME ...``; FAKE_ENGINE names its behaviour, and the
folder FAKE_RECORD receives its arguments, environment, process ids and requests.
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

MODE = os.environ.get("FAKE_ENGINE", "well")
RECORD = Path(os.environ["FAKE_RECORD"])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    names: tuple[str, ...] = ()

    def do_GET(self):
        self.answer(200, {"data": [{"id": name} for name in self.names]})

    def do_POST(self):
        body, key = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.headers.get("Authorization")
        (RECORD / "request.json").write_text(json.dumps({"body": body, "key": key}))
        if MODE == "cannot complete":
            print(f"refused {key}", flush=True)
            self.answer(500, {"error": {"message": f"head_dim=16 is not supported ({key})"}})
        elif MODE == "never ready":
            self.answer(503, {})
        else:
            self.answer(200, {"choices": [{"message": {"content": "Paris"}, "finish_reason": "stop"}]})

    def answer(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def main():
    options = dict(pairwise(sys.argv))
    RECORD.mkdir(exist_ok=True)
    seen = {name: os.environ.get(name) for name in ("HF_HUB_OFFLINE", "VLLM_CPU_KVCACHE_SPACE", "VLLM_API_KEY")}
    (RECORD / "start.json").write_text(json.dumps({"arguments": sys.argv[1:], "environment": seen}))
    pids = [os.getpid()]
    if MODE == "dies at start":
        print("Loading weights\nRuntimeError: not enough memory for the KV cache", flush=True)
        sys.exit(3)
    if MODE == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        worker = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        pids.append(subprocess.Popen([sys.executable, "-c", worker]).pid)
    (RECORD / "pids.json").write_text(json.dumps(pids))
    if MODE == "silent":
        time.sleep(600)
    Handler.names = (options.get("--served-model-name", "/path/of/the/model"),)
    print("listening", flush=True)
    host = options.get("--host") or options["--hostname"]
    ThreadingHTTPServer((host, int(options["--port"])), Handler).serve_forever()


if __name__ == "__main__":
    main()
