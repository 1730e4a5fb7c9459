"""The engine's process: `python -m tessera.serve.http FD DEVICE`, where FD is a socket to the server."""

import importlib
import sys

from tessera.util import cuda_context
from tessera.util.garbage import collection_paused, freeze
from tessera.util.phases import phase

cuda_context.begin(sys.argv[2])
with collection_paused(), phase("imports"):
    worker = importlib.import_module("tessera.serve.http.worker")
freeze()  # what is imported stays: to look for garbage among it takes as long as a step
sys.exit(worker.main())
