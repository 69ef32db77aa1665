# Copyright 2026 the multi_policy_async authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The served model's weights: loaded by name, complete or refused, with a checksum."""

import hashlib
from collections.abc import Iterable

import torch


def checksum_of(digests: dict[str, bytes]) -> str:
    """One SHA-256 over all tensors, from their digests: independent of the order in which they were sent."""
    total = hashlib.sha256()
    for name in sorted(digests):
        total.update(name.encode())
        total.update(digests[name])
    return total.hexdigest()


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """SHA-256 of a tensor's bytes, row-major."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy()).digest()


class WeightStore:
    """Loads tensors into a model under their state-dict names, tied names included."""

    def __init__(self, model: torch.nn.Module):
        self._tensors = dict(model.state_dict(keep_vars=True))
        self._loaded: set[str] = set(self._tensors)
        self.complete = True
        """False from ``begin_load`` until every weight has been replaced."""

    def begin_load(self) -> None:
        self._loaded = set()
        self.complete = False

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Replace one tensor.

        Raises:
            ValueError: the model has no such tensor, or it has another shape.
        """
        held = self._tensors.get(name)
        if held is None:
            raise ValueError(f"weight {name!r} is not part of the served model")
        if held.shape != tensor.shape:
            raise ValueError(f"weight {name!r} has shape {tuple(tensor.shape)}, the model {tuple(held.shape)}")
        with torch.no_grad():
            held.copy_(tensor)
        self._loaded.add(name)

    def finish_load(self) -> None:
        """Close a load.

        Raises:
            ValueError: weights are missing; a tied weight counts as loaded when any of its names was.
        """
        storages = {self._tensors[name].data_ptr() for name in self._loaded}
        missing = [name for name, tensor in self._tensors.items() if tensor.data_ptr() not in storages]
        if missing:
            raise ValueError(f"{len(missing)} weights were not sent, such as {missing[:3]}")
        self.complete = True

    def checksum(self, names: Iterable[str] | None = None) -> str:
        """Of the served weights, under the names of the last load: equal to the sender's checksum of what it sent."""
        chosen = self._loaded if names is None else names
        return checksum_of({name: tensor_digest(self._tensors[name]) for name in chosen})
