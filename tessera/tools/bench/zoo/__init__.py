"""`tessera bench zoo`: models of many families that nobody tuned for, against eager and TorchInductor."""
