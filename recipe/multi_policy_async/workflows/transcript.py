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
"""What the agents of some episodes said, for people to read: ``episodes.jsonl`` in the run directory."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from .base import Task

logger = logging.getLogger(__name__)


class Transcripts:
    """Listens on the shared HTTP client and keeps the calls of the workflows it was asked to watch.

    Only calls through that client are seen; a framework with its own client leaves no messages here.

    Args:
        path: the JSONL file; ``None`` writes nothing.
        every: one episode of so many is written; 0: none.
    """

    def __init__(self, path: Path | None, every: int):
        self._path = path
        self._every = every if path is not None else 0
        self._seen = 0
        self.lost = 0  # episodes that could not be written
        self._watched: dict[str, list[dict[str, Any]]] = {}  # by a piece of the workflow's URLs

    def watch(self, token: str) -> bool:
        """Count an episode; start to keep its calls if it is one of those to write."""
        self._seen += 1
        if not self._every or (self._seen - 1) % self._every:
            return False
        self._watched[token] = []
        return True

    async def on_response(self, response: httpx.Response) -> None:
        """Event hook of ``httpx.AsyncClient``."""
        parts = response.request.url.path.split("/")
        token = parts[2] if len(parts) > 4 and parts[1] == "w" else ""
        if token not in self._watched or not response.headers.get("content-type", "").startswith("application/json"):
            return
        await response.aread()
        try:
            call = _readable(parts[4], json.loads(response.request.content), response.json())
        except (ValueError, TypeError, AttributeError):  # an error page, or JSON of another shape
            logger.info("a call of workflow %s cannot be read and is left out of its transcript", token)
            return
        self._watched.get(token, []).append(call)  # the workflow may have ended while the answer was read

    def write(self, token: str, task: Task, episode: Mapping[str, Any]) -> None:
        """Append the episode if it was watched; one that cannot be written is logged and counted in ``lost``."""
        calls = self._watched.pop(token, None)
        if calls is None or self._path is None:
            return
        try:
            line = {"task": task.index, "question": task.question, "ground_truth": task.ground_truth, "calls": calls}
            text = json.dumps({**episode, **line}, default=str, ensure_ascii=False)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
        except Exception:
            # A full disk, a prompt without a user message, the user's own objects: the workflow is finalized, and
            # what people read is not worth a job.
            self.lost += 1
            logger.warning("episode %s is not written down", episode.get("workflow_id"), exc_info=True)

    def forget(self, token: str) -> None:
        """The attempt was given up."""
        self._watched.pop(token, None)


def _readable(agent: str, request: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
    return {
        "agent": agent,
        "messages": [_without_images(message) for message in request.get("messages") or ()],
        "answer": [choice.get("message") for choice in response.get("choices", ())] or response,
        "metadata": response.get("metadata"),
    }


def _without_images(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a note in the place of each image: people read this."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    note = {"type": "text", "text": "(an image)"}
    return {**message, "content": [note if part.get("type") == "image_url" else part for part in content]}
