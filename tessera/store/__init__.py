"""Compiled programs, kept on disk: a process that captures what another one compiled begins with its programs."""
