"""Groups of operators that one operator computes better."""
