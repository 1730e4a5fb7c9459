"""What a compiled program relies on, in words.

In: the identifier of a compilation. Out: Dynamo's guards on the user's own values, one short line each. Guards that
every program has (global state, that `torch` is torch, that an object has no further attributes or hooks) and those on
objects' identities are left out.
"""

from __future__ import annotations

import re

from tessera.just_in_time.backend import Backend, Handle
from tessera.torch_internals import dynamo, functorch
from tessera.torch_internals.dynamo import all_entries, compilation_metrics


def guards(compile_id: str) -> tuple[str, ...]:
    """The guards under which this compilation is used; empty where Dynamo has dropped it or does not tell."""
    for entry in all_entries():
        if str(getattr(entry, "compile_id", "")) == compile_id:
            parts = getattr(getattr(entry, "guard_manager", None), "code_parts", None) or ()
            return tuple(dict.fromkeys(filter(None, map(readable, parts))))
    return ()


_TENSOR = re.compile(
    r"check_tensor\((?P<who>.+?), \w+, DispatchKeySet\([^)]*\), torch\.(?P<dtype>\w+),.*"
    r"requires_grad=(?P<grad>\w+), size=\[(?P<size>.*?)\]"
)
_QUIET = (
    "hasattr(", "___check_global_state", "___check_torch_function", "utils_device", functorch.HOME,
    "___check_obj_id", "___check_type_id", "check_no_aliasing", "___skip", "___is_grad", "___dict_contains",
    "not ___dict_contains", "___get_torch_function_mode_stack",
)  # fmt: skip


def readable(part: str) -> str:
    """`check_tensor(L['x'], …)` as `x: float32[4, 8]`; empty for a guard not worth telling."""
    if match := _TENSOR.match(part):
        size = match["size"].replace("None", "any")
        grad = ", requires grad" if match["grad"] == "True" else ""
        return f"{plain(match['who'])}: {match['dtype']}[{size}]{grad}"
    if part.startswith(_QUIET) or "___check_obj_id" in part or "G['__builtins" in part:
        return ""
    return plain(part)


def plain(text: str) -> str:
    """Names as the user wrote them: `L['self']._modules['fc']` reads `self.fc`."""
    text = re.sub(r"[LG]\['(\w+)'\]", r"\1", text)
    text = re.sub(r"\.(?:_modules|_parameters|_buffers|__dict__)\['(\w+)'\]", r".\1", text)
    return text.replace("tessera_model", "self").replace("___", "")


def limits_hit(backend: Backend) -> dict[str, tuple[int, str]]:
    """Compilations for a backend that Dynamo did not begin, having done too many: the limit, the guard that failed.

    Dynamo numbers frames anew after a reset: the one meant is a frame whose programs it holds, and made before.
    """
    held: dict[str, list[int]] = {}  # frame -> those of its compilations that Dynamo holds
    for entry in all_entries():
        handle = getattr(getattr(entry, "backend", None), "compiler_fn", None)
        if isinstance(handle, Handle) and handle.backend() is backend:
            frame, number = _numbers(entry)
            held.setdefault(frame, []).append(number)
    made_at = {_numbers(g)[0]: g.made for g in backend.graphs}
    refused = {}
    for m in compilation_metrics():
        frame, number = _numbers(m)
        failed = m.fail_reason or ""
        if frame in held and number > max(held[frame]) and re.search(r"(recompile|cache)( size)? limit", failed):
            match = re.search(r"set to (\d+)", failed)
            limit = int(match[1]) if match else dynamo.config.recompile_limit
            if len(held[frame]) >= limit and (m.start_time_us or 0) / 1e6 > made_at.get(frame, 0.0):
                refused[str(m.compile_id)] = limit, m.recompile_reason or ""
    return refused


def _numbers(of: object) -> tuple[str, int]:
    """The frame of an entry or a compilation, and which of its compilations it is."""
    frame, _, number = str(getattr(of, "compile_id", "")).partition("/")
    return frame, int(number) if number.isdigit() else -1
