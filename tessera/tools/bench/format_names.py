"""Who and what `tessera bench formats` measures, for those that must not import ONNX or JAX."""

from __future__ import annotations

ONNX, JIT, ORT, TORCH_ONNX = "tessera.onnx", "tessera.jit", "onnxruntime", "torch.onnx"
JAX, TORCH = "from JAX", "PyTorch"
ZOO = (
    "bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet", "vgg19",
    "zfnet512",
)  # fmt: skip
EXPORTED = ("bert", "gpt")  # by torch.onnx, which needs onnxscript; bert is transformers'
