"""Stands in for a measurement of the zoo: gives figures, crashes or hangs, as the order says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main(order: str, file: str, ready: str) -> None:
    match json.loads(order):
        case {"do": "figures"}:
            found = {"status": "ok", "cache": os.environ["TESSERA_CACHE"]}
            Path(file).write_text(json.dumps(found))
        case {"do": "wait"}:
            compiled = time.time()
            Path(ready).touch()
            sys.stdin.readline()
            timed = [time.time()]
            time.sleep(0.1)
            figures = {"status": "ok", "compiled": compiled, "timed": [*timed, time.time()]}
            Path(file).write_text(json.dumps(figures))
        case {"do": "crash"}:
            print("about to go")
            os._exit(3)
        case {"do": "hang", "pid": pid}:
            other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(pid).write_text(str(other.pid))
            time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
