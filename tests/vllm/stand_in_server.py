"""A vLLM server without vLLM: the same requests and answers, about a model of transformers that reloads from files."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from trinity_sync.config.model_checks import TESTED

GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""Paths for which vLLM asks for its key."""


class StandInServer:
    """What a server knows and was asked.

    Args:
        model: folder of its model; None: it answers to `facts` at most.
        key: its ``--api-key``.
        guarded: the beginnings of the paths that need the key.

    Attributes:
        url: where it answers.
        folder: of its model.
        heard: path and ``Authorization`` of each request.
        loaded: the versions that it was given.
        generated: its samples.
    """

    url = ""

    def __init__(self, model: Path | None, key: str | None, guarded: tuple[str, ...] = GUARDED) -> None:
        self.key, self.guarded, self.folder = key, guarded, model
        self.heard: list[tuple[str, str | None]] = []
        self.loaded: list[str] = []
        self.generated = 0
        self._version = "default"
        self._lock = threading.Lock()
        self._model = None if model is None else AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)

    def answer(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        match path:
            case "/server_info":
                return {"vllm_config": self._config()}
            case "/v1/models":
                return {"data": [{"id": "model", "root": str(self.folder)}]}
            case "/version":
                return {"version": f"{TESTED}.0"}
            case "/weight_info":
                return {"weight_version": self._version}
            case "/update_weight_version":
                self._version = body["new_version"]
            case "/collective_rpc":
                self._reload(Path(body["kwargs"]["weights_path"]))
            case "/v1/completions":
                return self._complete(body)
        return {}

    def _config(self) -> Mapping[str, Any]:
        described = {"max_model_len": 128, "dtype": "torch.bfloat16", "logprobs_mode": "raw_logprobs"}
        return {
            "model_config": described | {"quantization": None},
            "weight_transfer_config": None,
            "parallel_config": {"world_size": 1, "data_parallel_size": 1},
            "load_config": {"load_format": "auto"},
        }

    def _reload(self, folder: Path) -> None:
        assert self._model is not None
        with self._lock:
            self._model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
            self.loaded.append(self._version)

    @torch.inference_mode()
    def _complete(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._model is not None
        ids, log_probs = list(body["prompt"]), []
        drawing = torch.Generator().manual_seed(body["seed"])
        with self._lock:
            while len(log_probs) < body["max_tokens"] and not (log_probs and ids[-1] in body["stop_token_ids"]):
                of_all = self._model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
                ids.append(int(torch.multinomial(of_all.exp(), 1, generator=drawing)))
                log_probs.append(float(of_all[ids[-1]]))
            self.generated += 1
        ended = "stop" if ids[-1] in body["stop_token_ids"] else "length"
        tokens = {"token_ids": ids[len(body["prompt"]) :], "logprobs": {"token_logprobs": log_probs}}
        return {"choices": [tokens | {"finish_reason": ended}]}


@contextmanager
def stand_in_server(
    model: Path | None = None, key: str | None = None, guarded: tuple[str, ...] = GUARDED, host: str = "127.0.0.1"
) -> Iterator[StandInServer]:
    """A server for as long as the body runs."""
    server = StandInServer(model, key, guarded)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, sent = urlsplit(self.path).path, self.headers["Authorization"]
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            server.heard.append((path, sent))
            refused = server.key and path.startswith(server.guarded) and sent != f"Bearer {server.key}"
            found = {"error": "Unauthorized"} if refused else server.answer(path, json.loads(body or b"{}"))
            text = json.dumps(found).encode()
            self.send_response(401 if refused else 200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer((host, 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        server.url = f"http://{host}:{listening.server_port}"
        yield server
        listening.shutdown()
