"""Programs that are replayed as CUDA graphs.

In: a compiled program, and which of its inputs it writes. Out: the same function, which after two ordinary calls of a
size captures the program and from then on replays it: one launch for the host, however many kernels. Inputs that stood
still while warming up (parameters, caches, optimizer state) are used where they are, and their addresses are checked at
every call; others are copied into buffers of the graph's own. Memory that is written and moved after many replays (a
new cache for another text) is captured anew rather than copied at every call. Capturing runs nothing, so every call
carries the program out exactly once. A program may be left as it is where that is no slower: one further ordinary call
is measured then, on the host and on the device. All graphs of a program share one pool of memory. What is handed out is
never overwritten while anyone holds it. Where a program cannot be captured it runs as before, and `reason` says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tessera.torch_internals.memory import storage_uses
from tessera.torch_internals.operators import foreach_copy_

WARM_UP = 2  # ordinary calls of a size before it is captured: libraries and kernels get ready in them
MOST_GRAPHS = 16  # sizes that are captured; others run as before
MOST_MOVES = 8  # captures anew because memory moved
PAID = 16  # replays after which a capture has paid for itself, and another one may take its place
SMALL = 1 << 20  # bytes of results that are copied rather than watched
BUSY = 0.5  # of the device's time: a host that needs more to launch a program leaves gaps, now or under load

Tensors = list[torch.Tensor]


class Device(Protocol):
    """What capturing needs of a device; tests put one in that has no GPU."""

    def pool(self) -> object: ...

    def beside(self, run: Callable[[], tuple], device: torch.device) -> tuple:
        """Run on the stream that captures, in order with the current one."""
        ...

    def timed(self, run: Callable[[], tuple], device: torch.device) -> tuple[tuple, float, float]:
        """What `beside` gives; the seconds in which the host has launched it, and those from its start to its end."""
        ...

    def capture(self, run: Callable[[], tuple], pool: object, device: torch.device) -> tuple[Callable[[], None], tuple]:
        """What replays `run`, and the tensors it leaves its results in. Nothing is carried out."""
        ...


class Cuda:
    """The real one."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def pool(self) -> object:
        return torch.cuda.graph_pool_handle()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def beside(self, run: Callable[[], tuple], device: torch.device) -> tuple:
        stream, current = self._stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            out = run()
        current.wait_stream(stream)
        for x in out:
            if isinstance(x, torch.Tensor) and x.is_cuda:
                x.record_stream(current)
        return out

    def timed(self, run: Callable[[], tuple], device: torch.device) -> tuple[tuple, float, float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        host = 0.0

        def measured() -> tuple:
            nonlocal host
            start.record()
            began = time.perf_counter()
            out = run()
            host = time.perf_counter() - began
            end.record()
            return out

        out = self.beside(measured, device)
        end.synchronize()
        return out, host, start.elapsed_time(end) / 1000

    def capture(self, run: Callable[[], tuple], pool: object, device: torch.device) -> tuple[Callable[[], None], tuple]:
        graph = torch.cuda.CUDAGraph()
        # Relaxed: a kernel's table of pointers goes to the device while the graph is captured, beside it.
        with (
            torch.cuda.device(device),
            torch.cuda.graph(
                graph,
                pool=pool,
                stream=self._stream(device),
                capture_error_mode="relaxed",  # type: ignore[arg-type]
            ),
        ):
            out = run()
        return graph.replay, out


CUDA = Cuda()


@dataclass
class _Graph:
    """A captured program for one class of inputs."""

    replay: Callable[[], None]
    results: tuple
    copied: dict[int, torch.Tensor]  # input -> the buffer that the graph reads instead of it
    addresses: dict[int, int]  # input -> where the graph expects it
    uses: dict[int, int]  # result -> how many hold its memory while nobody outside does
    copies: bool  # results are copied before they are handed out
    replays: int = 0


@dataclass
class _Size:
    """What is known about calls of one class of inputs."""

    calls: int = 0
    seen: dict[int, int] = field(default_factory=dict)  # addresses at the first call
    moving: set[int] = field(default_factory=set)  # inputs that come from elsewhere at every call
    graph: _Graph | None = None
    copies: bool = False
    pays: bool | None = None  # None: not known yet


class Graphed:
    """A program that replays itself. Call it as the program."""

    def __init__(
        self,
        run: Callable[..., tuple],
        written: Sequence[int],
        device: torch.device,
        api: Device = CUDA,
        varying: Sequence[int] | None = None,
        always: bool = True,
    ) -> None:
        """`varying` are the inputs whose sizes or values may differ from call to call; None: any of them. Not `always`:
        only where the host is found to be the slower one, or nearly."""
        self.run, self.written, self.device, self.api = run, frozenset(written), device, api
        self.varying, self.always = varying, always
        self.sizes: dict[tuple, _Size] = {}
        self.memory: object = None
        # Kept alive: their memory may be in someone's hands, and a pool lives only as long as a graph uses it.
        self.retired: list[_Graph] = []
        self.captures = self.replays = self.moves = 0
        self.reason = ""  # why nothing is captured any more
        self.measured = ""  # how long host and device took, where that left a program as it is

    def __str__(self) -> str:
        if self.reason:
            return f"no CUDA graph: {self.reason}"
        live = sum(size.graph is not None for size in self.sizes.values())
        if self.measured and not live:
            return f"no CUDA graph: {self.measured}"
        return f"CUDA graphs: {live} captured, {self.replays} replays"

    def __call__(self, *args: object) -> tuple:
        if self.reason:
            return self.run(*args)
        key = tuple(_kind(x) for x in (args if self.varying is None else [args[i] for i in self.varying]))
        size = self.sizes.get(key)
        if size is None:
            if len(self.sizes) >= MOST_GRAPHS:
                return self.run(*args)
            size = self.sizes[key] = _Size()
        size.calls += 1
        if size.calls <= WARM_UP:
            return self._warm_up(size, args)
        if size.pays is None and not self.always:
            return self._measure(size, args)
        if size.pays is False:
            return self.run(*args)
        if size.graph is not None and not self._usable(size, size.graph, args):
            self.retired.append(size.graph)
            size.graph = None
        if self.reason or (size.graph is None and not self._capture(size, args)):
            return self.run(*args)
        assert size.graph is not None
        return self._replay(size.graph, args)

    def _usable(self, size: _Size, graph: _Graph, args: tuple) -> bool:
        """The inputs are where the graph expects them, and nobody holds the results of an earlier replay."""
        moved = {i for i, address in graph.addresses.items() if args[i].data_ptr() != address}
        if moved:
            if graph.replays >= PAID:
                moved -= self.written
            size.moving |= moved
            self.moves += bool(moved)
            if self.moves > MOST_MOVES:
                self._stop("the memory of its inputs moves again and again")
            return False
        if not graph.copies and any(storage_uses(graph.results[k]) > n for k, n in graph.uses.items()):
            size.copies = True  # whoever holds them keeps them: another graph, with memory of its own, takes over
            return False
        return True

    def _warm_up(self, size: _Size, args: tuple) -> tuple:
        for i, x in enumerate(args):
            if isinstance(x, torch.Tensor) and size.seen.setdefault(i, x.data_ptr()) != x.data_ptr():
                size.moving.add(i)
        return self.api.beside(lambda: self.run(*args), self.device)

    def _measure(self, size: _Size, args: tuple) -> tuple:
        out, host, device = self.api.timed(lambda: self.run(*args), self.device)
        size.pays = host > BUSY * device
        if not size.pays:
            self.measured = f"the host launches in {host * 1e3:.2f} ms what the device needs {device * 1e3:.2f} ms for"
        return out

    # --- capturing ---

    def _capture(self, size: _Size, args: tuple) -> bool:
        given = list(args)
        copied: dict[int, torch.Tensor] = {}
        for i in sorted(size.moving):
            x = args[i]
            copied[i] = given[i] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
        try:
            if self.memory is None:
                self.memory = self.api.pool()
            replay, results = self.api.capture(lambda: self.run(*given), self.memory, self.device)
        except Exception as error:
            self._stop(f"capturing failed: {type(error).__name__}: {error}".splitlines()[0])
            return False
        self.captures += 1
        self.retired = [graph for graph in self.retired if not graph.copies]  # what was copied is in nobody's hands
        addresses = {
            i: x.data_ptr() for i, x in enumerate(args) if isinstance(x, torch.Tensor) and i not in size.moving
        }
        mine = {x.untyped_storage().data_ptr() for x in given if isinstance(x, torch.Tensor)}
        tensors = {k: x for k, x in enumerate(results) if isinstance(x, torch.Tensor)}
        shown = any(x.untyped_storage().data_ptr() in mine for x in tensors.values())
        little = sum(x.numel() * x.element_size() for x in tensors.values()) <= SMALL
        uses = {k: storage_uses(x) for k, x in tensors.items()}
        size.graph = _Graph(replay, results, copied, addresses, uses, size.copies or shown or little)
        return True

    def _stop(self, reason: str) -> None:
        self.reason = reason
        self.sizes.clear()

    # --- replaying ---

    def _replay(self, graph: _Graph, args: tuple) -> tuple:
        if graph.copied:
            foreach_copy_(list(graph.copied.values()), [args[i] for i in graph.copied])
        graph.replay()
        self.replays += 1
        graph.replays += 1
        for i, buffer in graph.copied.items():
            if i in self.written:
                args[i].copy_(buffer)
        if graph.copies:
            return tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in graph.results)
        return tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in graph.results)


def _kind(x: object) -> object:
    """What decides which graph serves an input: everything of a tensor but its contents, all of a number."""
    if isinstance(x, torch.Tensor):
        return (tuple(x.shape), x.stride(), x.dtype, x.device)
    return (type(x), x)
