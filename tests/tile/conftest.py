"""Its being here puts this folder on the path, so that tests can import `tile_kernels`."""
