"""One line of an OpenAI batch file as the columns that other rooms read.

What a request asks for has the names of our own columns already (``messages``, ``temperature``,
``stop``, ...). This module says which there are, which ask for nothing, and refuses the rest: what
is not understood must not be answered as if it had not been said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchradix.errors import RowErrorCode

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
REQUEST_FIELDS = ("custom_id", "method", "url", "body")
MAX_CHOICES = 128
"""The most of ``n``, as in OpenAI's API."""

SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
)
# Who asks, what for and how it is billed: nothing of the answer.
WITHOUT_EFFECT = frozenset(
    {
        "model",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "stream_options",
        "priority",
        "request_id",
    }
)
# Values with which a parameter asks for what is done anyway.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "ignore_eos": (False,),
    "min_tokens": (0,),
}
_LONGEST = 60  # characters of a value that a message shows
_GOLDEN = 0x9E3779B97F4A7C15


class BadRequest(Exception):
    """This request is an error row. ``sentence`` names the parameter and the remedy."""

    def __init__(self, code: RowErrorCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence


def read_request(fields: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """The columns of a request line, and how many answers it wants (``n``).

    Parameters that are null or absent are absent. Raises `BadRequest`; what other rooms look
    into (messages, numbers, schemas) they refuse themselves.
    """
    body = _body(fields)
    given = {str(name): value for name, value in body.items() if value is not None}
    if not isinstance(given.get("model", ""), str):
        raise BadRequest(RowErrorCode.BAD_VALUE, "'model' must be text")
    given = {name: value for name, value in given.items() if name not in WITHOUT_EFFECT}
    num_choices = _num_choices(given.pop("n", 1))
    if given.get("best_of") == num_choices:
        del given["best_of"]
    values = {name: given.pop(name) for name in SETTINGS if name in given}
    limits = [given.pop(name, None) for name in ("max_completion_tokens", "max_tokens")]
    limit = next((limit for limit in limits if limit is not None), None)
    if limit is not None:
        values["max_tokens"] = limit
    if values.get("stop") == []:
        del values["stop"]
    read = _chat if fields["url"] == CHAT_URL else _completion
    values |= read(given)
    for name, value in given.items():
        _refuse_unless_neutral(name, value)
    return values, num_choices


def kind_of(fields: Mapping[str, Any]) -> str | None:
    """What the response is called: ``chat``, ``tools`` (a chat that may hold calls) or
    ``completion``; None for what is neither."""
    url, body = fields.get("url"), fields.get("body")
    if url == COMPLETIONS_URL:
        return "completion"
    if url != CHAT_URL:
        return None
    may_call = isinstance(body, Mapping) and body.get("tools") and body.get("tool_choice") != "none"
    return "tools" if may_call else "chat"


def seed_of_choice(seed: Any, number: int) -> Any:
    """The seed of a request's answer ``number`` (from 0): its own for the first, then others."""
    if number == 0 or not isinstance(seed, int) or isinstance(seed, bool):
        return seed
    mixed = (seed + number * _GOLDEN) % 2**64
    return mixed - 2**64 if mixed >= 2**63 else mixed


def _body(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in REQUEST_FIELDS:
        if fields.get(name) is None:
            raise BadRequest(RowErrorCode.MISSING_FIELD, f"the request has no {name!r}")
    if fields["method"] != "POST":
        raise BadRequest(
            RowErrorCode.UNSUPPORTED_ENDPOINT,
            f"'method' must be POST, not {_short(fields['method'])}",
        )
    if fields["url"] not in (CHAT_URL, COMPLETIONS_URL):
        raise BadRequest(
            RowErrorCode.UNSUPPORTED_ENDPOINT,
            f"'url' must be {CHAT_URL} or {COMPLETIONS_URL}, not {_short(fields['url'])}",
        )
    body = fields["body"]
    if not isinstance(body, Mapping):
        raise BadRequest(RowErrorCode.BAD_VALUE, f"'body' must be an object, not {_short(body)}")
    return body


def _num_choices(n: Any) -> int:
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_CHOICES:
        raise BadRequest(
            RowErrorCode.BAD_SETTING,
            f"'n' must be an integer from 1 to {MAX_CHOICES}, not {_short(n)}",
        )
    return n


def _chat(given: dict[str, Any]) -> dict[str, Any]:
    """The columns of a chat; takes what it reads out of ``given``."""
    messages = given.pop("messages", None)
    if not isinstance(messages, list):
        code = RowErrorCode.MISSING_FIELD if messages is None else RowErrorCode.BAD_VALUE
        raise BadRequest(code, "'messages' must be a list of messages")
    values = {"messages": messages, "continue_final_message": False}
    if given.get("continue_final_message") is True:
        values["continue_final_message"] = True
        del given["continue_final_message"]
        if given.get("add_generation_prompt") is False:  # vLLM wants the two together
            del given["add_generation_prompt"]
    for name, neutral in (("continue_final_message", False), ("add_generation_prompt", True)):
        if given.get(name) is neutral:
            del given[name]
    if given.get("chat_template_kwargs") is not None:
        values["chat_template_kwargs"] = given.pop("chat_template_kwargs")
    if "response_format" in given:
        values["response_format"] = given.pop("response_format")
    tools, choice = given.pop("tools", None), given.pop("tool_choice", None)
    parallel = given.pop("parallel_tool_calls", None)
    if tools and choice != "none":
        values |= {"tools": tools, "tool_choice": "auto" if choice is None else choice}
        if parallel is not None:
            values["parallel_tool_calls"] = parallel
    elif not tools and choice not in (None, "none", "auto"):
        raise BadRequest(RowErrorCode.BAD_SETTING, "'tool_choice' needs 'tools' to choose from")
    return values


def _completion(given: dict[str, Any]) -> dict[str, Any]:
    """The columns of a completion; takes what it reads out of ``given``."""
    prompt = given.pop("prompt", None)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if prompt is None:
        raise BadRequest(RowErrorCode.MISSING_FIELD, "the body has no 'prompt'")
    if isinstance(prompt, list):
        raise BadRequest(
            RowErrorCode.UNSUPPORTED_PARAMETER,
            "'prompt' is a list of token ids or of several prompts; give text, and each prompt a "
            "line of its own",
        )
    if not isinstance(prompt, str):
        raise BadRequest(RowErrorCode.BAD_VALUE, f"'prompt' must be text, not {_short(prompt)}")
    return {"prompt": prompt}


def _refuse_unless_neutral(name: str, value: Any) -> None:
    if any(type(value) is type(each) and value == each for each in _NEUTRAL.get(name, ())):
        return
    why = "the engine does not give them" if "logprobs" in name else "it is not supported"
    raise BadRequest(
        RowErrorCode.UNSUPPORTED_PARAMETER,
        f"the parameter {_short(name)} asks for {_short(value)}, and {why}; leave it out",
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
