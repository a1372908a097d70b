"""Makes `smollm2.json.gz`: what transformers alone answers, greedily and in float32, row by row.

    python tests/oracle/make_oracle.py                   # the model as batchradix keeps it
    python tests/oracle/make_oracle.py --model FILE.gguf --output FILE.json.gz

Needs a Debian system for its texts (licences); the prompts are in the
output, so the tests do not. Takes some minutes on two cores. Run it again when the rows are to
change; the answers themselves belong to the model and never do.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from i3 import TIE_GAP, Alone, OracleRow, save_rows

FOLDER = Path(__file__).parent
LICENCES = Path("/usr/share/common-licenses")
INSTRUCTIONS = [
    "Below is a passage from a licence. Read it and answer the question in a few words.\n\n",
    "Passage:\n",
]
QUESTIONS = [
    "What is this passage about?",
    "Who holds the copyright?",
    "Which licence is named first?",
    "May the work be sold?",
    "May the work be modified?",
    "Is there a warranty?",
    "Who is liable for damages?",
    "Which year is mentioned?",
    "What must be kept in copies?",
    "What must a contributor do?",
    "Does it speak of patents?",
    "Summarise the passage in one sentence.",
]
SHORT = [
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n",
    "1, 2, 3, 4,",
    "Water boils at",
    "Dear Sir or Madam,",
    "import numpy as np\n",
    "Roses are red,",
    "The quick brown fox",
    "SELECT name FROM users WHERE",
    "Monday, Tuesday, Wednesday,",
    "In 1969, humans first",
    "<html>\n<head>\n",
    "A group of wolves is called a",
    "To be or not to be,",
    "Ingredients: flour, sugar,",
    "ERROR: file not found:",
    "The opposite of hot is",
    "Größe und Gewicht:",
    "日本の首都は",
]
CHATS = [
    "Give me a name for a cat.",
    "What is 12 plus 30?",
    "Say hello in French.",
    "Name three colours.",
    "Is the sky blue?",
    "Write a haiku about rain.",
    "Name three fruits.",
    "Translate 'good night' to Spanish.",
]


def passages() -> list[str]:
    """Passages of licences, 40 to 320 tokens or so; versions of one licence share their
    beginnings."""
    names = ["Apache-2.0", "Artistic", "BSD", "CC0-1.0", "GFDL-1.2", "GFDL-1.3", "GPL-1"]
    names += ["GPL-2", "GPL-3", "LGPL-2", "LGPL-2.1", "LGPL-3", "MPL-1.1", "MPL-2.0"]
    draw = random.Random(2)
    found = []
    for number, name in enumerate(names):
        text = (LICENCES / name).read_text(encoding="utf-8")
        text = re.sub(r"[ \t]+|([-=_*.])\1{3,}", " ", text)
        blocks = [block.strip() for block in text.split("\n\n") if len(block) > 80]
        for part in range(1 + number % 2 + (number % 3 == 0)):
            size = draw.choice([200, 300, 450, 600, 800, 1500])
            first = 0 if part == 0 else draw.randrange(1, len(blocks) - 3)
            found.append("\n\n".join(blocks[first:])[:size].rsplit(" ", 1)[0])
    return found


def sources(tokenizer: Any) -> list[dict[str, Any]]:
    """The rows as a job would hold them: a prompt or messages, and max_tokens."""
    draw = random.Random(3)
    prompts = []
    for number, passage in enumerate(passages()):
        instruction = INSTRUCTIONS[number % 4 == 3]
        for question in draw.sample(QUESTIONS, draw.randrange(5, 9)):
            prompts.append(f"{instruction}{passage}\n\nQuestion: {question}\nAnswer:")
    beginnings: list[str] = []
    while len(beginnings) < 14:
        ids = tokenizer(draw.choice(prompts)).input_ids
        cut = tokenizer.decode(ids[: draw.randrange(3, len(ids))])
        again = tokenizer(cut).input_ids
        if again == ids[: len(again)]:
            beginnings.append(cut)
    duplicates = draw.sample(prompts, 8) + draw.sample(beginnings, 3) + SHORT[:2]
    rows: list[dict[str, Any]] = [
        {"prompt": text, "max_tokens": draw.choice([8, 8, 10, 12, 16, 24])}
        for text in [*prompts, *beginnings, *duplicates, *SHORT]
    ]
    rows += [{"messages": [{"role": "user", "content": text}], "max_tokens": 20} for text in CHATS]
    draw.shuffle(rows)
    return rows


def encode(tokenizer: Any, row: dict[str, Any]) -> list[int]:
    if "prompt" in row:
        ids = tokenizer(row["prompt"]).input_ids
    else:
        ids = tokenizer.apply_chat_template(
            row["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
    return list(ids)


def model_file(given: Path | None) -> Path:
    if given is not None:
        return given
    from batchradix.checkpoint.checkpoint import open_checkpoint

    return open_checkpoint("smollm2-135m").path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file; default: smollm2-135m")
    parser.add_argument("--output", type=Path, default=FOLDER / "smollm2.json.gz")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    path = model_file(arguments.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    rows = sources(tokenizer)
    eos_ids = [tokenizer.eos_token_id]
    alone = Alone.load(path.parent, eos_ids, gguf_file=path.name)
    started_s = time.monotonic()
    oracle: list[OracleRow] = []
    for number, row in enumerate(rows):
        oracle.append(alone(encode(tokenizer, row), row["max_tokens"]))
        if number % 20 == 19:
            print(f"{number + 1} of {len(rows)}", file=sys.stderr)
    save_rows(
        arguments.output,
        oracle,
        model=path.name,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        eos_ids=eos_ids,
        transformers=transformers.__version__,
        torch=torch.__version__,
        sources=rows,
    )
    gaps = [gap for row in oracle for gap in row.gaps]
    print(
        f"{len(oracle)} rows of {min(len(r.prompt) for r in oracle)} to "
        f"{max(len(r.prompt) for r in oracle)} tokens, "
        f"{sum(len(r.prompt) for r in oracle)} prompt tokens, {len(gaps)} steps, "
        f"{sum(gap <= TIE_GAP for gap in gaps)} with a gap of at most {TIE_GAP}, "
        f"{sum(r.ids[-1] in eos_ids for r in oracle)} ended, "
        f"{arguments.output.stat().st_size} bytes, {time.monotonic() - started_s:.0f} s"
    )


if __name__ == "__main__":
    main()
