"""The version of this package, for those who cannot import it whole."""

VERSION = "0.1.0"
