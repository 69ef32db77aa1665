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
"""Errors of the gateway, in the shape and with the status an SDK acts on.

The error model (invariant 9):

* A client's fault is a 4xx that SDKs do not retry (``x-should-retry: false``) and leaves the session usable.
* A model that is not ready is a 429 with ``Retry-After`` after a bounded wait: SDKs back off and try again.
* Only a dead upstream is a 503.
* There is no 500. Whatever else is raised inside a request is a bug: it is logged and answered as a 503, so that
  agents retry elsewhere, and counted under ``reason="internal"``, where tests look for it.

Each route renders the same error in its provider's shape.
"""

from collections.abc import Iterable
from typing import Any


class GatewayError(Exception):
    """Base of everything a request may end with.

    Args:
        message: for the person who reads the agent's log; names the known alternatives where there are any.
        param: the request field at fault, as in ``messages[2].content``.
    """

    status = 503
    code = "internal"
    openai_type = "server_error"
    anthropic_type = "api_error"
    retry = False  # what SDKs are told to do; their own rule would also retry a 409

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def openai_body(self) -> dict[str, Any]:
        """The body OpenAI's API gives."""
        error = {"message": self.message, "type": self.openai_type, "param": self.param, "code": self.code}
        return {"error": error}

    def anthropic_body(self) -> dict[str, Any]:
        """The body Anthropic's API gives."""
        return {"type": "error", "error": {"type": self.anthropic_type, "message": self.message}}

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"x-should-retry", b"true" if self.retry else b"false")]


class BadRequest(GatewayError):
    """Malformed, or asks for something that is not served."""

    status = 400
    code = "invalid_request"
    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"


class UnsupportedValue(BadRequest):
    """Well-formed, but this gateway or this model does not do it."""

    code = "unsupported_value"


class TemplateRefused(BadRequest):
    """The model's chat template raised on the messages."""

    code = "template_refused"


class ContextLengthExceeded(BadRequest):
    """The prompt, or the prompt with its budget, does not fit; the numbers are true token counts."""

    code = "context_length_exceeded"

    def __init__(self, *, prompt: int, budget: int, limit: int, what: str) -> None:
        super().__init__(
            f"{what} is {limit} tokens, but the messages resulted in {prompt} tokens"
            + (f" and {budget} more were asked for the completion" if budget else ""),
            param="messages",
        )


class TooManyCalls(BadRequest):
    """The workflow reached its own bound; waiting does not help."""

    code = "too_many_calls"


class Unauthorized(GatewayError):
    status = 401
    code = "invalid_api_key"
    openai_type = "invalid_request_error"
    anthropic_type = "authentication_error"


class NotFound(GatewayError):
    """An unknown workflow, agent or model; never answered by a default."""

    status = 404
    openai_type = "invalid_request_error"
    anthropic_type = "not_found_error"

    def __init__(self, what: str, name: str, known: Iterable[str] | None = None) -> None:
        self.code = f"{what}_not_found"
        hint = "" if known is None else f"; known are {sorted(known)}"
        super().__init__(f"unknown {what} {name!r}{hint}")


class WorkflowClosed(GatewayError):
    """A call after finalize or abort: too late to become training data."""

    status = 409
    code = "workflow_closed"
    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"


class RequestTimeout(GatewayError):
    """The body never ended. Not to be tried again by itself: only its body tells a retry from a new request."""

    status = 408
    code = "request_timeout"
    openai_type = "invalid_request_error"
    anthropic_type = "timeout_error"

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"connection", b"close")]


class BodyTooLarge(GatewayError):
    status = 413
    code = "request_too_large"
    openai_type = "invalid_request_error"
    anthropic_type = "request_too_large"


class Busy(GatewayError):
    """Try again later: the model is not ready, or a bound is reached."""

    status = 429
    openai_type = "rate_limit_error"
    anthropic_type = "rate_limit_error"
    retry = True

    def __init__(self, message: str, *, retry_after_s: int, code: str) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"retry-after", str(self.retry_after_s).encode())]


class UpstreamFailed(GatewayError):
    """The model's servers are dead or answered nonsense, after the bounded retry."""

    status = 503
    code = "model_unavailable"
    anthropic_type = "overloaded_error"
    retry = True


class CallLost(GatewayError):
    """A running answer cannot be completed; sent as the error of a stream that has begun."""

    status = 503
    code = "generation_lost"
    retry = True
