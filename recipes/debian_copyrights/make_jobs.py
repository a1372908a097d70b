"""Makes jobs.parquet of the copyright files that every Debian machine has.

    python make_jobs.py --docs /usr/share/doc --out jobs.parquet

One row a package: `id` (the package) and `text` (the first notice of its copyright file).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

MAX_CHARACTERS = 300
MAX_FIELD_LINES = 2  # of a list of holders or a licence's text; `Copyright:` alone is none
SCHEMA = pa.schema([("id", pa.string()), ("text", pa.string())])

_ADDRESS = re.compile(r"\s*<?[\w.+-]+@[\w-]+(\.[\w-]+)+>?")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_BLANK = re.compile(r"\n(?: *\n)+")
_PLACE = re.compile(r"(Format|Files|Files-\S+|Source|Upstream-\S+|Comment|Disclaimer):")
_HEADING = re.compile(r".*:")
_HOLDER = re.compile(r"copyright|©|\(c\)", re.IGNORECASE)
_TERMS = re.compile(r"licen[cs]e|permission|redistribut|public domain|\bL?GPL", re.IGNORECASE)


def first_notice(text: str, max_characters: int = MAX_CHARACTERS) -> str:
    """The paragraphs from the first that names a holder to the first that names terms, without
    headings.

    Of the machine-readable format (DEP-5) this is the stanza ``Files: *``: without the fields
    that only name places, and with the beginnings of long fields. Where no paragraph names a
    holder the text's own beginning stands.
    """
    chosen: list[str] = []
    for paragraph in map(_shorten, _BLANK.split(text.strip("\n"))):
        if _HEADING.fullmatch(paragraph):
            continue
        if not chosen and (not _HOLDER.search(paragraph) or paragraph.startswith("This package")):
            continue
        chosen.append(paragraph)
        if _TERMS.search(paragraph):
            break
    return cut("\n".join(filter(None, chosen)) or text.strip(), max_characters)


def _shorten(paragraph: str) -> str:
    """Drops fields that name places, and of a field what is past `MAX_FIELD_LINES`."""
    lines: list[str] = []
    field, num_lines = "", 0
    for line in paragraph.splitlines():
        if not line.startswith(" "):
            field, num_lines = line, 0
        num_lines += not line.rstrip().endswith(":")
        is_kept = num_lines <= MAX_FIELD_LINES and line.strip() not in ("", ".")
        if is_kept and not _PLACE.match(field):
            lines.append(line.strip())
    return "\n".join(lines)


def clean(raw: bytes) -> str:
    """Valid UTF-8 without control characters and mail addresses."""
    text = raw.decode("utf-8", errors="replace").replace("\t", " ")
    return _ADDRESS.sub("", _CONTROL.sub("", text))


def cut(text: str, max_characters: int) -> str:
    """At most ``max_characters`` from the beginning, whole lines where there is more than one."""
    if len(text) <= max_characters:
        return text
    head = text[: max_characters + 1]
    whole, newline, _ = head.rpartition("\n")
    return (whole if newline else head[:max_characters]).rstrip()


def packages(docs: Path) -> Iterator[tuple[str, Path]]:
    """Name and copyright file of each package. A file that links lead to comes once, under the
    name it really has where that is among them."""
    seen: set[Path] = set()
    files = [folder / "copyright" for folder in sorted(docs.iterdir())]
    for file in sorted(files, key=lambda file: file.parent.is_symlink() or file.is_symlink()):
        if file.is_file() and (real := file.resolve()) not in seen:
            seen.add(real)
            yield file.parent.name, file


def read_jobs(docs: Path) -> pa.Table:
    """All rows of a docs folder, by name; packages whose file has no text are left out."""
    rows = []
    for name, file in sorted(packages(docs)):
        text = first_notice(clean(file.read_bytes()))
        if text:
            rows.append({"id": name, "text": text})
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Makes jobs.parquet of Debian copyright files.")
    parser.add_argument("--docs", type=Path, default=Path("/usr/share/doc"))
    parser.add_argument("--out", type=Path, default=Path("jobs.parquet"))
    parser.add_argument("--limit", type=int, help="only the first N packages")
    parser.add_argument("--only", help="only these packages: a,b,c")
    options = parser.parse_args(arguments)
    if not options.docs.is_dir():
        parser.error(f"there is no folder {options.docs}; give one that has PACKAGE/copyright")
    table = read_jobs(options.docs)
    if options.only is not None:
        wanted = set(options.only.split(","))
        names = table["id"].to_pylist()
        if missing := sorted(wanted.difference(names)):
            parser.error(f"{options.docs} has no copyright file of {', '.join(missing)}")
        table = table.filter(pa.array([name in wanted for name in names], pa.bool_()))
    table = table.slice(0, options.limit)
    if not table.num_rows:
        parser.error(f"{options.docs} has no PACKAGE/copyright file")
    pq.write_table(table, options.out, compression="zstd")
    print(f"{table.num_rows:,} rows in {options.out}")


if __name__ == "__main__":
    main()
