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
"""Images by URL: fetched from the hosts that the job names, and from no others.

An agent's URL must not make the gateway read what the agent itself cannot reach, so nothing is fetched by default, and
redirects are not followed.
"""

import aiohttp
from yarl import URL

from .errors import BadRequest, UnsupportedValue
from .image_parts import ImageUrl
from .spec import GatewaySpec

_TIMEOUT = aiohttp.ClientTimeout(total=20, sock_connect=5)


async def fetch_image(url: ImageUrl, spec: GatewaySpec) -> bytes:
    """The bytes behind a URL.

    Raises:
        BadRequest: the URL's host is not named, or it does not give an image of at most ``max_image_bytes``.
    """
    parsed = _allowed(url, spec)
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT) as session,
            session.get(parsed, allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise BadRequest(f"{url.param}: the server answered {response.status}", param=url.param)
            data = bytearray()
            async for piece in response.content.iter_any():
                data += piece
                if len(data) > spec.max_image_bytes:
                    break  # one byte too many is enough to be refused
            return bytes(data)
    except (TimeoutError, aiohttp.ClientError) as error:
        raise BadRequest(f"{url.param}: the image could not be fetched: {error!r}", param=url.param) from None


def _allowed(url: ImageUrl, spec: GatewaySpec) -> URL:
    try:
        parsed = URL(str(url))
        host, scheme, netloc = parsed.host, parsed.scheme, parsed.authority
    except ValueError:
        host = scheme = netloc = None
    if scheme not in ("http", "https") or not host:
        raise BadRequest(f"{url.param} must be a data: URL, or one of http or https", param=url.param)
    if host not in spec.image_hosts and netloc not in spec.image_hosts:
        raise UnsupportedValue(
            f"{url.param}: images are not fetched from {host} (gateway.image_hosts names the hosts that they may be "
            "fetched from); send a data: URL",
            param=url.param,
        )
    return parsed
