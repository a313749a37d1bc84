"""The document says what the server does: every route, every field, and only statuses that are written there."""

from aiohttp import web

from pdserve.gateway.api_keys import KeyLimits, KeyRing, keys_of
from pdserve.gateway.app import create_app
from pdserve.gateway.config import HttpConfig
from pdserve.gateway.deps import Backend
from pdserve.gateway.openapi import OPERATIONS, openapi_document
from pdserve.gateway.schemas import ChatBody, CompletionBody

MODEL = "org/demo"


def test_every_route_is_described_and_no_other(demo_tokenizer):
    app: web.Application = create_app(
        HttpConfig(model_names=("m",), max_model_len=8),
        demo_tokenizer,
        Backend(source=None, status=None, records=None, peers=None, quotas=None, responses=None),
        None,
    )
    routes = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.method != "HEAD" and route.resource is not None
    }

    assert {(operation.method, operation.path) for operation in OPERATIONS} == routes


def test_bodies_are_the_schemas_that_validate():
    schemas = openapi_document()["components"]["schemas"]

    assert set(schemas["ChatBody"]["properties"]) == set(ChatBody.model_fields)
    assert schemas["CompletionBody"]["required"] == ["model", "prompt"]
    assert set(schemas["CompletionBody"]["properties"]) == set(CompletionBody.model_fields)


async def test_the_document_and_its_page_are_served_without_a_key(start_gateway):
    gateway = await start_gateway(api_keys=KeyRing(keys_of(("secret",), KeyLimits())))

    async with gateway.session.get(gateway.url + "/openapi.json") as response:
        assert response.status == 200 and (await response.json()) == openapi_document()
    async with gateway.session.get(gateway.url + "/docs") as response:
        assert response.status == 200 and response.content_type == "text/html"
        page = await response.text()
    assert "openapi.json" in page and "http://" not in page and "https://" not in page


async def test_a_body_that_is_declared_as_something_else_is_not_read_as_json(gateway):
    body = b'{"model": "org/demo", "prompt": "Hi"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        async with gateway.session.post(
            gateway.url + "/v1/completions", data=body, headers={"Content-Type": kind}
        ) as response:
            assert response.status == 415, kind
            assert (await response.json())["error"]["code"] == "unsupported_media_type"
    for kind in ("application/json", "application/vnd.api+json", "application/octet-stream"):
        async with gateway.session.post(
            gateway.url + "/v1/completions", data=body, headers={"Content-Type": kind}
        ) as response:
            assert response.status == 200, kind


async def test_a_strict_server_refuses_unknown_fields(start_gateway):
    gateway = await start_gateway(refuse_unknown_fields=True)

    status, reply, _ = await gateway.post("/v1/completions", {"model": MODEL, "prompt": "Hi", "temprature": 1})

    assert status == 400 and reply["error"]["param"] == "temprature" and gateway.source.started == []
