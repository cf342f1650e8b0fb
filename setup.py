"""Map each room (a folder at the root) to ``kernelcast.<room>``.

The folders ``datasets`` and ``kernels`` share their names with published packages, so none of them may ever be
installed as a top-level name. The packages are found, not listed, so a new operation is one new folder.

Each ``_NAME.c`` in a room is compiled to the module ``_NAME`` beside it. All of them are optional: where one cannot be
compiled, the installation goes on without it, and numpy does the same.
"""

import os
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOMS = ("kernels", "featurizer", "datasets", "costmodel", "training", "runtime")

package_dir = {"kernelcast": "kernelcast"}
packages = ["kernelcast", *(f"kernelcast.{name}" for name in find_packages("kernelcast"))]
for room in ROOMS:
    package_dir[f"kernelcast.{room}"] = room
    packages += [f"kernelcast.{room}", *(f"kernelcast.{room}.{name}" for name in find_packages(room))]

# One build serves every CPython from 3.11 on, but for those without a global lock, which have no stable interface.
stable = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
compiled = [
    Extension(
        f"kernelcast.{path.parent.name}.{path.stem}",
        [path.as_posix()],
        define_macros=[("Py_LIMITED_API", "0x030B0000")] if stable else [],
        py_limited_api=stable,
        extra_compile_args=["-O3"],
        libraries=["m"] if os.name == "posix" else [],
        optional=True,
    )
    for room in ROOMS
    for path in sorted(Path(room).glob("_*.c"))
]

setup(
    ext_modules=compiled,
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if stable else {},
    package_dir=package_dir,
    packages=packages,
    # In every package: a room may hold data beside its modules.
    package_data={"": ["py.typed", "*.pyi", "*.toml", "*.html"]},
    # Sources of what is compiled are in the source distribution alone.
    exclude_package_data={"": ["*.c"]},
)
