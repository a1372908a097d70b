"""How rows are to become prompts. Part of `batchradix.config`, which has the rest."""

from __future__ import annotations

from dataclasses import dataclass

from batchradix.errors import OptionError

COLUMN_NEEDED = (
    "`instruction` and `column` belong together: `instruction` says what to do, "
    "`column` names the text to do it to"
)


def require(condition: bool, sentence: str) -> None:
    """Raises `OptionError` with the sentence unless the condition holds."""
    if not condition:
        raise OptionError(sentence)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """How a row becomes a prompt.

    Neither ``template`` nor ``instruction``: the input's ``messages`` column (chat) or
    ``prompt`` column (raw). ``template`` is text (or the text of a file) with ``{{ column }}``
    places, raw unless ``chat``. ``instruction`` with ``column`` is chat: instruction (and
    schema) first, the row's text last. ``null_text`` stands in for a place that is null or
    missing in a row; without it such a row is an error row. ``reorder_columns``: lines of the
    template that list fields stand, in each row, in the order in which rows share most of them;
    ``sort_passages``: so do the items of the list in this column.
    """

    template: str | None = None
    chat: bool = False
    instruction: str | None = None
    column: str | None = None
    system: str | None = None
    null_text: str | None = None
    reorder_columns: bool = False
    sort_passages: str | None = None

    def __post_init__(self) -> None:
        for name in ("template", "instruction", "column", "system", "null_text", "sort_passages"):
            value = getattr(self, name)
            require(
                value is None or isinstance(value, str), f"`{name}` must be text, not {value!r}"
            )
        require(
            self.template is None or self.instruction is None,
            "`template` and `instruction` exclude each other; give one of them",
        )
        require(self.instruction is None or self.column is not None, COLUMN_NEEDED)
        for name in ("chat", "reorder_columns"):
            value = getattr(self, name)
            require(isinstance(value, bool), f"`{name}` must be True or False, not {value!r}")
        require(
            not self.reorder_columns or self.template is not None,
            "`reorder_columns` orders the fields that a template lists; give a `template`",
        )
        require(
            self.sort_passages is None or not (self.template is None and self.instruction is None),
            "`sort_passages` orders the items of a list that prompts show; give a `template`, or "
            "an `instruction` and `column`",
        )
        require(
            not self.chat or self.template is not None,
            "`chat` turns a template into a chat message; give a `template` with it",
        )
