"""The part of this package that vLLM's processes load, in vLLM's own environment.

It imports only `areal_core.models.verified` of this package.

`TokenGuard` protects all routes of vLLM, including development routes, with the run's token. `SafetensorsEngine` loads
model weights from a safetensors file; vLLM finds this weight-transfer engine by its entry point.

    /start_weight_update   no effect yet
    /update_weights        begins to check {"path", "digest"} in the background, while decoding continues
    /finish_weight_update  waits for the check, then loads; damaged or unfitting files fail before the model changes

Each process maps the file and copies only its tensor-parallel shard. One process of a machine checks hash and numbers
for all of them.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from areal_core.models.verified import verified

NAME = "areal_safetensors"
_REFUSED = b'{"error": {"message": "needs the run\'s token", "type": "Error", "param": null, "code": 401}}'
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Files need no rendezvous."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """A safetensors file, or a folder with `model.safetensors`, and its hash."""

    path: str
    digest: str


class SafetensorsEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Reads all model weights of the checkpoint format from one file."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    defers_processing = True  # reading continues after update_weights has returned

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._reader = ThreadPoolExecutor(1, "weights")
        self._staged: Future[dict[str, torch.Tensor]] | None = None
        self._shapes = _shapes(Path(self.model_config.model))
        # vLLM unties a base model whose files store its tied head, and may tie it again: it expects both tensors.
        self._head_is_embedding = self.model_config.word_embeddings_untied_by_checkpoint

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        self._staged = None

    def update_weights(self, update_info: dict) -> None:
        """As the base class, but without waiting for the device, which receives nothing yet."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        path = Path(update_info.path)
        file = path / "model.safetensors" if path.is_dir() else path
        self._staged = self._reader.submit(
            _read, file, update_info.digest, self._shapes, head_is_embedding=self._head_is_embedding
        )

    def drain_pending(self) -> None:
        if self._staged is not None:
            self._staged.result()

    def finish_weight_update(self) -> None:
        """Load the staged weights. Raises RuntimeError if none were staged, and every error of reading them."""
        if self._staged is None:
            raise RuntimeError("no model weights were staged: call /update_weights first")
        weights = self._staged.result()
        self._staged = None
        initialize_layerwise_reload(self.model)
        self.model.load_weights(weights.items())
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():  # vLLM on a CPU uses a packed copy of the head, and does not renew a tied one
            for layer in self.model.modules():
                if isinstance(layer, ParallelLMHead):
                    layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)


class TokenGuard:
    """ASGI middleware that requires the run's token; vLLM's own keys protect only OpenAI's routes."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['AREAL_TOKEN']}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSED})


def register() -> None:
    """Entry point `vllm.general_plugins`, called once in each of vLLM's processes."""
    WeightTransferEngineFactory.register_engine(NAME, SafetensorsEngine)


def _shapes(model: Path) -> dict[str, list[int]]:
    """Return the shapes of a model folder's tensors by name; empty if there is no such folder."""
    shapes: dict[str, list[int]] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    return shapes


def _read(file: Path, digest: str, shapes: dict[str, list[int]], *, head_is_embedding: bool) -> dict[str, torch.Tensor]:
    """Map a verified file's tensors. Raises OSError, or ValueError for damaged or unfitting files."""
    with verified(file, digest), safe_open(file, framework="pt") as tensors:
        weights = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - no mapping
    if head_is_embedding and _EMBEDDING in weights:
        weights.setdefault(_HEAD, weights[_EMBEDDING])  # files may store another head despite a tied config
    for name in sorted(weights.keys() | shapes.keys()) if shapes else ():
        given, wanted = list(weights[name].shape) if name in weights else None, shapes.get(name)
        if given != wanted:
            raise ValueError(f"{name}: must have shape {wanted}, as in the base model, the update has {given}")
    return weights
