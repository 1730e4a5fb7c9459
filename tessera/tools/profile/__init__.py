"""`tessera.profile`: where a compiled function's time goes, equation by equation, against the machine's roofline."""

from tessera.tools.profile.measured import Row, Span
from tessera.tools.profile.result import Profile
from tessera.tools.profile.run import profile

__all__ = ["Profile", "Row", "Span", "profile"]
