"""`run()`: `python -c` without the seconds that importing torch takes. One server imports it; each run is a fork of it.

A fork knows nothing of flash_attn; environment, folder and sys.path are those of a new interpreter.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path


@functools.cache
def _server():
    return subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run(code, cwd=None, env=None, check=False):
    """subprocess.CompletedProcess of `python -c code`. env: in place of os.environ."""
    with tempfile.TemporaryDirectory() as folder:
        request = {"code": code, "cwd": str(cwd or Path.cwd()), "environment": dict(env or os.environ), "out": folder}
        _server().stdin.write(json.dumps(request) + "\n")
        _server().stdin.flush()
        status = int(_server().stdout.readline())
        texts = [Path(folder, name).read_text(encoding="utf-8") for name in ("stdout", "stderr")]
    result = subprocess.CompletedProcess(code, status, *texts)
    if check:
        result.check_returncode()
    return result


def _folders(environment):
    return [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _main(request):
    """The exit status of a fork."""
    for stream, name in enumerate((os.devnull, f"{request['out']}/stdout", f"{request['out']}/stderr")):
        os.dup2(os.open(name, os.O_RDONLY if stream == 0 else os.O_WRONLY | os.O_CREAT), stream)
    os.chdir(request["cwd"])
    installed = [folder for folder in sys.path[1:] if folder not in _folders(os.environ)]
    sys.path[:] = ["", *_folders(request["environment"]), *installed]
    os.environ.clear()
    os.environ.update(request["environment"])
    try:
        exec(request["code"], {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _serve():
    import torch  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = _main(json.loads(line))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
