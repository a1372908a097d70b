"""Thinking before an answer, in whole runs of models whose every token is known."""

from __future__ import annotations

import pytest
import batchradix


def rows(n=2):
    return [{"id": f"r{i}", "messages": [{"role": "user", "content": f"q{i}"}]} for i in range(n)]


@pytest.mark.parametrize("markers", ["added", "special", "text"])
@pytest.mark.parametrize("kind", ["switch", "opens", "toggle", "mentions"])
def test_x(thinker_folder, kind, markers):
    model = thinker_folder(kind, markers=markers)
    for thinking in ("auto", "on", "off"):
        for schema in (None, {"regex": "[0-9]+"}):
            try:
                out = batchradix.run(
                    rows(),
                    model=model,
                    thinking=thinking,
                    sampling=batchradix.SamplingOptions(max_tokens=8),
                    **(schema or {}),
                )
                print(
                    kind,
                    markers,
                    thinking,
                    schema,
                    out.summary.warnings,
                    {
                        k: v[0]
                        for k, v in out.table.to_pydict().items()
                        if k
                        in (
                            "text",
                            "status",
                            "reasoning",
                            "completion_tokens",
                            "reasoning_tokens",
                            "prompt_tokens",
                            "error",
                            "finish_reason",
                        )
                    },
                )
            except Exception as e:
                print(kind, markers, thinking, schema, repr(e))
