"""Configuration and errors: what every other folder may use."""
