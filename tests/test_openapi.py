"""The server's own OpenAPI document in the hands of schemathesis, and its metrics in those of Prometheus's own parser.

schemathesis makes requests up from the document, valid ones and such as break it in one place, and looks at every answer: none may be a fault of the
server, fail to come, or be of another form than documented. `support/envelope.py` adds what every error has to look like.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.process import eventually
from support.serve import Server, server

SUPPORT = Path(__file__).parent / "support"
CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "envelope",
]


def page(one: Server) -> dict[str, Any]:
    """The metrics, by the name of their family."""
    connection = one.connection()
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    assert (response.status, response.getheader("content-type")) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return {family.name: family for family in text_string_to_metric_families(text)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("phases", "examples"), [("examples,coverage", 1), ("fuzzing", 150)])
def test_schemathesis_finds_no_fault(phases: str, examples: int, home: Path, tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")]))
    with server("--mock-answer=Hello there.", home=home) as one:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{one.url}/openapi.json", f"--url={one.url}"),
                *(f"--phases={phases}", "--mode=all", f"--max-examples={examples}", f"--checks={','.join(CHECKS)}"),
                *("--seed=1", "--generation-deterministic"),
                *("--request-timeout=30", "--workers=1", "--continue-on-failure", "--warnings=off", "--no-color"),
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "SCHEMATHESIS_HOOKS": "envelope", "NO_PROXY": "*"},
            capture_output=True,
            encoding="utf-8",
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
        samples = page(one)["emberd_http_requests"].samples
        asked = {(sample.labels["route"], sample.labels["status"]): sample.value for sample in samples}
        paths = one.get("/openapi.json")[1]["paths"]
        assert {route for route, _ in asked} >= set(paths)
        posted = [path for path, item in paths.items() if "post" in item]
        assert all(asked[route, "400"] > 0 for route in posted)
        taken = [asked.get((route, "200"), 0) > 0 for route in posted]
        # What is made up at random may be a conversation that makes no sense each time.
        assert all(taken) if "coverage" in phases else any(taken)
        assert not [status for _, status in asked if status >= "500"]
        eventually(lambda: one.get("/health")[1]["in_flight"] == 0, "nothing is in flight any more")
        assert one.post({"input": "hi"})[1]["output"][0]["content"][0]["text"] == "Hello there."


def test_metrics_are_read_by_prometheus_own_parser(home: Path) -> None:
    with server("--mock-answer=Hello there.", home=home) as one:
        whole = one.post({"input": "hi"})[1]
        families = page(one)
        assert all(family.documentation for family in families.values())
        for family in families.values():
            assert family.type in ("counter", "gauge", "histogram"), family
            for sample in family.samples:
                assert sample.name.startswith(family.name)
                assert sample.labels.get("model", "smollm2-135m") == "smollm2-135m"
        [tokens] = families["emberd_output_tokens"].samples
        assert (tokens.labels["door"], tokens.value) == ("http", whole["usage"]["output_tokens"])
        outcomes = {sample.labels["outcome"]: sample.value for sample in families["emberd_requests"].samples}
        assert outcomes.pop("completed") == 1
        assert set(outcomes) == {"incomplete", "failed", "cancelled", "refused", "queue_full"}
        assert not any(outcomes.values())
        for name in (
            "emberd_time_to_first_token_seconds",
            "emberd_time_between_tokens_seconds",
            "emberd_step_sequences",
        ):
            samples = families[name].samples
            buckets = [sample.value for sample in samples if sample.name.endswith("_bucket")]
            [count] = [sample.value for sample in samples if sample.name.endswith("_count")]
            assert buckets == sorted(buckets)
            assert buckets[-1] == count > 0
