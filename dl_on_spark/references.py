"""Functions named in configuration as ``package.module:function``."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from typing import Any

from dl_on_spark.errors import ConfigError


def load_function(reference: str) -> Callable[..., Any]:
    """The function behind `reference`.

    Raises `ConfigError` when the module is not found, cannot be read as Python, imports what is not
    installed, or has no such function. Any other error inside the module is raised as it is.
    """
    module_name, separator, name = reference.partition(":")
    if not separator or not module_name or not name:
        raise ConfigError(f"{reference!r} names no function.", fix="Write it as package.module:function.")
    try:
        module = importlib.import_module(module_name)
    except SyntaxError as error:
        raise ConfigError(
            f"{reference!r}: {error.filename}, line {error.lineno}: {error.msg}.", fix="Mend that line."
        ) from error
    except ImportError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{reference!r} cannot be imported: {error}.",
                fix="Install that package in the environment of driver and executors, or ship it with --py-files.",
            ) from error
        raise ConfigError(
            f"{reference!r}: there is no module {error.name!r}.",
            fix="Ship it with --py-files (dl-on-spark package --include FOLDER), or run where it can be imported.",
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{reference!r}: {module_name} has no function {name!r}.", fix="Mend the name.")
    found: Callable[..., Any] = function
    return found


def raised_in(error: BaseException) -> str:
    """`` (FILE, line N)`` of the line in the called function's own file that led to `error`; empty if none did.

    Call it where the user's function was called: the first frame is the caller's, the next the function's.
    """
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
