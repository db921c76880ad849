"""Puts the library of CPU kernels into a wheel, where this machine has a compiler: who installs the wheel needs none.

Without a compiler the wheel is pure Python, and the library is built at its first use, or torch does the work. The
wheel's tag then differs: with the library it names the platform and its C library, which may be newer where the wheel
is used, not older. SHARDENGINE_NATIVE=off makes a pure wheel in any case, "require" fails without a compiler. Nothing
is compiled for an editable install or an sdist.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

NATIVE = "shardengine/kernels/native"


class NativeLibrary(BuildHookInterface[Any]):
    """Hatchling's hook of a wheel."""

    folder: str | None = None
    """Where the library lies until the wheel has it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say what the wheel is. version: "standard" or "editable"."""
        mode = os.environ.get("SHARDENGINE_NATIVE", "auto")
        if version == "editable" or mode == "off":
            return
        build = build_module(Path(self.root))
        key = build.source_key()
        try:
            compiler = build.find_compiler()
            if isinstance(compiler, str):
                raise OSError(compiler)
            data = build.compile_library(compiler, key)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            if mode == "require":
                raise
            self.app.display_warning(f"this wheel holds no library of CPU kernels: {error}")
            return
        self.folder = tempfile.mkdtemp(prefix="shardengine-")
        path = Path(self.folder) / f"{key}.so"
        path.write_bytes(data)
        build_data["force_include"][str(path)] = f"{NATIVE}/prebuilt/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The wheel is written."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def platform_tag() -> str:
    """The one that names the C library, too, where there is one: pip then refuses the wheel where that is older."""
    tags = list(platform_tags())
    return next((tag for tag in tags if not tag.startswith("linux_")), tags[0])


def build_module(root: Path) -> ModuleType:
    """``shardengine.kernels.native.build`` without its package, which would import torch."""
    spec = importlib.util.spec_from_file_location("shardengine_build", root / NATIVE / "build.py")
    if spec is None or spec.loader is None:
        raise OSError(f"{root / NATIVE / 'build.py'} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
