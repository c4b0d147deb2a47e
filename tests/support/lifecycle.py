"""The rules that the events of a response keep, whatever they tell: checked over a whole stream, and against the openai package's models.

What an answer says is for the tests.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

if TYPE_CHECKING:
    from support.serve import Event, Stream

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TERMINAL = {"response.completed", "response.incomplete", "response.failed"}
WHOLE = {"text", "arguments", "input", "refusal"}
"""Where the event that closes something says the whole of it."""


def strictly(response: dict[str, Any]) -> dict[str, Any]:
    """The object, which is as documented to the last field."""
    Response.model_validate_json(json.dumps(response), strict=True)
    return response


class Item:
    """An item that has been announced and not closed."""

    def __init__(self, item: dict[str, Any]) -> None:
        self.item = item
        self.parts: dict[tuple[str, int], bool] = {}
        """Of each part that was announced, by kind and index, whether it is open."""
        self.said: dict[tuple[str, int | None], str] = {}

    def hear(self, event: dict[str, Any]) -> None:
        """An event of this item."""
        kind, _, what = event["type"].rpartition(".")
        index = event.get("content_index", event.get("summary_index"))
        if kind in ("response.content_part", "response.reasoning_summary_part"):
            opens = what == "added"
            assert self.parts.get((kind, index)) is (None if opens else True), f"{event['type']} out of turn"
            assert index == sum(1 for known, _ in self.parts if known == kind) - (0 if opens else 1), "parts have gaps"
            self.parts[kind, index] = opens
            if not opens:
                said = "".join(said for (_, at), said in self.said.items() if at == index)
                assert event["part"]["text"] == said
        elif what == "delta":
            assert index is None or any(at == index and now_open for (_, at), now_open in self.parts.items())
            self.said[kind, index] = self.said.get((kind, index), "") + event["delta"]
        elif what == "done":
            [whole] = [event[key] for key in WHOLE & event.keys()]
            assert whole == self.said.setdefault((kind, index), ""), f"the deltas of {kind} do not add up"
        else:
            raise AssertionError(f"{event['type']} is of no item")

    def close(self, item: dict[str, Any]) -> None:
        """The item as it is in the end."""
        assert (item["id"], item["type"]) == (self.item["id"], self.item["type"])
        assert not any(self.parts.values()), "a part was never closed"
        said = "".join(self.said.values())
        if item["type"] == "message":
            assert "".join(part["text"] for part in item["content"]) == said
        elif item["type"] == "function_call":
            assert item["arguments"] == said
        elif item["type"] == "custom_tool_call":
            assert item["input"] == said
        else:
            parts = [*item["summary"], *item.get("content", [])]
            assert item["type"] == "reasoning"
            assert "".join(part["text"] for part in parts) == said


def checked(stream: Stream) -> dict[str, Any]:
    """Reads a stream to its end; the response that its last event has."""
    assert stream.status == 200
    events = list(stream)
    assert stream.done, "the end is marked"
    return heard(events)


def heard(events: list[Event]) -> dict[str, Any]:
    """The response at the end of these events, which keep every rule."""
    kinds = [kind for kind, _ in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert [kind for kind in kinds if kind in TERMINAL] == kinds[-1:]
    items: dict[int, Item] = {}
    done: list[dict[str, Any]] = []
    [name] = {event["response"]["id"] for _, event in events if "response" in event}
    assert name.startswith("resp_")
    for number, (kind, event) in enumerate(events):
        EVENT.validate_python(event)
        assert event["sequence_number"] == number
        if "response" in event:
            strictly(event["response"])
        elif kind == "response.output_item.added":
            assert event["output_index"] == len(items) + len(done), "indices are dense and each is one item's"
            items[event["output_index"]] = Item(event["item"])
        elif kind == "response.output_item.done":
            assert event["output_index"] == len(done), "items are closed in their order"
            items.pop(event["output_index"]).close(event["item"])
            done.append(event["item"])
        else:
            item = items[event["output_index"]]
            assert item.item["id"] == event["item_id"]
            item.hear(event)
    assert not items, "every item is closed"
    last: dict[str, Any] = events[-1][1]["response"]
    assert last["output"] == done
    assert len({item["id"] for item in done}) == len(done)
    return last
