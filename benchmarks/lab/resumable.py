"""A result of the laboratory that is measured part by part, in spite of kernels that hang or break the context.

What is under way stands in a file beside the result. A run that finds it there, because the one before it ended in the
middle, leaves that out and goes on with the parts that are missing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os

HANG_SECONDS = 30


def say(line):
    print(line, flush=True)


def under_way(path):
    """The file beside the result at `path` that tells what is under way."""
    return path.with_suffix(".now")


class Ended(Exception):
    """What is to be done next ended an earlier run."""


class Progress:
    """path: of the JSON. origin: what the result begins with; an unfinished one of the same commit goes on."""

    def __init__(self, path, origin, parts):
        self.path, self.now = path, under_way(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.result = {**origin, **parts, "ended_by": [], "finished": False}
        earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"finished": True}
        if not earlier.get("finished", True) and earlier["git"] == origin["git"]:
            self.result = earlier
        if self.now.is_file():
            self.result["ended_by"].append(self.now.read_text(encoding="utf-8"))
            self.now.unlink()
        self.write()

    def write(self):
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, self.path)

    def finish(self):
        self.result["finished"] = True
        self.write()

    @contextlib.contextmanager
    def watched(self, what):
        """Ends the program if the block takes longer than HANG_SECONDS: a kernel hangs. Ended: an earlier run did not
        survive it."""
        if what in self.result["ended_by"]:
            raise Ended("it hung, or ended the program")
        say(what)
        self.now.write_text(what, encoding="utf-8")
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
        self.now.unlink()  # not behind an exception, which a broken context may have raised
