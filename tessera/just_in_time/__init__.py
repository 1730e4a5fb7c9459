"""`jit`: functions and modules that compile themselves when called."""
