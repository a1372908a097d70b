"""Chat templates: jinja2 text from a model's files that turns messages into one prompt.

The environment is the one `transformers` renders chat templates in, so both give the same text.
Templates come from strangers: they run in jinja2's immutable sandbox, and what they may loop,
call and build is counted, so that none can hold up a job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from functools import lru_cache, reduce, wraps
from operator import add
from typing import TYPE_CHECKING, Any, TypeVar

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchradix.checkpoint.template_bounds import (
    FILTER_SIZES,
    call_size,
    format_size,
    joined_size,
    percent_size,
)
from batchradix.checkpoint.unseen import AskedError, Unseen, is_unseen
from batchradix.errors import TemplateError

if TYPE_CHECKING:
    from batchradix.checkpoint.checkpoint import Checkpoint

MAX_CHARACTERS = 50_000_000  # of a rendered prompt, and of any text built on the way
MAX_STEPS = 10_000_000  # loop rounds and calls of one rendering
_MAX_INDENT = 100
_BUDGET = "steps left"  # a variable that no template can name
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplateRaised(ValueError):
    """The chat template refused a row's messages, or failed on them; the message says why."""


def render_chat(
    checkpoint: Checkpoint,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> str:
    """The prompt that the model's chat template makes of ``messages``.

    ``kwargs`` are further variables of the template (``enable_thinking=False``, ...). Raises
    `TemplateError` when the model has no chat template or a malformed one, and
    `ChatTemplateRaised` when the template fails on these messages.
    """
    if checkpoint.chat_template is None:
        raise TemplateError(
            f"model {checkpoint.name} has no chat template; give prompts instead of messages"
        )
    variables = {
        **checkpoint.special_texts,
        "messages": _with_reasoning(messages),
        "tools": None if tools is None else list(tools),
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **kwargs,
    }
    return render_template(compile_template(checkpoint.chat_template), variables)


def render_template(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Renders a template of `compile_template`. Raises `ChatTemplateRaised` when it fails."""
    pieces: list[str] = []
    num_characters = 0
    try:
        for piece in template.generate({**variables, _BUDGET: _Budget()}):
            num_characters += len(piece)
            if num_characters > MAX_CHARACTERS:
                raise ChatTemplateRaised(f"it writes more than {MAX_CHARACTERS:,} characters")
            pieces.append(piece)
    except ChatTemplateRaised:
        raise
    except RecursionError:
        raise ChatTemplateRaised("it calls itself without end") from None
    except MemoryError:
        raise ChatTemplateRaised("it needs too much memory") from None
    except Exception as error:  # whatever a template's expressions raise on a row's values
        raise ChatTemplateRaised(str(error) or type(error).__name__) from error
    return "".join(pieces)


@lru_cache(maxsize=16)
def compile_template(text: str, *, unseen_marks: str = "") -> jinja2.Template:
    """Compiles a chat template, once for each text. Raises `TemplateError` on a syntax error.

    ``unseen_marks``: the marks of an `Unseen` text that it may then be rendered with; rendering
    fails where the result could depend on what that text is.
    """
    environment = _watching(unseen_marks) if unseen_marks else _environment(_Environment)
    try:
        tree = environment.parse(text)
        if unseen_marks:
            _refuse_unwatched(tree)
        _count_steps(tree)
        return environment.from_string(tree)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(
            f"the chat template is malformed in line {error.lineno}: {error.message}; mend it, or "
            f"use the model's files as they were published"
        ) from error
    except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
        raise TemplateError(f"the chat template is malformed: {error}") from error


def _with_reasoning(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages whose reasoning stands under the name that templates read.

    `transformers` takes older names too and fills in ``reasoning_content`` and ``thinking``.
    """
    filled: list[Mapping[str, Any]] = []
    for message in messages:
        values = (message.get(name) for name in _REASONING_FIELDS)
        reasoning = next((value for value in values if value is not None), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        filled.append(message)
    return filled


class _Budget:
    """Steps that one rendering may still take."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS

    def take(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise ChatTemplateRaised(f"it takes more than {MAX_STEPS:,} steps")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with calls counted and the operators that can blow up text limited."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __context[_BUDGET].take(1)
        if getattr(__obj, "__name__", "") == "join" and args and not isinstance(args[0], Sized):
            args = (list(_counting(args[0], __context[_BUDGET])), *args[1:])
        _limited(call_size(__obj, args, kwargs))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        bare = super().wrap_str_format(value)
        if bare is None:
            return None

        @wraps(bare)
        def bounded(*args: Any, **kwargs: Any) -> str:
            is_map = value.__name__ == "format_map" and args and isinstance(args[0], Mapping)
            _limited(format_size(value.__self__, args, args[0] if is_map else kwargs))
            return str(bare(*args, **kwargs))

        return bounded

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, Sized) and isinstance(times, int):
                    _limited(len(items) * times)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _limited(left.bit_length() * right)
        if operator == "%" and isinstance(left, str | bytes):
            _limited(percent_size(left, right))
        result = super().call_binop(context, operator, left, right)
        if operator == "+" and isinstance(result, Sized):
            _limited(len(result))
        return result


def _limited(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise ChatTemplateRaised(f"it builds a text of more than {MAX_CHARACTERS:,} characters")


class _Generation(jinja2.ext.Extension):
    """``{% generation %} … {% endgeneration %}`` marks answers for training: here only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        scope = jinja2.nodes.Scope(body)  # as in transformers, what it sets stays inside
        return [scope.set_lineno(lineno)]


class _ChatNamespace(jinja2.utils.Namespace):
    """``namespace`` for templates, without names that Python gives a meaning to."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _require_plain_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_plain_name(name)
        super().__setitem__(name, value)


def _require_plain_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise ChatTemplateRaised(f"it sets {name!r} of a namespace, which it must not")


class _SafeDict:
    """``dict`` for templates, without the class behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Watching(_Environment):
    """An environment in which a template can do no more with `Unseen` texts than place them."""

    marks: str

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if __obj is not __self.globals["namespace"]:
            given = {name: kwargs[name] for name in kwargs if name not in _SCOPES}
            __self.refuse(args, given)
        result = super().call(__context, __obj, *args, **kwargs)
        if type(result) is str:
            __self.refuse(result)
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if not (isinstance(left, Unseen) or isinstance(right, Unseen)):
            return super().call_binop(context, operator, left, right)
        if operator != "+":
            self.refuse(left, right)
        return left + right

    def refuse(self, *values: Any) -> None:
        if is_unseen(values, self.marks):
            raise AskedError("it does more with a text than to place it")

    def watched(self, bare: Any) -> Callable[..., Any]:
        """A filter or a test that is given no unseen text."""
        num_contexts = int(hasattr(bare, "jinja_pass_arg"))

        @wraps(bare)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.refuse(args[num_contexts:], kwargs)
            return bare(*args, **kwargs)

        return watched


_Kind = TypeVar("_Kind", bound=_Environment)
# What says nothing of a text, or asks it in a way that an `Unseen` one notices.
_HARMLESS_FILTERS = {"count", "d", "default", "first", "last", "length", "list", "string", "trim"}
_HARMLESS_TESTS = {"boolean", "defined", "mapping", "none", "number", "string", "undefined"}
_PLAIN_KEYS = ("role", "type")
_SCOPES = ("_loop_vars", "_block_vars")  # jinja2 hands a template's variables along with a call


def _watching(marks: str) -> _Watching:
    environment = _environment(_Watching)
    environment.marks = marks
    for table, harmless in (
        (environment.filters, _HARMLESS_FILTERS | {_COUNTED, _JOINED}),
        (environment.tests, _HARMLESS_TESTS),
    ):
        for name, bare in table.items():
            if name not in harmless:
                table[name] = environment.watched(bare)
    environment.filters[_JOINED] = _joined_unseen
    return environment


def _refuse_unwatched(tree: jinja2.nodes.Template) -> None:
    """Raises `TemplateError` where an environment is not asked: text that is gathered, and ``in``
    with anything but what cannot be an unseen text on its left."""
    nodes = jinja2.nodes
    gathers = tree.find(nodes.AssignBlock) is not None
    if gathers or not all(map(_looks_at_no_text, tree.find_all(nodes.Compare))):
        raise TemplateError("the chat template may look into texts")


def _looks_at_no_text(compare: jinja2.nodes.Compare) -> bool:
    nodes, left = jinja2.nodes, compare.expr
    if all(operand.op not in ("in", "notin") for operand in compare.ops):
        return True
    if len(compare.ops) > 1:
        return False
    if isinstance(compare.ops[0].expr, nodes.List | nodes.Tuple | nodes.Dict):
        return True
    if isinstance(left, nodes.Getattr):
        return left.attr in _PLAIN_KEYS
    if isinstance(left, nodes.Getitem):
        left = left.arg
        return isinstance(left, nodes.Const) and left.value in _PLAIN_KEYS
    return isinstance(left, nodes.Const)


def _environment(kind: type[_Kind]) -> _Kind:
    environment = kind(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    for name, size in FILTER_SIZES.items():
        environment.filters[name] = _bounded_filter(environment.filters[name], size)
    environment.filters["join"] = _join
    environment.filters["tojson"] = _tojson
    environment.filters[_COUNTED] = _counted
    environment.filters[_JOINED] = _joined
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _SafeDict()
    environment.globals["namespace"] = _ChatNamespace
    del environment.globals["lipsum"]  # random text, as long as one likes
    return environment


def _bounded_filter(bare: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
    """A filter of jinja2 that refuses what would make too large a text or list."""
    num_contexts = int(hasattr(bare, "jinja_pass_arg"))  # jinja2 hands one in before the value

    @wraps(bare)  # keeps jinja2's marks
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _limited(size(*args[num_contexts:], **kwargs))
        return bare(*args, **kwargs)

    return bounded


@jinja2.pass_eval_context
def _join(context: Any, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    items = list(value)
    if attribute is None:
        _limited(joined_size(d, items))
    return str(jinja2.filters.sync_do_join(context, items, d, attribute))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, not escaped for HTML as jinja2's own filter does."""
    if isinstance(indent, int) and indent > _MAX_INDENT:
        raise ChatTemplateRaised(f"it indents JSON by more than {_MAX_INDENT} places")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise ChatTemplateRaised(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


_COUNTED, _JOINED = "__counted__", "__joined__"


def _count_steps(tree: jinja2.nodes.Template) -> None:
    """Lets every loop of the template count its rounds, and ``~`` the text it builds."""
    for loop in list(tree.find_all(jinja2.nodes.For)):
        loop.iter = _filter(loop.iter, _COUNTED)
    for concat in list(tree.find_all(jinja2.nodes.Concat)):
        parts = jinja2.nodes.List(concat.nodes, lineno=concat.lineno)
        concat.nodes = [_filter(parts, _JOINED)]


def _filter(node: jinja2.nodes.Node, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@jinja2.pass_context
def _counted(context: jinja2.runtime.Context, items: Iterable[Any]) -> Iterable[Any]:
    budget: _Budget = context[_BUDGET]
    if isinstance(items, Sized):
        budget.take(len(items))
        return items
    return _counting(items, budget)


def _counting(items: Iterable[Any], budget: _Budget) -> Iterator[Any]:
    for item in items:
        budget.take(1)
        yield item


@jinja2.pass_context
def _joined(context: jinja2.runtime.Context, parts: Sequence[Any]) -> str:
    texts = [str(part) for part in parts]
    _limited(sum(map(len, texts)))
    return "".join(texts)


def _joined_unseen(parts: Sequence[Any]) -> Any:
    if any(isinstance(part, Unseen) for part in parts):
        return reduce(add, (part if isinstance(part, Unseen) else str(part) for part in parts))
    return "".join(map(str, parts))
