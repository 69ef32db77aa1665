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
"""Whose fault was it? A dead gateway or policy is tried again, a workflow's own error is not."""

from collections.abc import Iterator


class InfrastructureError(RuntimeError):
    """The gateway or a policy was not there; the attempt says nothing about the agents."""


_TRY_AGAIN = (408, 429)  # 429: the gateway's answer while a policy is not ready


def status_code(error: BaseException) -> int | None:
    """HTTP status of a client's error (openai, anthropic, httpx and the control client tell it), or ``None``."""
    for holder, name in ((error, "status_code"), (error, "status"), (getattr(error, "response", None), "status_code")):
        code = getattr(holder, name, None)
        if isinstance(code, int):
            return code
    return None


def is_refusal(error: BaseException) -> bool:
    """Whether a control call was answered with 4xx: trying it again would not help."""
    code = status_code(error)
    return code is not None and 400 <= code < 500 and code not in _TRY_AGAIN


def is_infrastructure(error: BaseException, gateway_url: str) -> bool:
    """Whether ``error``, or one it came from, is a call to the gateway that broke, or that it could not serve.

    Failures of other services (a tool, a judge) are the workflow's own, and so are calls that the gateway refuses.
    """
    for each in _chain(error):
        url, code = _url(each), status_code(each)
        if url is None or not url.startswith(gateway_url):
            continue
        if code is None or code >= 500 or code in _TRY_AGAIN:
            return True
    return False


def describe(error: BaseException) -> str:
    """One line for logs and terminal records."""
    text = str(error).strip().splitlines()
    line = f"{type(error).__name__}: {text[0][:500]}" if text else type(error).__name__
    return line.encode("utf-8", "replace").decode()  # half a surrogate pair could not be sent


def _url(error: BaseException) -> str | None:
    try:
        request = getattr(error, "request", None)
    except RuntimeError:  # httpx: the request was not set
        return None
    url = getattr(request, "url", None)
    return None if url is None else str(url)


def _chain(error: BaseException | None, depth: int = 0) -> Iterator[BaseException]:
    if error is None or depth > 20:
        return
    yield error
    for inner in getattr(error, "exceptions", ()):  # exception groups
        yield from _chain(inner, depth + 1)
    yield from _chain(error.__cause__ or error.__context__, depth + 1)
