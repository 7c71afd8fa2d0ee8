"""What stands in for SGLang's engine: samples from succ16 or a change of it, with exact numbers, and answers in the
shapes that were recorded from a real server (recorded.json), its oddities included.

    logits after token x = 4 * (W + scale * B A)[:, x],   W: the output head in the model's files
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray
Body = dict
Answer = tuple[int, dict]

_HIDDEN_SCALE = 4.0
_LORA = "base_model.model.lm_head.lora_{}.weight"


class StandInEngine:
    """Owned by its server's event loop; tests may set the public fields before they ask for anything.

    eos: ends samples as in SGLang, which adds it to every list of stop tokens. finds_strings: whether stop strings are
    seen. pause_at: samples wait at this length
    until `go_on`, or until they are aborted. mangle: changes what /generate answers.
    """

    def __init__(self, model: Path, *, max_loaded: int | None = None, **info: object) -> None:
        self.info = {
            "version": "0.5.23",
            "skip_tokenizer_init": False,
            "enable_lora": True,
            "max_lora_rank": 16,
            "lora_target_modules": ["all"],
            "max_loaded_loras": max_loaded,
            "enable_deterministic_inference": False,
            "enable_return_routed_experts": False,
            "attention_backend": "torch_native",
            "weight_version": "default",
            "max_req_input_len": 1026,
            **info,
        }
        self.eos: tuple[int, ...] = ()
        self.finds_strings = True
        self.pause_at: int | None = None
        self.go_on = asyncio.Event()
        self.mangle: Callable[[dict], dict] = lambda reply: reply
        self.log: list[tuple[str, Body]] = []
        self.most_loaded = 0
        self.most_running = 0
        self.running: dict[str, asyncio.Event] = {}
        self._model = model
        self._max_loaded = max_loaded
        self._rng = np.random.default_rng(0)
        self._seen: set[tuple] = set()
        self.restart()

    def restart(self) -> None:
        """As after a crash: nothing of what was loaded is left."""
        self.version = "default"
        self.adapters: dict[str, Path] = {}
        self._head = load_file(self._model / "model.safetensors")["lm_head.weight"]
        self._seen.clear()
        self.running.clear()

    def paths(self, wanted: str) -> list[Body]:
        """The bodies of all requests to this path."""
        return [body for path, body in self.log if path == wanted]

    async def answer(self, path: str, body: Body) -> Answer:
        self.log.append((path, body))
        match path:
            case "/ready":
                return 200, {}
            case "/server_info":
                return 200, {**self.info, "weight_version": self.version}
            case "/generate":
                return await self._generate(body)
            case "/abort_request":
                if body["rid"] in self.running:
                    self.running[body["rid"]].set()
                return 200, {}
            case "/load_lora_adapter":
                return self._load(body["lora_name"], Path(body["lora_path"]))
            case "/unload_lora_adapter":
                return self._unload(body["lora_name"])
            case "/update_weights_from_disk":
                return await self._update(Path(body["model_path"]), body["weight_version"])
            case _:
                return 404, {"detail": "Not Found"}

    def _load(self, name: str, path: Path) -> Answer:
        if name in self.adapters:
            message = f"Failed to load LoRA adapter {name} because it is already loaded"
            return 400, {"success": False, "error_message": message}
        if not (path / "adapter_config.json").exists():
            message = f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{path}'."
            return 400, {"success": False, "error_message": message}
        self.adapters[name] = path
        self.most_loaded = max(self.most_loaded, len(self.adapters))
        return 200, {"success": True, "error_message": ""}

    def _unload(self, name: str) -> Answer:
        if self.adapters.pop(name, None) is None:
            message = f"LoRA with name {name} does not exist."
            return 400, {"success": False, "error_message": message}
        return 200, {"success": True, "error_message": ""}

    async def _update(self, path: Path, version: str) -> Answer:
        while self.running:
            await asyncio.sleep(0.001)
        if not (path / "model.safetensors").exists():
            return 400, {"success": False, "message": f"Failed to get weights iterator: {path}"}
        self._head = load_file(path / "model.safetensors")["lm_head.weight"]
        self.version = version
        self._seen.clear()
        return 200, {"success": True, "message": "Succeeded to update model weights."}

    async def _generate(self, body: Body) -> Answer:
        name = body.get("lora_path")
        if name is not None and name not in self.adapters:
            return 400, _error(f"Got LoRA adapter that has never been loaded: {name}")
        rid, aborted = body["rid"], asyncio.Event()
        if rid in self.running:
            return 400, _error(f"Duplicate request ID detected: {rid}")
        self.running[rid] = aborted
        self.most_running = max(self.most_running, len(self.running))
        try:
            table = self._table(name)
            tokens, finish = await self._sample(body, table, aborted)
        finally:
            self.running.pop(rid, None)
        return 200, self.mangle(self._reply(body, table, tokens, finish))

    async def _sample(
        self, body: Body, table: Array, aborted: asyncio.Event
    ) -> tuple[list[int], dict]:
        params, last = body["sampling_params"], body["input_ids"][-1]
        stops = {*params.get("stop_token_ids", ()), *self.eos}
        tokens: list[int] = []
        while len(tokens) < params["max_new_tokens"]:
            await asyncio.sleep(0)
            if len(tokens) == self.pause_at:
                await _first(self.go_on.wait(), aborted.wait())
            if aborted.is_set():
                return tokens, {"type": "abort", "message": "Aborted", "status_code": None}
            last = self._draw(table[last], params["temperature"])
            tokens.append(last)
            text = "".join(map(letter, tokens))
            for string in params.get("stop", ()) if self.finds_strings else ():
                if text.endswith(string):
                    return tokens, {"type": "stop", "matched": string}
            if not params.get("ignore_eos") and last in stops:
                return tokens, {"type": "stop", "matched": last}
        return tokens, {"type": "length", "length": len(tokens)}

    def _draw(self, logprobs: Array, temperature: float) -> int:
        if temperature == 0:
            return int(logprobs.argmax())
        masses = np.exp(logprobs / temperature)
        return int(self._rng.choice(len(masses), p=masses / masses.sum()))

    def _reply(self, body: Body, table: Array, tokens: list[int], finish: dict) -> dict:
        prompt, start = body["input_ids"], body.get("logprob_start_len", -1)
        key = (body.get("lora_path"), *prompt)
        meta = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            "cached_tokens": len(prompt) - 1 if key in self._seen and start < 0 else 0,
            "weight_version": self.version,
        }
        self._seen.add(key)
        if body.get("return_logprob"):
            contexts = [prompt[-1], *tokens][: len(tokens)]
            meta["output_token_logprobs"] = _own(table, contexts, tokens)
            if body.get("top_logprobs_num"):
                meta["output_top_logprobs"] = _top(table, contexts, body["top_logprobs_num"])
        if start >= 0:
            contexts, scored = prompt[start:-1], prompt[start + 1 :]
            # The last token of the vocabulary is called 0 there.
            rows = [
                [p, 0 if t == len(table) - 1 else t, x] for p, t, x in _own(table, contexts, scored)
            ]
            meta["input_token_logprobs"] = [[None, prompt[start], None], *rows]
            if body.get("top_logprobs_num"):
                rows = _top(table, contexts, body["top_logprobs_num"])
                meta["input_top_logprobs"] = [None, *rows]
            if body.get("token_ids_logprob"):
                rows = [
                    [[float(table[c, t]), t, None] for t in body["token_ids_logprob"]]
                    for c in contexts
                ]
                meta["input_token_ids_logprobs"] = [None, *rows]
        return {"output_ids": tokens, "meta_info": meta}

    def _table(self, name: str | None) -> Array:
        """[i, j] = log p(j | i)."""
        head = self._head.astype(np.float64)
        if name is not None:
            config = json.loads((self.adapters[name] / "adapter_config.json").read_text())
            tensors = load_file(self.adapters[name] / "adapter_model.safetensors")
            delta = tensors[_LORA.format("B")] @ tensors[_LORA.format("A")]
            head = head + config["lora_alpha"] / config["r"] * delta
        logits = _HIDDEN_SCALE * head.T
        peaks = logits.max(axis=1, keepdims=True)
        return logits - peaks - np.log(np.exp(logits - peaks).sum(axis=1, keepdims=True))


def letter(token: int) -> str:
    """The text of a token of 16."""
    return chr(ord("a") + token)


def _own(table: Array, contexts: list[int], tokens: list[int]) -> list:
    return [[float(table[c, t]), t, None] for c, t in zip(contexts, tokens, strict=True)]


def _top(table: Array, contexts: list[int], k: int) -> list:
    assert k <= len(table), "a real server ends here"
    return [
        [[float(table[c, t]), int(t), None] for t in np.argsort(-table[c])[:k]] for c in contexts
    ]


def _error(message: str) -> dict:
    return {"error": {"message": message}}


async def _first(*waits) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
