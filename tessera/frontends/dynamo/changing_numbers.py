"""Integer attributes of a model that change from call to call, such as a counter.

Dynamo makes an integer argument dynamic once it has changed, but keeps an integer attribute of a model fixed: it would
compile a program for every value until its limit. In: why Dynamo compiles a frame again. Out: the attribute is on
Dynamo's list of dynamic sources from its second change on, so that the next program serves every value of it.
"""

from __future__ import annotations

import re

import torch

from tessera.frontends.dynamo.frames import MODEL

_FIXED = re.compile(rf"(?:\d+/\d+: )?(?P<source>G\['{MODEL}'\][^ ,]*) == -?\d+ ")


def make_dynamic(reason: str, changed: set[str]) -> None:
    """`reason`: the guard that failed. `changed`: integers of this function that have changed before."""
    match = _FIXED.match(reason)
    if match is None:
        return
    source, known = match["source"], torch.compiler.config.dynamic_sources
    if source in changed and source not in known.split(","):
        torch.compiler.config.dynamic_sources = f"{known},{source}".lstrip(",")
    changed.add(source)
