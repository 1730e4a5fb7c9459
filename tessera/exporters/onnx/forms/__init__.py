"""How ATen's operators are said in ONNX, by family."""
