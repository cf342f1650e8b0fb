"""Map each room (a folder at the root) to ``kernelcast.<room>``.

The folders ``datasets`` and ``kernels`` share their names with published packages, so none of them may ever be
installed as a top-level name. The packages are found, not listed, so a new operation is one new folder.
"""

from setuptools import find_packages, setup

ROOMS = ("kernels", "featurizer", "datasets", "costmodel", "training", "runtime")

package_dir = {"kernelcast": "kernelcast"}
packages = ["kernelcast", *(f"kernelcast.{name}" for name in find_packages("kernelcast"))]
for room in ROOMS:
    package_dir[f"kernelcast.{room}"] = room
    packages += [f"kernelcast.{room}", *(f"kernelcast.{room}.{name}" for name in find_packages(room))]

setup(
    package_dir=package_dir,
    packages=packages,
    # In every package: a room may hold data beside its modules.
    package_data={"": ["py.typed", "*.toml", "*.html"]},
)
