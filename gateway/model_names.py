"""The names under which the one model of a gateway is asked for."""

from aiohttp import web

from pdserve.gateway.config import HttpConfig
from pdserve.gateway.deps import DEPS, GatewayDeps
from pdserve.gateway.error_responses import ErrorReply, HttpError, json_response
from pdserve.gateway.other_reply_types import ModelCard, ModelList


def check_model(name: str, config: HttpConfig) -> None:
    """Refuse a model that is not served here."""
    if name not in config.model_names:
        raise HttpError(
            ErrorReply(404, "there is no such model here; GET /v1/models lists them", "model", "model_not_found")
        )


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    deps = request.app[DEPS]
    names = deps.config.model_names
    models: ModelList = {
        "object": "list",
        "data": [_card(name, deps) for name in names],
        "has_more": False,
        "first_id": names[0],
        "last_id": names[-1],
    }
    return json_response(models)


async def show_model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}; ids may contain slashes."""
    deps = request.app[DEPS]
    name = request.match_info["name"]
    check_model(name, deps.config)
    return json_response(_card(name, deps))


def _card(name: str, deps: GatewayDeps) -> ModelCard:
    max_model_len = deps.max_model_len()
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "pdserve",
        "root": deps.config.model_names[0],
        "max_model_len": max_model_len,
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",  # what Anthropic's API says of a model whose date is not known
        "max_input_tokens": max_model_len,
    }
