"""Descriptors that are made once: what reaches the launcher is what Triton would make at every launch.

Kernels are compiled for Hopper; the driver below Triton's launcher only writes down what it is called with.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kernels
import pytest
import torch

from tessera.tile.schedules.schedule import Schedule

pytest.importorskip("triton")
from tessera.tile.targets.triton import descriptors, direct  # noqa: E402
from tessera.tile.targets.triton.launch import Launcher  # noqa: E402
from tessera.tile.targets.triton.resources import compile_for  # noqa: E402

FUNCTION, STREAM, PROGRAMS = 22, 11, 3
SCHEDULE = Schedule((("i", 64), ("j", 64), ("r", 64)), warps=4, loop=True, persistent=True, extra=(("bulk", True),))


class Device:
    """What is below Triton's launcher. Tensors of the CPU are on "device -1"."""

    def __init__(self) -> None:
        self.launched: list[tuple] = []
        self.maps = 0

    def launch(self, *args: object) -> None:
        """Sizes, addresses and maps of a launch, however this Triton arranges them."""
        flat = [part for arg in args for part in (arg if isinstance(arg, (list, tuple)) else [arg])]
        self.launched.append(tuple(a.address if isinstance(a, Address) else a for a in flat))

    def fill(self, address: int, swizzle, size, kind, block, shape, strides, padding) -> str:  # noqa: ANN001
        self.maps += 1
        return f"map of {address}: {swizzle} {size} {kind} {list(block)} {list(shape)} {list(strides)} {padding}"

    @property
    def utilities(self) -> SimpleNamespace:
        return SimpleNamespace(
            launch=self.launch,
            fill_tma_descriptor=self.fill,
            fill_tma_descriptor_tiled=self.fill,
            build_signature_metadata=lambda types: b"",
        )


class Address:
    """A tensor of which only the address matters."""

    is_cuda = True

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return -1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Device:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    return Device()


class Kernel:
    """A launcher whose kernels are compiled for Hopper, and launched on that device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: Device, case: kernels.Case) -> None:
        import triton
        from triton.backends.nvidia import driver

        self.patch, self.device, self.launcher = monkeypatch, device, Launcher(case.kernel, SCHEDULE)
        self.compiled: Any = compile_for(case.kernel, SCHEDULE, 90)
        active = SimpleNamespace(get_current_stream=lambda number: STREAM, utils=device.utilities)
        monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
        monkeypatch.setattr(driver, "PyKernelArg", lambda **what: "", raising=False)
        monkeypatch.setattr(driver, "library_dirs", lambda: [])  # Triton 3.6 compiles a launcher for every kernel
        in_c = SimpleNamespace(launch=device.launch)
        monkeypatch.setattr(driver, "compile_module_from_src", lambda **what: in_c, raising=False)
        monkeypatch.setattr(direct, "current_device", lambda: -1)
        monkeypatch.setattr(torch.cuda, "device", lambda number: contextlib.nullcontext())
        self.ready = SimpleNamespace(
            run=driver.CudaLauncher(self.compiled.src, self.compiled.metadata),
            src=self.compiled.src,
            metadata=self.compiled.metadata,
            function=FUNCTION,
            packed_metadata=(4, 1, 0),
        )

    def tensors(self, *addresses: int) -> list:
        return [Address(a, d) for a, d in zip(addresses, self.launcher.dtypes, strict=True)]

    def prepare(self, addresses: tuple[int, ...], sizes: tuple[int, ...] = ()) -> Callable[..., None]:
        """The general launch; the short one is known afterwards."""
        variant = self.launcher.variant(False, False, True)
        made = SimpleNamespace(warmup=lambda *args, **options: self.ready)
        variant.__dict__["function"] = made
        return self.launcher._prepare(-1, variant, PROGRAMS, self.tensors(*addresses), sizes)

    def short(self, addresses: tuple[int, ...], sizes: tuple[int, ...] = ()) -> tuple:
        assert self.launcher.at(-1, addresses, sizes)
        return self.device.launched.pop()


def places(*starts: int) -> tuple[int, ...]:
    return tuple(0x7F0000000000 + 4096 * n for n in starts)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_short_launch_is_a_launch(
    monkeypatch: pytest.MonkeyPatch, device: Device, batch: int, dtype: torch.dtype
) -> None:
    kernel = Kernel(monkeypatch, device, kernels.matmul(256, 128, 192, dtype=dtype, batch=batch))
    first, second = places(1, 2, 3, 4), places(5, 2, 3, 6)
    general = kernel.prepare(first)
    for addresses in (first, second, first):
        general(kernel.tensors(*addresses), ())
        want = device.launched.pop()
        assert kernel.short(addresses) == want
        assert sum(str(part).startswith("map of") for part in want) == 3


def test_descriptors_are_made_once(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    kernel = Kernel(monkeypatch, device, kernels.matmul(256, 128, 192))
    kernel.prepare(places(1, 2, 3, 4))
    device.maps = 0
    for x, y, made in ((1, 4, 0), (1, 4, 0), (5, 4, 1), (5, 6, 1), (1, 6, 0), (5, 4, 0)):
        kernel.short(places(x, 2, 3, y))
        assert device.maps == made
        device.maps = 0


def test_sizes_share_what_has_one_geometry(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    """Of other rows, the operand and the result are other matrices at the same address; the weight is the same."""
    kernel = Kernel(monkeypatch, device, kernels.matmul(256, 128, 192, dynamic=True))
    addresses = places(1, 2, 3, 4)
    kernel.prepare(addresses, (256, 128, 192))
    general = kernel.prepare(addresses, (512, 128, 192))
    assert len(kernel.launcher._descriptors._of) == 5  # two operands, two results, one weight
    general(kernel.tensors(*addresses), (512, 128, 192))
    assert device.launched.pop() == kernel.short(addresses, (512, 128, 192))
    assert kernel.short(addresses, (256, 128, 192)) != kernel.short(addresses, (512, 128, 192))


@pytest.mark.parametrize("most", [1, 5, 4096])
def test_any_order_of_sizes_and_addresses(monkeypatch: pytest.MonkeyPatch, device: Device, most: int) -> None:
    """Memory that is freed and used again, for matrices of other sizes, by a kernel that keeps so many descriptors."""
    monkeypatch.setattr(descriptors, "MOST", most)
    kernel = Kernel(monkeypatch, device, kernels.matmul(256, 128, 192, dynamic=True))
    chosen = random.Random(0)
    generals: dict[tuple[int, ...], Callable[..., None]] = {}
    for _ in range(300):
        sizes = (chosen.choice((64, 80, 256)), chosen.choice((128, 192)), chosen.choice((192, 128)))
        addresses = places(*(chosen.randrange(6) for _ in range(4)))
        if sizes not in generals:
            generals[sizes] = kernel.prepare(addresses, sizes)
        generals[sizes](kernel.tensors(*addresses), sizes)
        assert device.launched.pop() == kernel.short(addresses, sizes)
        assert sum(map(len, kernel.launcher._descriptors._of.values())) <= most


def test_every_kernel_keeps_its_own(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    """Matrices of another type or size at the same addresses."""
    addresses = places(1, 2, 3, 4)
    for case in (kernels.matmul(256, 128, 192), kernels.matmul(256, 128, 192, dtype=torch.float16)):
        kernel = Kernel(monkeypatch, device, case)
        general = kernel.prepare(addresses)
        general(kernel.tensors(*addresses), ())
        assert device.launched.pop() == kernel.short(addresses)


def test_an_address_that_is_not_aligned_is_none_of_a_descriptor(
    monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    kernel = Kernel(monkeypatch, device, kernels.matmul(256, 128, 192))
    addresses = places(1, 2, 3, 4)
    kernel.prepare(addresses)
    assert not kernel.launcher.at(-1, (addresses[0] + 2, *addresses[1:]))
    assert not device.launched


def _newer(kernel: Kernel) -> None:
    kernel.patch.setattr("triton.__version__", "3.60.0")


def _no_metadata(kernel: Kernel) -> None:
    kernel.ready.metadata = SimpleNamespace()


def _fewer(kernel: Kernel) -> None:
    kernel.ready.metadata = SimpleNamespace(tensordesc_meta=kernel.compiled.metadata.tensordesc_meta[:2])


def _another_launcher(kernel: Kernel) -> None:
    run = kernel.ready.run
    kernel.ready.run = lambda *args: run(*args)


def _another_wrapper(kernel: Kernel) -> None:
    launch = kernel.ready.run.launch
    kernel.ready.run.launch = lambda *args: launch(*args)


def _another_descriptor(kernel: Kernel) -> None:
    variant = kernel.launcher.variant(False, False, True)
    plain = variant.descriptors
    closed = type("Closed", (), {"__slots__": ("base",)})

    def described(*arguments: object) -> tuple:
        made = plain(*arguments)
        return made if isinstance(arguments[0], Address) else tuple(closed() for _ in made)

    variant.__dict__["descriptors"] = described


CHANGES = [_newer, _no_metadata, _fewer, _another_launcher, _another_wrapper, _another_descriptor]


@pytest.mark.parametrize("change", CHANGES)
def test_another_triton_is_launched_the_general_way(
    monkeypatch: pytest.MonkeyPatch, device: Device, change: Callable[[Kernel], None]
) -> None:
    kernel = Kernel(monkeypatch, device, kernels.matmul(256, 128, 192))
    addresses = places(1, 2, 3, 4)
    kernel.prepare(addresses)(kernel.tensors(*addresses), ())
    want = device.launched.pop()
    kernel.launcher._direct.clear()
    change(kernel)
    general = kernel.prepare(addresses)
    assert not kernel.launcher._direct and not kernel.launcher.at(-1, addresses)
    general(kernel.tensors(*addresses), ())
    assert device.launched == [want]


def test_parts_that_differ_from_tritons_are_not_used(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    kernel = Kernel(monkeypatch, device, kernels.matmul(256, 128, 192))
    apart = descriptors._apart

    def reversed_numbers(signature: dict, metas: list) -> Callable[..., Any]:
        whole = apart(signature, metas)
        return whole if len(metas) > 1 else lambda *values: list(whole(*values))[::-1]

    monkeypatch.setattr(descriptors, "_apart", reversed_numbers)
    kernel.prepare(places(1, 2, 3, 4))
    assert not kernel.launcher._direct
