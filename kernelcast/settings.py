"""Settings: one place, one prefix.

======================  =====================================================================  ================
variable                meaning                                                                default
======================  =====================================================================  ================
``KERNELCAST_HOME``     folder of the store, the models, the cache and the tracking database   ``~/.kernelcast``
``KERNELCAST_MODE``     ``off``, ``cached``, ``predict``, ``verify`` or ``tune``               ``verify``
``KERNELCAST_DISABLE``  ``1`` makes every drop-in operation torch's own (the kill switch)      ``0``
                        and so does any other value but ``0``, with a warning
``KERNELCAST_IMPORT``   modules or files with kernels of the user's own, by commas             none
======================  =====================================================================  ================

A leaf module: it imports nothing of kernelcast but the errors. The environment is read at each call, so that a test or
a launcher may change it after the import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kernelcast.errors import SettingsError, warn

#: What :data:`os.environ` reads and writes, with encoded names and values: a lookup here takes 0.03 us, one there 0.8 us when
#: the name is absent, as that raises and catches. Changes through ``os.environ`` show at once.
raw_environment: Mapping[bytes, bytes] = getattr(os.environ, "_data", None) or getattr(os, "environb", {})

#: Values of KERNELCAST_DISABLE that were warned of.
_warned_of: set[str] = set()

MODES = ("off", "cached", "predict", "verify", "tune")


def home() -> Path:
    """The folder under which kernelcast keeps everything it writes. It need not exist yet.

    Raises:
        SettingsError: ``KERNELCAST_HOME`` is not set (or begins with ``~``), and the user has no home directory.
    """
    try:
        return Path(os.environ.get("KERNELCAST_HOME") or "~/.kernelcast").expanduser()
    except RuntimeError as error:
        raise SettingsError(f"{error} Set KERNELCAST_HOME to a folder that can be written.") from error


def store_dir() -> Path:
    """Measurements."""
    return home() / "store"


def models_dir() -> Path:
    """Registered model artifacts: ``<device>/<operation>/<version>``."""
    return home() / "models"


def cache_dir() -> Path:
    """Selections that were made before."""
    return home() / "cache"


def compile_cache_dir() -> Path:
    """What the compiler made of kernels: one file a target."""
    return home() / "compile"


def tracking_uri() -> str:
    """Where MLflow runs go: ``MLFLOW_TRACKING_URI`` if set, else a sqlite file under the home."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home() / 'mlflow.db'}"


def mode() -> str:
    """The selection mode in force.

    Raises:
        SettingsError: ``KERNELCAST_MODE`` is none of :data:`MODES`.
    """
    value = os.environ.get("KERNELCAST_MODE") or "verify"
    if value not in MODES:
        raise SettingsError(f"KERNELCAST_MODE is {value!r}; it must be one of {', '.join(MODES)}.")
    return value


def disabled() -> bool:
    """Whether the kill switch is on. A value that is neither 0 nor 1 counts as on, and is warned of once."""
    raw = raw_environment.get(b"KERNELCAST_DISABLE")
    if raw is None or raw == b"0":
        return False
    value = os.fsdecode(raw) or "0"
    if value not in ("0", "1"):
        # Who reaches for the switch wants torch, not an error in the middle of a program.
        if value not in _warned_of:
            _warned_of.add(value)
            warn(
                f"KERNELCAST_DISABLE is {value!r}; it must be 0 or 1. It counts as 1: torch's own operators run."
            )
        return True
    return value == "1"


def imports() -> tuple[str, ...]:
    """Modules (``my_kernels``) and files (``./my_kernels.py``) that register kernels of the user's own."""
    value = os.environ.get("KERNELCAST_IMPORT") or ""
    return tuple(name.strip() for name in value.split(",") if name.strip())
