from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from pdserve.control.messages import (
    LATENCY_BOUNDS_S,
    BlockCounts,
    DurationCounts,
    NodeLoad,
    PeerCounts,
    SpeculationCounts,
    Tier,
    TierCounts,
    TransferCounts,
)

MODEL = "org/demo"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


async def get(gateway, path: str) -> tuple[int, dict]:
    async with gateway.session.get(gateway.url + path) as response:
        return response.status, await response.json()


async def test_readiness_follows_the_service_and_liveness_does_not(gateway):
    assert (await get(gateway, "/ready"))[0] == 200

    gateway.status.reason = "no decode node"

    status, reply = await get(gateway, "/ready")
    assert status == 503 and reply["error"]["message"] == "no decode node"
    assert (await get(gateway, "/health"))[0] == (await get(gateway, "/live"))[0] == 200
    status, reply = await get(gateway, "/admin/status")
    assert status == 200 and reply["ready"] is False and reply["not_ready_reason"] == "no decode node"


async def test_admin_status_has_the_documented_names(gateway):
    _, reply = await get(gateway, "/admin/status")

    assert {"version", "ready", "uptime_s", "redis", "requests", "routes", "nodes"} <= set(reply)
    assert reply["ready"] is True and reply["uptime_s"] >= 0
    assert (await get(gateway, "/version"))[1] == {"version": reply["version"]}


async def test_models_show_their_context_length(gateway):
    _, reply = await get(gateway, "/v1/models")
    assert [(card["id"], card["max_model_len"]) for card in reply["data"]] == [(MODEL, 256)]

    assert (await get(gateway, f"/v1/models/{MODEL}"))[1]["id"] == MODEL
    status, reply = await get(gateway, "/v1/models/nope")
    assert status == 404 and reply["error"]["code"] == "model_not_found"


async def test_nodes_that_hold_less_bound_the_context(gateway):
    gateway.status.limit = 20

    _, reply = await get(gateway, "/v1/models")
    status, refused, _ = await gateway.post("/v1/completions", {"model": MODEL, "prompt": [5] * 20})

    assert reply["data"][0]["max_model_len"] == 20
    assert status == 400 and refused["error"]["code"] == "context_length_exceeded"


async def test_without_a_configured_limit_the_nodes_have_to_say_one(start_gateway):
    gateway = await start_gateway(max_model_len=None)

    status, reply, _ = await gateway.post("/v1/chat/completions", CHAT)
    assert status == 503 and reply["error"]["code"] == "no_nodes"

    gateway.status.limit = 100
    assert (await gateway.post("/v1/chat/completions", CHAT))[0] == 200


async def test_metrics_show_what_each_node_has_drafted(gateway):
    gateway.status.drafted = {"d1": SpeculationCounts("ngram", 10, 7), "d2": SpeculationCounts("draft_model", 4, 0)}

    async with gateway.session.get(gateway.url + "/metrics") as response:
        page = await response.text()

    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert samples["vllm:spec_decode_num_draft_tokens_total", "d1", "ngram"] == 10
    assert samples["vllm:spec_decode_num_accepted_tokens_total", "d1", "ngram"] == 7
    assert samples["vllm:spec_decode_num_draft_tokens_total", "d2", "draft_model"] == 4
    assert samples["vllm:spec_decode_num_accepted_tokens_total", "d2", "draft_model"] == 0


async def test_metrics_count_facts(gateway):
    gateway.status.counts = (2, 1)
    gateway.say("one two three")
    _, whole, answered = await gateway.post("/v1/chat/completions", CHAT)
    await gateway.post("/v1/chat/completions", {**CHAT, "n": 0})
    await gateway.post("/v1/chat/completions", {**CHAT, "max_tokens": 1})

    async with gateway.session.get(gateway.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        page = await response.text()
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }

    assert answered.headers["x-pdserve-route"] == "disaggregated"
    assert samples["pdserve_requests_total", "chat", "ok"] == 2
    assert samples["pdserve_requests_total", "chat", "invalid"] == 1
    assert samples["vllm:generation_tokens_total",] == whole["usage"]["completion_tokens"] + 1
    assert samples["vllm:prompt_tokens_total",] == 2 * whole["usage"]["prompt_tokens"]
    assert samples["vllm:request_success_total", "stop"] == samples["vllm:request_success_total", "length"] == 1
    assert samples["vllm:time_to_first_token_seconds_count",] == 2
    assert samples["vllm:inter_token_latency_seconds_count",] == whole["usage"]["completion_tokens"] - 1
    assert samples["pdserve_routes_total", "disaggregated"] == 2
    assert samples["vllm:num_requests_running",] == 2 and samples["vllm:num_requests_waiting",] == 1
    assert samples["pdserve_open_requests",] == 0 and samples["pdserve_ready",] == 1
    assert "nan" not in page.lower()


async def test_metrics_show_the_tiers_of_each_node(gateway):
    tiers = (TierCounts(Tier.DEVICE, 5, 9, 500, 3, 2, 0), TierCounts(Tier.HOST, 1, 2, 100, 1, 1, 4))
    no_transfers = TransferCounts(0, 0, 0, 0, 0)
    load = NodeLoad(True, 0, 0, 0, None, 0.0, BlockCounts(9, 4, 5, 0, 0), no_transfers, None, tiers, 6, 2)
    gateway.status.last_loads = {"d1": load}

    async with gateway.session.get(gateway.url + "/metrics") as response:
        page = await response.text()

    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert samples["pdserve_kv_blocks", "d1", "device"] == 5
    assert samples["pdserve_kv_bytes", "d1", "host"] == 100
    assert samples["pdserve_kv_block_hits_total", "d1", "device"] == 3
    assert samples["pdserve_kv_block_misses_total", "d1", "host"] == 1
    assert samples["pdserve_kv_corrupt_blocks_total", "d1", "host"] == 4
    assert samples["vllm:num_preemptions_total", "d1"] == 6
    assert samples["pdserve_swaps_total", "d1"] == 2


async def test_metrics_show_each_link_of_the_kv_plane(gateway):
    durations = DurationCounts((2, 0, 1, *[0] * (len(LATENCY_BOUNDS_S) - 2)), 0.5)
    causes = (("peer_lost", 3), ("wrong_checksum", 1))
    row = PeerCounts("d1", 10, 20, 30.0, 1, 2, 3, 4, 5, 11, 12, 13, 6, 7, 8, causes, durations, durations, durations)
    of_another_version = replace(row, peer="d2", tail=DurationCounts((1,), 1.0))
    blocks, moved = BlockCounts(9, 4, 5, 0, 0), TransferCounts(0, 0, 0, 0, 0)
    load = NodeLoad(True, 0, 0, 0, None, 0.0, blocks, moved, peers=(row, of_another_version), malformed=9)
    load = replace(load, refused_connections=14)
    gateway.status.last_loads = {"p1": load}
    gateway.status.last_malformed = {"p1": 2}
    gateway.status.last_retries = {"transfer_failed": 4}

    async with gateway.session.get(gateway.url + "/metrics") as response:
        page = await response.text()

    samples = {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert samples["pdserve_transfer_bytes_total", "sent", "p1", "d1"] == 10
    assert samples["pdserve_transfer_bytes_per_second", "p1", "d1"] == 30
    fates = [samples["pdserve_transfer_blocks_total", fate, "p1", "d1"] for fate in ("sent", "received", "skipped")]
    assert fates == [1, 2, 3]
    assert samples["pdserve_transfer_blocks_total", "refused", "p1", "d1"] == 4
    assert samples["pdserve_transfer_blocks_total", "converted", "p1", "d1"] == 5
    assert samples["pdserve_transfer_blocks_total", "compressed", "p1", "d1"] == 11
    assert samples["pdserve_transfer_shared_memory_bytes_total", "p1", "d1"] == 12
    assert samples["pdserve_transfer_shared_memory_failures_total", "p1", "d1"] == 13
    assert samples["pdserve_transfers_open", "p1", "d1"] == 6
    assert samples["pdserve_transfers_completed_total", "p1", "d1"] == 7
    assert samples["pdserve_lease_expiries_total", "p1", "d1"] == 8
    assert samples["pdserve_transfer_failures_total", "wrong_checksum", "p1", "d1"] == 1
    assert samples["pdserve_transfer_failures_total", "peer_lost", "p1", "d1"] == 3
    assert samples["pdserve_transfer_tail_seconds_bucket", "0.0025", "p1", "d1"] == 2
    assert samples["pdserve_transfer_tail_seconds_count", "p1", "d1"] == 3
    assert samples["pdserve_transfer_offer_to_grant_seconds_sum", "p1", "d1"] == 0.5
    assert ("pdserve_transfer_tail_seconds_count", "p1", "d2") not in samples
    assert samples["pdserve_malformed_messages_total", "p1", "node"] == 9
    assert samples["pdserve_malformed_messages_total", "p1", "gateway"] == 2
    assert samples["pdserve_refused_connections_total", "p1"] == 14
    assert samples["pdserve_retries_total", "transfer_failed"] == 4
