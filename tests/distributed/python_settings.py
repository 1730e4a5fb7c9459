"""A file whose numbers a model reads."""

RATE = 1.0
UNREAD = 0


def raised(x: object) -> object:
    return x**POWER


POWER = 1.0
