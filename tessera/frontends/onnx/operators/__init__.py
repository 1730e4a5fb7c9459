"""What ONNX's operators mean, one file a family. Importing this package declares them all."""
