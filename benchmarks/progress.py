"""The progress of a run on standard error: a bar that is redrawn on a terminal, one line per row elsewhere."""

from __future__ import annotations

import shutil
import sys
import time

BAR_CELLS = 24


def bar(done, total, cells=BAR_CELLS):
    filled = done * cells // max(1, total)
    return "[" + "#" * filled + "." * (cells - filled) + "]"


class Progress:
    def __init__(self, total, stream=None):
        self.total, self.stream, self.started = total, stream or sys.stderr, time.monotonic()
        self.redraw = self.stream.isatty()

    def show(self, done, text):
        """`done` of all rows are measured; `text` says what the last one gave."""
        elapsed = time.monotonic() - self.started
        left = elapsed / done * (self.total - done) if done else 0.0
        line = f"{bar(done, self.total)} {done}/{self.total} {elapsed:4.0f} s, {left:3.0f} s left  {text}"
        if self.redraw:
            columns = shutil.get_terminal_size().columns - 1
            line = "\r" + line[:columns].ljust(columns) + ("\n" if done == self.total else "")
        else:
            line += "\n"
        self.stream.write(line)
        self.stream.flush()
