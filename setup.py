"""Maps the package `corespan` onto the repository's root and builds the native kernels where a compiler is at hand.

Everything else about the distribution is in pyproject.toml.
"""

import os
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOMS = ("protocol", "shared", "client", "core", "engine", "vllm", "server")
KERNELS = Path("core/kernels")
FROM_SDIST = Path("PKG-INFO").exists()
FROM_A_CLONE_OF_PIPS = any(part.startswith(("pip-req-build-", "pip-install-")) for part in Path.cwd().parts)
BY_UV = "UV_INTERNAL__BUILD_DIR" in os.environ
IS_KEPT = FROM_SDIST or FROM_A_CLONE_OF_PIPS or BY_UV
"""Whether the wheel may go into a cache: pip keeps what it builds of an sdist and of a repository, uv everything. One
without kernels would be taken from there again when there is a compiler."""

WITHOUT_KERNELS = os.environ.get("CORESPAN_NO_KERNELS") == "1"
NOTHING_IS_KEPT = any(os.environ.get(name, "0") not in ("", "0") for name in ("PIP_NO_CACHE_DIR", "UV_NO_CACHE"))
DO_WITHOUT = """
    PIP_NO_CACHE_DIR=1 CORESPAN_NO_KERNELS=1 pip install ...
    UV_NO_CACHE=1 CORESPAN_NO_KERNELS=1 uv pip install ...
"""
REMEDY = f"""
The native kernels do not compile. Install a C++17 compiler (apt-get install g++) or, to do without them, slower:
{DO_WITHOUT}"""
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

    def build_extensions(self):
        """Compiles on all cores, a source file on each."""
        compile_in_turn = self.compiler.compile

        def compile_at_once(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                compiled = list(pool.map(lambda source: compile_in_turn([source], **options), sources))
            return [path for paths in compiled for path in paths]

        self.compiler.compile = compile_at_once
        super().build_extensions()

    def run(self):
        try:
            super().run()
        except Exception as error:
            raise SystemExit(f"{error}\n{REMEDY}") from error


class BdistWheel(bdist_wheel):
    """One wheel a platform for every Python: nothing in it is tied to a version."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


def native_extensions():
    """The kernels: plain C++17 on raw pointers.

    In a checkout a failed compile is a warning, and the torch reference serves; where the wheel is kept it is an error.
    """
    if WITHOUT_KERNELS and IS_KEPT and not NOTHING_IS_KEPT:
        raise SystemExit(
            f"This wheel would be kept, and installed again when there is a compiler. Build it so:\n{DO_WITHOUT}"
        )
    sources = sorted(str(path) for path in KERNELS.rglob("*.cpp"))
    if not sources or WITHOUT_KERNELS:
        return []
    return [
        Extension(
            "corespan.core.kernels._native",
            sources=sources,
            depends=sorted(str(path) for path in KERNELS.rglob("*.h")),
            define_macros=[("CORESPAN_SOURCE_HASH", str(source_hash(KERNELS / "csrc")))],
            extra_compile_args=["-std=c++17", "-O3", "-fwrapv", "-g0", "-fopenmp", "-fvisibility=hidden"],
            extra_link_args=["-fopenmp"],
            optional=not IS_KEPT,
        )
    ]


rooms = find_packages(include=[pattern for room in ROOMS for pattern in (room, f"{room}.*")])
setup(
    packages=["corespan", *(f"corespan.{room}" for room in rooms)],
    package_dir={"corespan": "."},
    ext_modules=native_extensions(),
    cmdclass={"bdist_wheel": BdistWheel, "build_ext": BuildExt, "build_py": BuildPy},
)
