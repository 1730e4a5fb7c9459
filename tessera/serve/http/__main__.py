"""The engine's process: `python -m tessera.serve.http FD`, where FD is a socket to the server."""

import importlib
import sys

from tessera.util.garbage import collection_paused, freeze

with collection_paused():
    worker = importlib.import_module("tessera.serve.http.worker")
freeze()  # what is imported stays: to look for garbage among it takes as long as a step
sys.exit(worker.main())
