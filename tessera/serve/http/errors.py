"""What a client is told when a request is not answered."""

from __future__ import annotations

from tessera.serve.http.wire import Message

KINDS = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}
RETRY = {"retry-after": "1"}  # seconds after which a refused request may come again


class HttpError(Exception):
    """`param` is the field at fault, if one is."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code

    @property
    def body(self) -> Message:
        """In OpenAI's form."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return RETRY if self.status in (429, 503) else {}
