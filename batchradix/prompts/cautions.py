"""What a job's prompts may ask for and probably do not mean."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from batchradix.config import PromptOptions
from batchradix.prompts.columns import listing
from batchradix.prompts.template import Template

TOOLS_UNTOLD = (
    "the model is not told of the tools: the prompts are raw, or its chat template has no "
    "place for them; name them in the prompts, or add {{ schema }} to a --template"
)
REQUEST_TOOLS_UNTOLD = (
    "requests have tools, and the model's chat template has no place for them: answers are "
    "held to them, but the model is not told what they are"
)
DATE_WRITTEN = (
    "the model's chat template writes today's date into every prompt, so the same job run on "
    "another day has other prompts"
)
KEPT_FROM_THINKING = (
    "the model can think before it answers, and does not where answers have to match something; "
    "--thinking on lets it, and the thinking goes to a column of its own"
)
SCHEMA_UNTOLD = (
    "the prompts come from the input as they are, without the schema: it only limits what the "
    "model can write, so say in them what its parts mean"
)


def template_cautions(
    options: PromptOptions, template: Template, schema_text: str | None
) -> Iterator[str]:
    """What is odd about the template of ``options``, a sentence each. ``schema_text``: the schema
    whose fields it is to speak of, None where there is none."""
    if not template.places:
        yield "the template has no place such as {{ column }}: every row gets the same prompt"
    if "{%" in (options.template or ""):
        yield (
            "the template holds '{%', which stays as it is: templates have only places such as "
            "{{ column }}, no statements"
        )
    for stray in dict.fromkeys(template.stray):
        yield f"{stray} in the template names no column and stays as it is"
    names = _property_names(schema_text)
    shown = f"{template.literal}\n{options.system or ''}"
    if names and not template.has_schema and not any(_mentions(shown, n) for n in names):
        yield (
            f"the template names no field of the schema ({listing(names)}): the schema only limits "
            f"what the model can write, so say in the template what the fields mean, or add "
            f"{{{{ schema }}}}"
        )


def _property_names(schema_text: str | None) -> list[str]:
    """Names of every property that a JSON Schema describes, outermost first."""
    try:
        schema = json.loads(schema_text or "null")
    except ValueError:
        return []
    names: dict[str, None] = {}
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, dict):
            properties = node.get("properties")
            if isinstance(properties, dict):
                names.update(dict.fromkeys(properties))
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    return list(names)


def _mentions(text: str, name: str) -> bool:
    """Whether ``text`` has ``name`` as a word, ``_`` and spaces alike, whatever the case."""
    words = r"[\s_\-]+".join(map(re.escape, re.split(r"[\s_\-]+", name)))
    return re.search(rf"(?<!\w){words}(?!\w)", text, re.IGNORECASE) is not None
