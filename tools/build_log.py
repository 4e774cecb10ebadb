"""Progress lines of a build: to standard output and, because pip hides that, to a log file as well."""

from __future__ import annotations

from pathlib import Path

_log_file: Path | None = None


def log_to(path: Path) -> None:
    """Start a new log at `path`; every later line of say() is added to it."""
    global _log_file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("", encoding="utf-8")
    _log_file = path


def say(text: str) -> None:
    """Print one line at once and add it to the log, if there is one."""
    print(text, flush=True)
    if _log_file is not None:
        with _log_file.open("a", encoding="utf-8") as log:
            log.write(text + "\n")
