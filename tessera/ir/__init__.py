"""The Trace IR: types, equations, traces, and what builds, prints, checks and runs them."""
