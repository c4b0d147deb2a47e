"""Renders every chat template of a folder with Jinja2 and writes what came out, in short form, to `templates.json`.

The environment is the one that Hugging Face transformers gives to `apply_chat_template`: an immutable sandbox, block trimming, loop
controls, a transparent `generation` block, `raise_exception`, `strftime_now` and a `tojson` that is plain `json.dumps`. The clock stands
still, so that the files are the same on any day. The templates themselves are not written anywhere: an outcome is a hash, a length and the
text's first and last characters, which is enough to tell that two renderings are equal and to see where an unequal one went wrong.

`snippets.json` holds short templates of our own, one for each thing that Python and Jinja2 do in their own way; their text is kept in full.
Both files of expectations are written anew by one run, so that `git diff` shows what a newer Jinja2 changed.

Usage: python tests/golden/make_templates.py [FOLDER]   (default: EMBERD_TEMPLATES, else ../shared/data/chat-templates)
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = Path(__file__).parent
NOW = datetime(2026, 1, 15, 9, 30, 5)
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
EXCERPT = 40
# What Python raises when a template does what its values cannot; Jinja2's own complaints are apart.
FAULTS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Generation(Extension):
    """The `{% generation %}` block, which marks what a model wrote and adds nothing to the text."""

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @staticmethod
    def _body(caller: Macro) -> str:
        return caller()


Generation.tags = {"generation"}


def raise_exception(message: str) -> NoReturn:
    """What a template calls to refuse a conversation."""
    raise jinja2.exceptions.TemplateError(message)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja2's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> jinja2.Environment:
    """Jinja2 as chat templates expect it, with a clock that stands at `NOW`."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = NOW.strftime
    return env


def rendered(template: jinja2.Template, conversation: dict[str, Any]) -> str:
    """What `apply_chat_template` gives for a conversation."""
    return template.render(
        messages=conversation["messages"],
        tools=conversation.get("tools"),
        documents=None,
        add_generation_prompt=conversation["add_generation_prompt"],
        **{**SPECIALS, **conversation.get("kwargs", {})},
    )


def outcome(template: jinja2.Template | None, conversation: dict[str, Any]) -> list[Any]:
    """`["text", sha256, length in bytes, start, end]`, or `["raised", message]`, or `["failed"]`."""
    if template is None:
        return ["failed"]
    try:
        text = rendered(template, conversation)
    except jinja2.exceptions.TemplateError as error:
        # A subclass is Jinja2's own complaint; the class itself is what `raise_exception` raises.
        return ["raised", str(error)[:EXCERPT]] if type(error) is jinja2.exceptions.TemplateError else ["failed"]
    except FAULTS:
        return ["failed"]
    data = text.encode("utf-8", "surrogatepass")
    return ["text", hashlib.sha256(data).hexdigest(), len(data), text[:EXCERPT], text[-EXCERPT:]]


VARIABLES = {
    "s": "string",
    "l": [1, 2, 3],
    "d": {"a": 1, "b": "two", "c": [1, None]},
    "f": 0.30000000000000004,
    "tiny": 1.5e-7,
    "whole": 3.0,
    "big": 2**63,
    "schema": {"type": "array", "items": {"type": "string"}},
    "maps": [{"n": 1, "q": "x"}, {"n": 2}],
}


def snippets() -> None:
    """Fills in what Jinja2 makes of each template in `snippets.json`; `null` is an error. `differs` says why ours is not the same."""
    path = HERE / "snippets.json"
    rows = []
    for row in json.loads(path.read_text("utf-8")):
        conversation = {"messages": [], "add_generation_prompt": True, "kwargs": VARIABLES}
        try:
            found = rendered(environment().from_string(row["template"]), conversation)
        except (jinja2.exceptions.TemplateError, *FAULTS):
            found = None
        rows.append(json.dumps({**row, "text": found}, ensure_ascii=False))
    path.write_text("[\n" + ",\n".join(rows) + "\n]\n", "utf-8")


def main(folder: Path) -> None:
    conversations = json.loads((HERE / "conversations.json").read_text("utf-8"))
    env = environment()
    lines = []
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text("utf-8")
        try:
            template = env.from_string(source)
        except jinja2.exceptions.TemplateSyntaxError:
            template = None
        found = {conversation["name"]: outcome(template, conversation) for conversation in conversations}
        rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in found.items())
        lines.append(f"{json.dumps(path.stem)}: {{\n{rows}\n}}")
    (HERE / "templates.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    print(f"{len(lines)} templates x {len(conversations)} conversations")


if __name__ == "__main__":
    snippets()
    default = HERE.parent.parent.parent / "shared" / "data" / "chat-templates"
    main(Path(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("EMBERD_TEMPLATES", default)))
