"""TorchDynamo's graphs become Traces."""
