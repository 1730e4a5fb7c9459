"""Ways into a Trace: TorchDynamo's graphs, plain Python functions, torch.export programs."""
