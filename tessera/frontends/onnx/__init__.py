"""ONNX files become Traces: the file is read and checked, and its operators run as functions over torch tensors."""
