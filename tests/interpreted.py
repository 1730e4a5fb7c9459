"""Scripts under Triton's interpreter, started quickly: one server has imported everything, and each script is its fork.

Triton decides when it is imported whether it interprets. So kernels run as Python in processes of their own;
`run_interpreted` starts one. Run as a program, this file is the server: it takes a script a line, as JSON, and answers
with the script's exit code.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

SECONDS = 600  # that a script may take


def run_interpreted(script: str | Path, *arguments: object, **environment: str) -> str:
    """What a script prints; it must end well."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        job = {"command": [str(script), *map(str, arguments)], "environment": environment, "folder": folder}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        code = server.stdout.readline().strip()
        printed, said = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    assert code == "0", f"exit code {code}: {said[-4000:]}"
    return printed


@functools.cache
def _server() -> subprocess.Popen[str]:
    """It ends with this process, when nothing more can come."""
    root = Path(__file__).parents[1]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _serve() -> None:
    import triton.language  # noqa: F401

    import tessera.api  # noqa: F401
    import tessera.ops.rows.kernels.linear
    import tessera.tile.targets.triton.launch  # noqa: F401

    _look_names_up_once()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _run(**json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(command: list[str], environment: dict[str, str], folder: str) -> None:
    """In a fork: what the script prints goes to files."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), number)
    signal.alarm(SECONDS)
    os.environ.update(environment)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    code = 1
    try:
        runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _look_names_up_once() -> None:
    """Whenever a kernel starts or calls another, Triton goes through all names of its language for those that it has to
    replace. That took a quarter of the time of small kernels, and it is always the same names."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @functools.cache
    def names(package: object) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def replace(package: object, builder: object, scope: object) -> None:
        for name in names(package):
            member = getattr(package, name)
            if is_builtin(member):  # else it is replaced already
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = replace


if __name__ == "__main__":
    _serve()
