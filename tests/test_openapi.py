"""The server's own OpenAPI document, and what schemathesis makes of it.

schemathesis invents requests from the document, valid ones and such as break it in one place, and checks every answer: none may be a fault of the
server, take too long, or be of another form than documented; an error is in the envelope, whatever was sent. The mock engine answers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from prometheus_client.parser import text_string_to_metric_families
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from support.serve import Server, server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
