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
"""A workflow that shows pictures, for jobs of policies that take images."""

import zlib
from collections.abc import Mapping
from typing import Any

from .tiny_vl_folder import png, shows


class Pictures:
    """The agent is shown a picture, asked again with another one, and asked something without any.

    Rewards differ within a group, so that every group trains.
    """

    agents: tuple[str, ...] = ("agent",)

    async def run(self, task: Any, agents: Mapping[str, Any]) -> dict[str, float]:
        client, limit = agents["agent"].client, {"model": "m", "max_tokens": 12}
        messages = [shows(task.question, png(zlib.crc32(task.question.encode())))]
        first = (await client.chat.completions.create(messages=messages, **limit)).choices[0].message.content
        messages += [{"role": "assistant", "content": first}, shows("and this?", png(1, 24, 40))]
        await client.chat.completions.create(messages=messages, **limit)
        await client.chat.completions.create(messages=[{"role": "user", "content": "no picture"}], **limit)
        return {"agent": zlib.crc32(first.encode()) % 100 / 100}
