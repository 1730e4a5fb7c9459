"""What to change in the program, by what Dynamo says about it.

Two tables: why a graph ended where it did, and why one was compiled again. A line is a pattern over Dynamo's words
and the advice; the first that matches counts. What no line knows gets Dynamo's own hints.
"""

from __future__ import annotations

import re

from tessera.frontends.dynamo.frames import MODEL

BREAKS: list[tuple[str, str]] = [
    (
        r"backwards? hooks|compiled.autograd",
        "hooks on the gradients of a module run as Python between its parts, so it runs eagerly: compile the modules "
        "in it that have none, or set a hook on a tensor in the forward (register_hook), which is compiled with it",
    ),
    (
        r"`print`|[Ll]ogging|Logger|`_?warnings\.warn`",
        "move the print or log out of the compiled function, or put the function that prints into "
        "torch._dynamo.config.reorderable_logging_functions, which runs it after the graph, or a logger's method into "
        "torch._dynamo.config.ignore_logging_functions, which leaves it out",
    ),
    (
        r"Tensor\.item|Tensor\.tolist|\.item\(\)|_local_scalar_dense|capture_scalar_outputs",
        "keep the number a tensor (torch.where, masks, indexing by tensors); if Python needs it, "
        "torch._dynamo.config.capture_scalar_outputs = True captures .item()",
    ),
    (
        r"generic_jump|[Dd]ata-dependent (branching|jump|control flow)|jump on a non-constant|assert with non-constant",
        "a Python `if`, `while` or assert asks for a tensor's value: use torch.where, torch.cond or tessera.cond, "
        "or decide from shapes and Python numbers",
    ),
    (
        r"[Dd]ynamic shape operator|data-dependent (output|shape|size)|nonzero|masked_select|unique",
        "the result's size depends on data: use a mask of fixed size (torch.where), or "
        "torch._dynamo.config.capture_dynamic_output_shape_ops = True",
    ),
    (r"graph_break\(\)", "the program asks for it: remove torch._dynamo.graph_break()"),
    (
        r"(_dynamo|compiler)\.disable|Skip calling|skip(ped)? (function|inlining)|marked as skipped",
        "the called function is excluded from compilation (torch.compiler.disable, or Dynamo's skip list): take the "
        "decorator away, or call it outside the compiled function",
    ),
    (r"numpy", "NumPy on values of tensors: use torch functions, or compute it before the compiled function"),
    (
        r"\.backward\(|Tensor\.backward|autograd\.grad|trace_autograd_ops",
        "compile the forward and call backward outside, or use tessera.grad, which is compiled with the function",
    ),
    (r"[Gg]enerator|yield", "make a list in place of the generator, or iterate over it outside"),
    (
        r"context manager|[Cc]ontext(Wrapping)?|__enter__|with statement",
        "enter this context manager outside the compiled function",
    ),
    (
        r"try|except(ion)?|raise|Observed exception",
        "the exception is part of the flow: test for the case with an `if` on Python values instead",
    ),
    (
        r"C(/C\+\+)? (Python )?(extension|function|binding)|builtin|pybind|[Aa]ttempted to call function",
        "Dynamo cannot see into this function: make it an operator with tessera.register_operator, or call it "
        "outside the compiled function",
    ),
    (
        r"setattr|mutat|side effect|STORE_ATTR",
        "the program changes an object that outlives the call: return the new value instead",
    ),
    (r"inspect|traceback|sys\.|os\.|time\.|random\.Random|datetime", "call this outside and pass its result in"),
    (r"loop", "the break stands in a loop, so that the whole frame runs eagerly: move the loop's body to a function"),
]

RECOMPILES: list[tuple[str, str]] = [
    (
        r"size mismatch at index (?P<dim>\d+)",
        "this dimension changes: torch._dynamo.mark_dynamic(tensor, {dim}) before the first call, or "
        "jit(..., dynamic=True), makes one program for every size; or pad to a few sizes",
    ),
    (
        r"stride mismatch",
        "the layout changes: call .contiguous() before the compiled function, or always pass the same layout",
    ),
    (
        r"dtype mismatch",
        "the dtype changes: convert before the call, or keep one compiled function a dtype",
    ),
    (
        r"requires_grad mismatch|requires_grad",
        "requires_grad differs between calls: each kind has a program of its own",
    ),
    (r"device mismatch|dispatch key", "the device or the kind of tensor changes: move it before the call"),
    (r"rank mismatch|ndim", "the number of dimensions changes: reshape before the call"),
    (
        r"grad_mode|GLOBAL_STATE|global_state",
        "a global setting differs (grad mode, autocast, threads, default dtype): training and inference each have a "
        "program of their own, which is expected once",
    ),
    (r"training", "train() or eval() was called: each has a program of its own, which is expected once"),
    (
        r"check_obj_id|___check_type_id|ID_MATCH|is not",
        "another object stands where one stood when the program was compiled: reuse the object, or pass what differs "
        "as a tensor",
    ),
    (
        r"len\(|dict_contains|keys",
        "a list or dict has another length or other keys: keep its structure, or stack its tensors into one",
    ),
    (
        rf"G\['{MODEL}'\]\S* == -?\d+$",
        "an integer attribute of the model changes; after its second change one program serves every value of it",
    ),
    (
        r"^\w+ == -?\d+$",
        "an integer argument changes; from its first change on one program serves every value of it",
    ),
    (
        r"==|!=",
        "a Python number or string that the program reads has changed: pass it as a tensor, or mark the attribute as "
        "changing by making it an argument (integers then become dynamic)",
    ),
]


def for_break(reason: str) -> str:
    """What to change so that the graph does not end here."""
    lines = [
        line for line in reason.splitlines() if line.strip() and not line.strip().startswith(("Hint", "Developer"))
    ]
    for pattern, advice in BREAKS:
        if any(re.search(pattern, line) for line in lines[:2]):  # what it is, and Dynamo's explanation
            return advice
    hints = [line.strip().removeprefix("Hint: ") for line in reason.splitlines() if line.strip().startswith("Hint")]
    useful = [hint for hint in hints if "report an issue" not in hint.lower()]
    return " ".join(useful) or "rewrite this line with torch operators, or move it out of the compiled function"


def for_recompile(reason: str) -> str:
    """What to change so that one program serves both calls. The line of the user behind the guard is no part of it."""
    guard, _ = changed(reason)
    for pattern, advice in RECOMPILES:
        if match := re.search(pattern, guard):
            return advice.format(**match.groupdict())
    return "keep what the guard names the same between calls, or pass it as a tensor"


_CHANGED = re.compile(r"expected (?P<before>.+?), actual (?P<now>.+?)(?:\s+#|$|\n)")


def changed(reason: str) -> tuple[str, str]:
    """(the guard that failed, what changed) of Dynamo's one line."""
    line = reason.strip().splitlines()[0] if reason.strip() else ""
    guard = re.sub(r"^\d+/\d+: ", "", line).split("  # ")[0].strip()
    values = _CHANGED.search(guard)
    return guard, f"{values['before']} → {values['now']}" if values else ""
