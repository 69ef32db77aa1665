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
"""The agent routes in the OpenAPI document.

They are plain ASGI, so FastAPI does not know them. The bodies are the providers'; named here are the fields that the
gateway reads. Others are ignored, unless the adapter refuses them.
"""

from typing import Any

from fastapi import FastAPI

_TEXT: dict[str, Any] = {"type": "string"}
_FLAG: dict[str, Any] = {"type": "boolean"}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 1}
_OBJECT: dict[str, Any] = {"type": "object"}


_ERROR = {"description": "An error in the provider's shape", "content": {"application/json": {"schema": _OBJECT}}}
ERRORS: dict[int | str, dict[str, Any]] = {"4XX": _ERROR, "503": _ERROR}


def _list(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def _one_of(*schemas: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": list(schemas)}


def _message(*roles: str) -> dict[str, Any]:
    content = _one_of(_TEXT, _list({"type": "object", "required": ["type"], "properties": {"type": _TEXT}}))
    return {"type": "object", "required": ["role"], "properties": {"role": {"enum": list(roles)}, "content": content}}


_SAMPLING: dict[str, Any] = {
    "model": _TEXT,
    "stream": _FLAG,
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1},
    "seed": {"type": "integer"},
}
_STOP = _one_of(_TEXT, _list(_TEXT, maxItems=16))
_TOOLS = {
    "tools": _list(_OBJECT),
    "parallel_tool_calls": _FLAG,
    "tool_choice": _one_of({"enum": ["auto", "none", "required"]}, _OBJECT),
}

_CHAT = {
    "required": ["messages"],
    "properties": {
        "messages": _list(_message("system", "developer", "user", "assistant", "tool"), minItems=1),
        **_SAMPLING,
        **_TOOLS,
        "n": _COUNT,
        "stop": _STOP,
        "max_tokens": _COUNT,
        "max_completion_tokens": _COUNT,
        "stream_options": _OBJECT,
        "logprobs": _FLAG,
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
        "response_format": _OBJECT,
        "chat_template_kwargs": _OBJECT,
    },
}
_COMPLETIONS = {
    "required": ["prompt"],
    "properties": {
        "prompt": _one_of(
            _TEXT,
            _list(_TEXT, minItems=1),
            _list({"type": "integer", "minimum": 0}, minItems=1),
            _list(_list({"type": "integer", "minimum": 0}, minItems=1), minItems=1),
        ),
        **_SAMPLING,
        "n": _COUNT,
        "stop": _STOP,
        "max_tokens": _COUNT,
        "stream_options": _OBJECT,
        "logprobs": {"type": "integer", "minimum": 0, "maximum": 5},
        "echo": {"enum": [False]},
    },
}
_RESPONSES = {
    "required": ["input"],
    "properties": {
        "input": _one_of(_TEXT, _list(_OBJECT, minItems=1)),
        "instructions": _TEXT,
        "previous_response_id": _TEXT,
        "max_output_tokens": _COUNT,
        **_SAMPLING,
        **_TOOLS,
        "text": _OBJECT,
        "metadata": {"type": "object", "additionalProperties": _TEXT},
    },
}
_MESSAGES = {
    "required": ["messages", "max_tokens"],
    "properties": {
        "messages": _list(_message("user", "assistant"), minItems=1),
        "system": _one_of(_TEXT, _list(_OBJECT)),
        "max_tokens": _COUNT,
        "stop_sequences": _list(_TEXT, maxItems=16),
        **_SAMPLING,
        "tools": _list(_OBJECT),
        "tool_choice": _OBJECT,
        "output_config": _OBJECT,
    },
}
_COUNT_TOKENS = {**_MESSAGES, "required": ["messages"]}

_REWARDS = {"properties": {"reward": {"type": "number"}, "rewards": {}}, "minProperties": 1, "maxProperties": 1}

_ROUTES: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "/v1/chat/completions": ("post", "OpenAI chat completions", _CHAT),
    "/v1/completions": ("post", "OpenAI completions", _COMPLETIONS),
    "/v1/responses": ("post", "OpenAI responses", _RESPONSES),
    "/v1/messages": ("post", "Anthropic messages", _MESSAGES),
    "/v1/messages/count_tokens": ("post", "Anthropic token count", _COUNT_TOKENS),
    "/v1/rewards": ("post", "Rewards known before the end", _REWARDS),
    "/v1/models": ("get", "The one model behind this agent", None),
    "/v1/models/{model_id}": ("get", "The same by its id", None),
}


def _parameter(name: str, where: str) -> dict[str, Any]:
    return {"name": name, "in": where, "required": True, "schema": _TEXT}


def _operation(summary: str, body: dict[str, Any] | None, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": summary,
        "tags": ["agents"],
        "parameters": parameters,
        "responses": {
            "200": {
                "description": "The provider's answer, with `metadata`",
                "content": {"application/json": {"schema": _OBJECT}, "text/event-stream": {"schema": _TEXT}},
            },
            **ERRORS,
        },
    }
    if body is not None:
        schema = {"type": "object", **body}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def agent_paths() -> dict[str, Any]:
    """Path items of every agent route, by the minted URL and by headers with the control key."""
    by_url = [_parameter("token", "path"), _parameter("agent_id", "path")]
    by_headers = [_parameter("x-workflow-id", "header"), _parameter("x-agent-id", "header")]
    paths: dict[str, Any] = {}
    for path, (method, summary, body) in _ROUTES.items():
        own = [_parameter("model_id", "path")] if "{model_id}" in path else []
        paths[f"/w/{{token}}/agents/{{agent_id}}{path}"] = {method: _operation(summary, body, by_url + own)}
        secured = {**_operation(summary, body, by_headers + own), "security": [{"HTTPBearer": []}]}
        paths[path] = {method: secured}
    return paths


def document_agent_routes(app: FastAPI) -> None:
    """Add the agent routes to the document that ``app`` serves."""
    own = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            own()["paths"].update(agent_paths())
        return app.openapi_schema

    app.openapi = document
