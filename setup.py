"""Builds the C kernels, where a compiler is: one plain shared library, loaded by ctypes.

Without a compiler the build warns and goes on; the torch operations then serve alone.
"""

from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = Path("kernels/batchradix_kernels")


class BuildLibrary(build_ext):
    """A shared library that is no Python module: one file name for every Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def get_export_symbols(self, ext: Any) -> list[str]:
        return []


setup(
    cmdclass={"build_ext": BuildLibrary},
    ext_modules=[
        Extension(
            "batchradix_kernels._native",
            sources=sorted(str(path) for path in KERNELS.glob("*/*.c")),
            depends=sorted(str(path) for path in KERNELS.glob("*/*.h")),
            include_dirs=[str(KERNELS / "native")],
            # Instruction sets are chosen function by function, at run time.
            extra_compile_args=[
                "-std=gnu11",
                "-O3",
                "-fopenmp-simd",
                "-fno-math-errno",
                "-fvisibility=hidden",
            ],
            libraries=["m"],
            optional=True,
        )
    ],
)
