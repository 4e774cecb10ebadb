"""Progress lines of a build: to standard output, to a log file and, because pip hides the output, to the terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SHOWN = "FLASH_ATTN_LOG_IS_SHOWN"  # set by who shows the log file as it grows
_log_file: Path | None = None
_replaced = False  # whether the terminal's current line is to be


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


def show(text: str, end: str = "\n") -> None:
    """Write a line to the terminal, if output goes elsewhere. end="": the next one replaces it."""
    global _replaced
    if os.environ.get(SHOWN) or sys.stdout.isatty():
        return
    start, _replaced = "\r\033[K" if _replaced else "\n", end == ""
    try:
        with open("/dev/tty", "w", encoding="utf-8") as terminal:
            terminal.write(f"{start}{text}{end}")
    except OSError:
        pass  # a process without a terminal


def announce(text: str) -> None:
    """say() it, and show() it."""
    say(text)
    show(text)


def duration(seconds: float) -> str:
    """ "40 s", "24 min" """
    return f"{seconds:.0f} s" if seconds < 99.5 else f"{seconds / 60:.0f} min"
