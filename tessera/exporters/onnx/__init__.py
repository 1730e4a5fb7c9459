"""ONNX out: a Trace as an ONNX model."""
