"""Python's code of generated programs.

In: text. Out: its code object. Python compiles some 5 MB of text a second, which for a deep model is a third of what
its program takes to come from the disk. So the code of long text is kept on disk, as Python keeps that of the files
that it imports: by the text and by the version of Python's instructions. It is trusted as the kernels' machine code in
the same folder is, which is the user's own.
"""

from __future__ import annotations

import importlib.util
import marshal
import sys
import zlib
from types import CodeType

from tessera.util import disk
from tessera.util.config import config

KIND = "code"
LONG = 1 << 14  # characters; shorter text compiles about as fast as a file is read
VERSION = f"{importlib.util.MAGIC_NUMBER.hex()} {sys.flags.optimize}"


def code_of(text: str, filename: str) -> CodeType:
    if len(text) < LONG or not config.program_cache:
        return compile(text, filename, "exec")
    key = f"{VERSION}\n{text}"
    data = disk.load(KIND, key)
    if data is not None:
        return _in_file(marshal.loads(zlib.decompress(data)), filename)
    code = compile(text, filename, "exec")
    disk.store(KIND, key, zlib.compress(marshal.dumps(code), 1))
    return code


def _in_file(code: CodeType, filename: str) -> CodeType:
    """The same code, with the functions in it, where tracebacks look for its lines."""
    inner = (_in_file(x, filename) if isinstance(x, CodeType) else x for x in code.co_consts)
    return code.replace(co_filename=filename, co_consts=tuple(inner))
