"""What went wrong, as one sentence for the person who started the run."""

from __future__ import annotations

import errno

_ADVICE = {
    errno.ENOSPC: "free some space on that disk",
    errno.EACCES: "choose one that you may write to",
    errno.EPERM: "choose one that you may write to",
}


class RunError(RuntimeError):
    """The run cannot start or go on; the message is one sentence that says what to do."""


def sentence(error: BaseException) -> str:
    """The innermost cause in one line.

    An error that crossed processes carries a remote traceback as its text and the original
    exception as `cause`; the original speaks. Lines are joined; an error without a message is
    named by its class.
    """
    remote_cause = getattr(error, "cause", None)
    if isinstance(remote_cause, BaseException):
        return sentence(remote_cause)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        advice = _ADVICE.get(error.errno or 0)
        return f"{where}{error.strerror}" + (f" ({advice})" if advice else "")
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return f"out of memory {text}".strip()
    if not text:
        return type(error).__name__
    if isinstance(error, KeyError):
        return f"missing key {text}"
    return text
