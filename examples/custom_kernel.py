"""Kernels of your own as operators: a tile program, and a Triton kernel.

Both become operators that stay whole in traces, have a derivative, and run under jit, grad, vmap and torch.compile.
The tile program runs on the CPU and on a GPU; the Triton kernel on a GPU, or here, without one, in its interpreter.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

import tessera

# --- a tile program: y = x * sigmoid(x) over n elements, in the text that `tessera` dumps ----------------

SWISH = """
"tile.kernel"() <{sym_name = "swish", axes = [#tile.axis<"i", "parallel", #tile.index<"n">>], symbol_names = ["n"]}> ({
^bb0(%x: !tile.buffer<f32>, %y: !tile.buffer<f32>, %n: index):
  %a = "tile.load"(%x) <{at = #tile.index<"i">, operandSegmentSizes = array<i32: 1, 0, 0, 0>}>
       : (!tile.buffer<f32>) -> !tile.value<f32, ["i"]>
  %s = "tile.apply"(%a) <{fn = "sigmoid"}> : (!tile.value<f32, ["i"]>) -> !tile.value<f32, ["i"]>
  %b = "tile.apply"(%a, %s) <{fn = "mul"}>
       : (!tile.value<f32, ["i"]>, !tile.value<f32, ["i"]>) -> !tile.value<f32, ["i"]>
  "tile.store"(%b, %y) <{at = #tile.index<"i">, mode = "set", operandSegmentSizes = array<i32: 1, 1, 0, 0>}>
       : (!tile.value<f32, ["i"]>, !tile.buffer<f32>) -> ()
}) : () -> ()
"""


def swish_vjp(ct: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(x)
    return ct * (s + y * (1 - s))


swish = tessera.register_kernel(
    "example::swish",
    SWISH,
    names=("x", "y"),
    outputs={"y": "x"},  # the result y looks like x
    given={"n": lambda x: x.numel()},
    vjp=swish_vjp,
)


# --- a Triton kernel: out = x + factor * y ----------------------------------------------------------------


def triton_operator():  # noqa: ANN201
    import triton
    import triton.language as tl

    @triton.jit
    def scaled_add_kernel(x, y, out, factor, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i < n
        tl.store(out + i, tl.load(x + i, mask=inside) + factor * tl.load(y + i, mask=inside), mask=inside)

    return tessera.register_kernel(
        "example::scaled_add",
        scaled_add_kernel,
        outputs={"out": "x"},
        scalars={"factor": float},  # a parameter of the operator that is a number
        given={"n": lambda x: x.numel(), "BLOCK": 64},
        grid=lambda n, BLOCK: (triton.cdiv(n, BLOCK),),
        vjp=lambda ct, out, x, y, factor: (ct, factor * ct, None),
    )


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = torch.randn(8, 40, device=device), torch.randn(8, 40, device=device)
    scaled_add = triton_operator()

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (scaled_add(swish(x), y, 0.5) ** 2).sum()

    def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((torch.nn.functional.silu(x) + 0.5 * y) ** 2).sum()

    fast = tessera.jit(loss)
    torch.testing.assert_close(fast(x, y), plain(x, y))
    print(tessera.stages(fast)[0].trace)

    given = [t.clone().requires_grad_() for t in (x, y)]
    fast(*given).backward()
    want = torch.func.grad(plain, argnums=(0, 1))(x, y)
    for got, other, w in zip(given, tessera.grad(loss, argnums=(0, 1))(x, y), want, strict=True):
        torch.testing.assert_close(got.grad, w)
        torch.testing.assert_close(other, w)
    torch.testing.assert_close(tessera.vmap(swish)(x), torch.nn.functional.silu(x))
    torch.testing.assert_close(torch.compile(loss, backend="tessera")(x, y), plain(x, y))
    print("both kernels agree with PyTorch: forward, backward, vmap, torch.compile")


if __name__ == "__main__":
    main()
