"""What people run around the compiler: the command line, benchmarks, and small models to try things on."""
