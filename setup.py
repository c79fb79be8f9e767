"""Maps the package `corespan` onto the repository's root and builds the native kernels where a compiler is at hand.

Everything else about the distribution is in pyproject.toml.
"""

import runpy
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOMS = ("protocol", "client", "core", "engine", "vllm", "server")
KERNELS = Path("core/kernels")
source_hash = runpy.run_path(str(KERNELS / "source_hash.py"))["source_hash"]


class BuildPy(build_py):
    """Keeps this file, which lies in the package's folder, out of the package."""

    def find_package_modules(self, package, package_dir):
        modules = super().find_package_modules(package, package_dir)
        return [module for module in modules if module[:2] != ("corespan", "setup")]


class BuildExt(build_ext):
    """Names the library `_native.so`: it is loaded with ctypes, so it is tied to no Python version."""

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split("."))) + ".so"


def native_extensions():
    """The kernels: plain C++17 on raw pointers. A failed compile is a warning; the torch reference then serves."""
    sources = sorted(str(path) for path in KERNELS.rglob("*.cpp"))
    if not sources:
        return []
    return [
        Extension(
            "corespan.core.kernels._native",
            sources=sources,
            depends=sorted(str(path) for path in KERNELS.rglob("*.h")),
            define_macros=[("CORESPAN_SOURCE_HASH", str(source_hash(KERNELS / "csrc")))],
            extra_compile_args=["-std=c++17", "-O3", "-fwrapv", "-g0", "-fopenmp", "-fvisibility=hidden"],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ]


rooms = find_packages(include=[pattern for room in ROOMS for pattern in (room, f"{room}.*")])
setup(
    packages=["corespan", *(f"corespan.{room}" for room in rooms)],
    package_dir={"corespan": "."},
    ext_modules=native_extensions(),
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
)
