"""The native entry of a kernel: a Python function in machine code, and the division of tasks among threads.

`entry` has the signature of a METH_FASTCALL function, so that a call costs no more than a built-in: it reads the
addresses and sizes from Python integers, counts the tasks, and runs them here, or, if there is enough to do, on the
threads of the OpenMP runtime that PyTorch uses (as many as that runtime would give PyTorch), without the GIL.
"""

from __future__ import annotations

from tessera.tile.targets.cpu.choice import Choice
from tessera.tile.targets.cpu.code import V
from tessera.tile.targets.cpu.host import Host
from tessera.tile.targets.cpu.host import HostCode as Code
from tessera.tile.targets.cpu.layout import Layout, cost
from tessera.tile.targets.cpu.lower import blocks
from tessera.tile.targets.cpu.memory import Memory

# Work is points times instructions. 1 << 15 take half a microsecond with AVX-512 and one and a half with NEON, about as
# long as waking a team of threads.
ALONE = 1 << 15  # below which the caller does all of it
SHARE = 1 << 14  # at least for a thread

PYTHON = """declare ptr @PyLong_AsVoidPtr(ptr)
declare i64 @PyLong_AsLongLong(ptr)
declare ptr @PyErr_Occurred()
declare void @PyErr_SetString(ptr, ptr)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare void @Py_IncRef(ptr)
@_Py_NoneStruct = external global i8
@PyExc_TypeError = external global ptr
@wrong = private constant [{length} x i8] c"{message}\\00\""""

RUN = """define internal void @run(ptr %args, i64 %tasks, i64 %work) {
entry:
  %little = icmp slt i64 %work, ALONE
  br i1 %little, label %alone, label %many
alone:
  call void @kernel(ptr %args, i64 0, i64 %tasks)
  ret void
many:
  %state = call ptr @PyEval_SaveThread()
THREADS
  call void @PyEval_RestoreThread(ptr %state)
  ret void
}"""

SINGLE = "  call void @kernel(ptr %args, i64 0, i64 %tasks)"

COUNT = """  %available = call i32 @omp_get_max_threads()
  %shares = udiv i64 %work, SHARE
  %wide = zext i32 %available to i64
  %few = call i64 @llvm.umin.i64(i64 %shares, i64 %tasks)
  %fewer = call i64 @llvm.umin.i64(i64 %few, i64 %wide)
  %threads = trunc i64 %fewer to i32
  %team = icmp ugt i32 %threads, 1
  br i1 %team, label %fork, label %one
one:
  call void @kernel(ptr %args, i64 0, i64 %tasks)
  br label %done
fork:
  %job = alloca { ptr, i64 }
  store ptr %args, ptr %job
  %job.tasks = getelementptr { ptr, i64 }, ptr %job, i32 0, i32 1
  store i64 %tasks, ptr %job.tasks
FORK
  br label %done
done:"""

SHARED = """declare i32 @omp_get_max_threads()
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
declare i64 @llvm.umin.i64(i64, i64)

define internal void @worker(ptr %job) {
  %args = load ptr, ptr %job
  %job.tasks = getelementptr { ptr, i64 }, ptr %job, i32 0, i32 1
  %tasks = load i64, ptr %job.tasks
  %me.short = call i32 @omp_get_thread_num()
  %all.short = call i32 @omp_get_num_threads()
  %me = zext i32 %me.short to i64
  %all = zext i32 %all.short to i64
  %from = mul i64 %tasks, %me
  %begin = udiv i64 %from, %all
  %to = add i64 %from, %tasks
  %end = udiv i64 %to, %all
  call void @kernel(ptr %args, i64 %begin, i64 %end)
  ret void
}
"""

GOMP_FORK = "  call void @GOMP_parallel(ptr @worker, ptr %job, i32 %threads, i32 0)"
GOMP = "declare void @GOMP_parallel(ptr, ptr, i32, i32)\n"

KMP_FORK = """  %thread = call i32 @__kmpc_global_thread_num(ptr @here)
  call void @__kmpc_push_num_threads(ptr @here, i32 %thread, i32 %threads)
  call void (ptr, i32, ptr, ...) @__kmpc_fork_call(ptr @here, i32 1, ptr @microtask, ptr %job)"""
KMP = """declare i32 @__kmpc_global_thread_num(ptr)
declare void @__kmpc_push_num_threads(ptr, i32, i32)
declare void @__kmpc_fork_call(ptr, i32, ptr, ...)
@place = private constant [23 x i8] c";unknown;unknown;0;0;;\\00"
@here = private constant { i32, i32, i32, i32, ptr } { i32 0, i32 2, i32 0, i32 0, ptr @place }

define internal void @microtask(ptr %global, ptr %bound, ptr %job) {
  call void @worker(ptr %job)
  ret void
}
"""


def entry(seen: Layout, choice: Choice, host: Host, openmp: str) -> str:
    """Module text: `entry` and what it calls. `openmp` is the runtime's kind: gomp, kmp, or empty for none."""
    kernel = seen.kernel
    buffers, symbols = len(kernel.buffers), len(kernel.symbol_names)
    message = f"{kernel.sym_name.data}: expected {buffers} addresses and {symbols} sizes"
    message = message.encode("ascii", "replace").decode().replace("\\", "/").replace('"', "'")
    parts = [PYTHON.format(length=len(message) + 1, message=message)]
    threads = SINGLE
    if openmp:
        fork = GOMP_FORK if openmp == "gomp" else KMP_FORK
        threads = COUNT.replace("FORK", fork).replace("SHARE", str(SHARE))
        parts += [GOMP if openmp == "gomp" else KMP, SHARED]
    parts.append(RUN.replace("THREADS", threads).replace("ALONE", str(ALONE)))
    text, declared = _entry_function(seen, choice, host, buffers, symbols)
    # The kernel's own text declares what it uses; the same declaration may not stand twice.
    parts += [d for d in declared if d not in "\n".join(parts)]
    parts.append(text)
    return "\n".join(parts)


def _entry_function(seen: Layout, choice: Choice, host: Host, buffers: int, symbols: int) -> tuple[str, list[str]]:
    b = Code(host)
    total = buffers + symbols
    names = {}
    b.emit(f"%args = alloca i64, i64 {max(total, 1)}")
    b.emit(f"%right = icmp eq i64 %count, {total}")
    b.emit("br i1 %right, label %read, label %refuse")
    b.label("refuse")
    b.emit("%error = load ptr, ptr @PyExc_TypeError")
    b.emit("call void @PyErr_SetString(ptr %error, ptr @wrong)")
    b.emit("ret ptr null")
    b.label("read")
    for k in range(total):
        b.emit(f"%where{k} = getelementptr ptr, ptr %argv, i64 {k}")
        b.emit(f"%object{k} = load ptr, ptr %where{k}")
        b.emit(f"%slot{k} = getelementptr i64, ptr %args, i64 {k}")
        if k < buffers:
            b.emit(f"%arg{k} = call ptr @PyLong_AsVoidPtr(ptr %object{k})")
            b.emit(f"store ptr %arg{k}, ptr %slot{k}")
        else:
            b.emit(f"%arg{k} = call i64 @PyLong_AsLongLong(ptr %object{k})")
            b.emit(f"store i64 %arg{k}, ptr %slot{k}")
            names[seen.kernel.symbol_names.data[k - buffers].data] = b.value(f"add i64 %arg{k}, 0", "i64", 0)
    b.emit("%failed = call ptr @PyErr_Occurred()")
    b.emit("%fine = icmp eq ptr %failed, null")
    b.emit("br i1 %fine, label %go, label %stop")
    b.label("stop")
    b.emit("ret ptr null")
    b.label("go")
    tasks, points = task_count(b, seen, choice, Memory(b, names))
    work = b.bin("mul", b.bin("mul", tasks, points), b.const("i64", max(cost(seen.kernel), 1)))
    b.emit(f"call void @run(ptr %args, {tasks}, {work})")
    b.emit("call void @Py_IncRef(ptr @_Py_NoneStruct)")
    b.emit("ret ptr @_Py_NoneStruct")
    head = "define ptr @entry(ptr %self, ptr %argv, i64 %count) {"
    return "\n".join([head, "entry:", *b.lines, "}"]), list(b.declared.values())


def task_count(b: Code, seen: Layout, choice: Choice, memory: Memory) -> tuple[V, V]:
    """How many tasks there are, and how many points one has."""
    tasks: V = b.const("i64", 1)
    points: V = b.const("i64", 1)
    for axis, size in seen.sizes.items():
        extent = memory.scalar(size)
        if axis in (seen.reduced, seen.sequential):
            points = b.bin("mul", points, extent)
        elif axis == choice.vector:
            tasks = b.bin("mul", tasks, blocks(b, extent, choice.block))
            points = b.bin("mul", points, b.call("smin", extent, b.const("i64", choice.block)))
        elif axis == choice.tile:
            tasks = b.bin("mul", tasks, blocks(b, extent, choice.native))
            points = b.bin("mul", points, b.const("i64", choice.native))
        else:
            tasks = b.bin("mul", tasks, extent)
    return tasks, points
