"""Weights from the trainer's GPU to vLLM's servers by vLLM's own trainer-side engine, over NCCL or CUDA IPC.

The controller responds to the engine as one vLLM server would and passes every phase on to all servers
(`generation.transfer`). The only module of training that imports vLLM: it needs an environment that has it.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import requests
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerWeightTransferEngine, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from areal_core.api.controller_client import ControllerClient
from areal_core.types import PolicyVersion

logger = logging.getLogger(__name__)

_PATIENCE_S = 600.0  # for one phase
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class NamedWeights(WeightSource):
    """Tensors by name, in one type, on the device that sends them."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self.tensors: Mapping[str, NDArray[Any]] = {}

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, self._dtype, tuple(array.shape)) for name, array in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, array in self.tensors.items():
            yield name, torch.from_numpy(array).to(self._device, self._dtype)


class VllmSender:
    """`engines.engine.Sender` for vLLM's servers. Belongs to rank 0, which occupies one CUDA device."""

    def __init__(self, controller: ControllerClient, transfer: str, dtype: str, *, device: str = "cuda") -> None:
        self._controller = controller
        self._transfer = transfer
        self._source = NamedWeights(device, _DTYPES.get(dtype, torch.float32))
        self._engine: TrainerWeightTransferEngine[Any] | None = None

    def send(self, version: PolicyVersion, tensors: Mapping[str, NDArray[Any]]) -> None:
        self._source.tensors = tensors
        group = self._controller.transfer_group(version.version)
        if not group["needed"]:
            return
        if self._engine is None or not group["open"]:
            if self._engine is not None:
                self._engine.shutdown()
            self._engine = self._open(group["world_size"])
        try:
            self._engine.send_weights()
        except OSError as error:  # the controller refused, or is gone
            _end(error)

    def _open(self, world_size: int) -> TrainerWeightTransferEngine[Any]:
        """Set up the transfer to the servers that there are now."""
        if self._transfer == "ipc":
            info: Any = IPCTrainerInitInfo(rank=0, packed=True)
        else:
            info = NCCLTrainerInitInfo(
                rank=0, master_address="127.0.0.1", master_port=_free_port(), world_size=1 + world_size
            )
        client = _Client(self._controller)
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=self._source)


class _Client(HTTPVLLMWeightSyncClient):
    """vLLM's own client, with the run's token; an update in which a server is lost ends this process, which may wait in
    a broadcast."""

    def __init__(self, controller: ControllerClient) -> None:
        super().__init__(controller.transfer_url(), timeout=_PATIENCE_S)
        self._headers = controller.authorization

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        url = f"{self.base_url}/{path}"
        requests.post(url, json=json, headers=self._headers, timeout=self.timeout).raise_for_status()

    def update_weights(self, update_info: Any) -> None:
        try:
            super().update_weights(update_info)
        except OSError as error:
            _end(error)


def _end(error: OSError) -> NoReturn:
    """End the process, so that all ranks are started again and set up the transfer to the servers that there are then.
    Nothing less ends a broadcast that waits for a lost server, not even the interpreter's own exit."""
    logger.error("the weights were not sent: %s", error)
    os._exit(1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
