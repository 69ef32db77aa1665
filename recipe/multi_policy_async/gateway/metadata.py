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
"""Where a response came from: on every answer of every protocol, in its body and its headers."""

from typing import Any

from .call import Exchange
from .http_io import Headers, header_safe

_HEADER_FIELDS = ("workflow_id", "agent_id", "model_id", "request_id")


def metadata(exchange: Exchange) -> dict[str, Any]:
    """What every response says about where it came from; versions once tokens were sampled."""
    spans = [span for call in exchange.calls if (span := call.version_span) is not None]
    return {
        "workflow_id": exchange.exchange_id.split(":", 1)[0],
        "agent_id": exchange.agent_id,
        "model_id": exchange.model_id,
        "request_id": exchange.exchange_id,
        "policy_version": [str(min(s.oldest for s in spans)), str(max(s.newest for s in spans))] if spans else None,
    }


def metadata_headers(exchange: Exchange, *, versions: bool) -> Headers:
    """The metadata as headers; a stream's headers are out before any version is known."""
    known = metadata(exchange)
    headers = [(f"x-{name.replace('_', '-')}".encode(), header_safe(known[name])) for name in _HEADER_FIELDS]
    if versions and known["policy_version"]:
        headers.append((b"x-policy-version", header_safe(",".join(known["policy_version"]))))
    return headers
